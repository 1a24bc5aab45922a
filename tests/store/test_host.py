"""What was measured of the host: `calibration/<gpu>/host.json`."""

from __future__ import annotations

from pathlib import Path

import pytest

from whichlora.errors import ConfigError, DataFileError
from whichlora.store.host import Host, now, read_host, write_host


def test_a_written_host_is_read_back(tmp_path: Path) -> None:
    host = Host(launch_s=18e-6, date=now(), environment={"libraries": {"torch": "2.13.0"}})
    path = write_host(tmp_path, "t4-16gb", host)
    assert path == tmp_path / "t4-16gb" / "host.json"
    assert read_host(tmp_path, "t4-16gb") == host
    assert read_host(tmp_path, "a100-sxm-80gb") is None


@pytest.mark.parametrize("launch_s", [0.0, -1e-6, 18.0, float("nan")])
def test_no_launch_takes_that_long(launch_s: float) -> None:
    with pytest.raises(ConfigError, match=r"launch_us: must be from 0\.1 to 10000 micro"):
        Host(launch_s=launch_s, date=now())


@pytest.mark.parametrize("text", ["{}", '{"schema_version": 1, "launch_s": 18, "date": "x"}', "["])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t4-16gb" / "host.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(DataFileError, match=r"host\.json"):
        read_host(tmp_path, "t4-16gb")
