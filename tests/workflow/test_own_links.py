"""The links of this machine: measured, kept as a file, and used before the packaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError, DataFileError
from whichlora.predict.rank_time import links_of
from whichlora.spec.parallel import ParallelConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.links import write_links
from whichlora.timing.links import on_node_s
from whichlora.workflow import own_links

GPU = find_gpu("rtx-3090-24gb")
TOLD: dict[str, Any] = {
    "sizes_bytes": [4096, 2**20],
    "microseconds": {
        "all_gather": {"2": [20.0, 100.0], "4": [30.0, 200.0]},
        "send": {"2": [10.0, 60.0]},
    },
    "latency_s": 2e-5,
    "host_bytes_per_s": 20e9,
    "host_thread_bytes_per_s": 12e9,
    "host_update_bytes_per_s": 80e9,
    "relative_deviation": 0.1,
}


def measured(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, count: int = 4
) -> own_links.OwnLinks:
    def told(device: str, ranks: int) -> dict[str, Any]:
        assert (device, ranks) == ("cuda", count)
        return TOLD | {"environment": {"host": "node7", "libraries": {"torch": "2.13.0"}}}

    monkeypatch.setattr(own_links, "installed_versions", lambda: {"torch": "2.13.0"})
    monkeypatch.setattr(own_links, "measure_links", told)
    monkeypatch.setattr(own_links, "gpus_here", lambda: [(None, GPU)] * count)
    return own_links.measure_own_links([GPU.key], folder)


def test_own_links_go_before_the_packaged_and_a_stated_one_before_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = measured(monkeypatch, tmp_path)
    assert own.path == tmp_path / "links" / "this-machine-rtx-3090-24gb.json"
    machines = load_calibration(GPU, tmp_path).machines

    def key(gpus: int, **settings: Any) -> str:
        config = ParallelConfig(strategy="ddp", gpus=gpus, **settings)
        links, _ = links_of(config, GPU, machines)
        assert links is not None
        return links.key

    assert key(4) == key(2) == "this-machine-rtx-3090-24gb"
    packaged = key(8)  # more than were measured
    assert not packaged.startswith("this-machine")
    assert key(4, interconnect="25GB/s") == "stated"
    assert key(4, interconnect=packaged) == packaged


def test_the_file_says_where_and_how_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = measured(monkeypatch, tmp_path)
    values = json.loads(own.path.read_text())
    assert values["gpus"] == [GPU.key]
    assert values["gpus_per_node"] == 4
    assert "node7" in values["sources"]["microseconds"]
    assert "torch 2.13.0" in values["sources"]["microseconds"]
    assert own.links.host_update_bytes_per_s == 80e9
    # a message from rank to rank was measured; without that it is half a gather of two
    assert on_node_s(own.links, "send", 2**20, 2) == pytest.approx(60e-6)


def test_a_single_gpu_has_no_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shows 1 rtx-3090-24gb, and links are between two"):
        measured(monkeypatch, tmp_path, count=1)
    with pytest.raises(ConfigError, match="one type of GPU, got t4, l4; give one"):
        own_links.measure_own_links(["t4", "l4"], tmp_path)


def test_a_time_that_cannot_be_is_not_written(tmp_path: Path) -> None:
    values = TOLD | {"latency_s": -1.0}
    with pytest.raises(DataFileError, match=r"latency_s|name"):
        write_links(tmp_path, "wrong", values)
    assert not (tmp_path / "links").exists()
