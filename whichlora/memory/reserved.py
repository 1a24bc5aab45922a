"""What the caching allocator reserves for one run: its requests, replayed."""

from __future__ import annotations

from collections.abc import Iterator

from whichlora.memory import generation_events, step_events
from whichlora.memory.allocator_simulator import SMALL_SEGMENT_BYTES, LargeReplay
from whichlora.memory.event_list import EventList
from whichlora.memory.inference import Generation
from whichlora.memory.step import TrainingStep
from whichlora.spec.numeric import round_up

_AGREES = 0.01  # of the peak: further off, a tensor that matters is missing among the events
_HAVE_THESE_RULES = ("cuda", "rocm")


def _stages(run: TrainingStep | Generation) -> Iterator[EventList]:
    """The requests of `run` where all of them are known, again each time that there are more."""
    if isinstance(run, Generation):
        if generation_events.has_events(run):
            yield from generation_events.generation_stages(run)
    elif step_events.has_events(run):
        yield step_events.training_events(run)


def replayed_idle_bytes(run: TrainingStep | Generation, *, live_bytes: int) -> int | None:
    """Bytes that the allocator has beyond the peak of live tensors; None where nobody can say.

    Loading and two steps, or one generation, are replayed through the allocator's rules without a
    limit of memory. Small requests have a pool of their own, and fill its segments of 2 MiB nearly
    to the end. Where the events do not add up to the ledger's peak, a tensor is missing among them,
    and the estimate stands. So it does where decoding needs new segments and has steps that are
    left out: how many segments a cache outgrows depends on each of them.

    Args:
        live_bytes: the ledger's peak without workspaces, which the events leave out, too.

    Kind: exact as far as the events are. Source: torch 2.13 `CUDACachingAllocator.cpp`; the errors
    against replays of traced runs are in `docs/accuracy/reserved.md`.
    """
    if run.gpu.kind not in _HAVE_THESE_RULES:
        return None
    replayed = LargeReplay(expandable_segments=bool(run.run.expandable_segments))
    requests, num_played, reserved_bytes = None, 0, 0
    for stage, requests in enumerate(_stages(run)):
        replayed.play(requests.plays[num_played:])
        if stage and requests.skips_steps and replayed.reserved_bytes > reserved_bytes:
            return None
        num_played, reserved_bytes = len(requests.plays), replayed.reserved_bytes
    if requests is None:
        return None
    # what blocks are larger than their tensors is no idle memory
    live = requests.peak_bytes + replayed.peak_allocated_bytes - requests.large_peak_bytes
    if abs(live / live_bytes - 1) > _AGREES:
        return None
    small: int = round_up(requests.small_peak_bytes, SMALL_SEGMENT_BYTES)
    return max(0, replayed.reserved_bytes + small - live)
