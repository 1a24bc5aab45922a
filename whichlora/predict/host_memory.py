"""Memory of the host as a limit: what all ranks of a node keep there, and what a node has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from whichlora.errors import ConfigError
from whichlora.parallel.base import RankKind
from whichlora.parallel.layout import Layout
from whichlora.spec.links import LinkSpec
from whichlora.spec.numeric import added
from whichlora.spec.parallel import ParallelConfig
from whichlora.units import format_bytes


def pinned_bytes(layout: Layout, kinds: Sequence[RankKind]) -> int:
    """Pinned host memory of the first node, whose ranks keep as much there as those of others.

    Kind: exact, of what a strategy pins; processes and the data that they load take more.
    Source: `Strategy.on_host`.

    Args:
        kinds: of the ranks.
    """
    if not layout.may_use_host:
        return 0
    per_node = layout.config.gpus_per_node
    return sum(
        int(added(entry.num_bytes for entry in layout.on_host(kind)))
        * sum(number < per_node for number in kind.ranks)
        for kind in kinds
    )


def memory_of_node(
    config: ParallelConfig,
    machines: Mapping[str, LinkSpec],
    this_host_bytes: Callable[[], int | None],
) -> tuple[int | None, str]:
    """Host memory of one node, and whose it is; None where nobody knows it.

    Args:
        machines: those that are known, by name.
        this_host_bytes: of this machine, where it has the GPU that is asked about.
    """
    if config.host_memory_bytes is not None:
        return config.host_memory_bytes, "stated"
    machine = machines.get(config.interconnect.strip())
    if machine is not None and machine.host_memory_bytes is not None:
        return machine.host_memory_bytes, f"of {machine.key}"
    return this_host_bytes(), "of this machine"


def host_fault(needed_bytes: int, node: tuple[int | None, str]) -> str:
    """Why so much can't be pinned on a node; empty where it can, or where nobody knows.

    Args:
        node: of `memory_of_node`.
    """
    has_bytes, source = node
    if has_bytes is None or needed_bytes <= has_bytes:
        return ""
    return (
        f"host memory: {format_bytes(needed_bytes)} pinned on each node do not fit in the "
        f"{format_bytes(has_bytes)} {source}; offload less, or use more nodes"
    )


def check_host(needed_bytes: int, node: tuple[int | None, str]) -> None:
    """Refuse what a node can't pin; args as of `host_fault`. Raises: ConfigError."""
    if fault := host_fault(needed_bytes, node):
        raise ConfigError(fault)
