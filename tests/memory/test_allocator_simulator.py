import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.memory.allocator_simulator import (
    Allocator,
    Event,
    ExpandableAllocator,
    LargeReplay,
    replay,
    rounded,
)
from whichlora.units import MiB


def births(*sizes: int) -> list[Event]:
    return [Event(index, size) for index, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("num_bytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (11 * MiB, 12 * MiB, 12 * MiB),  # a remainder of 1 MiB or less is not split off
        (12 * MiB - 512, 12 * MiB, 12 * MiB),
    ],
)
def test_one_request_takes_a_block_and_a_segment(
    num_bytes: int, allocated: int, reserved: int
) -> None:
    found = replay(births(num_bytes))
    assert found.peak_allocated_bytes == allocated
    assert found.peak_reserved_bytes == reserved


def test_a_remainder_of_a_large_segment_up_to_one_mib_stays_with_its_block() -> None:
    assert replay(births(19 * MiB)).peak_allocated_bytes == 20 * MiB
    assert replay(births(5 * MiB, 5 * MiB, 9 * MiB)).peak_allocated_bytes == 20 * MiB


def test_small_and_large_requests_never_share_a_segment() -> None:
    assert replay(births(MiB, 2 * MiB)).peak_reserved_bytes == 22 * MiB


def test_two_requests_share_a_segment_while_it_has_room() -> None:
    assert replay(births(8 * MiB, 8 * MiB)).peak_reserved_bytes == 20 * MiB
    assert replay(births(8 * MiB, 8 * MiB, 8 * MiB)).peak_reserved_bytes == 40 * MiB


def test_idle_segments_are_used_again_but_never_joined() -> None:
    events = [*births(16 * MiB, 16 * MiB), Event(0, None), Event(1, None), Event(2, 32 * MiB)]
    found = replay(events)
    assert found.peak_reserved_bytes == 64 * MiB
    assert found.peak_allocated_bytes == 32 * MiB


def test_free_neighbours_of_one_segment_are_joined() -> None:
    events = [Event(9, 30 * MiB), Event(9, None)]
    events += [*births(10 * MiB, 10 * MiB, 10 * MiB), Event(0, None), Event(1, None)]
    assert replay([*events, Event(5, 20 * MiB)]).peak_reserved_bytes == 30 * MiB


def test_the_smallest_block_that_fits_is_taken() -> None:
    events = [*births(40 * MiB, 12 * MiB), Event(0, None), Event(1, None)]
    found = replay([*events, Event(2, 12 * MiB), Event(3, 40 * MiB)])
    assert found.peak_reserved_bytes == 52 * MiB


def test_expandable_segments_join_what_separate_segments_cannot() -> None:
    events = [*births(40 * MiB, 40 * MiB), Event(0, None), Event(1, None), Event(2, 80 * MiB)]
    assert replay(events).peak_reserved_bytes == 160 * MiB
    assert replay(events, expandable_segments=True).peak_reserved_bytes == 80 * MiB


def test_expandable_segments_grow_behind_a_free_block() -> None:
    events = [*births(40 * MiB), Event(0, None), Event(1, 50 * MiB)]
    assert replay(events, expandable_segments=True).peak_reserved_bytes == 60 * MiB


SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 3 * MiB), st.integers(MiB, 64 * MiB), st.just(10 * MiB)
)


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Births and deaths in which only what lives can die."""
    events: list[Event] = []
    live: list[int] = []
    for number, size in enumerate(draw(st.lists(SIZES, max_size=60))):
        events.append(Event(number, size))
        live.append(number)
        while live and draw(st.booleans()):
            events.append(Event(live.pop(draw(st.integers(0, len(live) - 1))), None))
    return events


@given(events=histories(), expandable=st.booleans())
def test_reserved_covers_allocated_and_allocated_covers_what_lives(
    events: list[Event], expandable: bool
) -> None:
    live: dict[int, int] = {}
    for event in events:
        if event.num_bytes is None:
            del live[event.storage]
        else:
            live[event.storage] = event.num_bytes
    found = replay(events, expandable_segments=expandable)
    assert found.peak_reserved_bytes >= found.peak_allocated_bytes >= sum(live.values())


@given(events=histories(), expandable=st.booleans())
def test_blocks_never_overlap_and_neighbours_are_never_both_free(
    events: list[Event], expandable: bool
) -> None:
    allocator = (ExpandableAllocator if expandable else Allocator)()
    live = {}
    for event in events:
        if event.num_bytes is None:
            allocator.free(live.pop(event.storage))
            continue
        live[event.storage] = allocator.allocate(event.num_bytes)
        free = [*allocator._small.size_at.items(), *allocator.large.size_at.items()]
        ordered = sorted([*live.values(), *free])
        for (start, size), (next_start, _) in itertools.pairwise(ordered):
            assert start + size <= next_start
        spaces = [sorted(pool.size_at.items()) for pool in (allocator._small, allocator.large)]
        for (start, size), (next_start, _) in itertools.chain(*map(itertools.pairwise, spaces)):
            assert start + size < next_start
        assert sum(size for _, size in ordered) == allocator.reserved_bytes
    assert allocator.allocated_bytes == sum(size for _, size in live.values())
    for block in live.values():
        allocator.free(block)
    assert allocator.allocated_bytes == 0


@given(events=histories(), expandable=st.booleans(), cut=st.integers(0, 60))
def test_large_requests_in_chunks_reserve_what_a_whole_replay_says(
    events: list[Event], expandable: bool, cut: int
) -> None:
    large = {number for number, size in events if size is not None and size > MiB}
    events = [event for event in events if event.storage in large]
    found = LargeReplay(expandable_segments=expandable)
    for part, first in ((events[:cut], -5), (events[cut:], 7)):
        # as the event lists have them: sizes of blocks, numbers from the first tensor of a chunk
        blocks = [(number - first, size and rounded(size)) for number, size in part]
        found.play([(blocks, first)])
    whole = replay(events, expandable_segments=expandable)
    assert found.peak_allocated_bytes == whole.peak_allocated_bytes
    assert found.reserved_bytes == whole.peak_reserved_bytes
