"""Memory of the host as a limit: what a node's ranks load, keep and copy there, and what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from whichlora.memory.step import TrainingStep
from whichlora.parallel.base import RankKind
from whichlora.parallel.layout import Layout
from whichlora.spec.links import LinkSpec
from whichlora.spec.numeric import added
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import SavingPrediction, SeveralGpus
from whichlora.units import format_bytes

HOST_MEMORY = "host memory: "  # how a line begins that says what a node lacks


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """What the ranks of one node take of its memory, together; data and Python are left out.

    Args:
        pinned_bytes: all the time.
        loading_bytes: before that, until the GPUs have the weights.
        saving: of a checkpoint, beside what is pinned; None where ranks write what they hold.
    """

    pinned_bytes: int = 0
    loading_bytes: int = 0
    saving: SavingPrediction | None = None


def host_use(layout: Layout, step: TrainingStep, kinds: Sequence[RankKind]) -> HostUse:
    """Of the first node of a run that is spread.

    Args:
        step: of the run, as no strategy has divided it yet.
        kinds: of the ranks.
    """
    return HostUse(
        pinned_bytes=pinned_bytes(layout, kinds),
        loading_bytes=loading_bytes(layout, step),
        saving=saving_of(layout, kinds[0]),
    )


def loading_bytes(layout: Layout, step: TrainingStep) -> int:
    """Host memory that all processes of a node take at once while they load the weights.

    Kind: exact, of tensors. Source: `Strategy.loading`, `Strategy.loading_of_others`.
    """
    if step.gpu.backend.shares_host_memory:  # its device is the host, which is judged already
        return 0
    processes = 1 if layout.launcher == "python" else layout.config.gpus_per_node
    return layout.loading(step) + (processes - 1) * layout.loading_of_others(step)


def saving_of(layout: Layout, kind: RankKind) -> SavingPrediction | None:
    """What a checkpoint copies or gathers; None where ranks write what they hold."""
    saving = layout.saving(kind)
    if saving is None:
        return None
    copies = layout.config.gpus_per_node if saving.by_all_ranks else 1
    return SavingPrediction(
        what=saving.what,
        by_all_ranks=saving.by_all_ranks,
        host_bytes=int(saving.host_bytes * copies),
        device_bytes=int(saving.device_bytes),
        instead=saving.instead,
    )


def most_on_host(several: SeveralGpus) -> int:
    """What a node needs before and while it trains, whichever is more; saving left out."""
    return max(several.host_bytes, several.loading_host_bytes)


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


def most_of_a_node(machines: Mapping[str, LinkSpec]) -> tuple[int | None, str]:
    """Host memory of the largest machine that is known, and whose it is."""
    known = [machine for machine in machines.values() if machine.host_memory_bytes is not None]
    largest = max(known, key=lambda machine: machine.host_memory_bytes or 0, default=None)
    if largest is None:
        return None, ""
    return largest.host_memory_bytes, f"of {largest.key}, the most of the machines that are known"


def open_note(use: HostUse, node: tuple[int | None, str]) -> str:
    """What nodes need whose memory nobody knows; empty where it is known, or nothing is needed.

    Args:
        node: of `memory_of_node`.
    """
    needs = [
        *([f"{format_bytes(use.pinned_bytes)} pinned on each node"] if use.pinned_bytes else []),
        *([f"{format_bytes(use.loading_bytes)} while loading"] if use.loading_bytes else []),
    ]
    if node[0] is not None or not needs:
        return ""
    return f"{HOST_MEMORY}{', '.join(needs)}; nobody says what a node has (host_memory)"


def host_fault(use: HostUse, node: tuple[int | None, str]) -> str:
    """Why a node has too little memory; empty where it has enough, or where nobody knows.

    A checkpoint counts where no setting writes it in shares.

    Args:
        node: of `memory_of_node`.
    """
    has_bytes, source = node
    if has_bytes is None:
        return ""
    has = f"do not fit in the {format_bytes(has_bytes)} {source}"
    if use.pinned_bytes > has_bytes:
        pinned = format_bytes(use.pinned_bytes)
        return f"{HOST_MEMORY}{pinned} pinned on each node {has}; offload less, or use more nodes"
    if use.loading_bytes > has_bytes:
        return (
            f"{HOST_MEMORY}{format_bytes(use.loading_bytes)}, which the processes of each node "
            f"load at once, {has}; use fewer GPUs of a node, or a strategy that loads on GPUs"
        )
    if use.saving is not None and not use.saving.instead:
        return _beyond_in_saving(use, use.saving, node)
    return ""


def saving_note(use: HostUse, node: tuple[int | None, str]) -> str:
    """What to set so that a checkpoint does not fail on a node; empty where it does not.

    Args:
        node: of `memory_of_node`.
    """
    if use.saving is None or not use.saving.instead:
        return ""
    fault = _beyond_in_saving(use, use.saving, node)
    return f"{fault}: {use.saving.instead} writes shares instead" if fault else ""


def _beyond_in_saving(use: HostUse, saving: SavingPrediction, node: tuple[int | None, str]) -> str:
    has_bytes, source = node
    if has_bytes is None or use.pinned_bytes + saving.host_bytes <= has_bytes:
        return ""
    beside = f" beside {format_bytes(use.pinned_bytes)} pinned" if use.pinned_bytes else ""
    return (
        f"{HOST_MEMORY}saving fails, since {saving.in_words}{beside}, and each node has "
        f"{format_bytes(has_bytes)} {source}"
    )
