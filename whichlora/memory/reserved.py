"""What the caching allocator reserves for one training run: its requests, replayed."""

from __future__ import annotations

from whichlora.memory.allocator_simulator import SMALL_SEGMENT_BYTES, replay
from whichlora.memory.step import TrainingStep
from whichlora.memory.step_events import has_events, training_events
from whichlora.spec.numeric import round_up

_AGREES = 0.01  # of the peak: further off, a tensor that matters is missing among the events
_HAVE_THESE_RULES = ("cuda", "rocm")


def replayed_idle_bytes(step: TrainingStep, *, live_bytes: int) -> int | None:
    """Bytes that the allocator has beyond the peak of live tensors; None where nobody can say.

    Loading and two steps are replayed through the allocator's rules without a limit of memory.
    Small requests have a pool of their own, and fill its segments of 2 MiB nearly to the end. Where
    the events do not add up to the ledger's peak, a tensor is missing among them, and the estimate
    of `allocator.idle_after_step_bytes` stands.

    Args:
        live_bytes: the ledger's peak without workspaces, which the events leave out, too.

    Kind: exact as far as the events are. Source: torch 2.13 `CUDACachingAllocator.cpp`; the errors
    against replays of traced runs are in `docs/accuracy/reserved.md`.
    """
    if step.gpu.kind not in _HAVE_THESE_RULES or not has_events(step):
        return None
    requests = training_events(step)
    is_expandable = bool(step.run.expandable_segments)
    found = replay(requests.events, expandable_segments=is_expandable)
    # what blocks are larger than their tensors is no idle memory
    live = requests.peak_bytes + found.peak_allocated_bytes - requests.large_peak_bytes
    if abs(live / live_bytes - 1) > _AGREES:
        return None
    small: int = round_up(requests.small_peak_bytes, SMALL_SEGMENT_BYTES)
    return max(0, found.peak_reserved_bytes + small - live)
