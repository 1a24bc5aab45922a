"""Seconds of one collective over the links of a machine, and between machines."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from whichlora.spec.links import LinkSpec
from whichlora.spec.numeric import Real, is_plain, largest

# Of a tensor, what each of n ranks sends as a multiple of (n-1)/n. Source: nccl-tests
# `doc/PERFORMANCE.md`.
RING_FACTORS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
TO_HOST = ("to_host", "from_host")
# What an optimizer's update reads and writes of host memory in a second: one thread, and all
# processes of a node. Kind: estimate, the geometric means of published and measured hosts
# (`benchmarks/host_update.py`): 13, 13 and 26 GB/s; 15, 48, 54 and 76 GB/s, from which the
# deviation of the time is, too.
HOST_THREAD_BYTES_PER_S = 17e9
HOST_UPDATE_BYTES_PER_S = 42e9
HOST_UPDATE_DEVIATION = 0.6
MEASURED_UPDATE_DEVIATION = 0.2  # where this host was measured. Kind: estimate.


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that take part in a collective, and where they are.

    Args:
        on_node: how many of them each node has.
        nodes: on how many nodes they are.
        sharing: such groups that use the network of a node at once.
    """

    on_node: int
    nodes: int
    sharing: int = 1

    @property
    def size(self) -> int:
        return self.on_node * self.nodes


def group_of(size: int, stride: int, gpus_per_node: int) -> Group:
    """Where `size` ranks are whose numbers differ by `stride`, GPUs of a node being numbered first.

    Kind: exact, where sizes divide each other.
    Source: torchrun numbers ranks node by node: `torch.distributed.run`, `RANK`.
    """
    on_node = max(1, min(size, gpus_per_node // stride))
    return Group(
        on_node=on_node,
        nodes=-(-size // on_node),
        sharing=max(1, min(gpus_per_node, gpus_per_node // on_node)),
    )


def between(sizes: Sequence[float], values: Sequence[float], size: Real) -> Real:
    """The value at `size`, straight between measured points on logarithmic scales.

    Smaller sizes than were measured take as long as the smallest; larger ones pass at the rate of
    the largest.

    Kind: exact at the points, estimate between them.
    Source: the measured times of `calibration/links/`.
    """
    most = sizes[-1]
    beyond = largest(1.0, size / most)
    if is_plain(size):
        place = min(max(size, sizes[0]), most)
        upper = max(1, bisect.bisect_left(sizes, place))
        low, high = sizes[upper - 1], sizes[upper]
        share = math.log(place / low) / math.log(high / low)
        return values[upper - 1] ** (1 - share) * values[upper] ** share * beyond
    import numpy as np

    logs = np.interp(np.log(np.maximum(size, 1e-300)), np.log(sizes), np.log(values))
    return np.exp(logs) * beyond


def on_node_s(links: LinkSpec, collective: str, num_bytes: Real, size: int) -> Real:
    """Seconds of one collective among `size` GPUs of one node; NaN where nothing is known.

    Numbers of GPUs between measured ones take times between theirs; more than were measured are
    extended by what a ring sends.

    Kind: fitted, to measured times, or estimate by bandwidth and latency.
    Source: `calibration/links/`.
    """
    if size < 2:
        return 0.0 * num_bytes
    if collective == "send":
        if "send" in links.seconds:
            return between(links.sizes_bytes, links.seconds["send"][2], num_bytes)
        # of two ranks that gather, each sends half
        return on_node_s(links, "all_gather", 2 * num_bytes, 2)
    factor, share = RING_FACTORS[collective], (size - 1) / size
    tables = links.seconds.get(collective)
    if not tables:
        if links.bandwidth_bytes_per_s is None:
            return math.nan * num_bytes
        latency = links.latency_s * math.log2(size) * factor
        return latency + factor * share * num_bytes / links.bandwidth_bytes_per_s
    measured = sorted(tables)

    def at(number: int) -> Real:
        return between(links.sizes_bytes, tables[number], num_bytes)

    if size in tables:
        return at(size)
    if size > measured[-1]:
        return at(measured[-1]) * share / ((measured[-1] - 1) / measured[-1])
    above = bisect.bisect(measured, size)
    if above == 0:
        return at(measured[0])
    low, high = measured[above - 1], measured[above]
    weight = math.log(size / low) / math.log(high / low)
    return at(low) ** (1 - weight) * at(high) ** weight


def collective_s(links: LinkSpec, collective: str, num_bytes: Real, group: Group) -> Real:
    """Seconds of one collective; NaN where the links are not known.

    Between nodes a ring passes the network once per node: the slower of it and of the links of a
    node decides. Groups that send at once share the adapters of their node.

    Kind: estimate. Source: NCCL's ring algorithm, nccl-tests `doc/PERFORMANCE.md`.
    """
    if collective in TO_HOST:
        return num_bytes / links.host_bytes_per_s
    if group.nodes == 1:
        return on_node_s(links, collective, num_bytes, group.size)
    network = links.network
    if network is None:
        return math.nan * num_bytes
    rate = network.bandwidth_bytes_per_s * network.reached_share / group.sharing
    if collective == "send":
        return network.latency_s + num_bytes / rate
    factor = RING_FACTORS[collective]
    hops = factor * (group.nodes - 1)
    passing = factor * (group.size - 1) / group.size * num_bytes / rate
    inside = on_node_s(links, collective, num_bytes, group.on_node)
    return hops * network.latency_s + largest(inside, passing)


def host_update_s(
    links: LinkSpec, num_bytes: Real, *, threads: int, processes: int
) -> tuple[Real, float]:
    """Seconds of an update that reads and writes so much host memory, and their deviation.

    Args:
        threads: of each process.
        processes: of a node, which update at once.

    Kind: estimate: threads add up until the memory of the node is the limit.
    Source: `HOST_THREAD_BYTES_PER_S`, or what `whichlora calibrate --links` measured.
    """
    thread, node = links.host_thread_bytes_per_s, links.host_update_bytes_per_s
    deviation = MEASURED_UPDATE_DEVIATION if thread and node else HOST_UPDATE_DEVIATION
    of_threads = threads * (thread or HOST_THREAD_BYTES_PER_S)
    rate = min(of_threads, (node or HOST_UPDATE_BYTES_PER_S) / processes)
    return num_bytes / rate, deviation


def extends_measurements(
    links: LinkSpec, collective: str, num_bytes: Real, group: Group
) -> str | None:
    """Why a time goes beyond what was measured; None where it does not.

    Kind: exact. Source: the measured sizes of `calibration/links/`.
    """
    if group.nodes > 1 or collective in (*TO_HOST, "send"):
        return None
    tables = links.seconds.get(collective)
    if not tables:
        return None
    if group.size > max(tables):
        return f"{max(tables)} GPUs at most were measured"
    if float(largest(num_bytes, 0)) > links.sizes_bytes[-1]:
        return f"tensors of {links.sizes_bytes[-1] // 2**20} MiB at most were measured"
    return None
