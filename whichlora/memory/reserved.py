"""What the caching allocator reserves for one run: its requests, replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

from whichlora.memory import generation_events
from whichlora.memory.allocator_simulator import SMALL_SEGMENT_BYTES, LargeReplay
from whichlora.memory.event_list import EventList
from whichlora.memory.inference import Generation
from whichlora.memory.metal_heaps import SMALL_HEAP_BYTES, HeapReplay
from whichlora.memory.step import TrainingStep
from whichlora.memory.step_events import has_events, training_events
from whichlora.spec.numeric import round_up
from whichlora.spec.targets import adapted_linears

# Of the peak: further off, a tensor that matters is missing among the events. Those that a method
# keeps beside the layers' are left out there, and idle memory hardly depends on them.
_AGREES, _AGREES_BESIDE = 0.01, 0.03
# Of the backends whose rules are public: bytes of what serves small requests.
_MOST_BYTES = 2**50  # no card has as much; what a step adds to it still has an address of 64 bits
_SMALL_POOL_STEP = {"segments": SMALL_SEGMENT_BYTES, "heaps": SMALL_HEAP_BYTES}
_IS_EARLY: ContextVar[bool] = ContextVar("is_early", default=False)


@contextmanager
def early_replays() -> Iterator[None]:
    """Inside, a replay of training ends after a few layers of the first backward.

    That is a fifth of its requests. What is reserved by then is what the whole run reserves,
    unless the optimizer's states, or blocks between others, need more.
    """
    token = _IS_EARLY.set(True)
    try:
        yield
    finally:
        _IS_EARLY.reset(token)


class _Replayed(NamedTuple):
    """Peaks of the requests of a run, and what its large ones allocate and reserve at most."""

    peak_bytes: int
    large_peak_bytes: int
    small_peak_bytes: int
    workspace_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    @classmethod
    def of(cls, requests: EventList, *, allocated_bytes: int, reserved_bytes: int) -> _Replayed:
        return cls(
            requests.peak_bytes,
            requests.large_peak_bytes,
            requests.small_peak_bytes,
            requests.workspace_bytes,
            allocated_bytes,
            reserved_bytes,
        )


OfRank: TypeAlias = tuple[Hashable, Callable[[], EventList | None]]
"""How a run is spread over several GPUs, and what writes the requests of one."""


class _OnAnyCard:
    """A run, equal to the same run on another card of its kind: both request the same."""

    def __init__(self, run: TrainingStep | Generation, of_rank: OfRank | None = None) -> None:
        self.run = run
        spread: Hashable = None
        self._write: Callable[[], EventList | None] | None = None
        if of_rank is not None:
            spread, self._write = of_rank
        names = (field.name for field in fields(run) if field.name != "gpu")
        self._key = (type(run), run.gpu.kind, spread, *(getattr(run, name) for name in names))

    def requests(self) -> EventList | None:
        """Those of a training, where they are written."""
        if self._write is not None:
            return self._write()
        assert isinstance(self.run, TrainingStep)
        return training_events(self.run) if has_events(self.run) else None

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnAnyCard) and self._key == other._key


def _replay(*, in_heaps: bool, expandable_segments: bool) -> LargeReplay | HeapReplay:
    return HeapReplay() if in_heaps else LargeReplay(expandable_segments=expandable_segments)


class _Begun:
    """The replay of a training after its beginning.

    Attributes:
        early: bytes that large requests allocate and reserve at most, so far.
    """

    def __init__(self, requests: EventList, *, in_heaps: bool, expandable_segments: bool) -> None:
        begun = len(requests.plays) if requests.num_early is None else requests.num_early
        self._replay = _replay(in_heaps=in_heaps, expandable_segments=expandable_segments)
        self._replay.play(requests.plays[:begun])
        self._rest = requests.plays[begun:]
        self.early = self._most()

    @cached_property
    def whole(self) -> tuple[int, int]:
        """As `early`, of the whole training."""
        self._replay.play(self._rest)
        return self._most()

    def _most(self) -> tuple[int, int]:
        return self._replay.peak_allocated_bytes, self._replay.reserved_bytes


_begun = lru_cache(maxsize=8)(_Begun)  # a fifth of an explanation's alternatives request the same


@lru_cache(maxsize=8)
def _training_requests(asked: _OnAnyCard) -> EventList | None:
    return asked.requests()


def _replayed_training(asked: _OnAnyCard, *, is_early: bool) -> _Replayed | None:
    requests, step = _training_requests(asked), asked.run
    if requests is None:
        return None
    begun = _begun(
        requests,
        in_heaps=step.gpu.backend.allocator == "heaps",
        expandable_segments=bool(step.run.expandable_segments),
    )
    allocated_bytes, reserved_bytes = begun.early if is_early else begun.whole
    if requests.aside:
        aside = _replay(
            in_heaps=step.gpu.backend.allocator == "heaps",
            expandable_segments=bool(step.run.expandable_segments),
        )
        aside.play(requests.aside)
        reserved_bytes += aside.reserved_bytes
    return _Replayed.of(requests, allocated_bytes=allocated_bytes, reserved_bytes=reserved_bytes)


def _replayed_generation(run: Generation) -> _Replayed | None:
    """Pass by pass; none where steps are left out and one of the others needs a new segment."""
    if not generation_events.has_events(run):
        return None
    replayed = _replay(
        in_heaps=run.gpu.backend.allocator == "heaps",
        expandable_segments=bool(run.run.expandable_segments),
    )
    num_played = reserved_bytes = 0
    for number, requests in enumerate(generation_events.generation_stages(run)):
        replayed.play(requests.plays[num_played:])
        if number and requests.skips_steps and replayed.reserved_bytes > reserved_bytes:
            return None
        num_played, reserved_bytes = len(requests.plays), replayed.reserved_bytes
    return _Replayed.of(
        requests,
        allocated_bytes=replayed.peak_allocated_bytes,
        reserved_bytes=reserved_bytes,
    )


@lru_cache(maxsize=1024)  # `where` asks for one run on every card
def _replay_of(asked: _OnAnyCard, *, is_early: bool) -> _Replayed | None:
    if isinstance(asked.run, Generation):
        return _replayed_generation(asked.run)
    return _replayed_training(asked, is_early=is_early)


def _tolerance(run: TrainingStep | Generation) -> float:
    if isinstance(run, Generation):
        return _AGREES
    shared = run.method.shared_tensors(adapted_linears(run.model, run.targets), run.r)
    return _AGREES_BESIDE if shared or run.method.outer_tensors(run.model) else _AGREES


def replayed_idle_bytes(
    run: TrainingStep | Generation, *, live_bytes: int, of_rank: OfRank | None = None
) -> int | None:
    """Bytes that the allocator has beyond the peak of live tensors; None where nobody can say.

    Loading and two steps, or one generation, are replayed through the allocator's rules without a
    limit of memory. Small requests have a pool of their own, and fill its segments of 2 MiB, or
    Metal's heaps of 8 MiB, nearly to the end. Where the events do not add up to the ledger's peak,
    a tensor is missing among them, and the estimate stands. So it does where decoding needs new
    segments and has steps that are left out: how many segments a cache outgrows depends on each.

    Args:
        live_bytes: the ledger's peak without workspaces.
        of_rank: of a run on several GPUs.

    Kind: exact as far as the events are. Source: torch 2.13 `CUDACachingAllocator.cpp`,
    `XPUCachingAllocator.cpp`, `MPSAllocator.mm`; the errors against replays of traced runs are in
    `docs/accuracy/reserved.md`.
    """
    step_bytes = _SMALL_POOL_STEP.get(run.gpu.backend.allocator)
    if step_bytes is None or live_bytes > _MOST_BYTES:
        return None
    replayed = _replay_of(_OnAnyCard(run, of_rank), is_early=_IS_EARLY.get())
    if replayed is None:
        return None
    # what blocks are larger than their tensors is no idle memory
    live = replayed.peak_bytes + replayed.allocated_bytes - replayed.large_peak_bytes
    if abs((live - replayed.workspace_bytes) / live_bytes - 1) > _tolerance(run):
        return None
    small: int = round_up(replayed.small_peak_bytes, step_bytes)
    return max(0, replayed.reserved_bytes + small - live)
