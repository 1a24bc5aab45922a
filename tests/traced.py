"""Bytes alive along a trace."""

from collections.abc import Iterable, Iterator

from whichlora.tracer.extrapolate import TracedEvent


def live_bytes(events: Iterable[TracedEvent]) -> Iterator[tuple[TracedEvent, int]]:
    """Every event with the bytes alive after it."""
    sizes: dict[int, int] = {}
    total = 0
    for event in events:
        if event.num_bytes is None:
            total -= sizes.pop(event.storage)
        else:
            sizes[event.storage] = event.num_bytes
            total += event.num_bytes
        yield event, total
