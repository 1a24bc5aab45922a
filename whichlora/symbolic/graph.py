"""What the small autograd records of a block: tensors, operators and the nodes of their graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from whichlora.symbolic.linear_form import LinearForm, packed, scaled


class Assigned(NamedTuple):
    """A temporary that a variable names; what it named before goes when the new one is there.

    Args:
        form: None where the variable lets go of what it names.
    """

    variable: str
    form: LinearForm | None


Temporaries: TypeAlias = LinearForm | Sequence[LinearForm | Assigned]
"""One tensor that an operator makes and drops, or several in the order in which it makes them."""
LAYER_INPUT = "layer input"
FP32_BYTES = 4  # bytes
INDEX_BYTES = 8  # torch indexes with int64


class TapeEvent(NamedTuple):
    """A tensor of the tape is born with `form` bytes, or dies (`form` is None).

    Storages of the forward have their number on the tape, gradients and temporaries negative ones.
    While a tape is walked, forms are `packed`.
    """

    tensor: int
    form: LinearForm | None


PackedEvent: TypeAlias = tuple[int, int | None]


@dataclass(eq=False, slots=True)
class Tensor:
    """Elements of one dtype; several tensors may share one storage.

    Args:
        storage: number of its storage on the tape; -1 for one counted elsewhere, such as a weight.
        elements: how many.
        size: bytes of each.
        needs_grad: a gradient flows into it.
        is_leaf: the gradient is kept: a trained parameter.
        joined: laid out as [batch, heads, seq, head_dim] in memory.
        strided: its rows are transposed, so that a product copies them first.
        cut: so are rows that are a part of longer sequences, unless something makes them anew.
        repeats: how often a view shows each element that there is, which is read once.
        edge: key of the buffer that sums its gradient; a view of all elements shares it.
    """

    storage: int
    elements: LinearForm
    size: int
    edge: int = 0
    needs_grad: bool = False
    is_leaf: bool = False
    joined: bool = False
    strided: bool = False
    cut: bool = False
    repeats: int = 1

    @property
    def form(self) -> LinearForm:
        return scaled(self.elements, self.size)

    @property
    def packed(self) -> int:
        """`form` as one integer."""
        return packed(self.elements) * self.size

    @property
    def packed_in_fp32(self) -> int:
        return packed(self.elements) * FP32_BYTES


@dataclass(frozen=True, slots=True)
class Inner:
    """Temporaries of one operator.

    Args:
        events: births, and deaths before its end, by the place of the temporary.
        peaks: bytes alive before each of these deaths.
        left: those at the end, when there is what the operator returns.
    """

    events: tuple[PackedEvent, ...] = ()
    peaks: tuple[int, ...] = ()
    left_bytes: int = 0
    left: tuple[int, ...] = ()

    @property
    def moved(self) -> int:
        """Each is written by one kernel and read by another."""
        return 2 * sum(form for _, form in self.events if form is not None)

    @property
    def kernels(self) -> int:
        return sum(form is not None for _, form in self.events)


NO_INNER = Inner()


@dataclass(slots=True)
class Node:
    """The node that autograd adds to its graph for one operator."""

    step: int
    results: Sequence[Tensor]
    inputs: Sequence[Tensor]
    saved: Sequence[int]
    packs: bool
    passes: bool
    inner: Inner = NO_INNER
    hidden: bool = False
    reshapes: bool = False
    casts: int = 0
    overwrites: bool = False
    narrows: bool = False
    sums_wide: bool = False
    multiplies: bool = False
    picks: bool = False
    read_elsewhere: int = 0  # packed bytes of saved tensors that have no storage on the tape
    num_saved: int = 0  # weights and tensors that others made among them


@dataclass(slots=True)
class Step:
    """Attributes: `moved`, `passing` and `kernels` as of `Traffic`, its results left out."""

    reads: Sequence[int]
    makes: Sequence[int]
    inner: Inner = NO_INNER
    by_graph: bool = False
    in_turn: bool = False
    moved: int = 0
    passing: int = 0
    kernels: int = 0

    def made(self, *, saving: bool) -> Sequence[int]:
        """Storages that are there at the end of the step."""
        return self.makes[:1] if self.in_turn and not saving else self.makes


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor saved for backward; `element_bytes` is 0 for several tensors of one operator."""

    what: str
    element_bytes: int
    form: LinearForm
