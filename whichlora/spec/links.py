"""Facts about the links of one machine: between its GPUs, to the host, and to other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# To and from pinned host memory over PCIe 3.0 x16: 3/4 of what is stated. Kind: estimate.
LEAST_HOST_BYTES_PER_S = 12e9


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """What connects a node to others.

    Args:
        bandwidth_bytes_per_s: of all adapters of a node together, one direction, as stated.
        reached_share: of it, what collectives reach.
        latency_s: of one hop of a collective.
    """

    name: str
    bandwidth_bytes_per_s: float
    reached_share: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The links of one machine.

    Args:
        key: file name under `calibration/links/`.
        gpus: types of accelerator whose machines usually have these links.
        gpus_per_node: at most.
        sizes_bytes: of the whole tensor, of the measured times.
        seconds: measured, by collective and number of GPUs, one for each of `sizes_bytes`; empty
            where nobody measured.
        bandwidth_bytes_per_s: that one GPU sends with in a collective, where nothing is measured.
        latency_s: of a collective of a few bytes among two GPUs, likewise.
        host_bytes_per_s: that a GPU reaches to and from pinned host memory.
        host_thread_bytes_per_s: that one thread reads and writes host memory with in an optimizer's
            update; None where nobody measured.
        host_update_bytes_per_s: that all processes of a node do so with; likewise.
        host_memory_bytes: of a node; None where such machines differ.
        contention: seconds that a second of communication costs the computing beside it, whose
            multiprocessors and memory NCCL's kernels take.
        relative_deviation: of a time, one standard deviation.
        interval_scale: what the stated deviation of a whole step is multiplied with where nobody
            measured the GPU either.
        network: None where nodes are alone.
        sources: where each fact comes from.
    """

    key: str
    name: str
    gpus: tuple[str, ...] = ()
    gpus_per_node: int = 8
    sizes_bytes: tuple[int, ...] = ()
    seconds: Mapping[str, Mapping[int, tuple[float, ...]]] = field(default_factory=dict)
    bandwidth_bytes_per_s: float | None = None
    latency_s: float = 10e-6
    host_bytes_per_s: float = LEAST_HOST_BYTES_PER_S
    host_thread_bytes_per_s: float | None = None
    host_update_bytes_per_s: float | None = None
    host_memory_bytes: int | None = None
    contention: float = 0.0
    relative_deviation: float
    interval_scale: float = 1.0
    network: NetworkSpec | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
