"""The links of machines: every packaged file, and what a wrong one is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whichlora.errors import DataFileError
from whichlora.store.gpus import list_gpus
from whichlora.store.links import LinkFiles, read_links
from whichlora.store.paths import data_folder
from whichlora.timing.links import collective_s, group_of

PACKAGED = data_folder("calibration") / "links"
MACHINES = LinkFiles((data_folder("calibration"),))
OPTIONAL = ("bandwidth_bytes_per_s", "network", "microseconds", "like")


@pytest.mark.parametrize("name", sorted(path.stem for path in PACKAGED.glob("*.json")))
def test_every_machine_has_a_time_and_sources(name: str) -> None:
    links = read_links(PACKAGED / f"{name}.json")
    group = group_of(links.gpus_per_node, 1, links.gpus_per_node)
    times = [collective_s(links, "all_reduce", size, group) for size in (1e3, 1e6, 1e9)]
    assert 0 < times[0] <= times[1] < times[2] < 60
    values = json.loads((PACKAGED / f"{name}.json").read_text())
    stated = {*OPTIONAL, "host_bytes_per_s", "contention"}
    stated |= {"host_memory_bytes"} & values.keys()
    assert {fact for fact in stated if values[fact]} <= values["sources"].keys()


def test_an_accelerator_has_one_usual_machine_of_a_size_and_the_least_first() -> None:
    usual: dict[str, list[int]] = {}
    for links in MACHINES.values():
        for gpu in links.gpus:
            usual.setdefault(gpu, []).append(links.gpus_per_node)
    assert set(usual) <= {gpu.key for gpu in list_gpus()}
    assert all(sizes == sorted(set(sizes)) for sizes in usual.values())
    assert usual["h200-nvl-141gb"] == [2, 8]  # those of a bridge, and those of a server


def test_all_gathers_reach_the_published_bandwidth() -> None:
    # GB/s at 512 MiB among 8, of the fits of the same tables
    published = {"hgx-a100": 205, "hgx-h100": 335, "hgx-b200": 617, "l40s-pcie": 1.2}
    for name, expected in published.items():
        seconds = collective_s(MACHINES[name], "all_gather", 2**29, group_of(8, 1, 8))
        assert 7 / 8 * 2**29 / seconds / 1e9 == pytest.approx(expected, rel=0.03), name


def test_files_of_the_user_go_before(tmp_path: Path) -> None:
    values = json.loads((PACKAGED / "pcie-4-peer.json").read_text()) | {"name": "mine"}
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "pcie-4-peer.json").write_text(json.dumps(values))
    machines = LinkFiles((tmp_path, data_folder("calibration")))
    assert machines["pcie-4-peer"].name == "mine"
    assert len(machines) == len(MACHINES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency_s": -1}, "latency_s: got -1; must be seconds"),
        ({"speed": 1}, "speed: is not a field"),
        ({"key": "x"}, "is 'x', the file is 'hgx-a100'"),
        ({"sizes_bytes": [1, 2]}, r"microseconds.all_gather.2: has 21 times for 2 sizes_bytes"),
        ({"microseconds": {"gather": {}}}, "microseconds: got"),
        ({"network": {"name": "x"}}, "network: got"),
        ({"sources": {"speed": "x"}}, "sources: 'speed' is no field"),
        ({"like": "../x"}, "like: got '../x'"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = json.loads((PACKAGED / "hgx-a100.json").read_text()) | changes
    path = tmp_path / "hgx-a100.json"
    path.write_text(json.dumps(values))
    with pytest.raises(DataFileError, match=message):
        read_links(path)


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("rtx-5060-ti-16gb", "pcie-4-no-peer"),  # PCIe 5.0 x8, the rate of 4.0 x16
        ("rtx-4060-ti-16gb", "pcie-3-no-peer"),  # PCIe 4.0 x8, the rate of 3.0 x16
        ("rtx-2080-8gb", "pcie-3-no-peer"),
        ("rtx-a5500-24gb", "pcie-4-peer"),
        ("rtx-pro-6000-blackwell-max-q-96gb", "rtx-pro-6000-pcie"),
        ("rtx-pro-4500-blackwell-32gb", "pcie-5-peer"),
    ],
)
def test_cards_that_people_pair_at_home_have_links(gpu: str, machine: str) -> None:
    assert gpu in read_links(PACKAGED / f"{machine}.json").gpus
