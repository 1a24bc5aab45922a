"""What was measured of the host beside an accelerator: `calibration/<gpu>/host.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError, DataFileError
from whichlora.store.jsonfiles import check_schema_version, read_object, require_slug, write_object

HOST_SCHEMA_VERSION = 1
_LEAST_S, _MOST_S = 1e-7, 1e-2  # of a launch: beyond, a unit was mistaken


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host that launches kernels on one accelerator.

    Args:
        launch_s: seconds for a kernel that Python launches.
        date: when it was measured or stated.
        environment: device, driver, host and library versions; empty where a user stated it.

    Raises:
        ConfigError: no time that a launch can take.
    """

    launch_s: float
    date: str
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _LEAST_S <= self.launch_s <= _MOST_S:
            raise ConfigError(
                f"launch_us: must be from {1e6 * _LEAST_S:g} to {1e6 * _MOST_S:g} microseconds for "
                f"a kernel, got {1e6 * self.launch_s:g}; usual are 10 to 30"
            )


def now() -> str:
    """The date of a fact that is stated now."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_host(root: Path, gpu: str) -> Host | None:
    """The host of `gpu` as `root`, the user's folder, has it; None where nobody measured it.

    Raises:
        ConfigError: `gpu` can't name a folder.
        DataFileError: the file is broken, or newer than this release.
    """
    path = root / require_slug("gpu", gpu) / "host.json"
    if not path.is_file():
        return None
    values = read_object(path)
    check_schema_version(values, HOST_SCHEMA_VERSION, str(path))
    try:
        return Host(
            launch_s=float(values["launch_s"]),
            date=str(values["date"]),
            environment=dict(values.get("environment", {})),
        )
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise DataFileError(
            f"{path}: {error}: is missing or wrong; correct it, or remove the file"
        ) from None


def write_host(root: Path, gpu: str, host: Host) -> Path:
    """Replace what `root` has of the host of `gpu`; returns the path.

    Raises:
        ConfigError: `gpu` can't name a folder.
    """
    path = root / require_slug("gpu", gpu) / "host.json"
    payload = {
        "schema_version": HOST_SCHEMA_VERSION,
        "launch_s": host.launch_s,
        "date": host.date,
        "environment": dict(host.environment),
    }
    write_object(path, payload)
    return path
