"""What the kernels of a block read and write, sorted by how much each of them moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from whichlora.symbolic.linear_form import NOTHING, LinearForm, total


class Sized(NamedTuple):
    """Kernels that move about as many bytes each.

    Args:
        number: how many they are.
        moved: bytes that all of them read and write.
        passing: of these, what a cache may hold all its life: inputs that one of the kernels right
            before has read or written, and results that nobody keeps.
    """

    number: int
    moved: LinearForm
    passing: LinearForm


class Traffic(NamedTuple):
    """What the kernels of one forward or backward read and write.

    Args:
        moved: bytes, those of products of matrices left out.
        kernels: how many run, products included.
        sizes: the same kernels by what each of them moves, products left out.
        saves: tensors that operators save for their backward, each time that one does; those
            that bypass the saved-tensor hooks left out.
    """

    moved: LinearForm = NOTHING
    kernels: int = 0
    sizes: tuple[Sized, ...] = ()
    saves: int = 0


class StepTraffic(NamedTuple):
    """Of a forward, of its repetition where it is checkpointed, and of the backward."""

    forward: Traffic = Traffic()
    repeated: Traffic = Traffic()
    backward: Traffic = Traffic()


@dataclass(slots=True)
class KernelCounts:
    """Kernels on their way to a `Traffic`, by the power of two of the bytes per token of each."""

    kernels: int = 0
    by_size: dict[int, list[int]] = field(default_factory=dict)

    def add(self, moved: int, passing: int, kernels: int = 1) -> None:
        """Args: `moved` and `passing` are packed forms."""
        self.kernels += kernels
        if moved:
            counts = self.by_size.setdefault(moved.bit_length(), [0, 0, 0])
            counts[0] += max(1, kernels)
            counts[1] += moved
            counts[2] += passing

    def traffic(self, form: Callable[[int], LinearForm]) -> Traffic:
        sizes = tuple(
            Sized(count, form(moved), form(passing))
            for count, moved, passing in self.by_size.values()
        )
        return Traffic(total(sized.moved for sized in sizes), self.kernels, sizes)
