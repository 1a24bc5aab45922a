"""The layout of ggml's buffer: where its allocator puts every tensor of a graph.

Neighbours of different size leave gaps, so that the peak of what lives at once is too little: the
allocator's own rules are followed, node by node.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from typing import NamedTuple


class Node(NamedTuple):
    """A tensor: what it is made of, and which of those it may lie on."""

    num_bytes: int
    sources: tuple[int, ...] = ()
    over: tuple[int, ...] = ()


@dataclass(slots=True)
class Graph:
    """Nodes in the order in which they are computed."""

    nodes: list[Node] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)

    def add(self, num_bytes: int, *sources: int, over: tuple[int, ...] = ()) -> int:
        self.nodes.append(Node(num_bytes, sources, over))
        return len(self.nodes) - 1

    def split(self) -> None:
        """The graph is divided before the last node, a copy of what the host has.

        Source: llama.cpp 0c1e570 ggml/src/ggml-backend.cpp `ggml_backend_sched_split_graph`.
        """
        self.splits.append(len(self.nodes) - 1)

    def _inputs(self) -> dict[int, list[int]]:
        """Inputs by the node that they are allocated after; -1 are those of the first split.

        Inputs of a split are allocated where it starts, in the order of their use.
        """
        inputs: dict[int, list[int]] = {}
        seen: set[int] = set()
        for index, node in enumerate(self.nodes):
            for source in node.sources:
                if self.nodes[source].sources or source in seen:
                    continue
                seen.add(source)
                before = bisect(self.splits, index)
                inputs.setdefault(self.splits[before - 1] if before else -1, []).append(source)
        return inputs

    def buffer_bytes(self, alignment: int) -> int:
        """Bytes up to the highest address that is used.

        Source: llama.cpp 0c1e570 ggml/src/ggml-alloc.c:709 ggml_gallocr_alloc_graph_impl.
        """
        users = [0] * len(self.nodes)
        for node in self.nodes:
            for source in node.sources:
                users[source] += 1
        space = Space()
        ranges: dict[int, tuple[int, int]] = {}
        inputs = self._inputs() if self.splits else {}

        def take(index: int) -> None:
            size = -(-self.nodes[index].num_bytes // alignment) * alignment
            ranges[index] = space.take(size)

        first = [index for index, node in enumerate(self.nodes) if not node.sources]
        for index in inputs.get(-1, []) if self.splits else first:
            take(index)
        for index, node in enumerate(self.nodes):
            if not node.sources:
                continue
            for below in node.over:
                if users[below] == 1 and below in ranges:
                    ranges[index] = ranges.pop(below)
                    break
            else:
                if node.num_bytes:
                    take(index)
            for given in inputs.get(index, ()):
                take(given)
            for source in node.sources:
                users[source] -= 1
                if users[source] == 0 and source in ranges:
                    space.give(*ranges.pop(source))
        return space.highest


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
