"""Times between measured points, beyond them, and between nodes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from whichlora.spec.links import LinkSpec, NetworkSpec
from whichlora.timing.links import (
    Group,
    between,
    collective_s,
    extends_measurements,
    group_of,
    host_update_s,
    on_node_s,
)

SIZES = (1_000, 1_000_000)
MACHINE = LinkSpec(
    key="measured",
    name="measured",
    sizes_bytes=SIZES,
    seconds={"all_gather": {2: (1e-5, 1e-3), 8: (2e-5, 4e-3)}},
    host_bytes_per_s=10e9,
    relative_deviation=0.1,
    network=NetworkSpec(
        name="network", bandwidth_bytes_per_s=8e6, reached_share=0.5, latency_s=1e-3
    ),
)
BY_BANDWIDTH = LinkSpec(
    key="stated", name="stated", bandwidth_bytes_per_s=1e9, latency_s=1e-5, relative_deviation=0.2
)


def test_times_go_through_the_measured_points_and_straight_between_them_in_logarithms() -> None:
    assert between((10, 1000), (1.0, 4.0), 10) == 1.0
    assert between((10, 1000), (1.0, 4.0), 1000) == 4.0
    assert between((10, 1000), (1.0, 4.0), 100) == pytest.approx(2.0)


def test_smaller_tensors_take_as_long_as_the_smallest_and_larger_ones_pass_at_its_rate() -> None:
    assert between(SIZES, (1e-5, 1e-3), 1) == 1e-5
    assert between(SIZES, (1e-5, 1e-3), 3_000_000) == pytest.approx(3e-3)
    assert extends_measurements(MACHINE, "all_gather", 2e6, group_of(2, 1, 8)) is not None
    assert extends_measurements(MACHINE, "all_gather", 2e5, group_of(2, 1, 8)) is None


def test_many_sizes_at_once_take_what_each_does() -> None:
    sizes = np.array([1.0, 1e4, 1e6, 1e9])
    many = on_node_s(MACHINE, "all_gather", sizes, 4)
    assert list(many) == pytest.approx(
        [on_node_s(MACHINE, "all_gather", float(size), 4) for size in sizes]
    )


def test_numbers_of_gpus_between_measured_ones_take_times_between_theirs() -> None:
    assert on_node_s(MACHINE, "all_gather", 1e6, 4) == pytest.approx(1e-3 * 4**0.5)
    assert on_node_s(MACHINE, "all_gather", 1e6, 1) == 0
    longer = on_node_s(MACHINE, "all_gather", 1e6, 16)
    assert longer == pytest.approx(4e-3 * (15 / 16) / (7 / 8))
    assert extends_measurements(MACHINE, "all_gather", 1e4, group_of(16, 1, 16)) is not None


def test_a_send_takes_what_two_that_gather_twice_the_bytes_do() -> None:
    assert on_node_s(MACHINE, "send", 5e5, 8) == on_node_s(MACHINE, "all_gather", 1e6, 2)


def test_a_stated_bandwidth_gives_rings() -> None:
    gather = on_node_s(BY_BANDWIDTH, "all_gather", 1e9, 4)
    assert gather == pytest.approx(2e-5 + 0.75)
    assert on_node_s(BY_BANDWIDTH, "all_reduce", 1e9, 4) == pytest.approx(2 * gather)


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, Group(on_node=8, nodes=1, sharing=1)),
        (16, 1, Group(on_node=8, nodes=2, sharing=1)),
        (2, 8, Group(on_node=1, nodes=2, sharing=8)),
        (4, 2, Group(on_node=4, nodes=1, sharing=2)),
        (4, 4, Group(on_node=2, nodes=2, sharing=4)),
    ],
)
def test_ranks_are_numbered_node_by_node(size: int, stride: int, expected: Group) -> None:
    assert group_of(size, stride, 8) == expected
    assert group_of(size, stride, 8).size == size


def test_groups_that_cross_nodes_share_the_adapters_of_a_node() -> None:
    alone = collective_s(MACHINE, "all_gather", 1e6, group_of(16, 1, 8))
    assert alone == pytest.approx(1e-3 + 1e6 * 15 / 16 / 4e6)
    shared = collective_s(MACHINE, "all_gather", 1e6, group_of(2, 8, 8))
    assert shared == pytest.approx(1e-3 + 8 * 1e6 / 2 / 4e6)


def test_the_host_is_as_far_as_its_link() -> None:
    assert collective_s(MACHINE, "to_host", 1e9, group_of(1, 1, 8)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("links", "group"),
    [
        (LinkSpec(key="x", name="x", relative_deviation=1.0), group_of(2, 1, 8)),
        (BY_BANDWIDTH, group_of(16, 1, 8)),
    ],
)
def test_what_nobody_knows_is_nan(links: LinkSpec, group: Any) -> None:
    assert math.isnan(collective_s(links, "all_reduce", 1e6, group))


def test_an_update_on_the_host_is_as_fast_as_its_threads_until_memory_is_the_limit() -> None:
    unknown = LinkSpec(key="a", name="a", relative_deviation=0.1)
    measured = replace(unknown, host_thread_bytes_per_s=10e9, host_update_bytes_per_s=40e9)
    one, deviation = host_update_s(measured, 80e9, threads=1, processes=2)
    assert one == pytest.approx(8.0)
    assert host_update_s(measured, 80e9, threads=8, processes=2)[0] == pytest.approx(4.0)
    assert host_update_s(measured, 80e9, threads=8, processes=8)[0] == pytest.approx(16.0)
    assert deviation < host_update_s(unknown, 80e9, threads=1, processes=2)[1]
