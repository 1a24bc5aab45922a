"""Coefficients fitted to the runs of one accelerator: `calibration/<gpu>/coefficients.json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whichlora.store.jsonfiles import check_schema_version, read_object, require_slug, write_object

COEFFICIENTS_SCHEMA_VERSION = 1


def coefficients_file(roots: Iterable[Path], gpu: str) -> Path | None:
    """The file with the coefficients of `gpu`, in the first of `roots` that has one.

    Raises:
        ConfigError: `gpu` can't name a folder.
    """
    require_slug("gpu", gpu)
    paths = (root / gpu / "coefficients.json" for root in roots)
    return next((path for path in paths if path.is_file()), None)


def read_coefficients(roots: Iterable[Path], gpu: str) -> dict[str, Any] | None:
    """The coefficients of `gpu`, from the first of `roots` that has them; None where none has.

    Raises:
        ConfigError: `gpu` can't name a folder.
        DataFileError: the file is broken, or newer than this release.
    """
    path = coefficients_file(roots, gpu)
    if path is None:
        return None
    values = read_object(path)
    check_schema_version(values, COEFFICIENTS_SCHEMA_VERSION, str(path))
    return values


def write_coefficients(root: Path, gpu: str, payload: Mapping[str, Any]) -> Path:
    """Replace the coefficients of `gpu` below `root` in one step; returns their path.

    Raises:
        ConfigError: `gpu` can't name a folder.
    """
    path = root / require_slug("gpu", gpu) / "coefficients.json"
    write_object(path, {**payload, "schema_version": COEFFICIENTS_SCHEMA_VERSION})
    return path
