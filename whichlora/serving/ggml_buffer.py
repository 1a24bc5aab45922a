"""The layout of ggml's buffer: where its allocator puts every tensor of a graph.

Neighbours of different size leave gaps, so that the peak of what lives at once is too little: the
allocator's own rules are followed, node by node.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = -1  # the place of what no GPU has


class Node(NamedTuple):
    """A tensor: what it is made of, and which of those it may lie on.

    Args:
        place: the number of the GPU that computes it, from 0, or `HOST`.
        is_weight: a matrix of the file, which another place computes with a copy of.
    """

    num_bytes: int
    sources: tuple[int, ...] = ()
    over: tuple[int, ...] = ()
    place: int = 0
    is_weight: bool = False


class _Event(NamedTuple):
    """What a place does with its buffer: take room for `tensor`, if any, then free `sources`.

    Tensors are numbered by their node; a copy has the number of what it copies, below 0.
    """

    tensor: int | None
    num_bytes: int = 0
    sources: tuple[int, ...] = ()
    over: tuple[int, ...] = ()


@dataclass(slots=True)
class Graph:
    """Nodes in the order in which they are computed.

    Args:
        place: of nodes that are added.
    """

    nodes: list[Node] = field(default_factory=list)
    place: int = 0

    def add(
        self, num_bytes: int, *sources: int, over: tuple[int, ...] = (), place: int | None = None
    ) -> int:
        self.nodes.append(Node(num_bytes, sources, over, self.place if place is None else place))
        return len(self.nodes) - 1

    def weight(self, num_bytes: int) -> int:
        """A matrix that the host has."""
        self.nodes.append(Node(num_bytes, place=HOST, is_weight=True))
        return len(self.nodes) - 1

    def buffer_bytes(self, alignment: int, *, place: int = 0, copies: int = 1) -> int:
        """Bytes up to the highest address that is used of the buffer of `place`.

        Args:
            copies: of each input from another place; several stay to the end, and nothing lies on
                them.

        Source: llama.cpp 0c1e570 ggml/src/ggml-alloc.c:709 ggml_gallocr_alloc_graph_impl.
        """
        events = self._events(place)
        users: dict[int, int] = {}
        for event in events:
            for source in event.sources:
                users[source] = users.get(source, 0) + 1
        space = Space()
        ranges: dict[int, tuple[int, int]] = {}
        if copies > 1:
            for event in events:
                if event.tensor is not None and event.tensor < 0:
                    for _ in range(copies):
                        space.take(-(-event.num_bytes // alignment) * alignment)
        for tensor, num_bytes, sources, over in events:
            is_copied = copies > 1 and tensor is not None and tensor < 0
            if tensor is not None and not is_copied:
                size = -(-num_bytes // alignment) * alignment
                for below in over:
                    if users[below] == 1 and below in ranges:
                        ranges[tensor] = space.cut(ranges.pop(below), size)
                        break
                else:
                    if num_bytes:
                        ranges[tensor] = space.take(size)
            for source in sources:
                users[source] -= 1
                if users[source] == 0 and source in ranges:
                    space.give(*ranges.pop(source))
        return space.highest

    def _events(self, place: int) -> list[_Event]:
        """What `place` does: its own inputs come first, then the parts of the graph it computes.

        A part ends where the next node is computed elsewhere, or with a matrix of another place.
        At its beginning, all that it reads from other places is copied, once in the whole graph.

        Source: llama.cpp 0c1e570 ggml/src/ggml-backend.cpp:1244 `ggml_backend_sched_split_graph`,
        pass 5.
        """
        nodes = self.nodes
        events = [
            _Event(index, node.num_bytes)
            for index, node in enumerate(nodes)
            if not node.sources and node.place == place
        ]
        copied: set[tuple[int, int]] = set()
        places = [node.place for node in nodes]
        current, num_inputs, begin = None, 0, 0
        for index, (num_bytes, sources, over, at, _) in enumerate(nodes):
            if not sources:
                continue
            foreign = [each for each in sources if places[each] != at]
            if not foreign and at == current:  # as most are
                if at == place:
                    events.append(_Event(index, num_bytes, sources, over))
                continue
            ends_part = num_inputs and any(nodes[each].is_weight for each in foreign)
            if at != current or ends_part:
                current, num_inputs, begin = at, 0, len(events)
            for each in foreign:
                if (each, at) in copied:
                    continue
                copied.add((each, at))
                num_inputs += 1
                if at == place:
                    events.insert(begin, _Event(-1 - each, nodes[each].num_bytes))
                    begin += 1
                elif places[each] == place:
                    events.append(_Event(None, sources=(each,)))
            if at != place:
                continue
            if foreign:
                sources = tuple(-1 - each if each in foreign else each for each in sources)
                over = tuple(-1 - each if each in foreign else each for each in over)
            events.append(_Event(index, num_bytes, sources, over))
        return events


@dataclass(slots=True)
class Space:
    """Free ranges below an end that moves.

    Source: llama.cpp 0c1e570 ggml/src/ggml-alloc.c:241 ggml_dyn_tallocr_alloc.
    """

    highest: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0

    def take(self, size: int) -> tuple[int, int]:
        """The first and the last byte, excluded, of the smallest free range that is large enough.

        Of equal ones the last; where there is none, at the end.
        """
        best, least = -1, -1
        for place, (start, stop) in enumerate(self.free):
            room = stop - start
            if room >= size and (best < 0 or room <= least):
                best, least = place, room
        if best < 0:
            start, self.end = self.end, self.end + size
        else:
            start, stop = self.free[best]
            self.free[best : best + 1] = [(start + size, stop)] if least > size else []
        self.highest = max(self.highest, start + size)
        return start, start + size

    def cut(self, taken: tuple[int, int], size: int) -> tuple[int, int]:
        """The first `size` of what was taken; the rest goes back.

        Source: llama.cpp 0c1e570 ggml/src/ggml-alloc.c:600 ggml_gallocr_free_extra_space.
        """
        start, stop = taken
        if stop <= start + size:
            return taken
        self.give(start + size, stop)
        return start, start + size

    def give(self, start: int, stop: int) -> None:
        """Back what was taken, joined with what is free before and after it."""
        place = bisect(self.free, (start, stop))
        if place < len(self.free) and self.free[place][0] == stop:
            stop = self.free.pop(place)[1]
        if place and self.free[place - 1][1] == start:
            place -= 1
            start = self.free.pop(place)[0]
        if stop == self.end:
            self.end = start
        else:
            self.free.insert(place, (start, stop))
