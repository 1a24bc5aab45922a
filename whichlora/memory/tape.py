"""A small autograd: which tensors live at each point of a block's forward and backward.

A block is written as the library writes it, on tensors that have a size and no values. The tape
keeps what autograd keeps, frees what nothing holds any more, and returns the bytes alive at the
points where the most can be. Sizes are linear in the quantities of `TERMS`, so that one pass over
a block serves every batch size, length and rank, as numbers or as arrays of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import ge

from whichlora.numeric import Count, largest

TERMS = (
    "tokens",
    "tokens · span",
    "1",
    "r · tokens",
    "r",
    "span²",
    "many rows",
    "chunks",
    "sequences",
)
Form = tuple[int, int, int, int, int, int, int, int, int, int]
"""Bytes or elements per each of `TERMS`, and last how many tokens a chunk has."""

NOTHING: Form = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
LAYER_INPUT = "layer input"
CHUNK = 64  # tokens that a gated delta net takes at once, the last ones padded
FUSED_ROWS = 1536  # of a 4-bit product; bitsandbytes 0.50 expands the weight first for more


def _term(index: int, count: int) -> Form:
    a, b, c, d, e, f, g, h, i = (count if index == number else 0 for number in range(len(TERMS)))
    return (a, b, c, d, e, f, g, h, i, 0)


def per_token(count: int) -> Form:
    return _term(0, count)


def per_pair(count: int) -> Form:
    return _term(1, count)


def constant(count: int) -> Form:
    return _term(2, count)


def per_rank_token(count: int) -> Form:
    return _term(3, count)


def per_rank(count: int) -> Form:
    return _term(4, count)


def per_span_squared(count: int) -> Form:
    return _term(5, count)


def where_many_rows(count: int) -> Form:
    """Bytes that are there only above `FUSED_ROWS` rows."""
    return _term(6, count)


def per_chunk(count: int, size: int = CHUNK) -> Form:
    """Per `size` tokens of one sequence, a part of them counted as a whole.

    The chunks of one layer are all of one size.
    """
    return (0, 0, 0, 0, 0, 0, 0, count, 0, size)


def per_sequence(count: int) -> Form:
    return _term(8, count)


def scaled(form: Form, factor: int) -> Form:
    a, b, c, d, e, f, g, h, i, size = form
    k = factor
    return (a * k, b * k, c * k, d * k, e * k, f * k, g * k, h * k, i * k, size)


def plus(one: Form, other: Form) -> Form:
    a, b, c, d, e, f, g, h, i, size = one
    p, q, r, s, t, u, v, w, x, other_size = other
    size = size or other_size
    return (a + p, b + q, c + r, d + s, e + t, f + u, g + v, h + w, i + x, size)


def minus(one: Form, other: Form) -> Form:
    return plus(one, scaled(other, -1))


def total(forms: Iterable[Form]) -> Form:
    result = NOTHING
    for form in forms:
        result = plus(result, form)
    return result


def without_sequences(form: Form) -> Form:
    """Without what a chunk or a whole sequence takes."""
    return (*form[:7], 0, 0, 0)


def evaluate(form: Form, *, tokens: Count, span: Count, r: Count) -> Count:
    """The number, or array of numbers, that `form` stands for."""
    of_token, of_pair, fixed, of_rank_token, of_rank, of_square, of_many = form[:7]
    of_chunk, of_sequence, size = form[7:]
    result: Count = 0 * tokens + fixed
    if of_token or of_pair or of_rank_token:
        each = of_token
        if of_pair:
            each = each + of_pair * span
        if of_rank_token:
            each = each + of_rank_token * r
        result = result + tokens * each
    if of_rank:
        result = result + of_rank * r
    if of_square:
        result = result + of_square * span * span
    if of_many:
        result = result + of_many * (tokens > FUSED_ROWS)
    if of_chunk or of_sequence:
        sequences = tokens // span
        result = result + sequences * (of_sequence + of_chunk * chunks(span, size))
    return result


def chunks(span: Count, size: int) -> Count:
    """How many chunks of `size` tokens a sequence of `span` has."""
    return -(-span // max(1, size))


def most(forms: Iterable[Form], *, tokens: Count, span: Count, r: Count) -> Count:
    return largest(*(evaluate(form, tokens=tokens, span=span, r=r) for form in forms), 0 * tokens)


def maximal(forms: Iterable[Form]) -> tuple[Form, ...]:
    """Those of `forms` that no other is at least as large as in every term."""
    candidates = sorted(set(forms), reverse=True)
    varying = [
        term for term, values in enumerate(zip(*candidates, strict=True)) if len(set(values)) > 1
    ]
    maxima: list[Form] = []
    terms_of_maxima: list[tuple[int, ...]] = []
    for form in candidates:  # a loop over 512 experts makes tens of thousands
        terms = tuple(form[term] for term in varying)
        if not any(all(map(ge, larger, terms)) for larger in terms_of_maxima):
            maxima.append(form)
            terms_of_maxima.append(terms)
    return tuple(maxima)


@dataclass(eq=False, slots=True)
class Tensor:
    """Elements of one dtype; several tensors may share one storage.

    Args:
        storage: number of its storage on the tape; -1 for what lives anyway, such as a weight.
        elements: how many.
        size: bytes of each.
        needs_grad: a gradient flows into it.
        is_leaf: the gradient is kept: a trained parameter.
        joined: laid out as [batch, heads, seq, head_dim] in memory.
        edge: what its gradient is gathered under; a view of the whole has the edge of the whole.
    """

    storage: int
    elements: Form
    size: int
    edge: int = 0
    needs_grad: bool = False
    is_leaf: bool = False
    joined: bool = False

    @property
    def form(self) -> Form:
        return scaled(self.elements, self.size)


@dataclass(slots=True)
class _Node:
    """What autograd writes down of one operator."""

    step: int
    results: Sequence[Tensor]
    inputs: Sequence[Tensor]
    saved: Sequence[int]
    packs: bool
    passes: bool
    inner: Form
    hidden: bool = False
    reshapes: bool = False


@dataclass(slots=True)
class _Step:
    reads: Sequence[int]
    makes: Sequence[int]
    inner: Form


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that autograd keeps; `element_bytes` 0 for several in one operator."""

    what: str
    element_bytes: int
    form: Form


class Tape:
    """Operators in the order of the forward, and the graph that they leave.

    A tensor lives until the last operator that reads it; `hold` says where a Python name, or a
    caller's, keeps it longer.

    Args:
        no_grad: nothing gets a gradient, so that operators keep nothing for a backward.
    """

    def __init__(self, *, no_grad: bool = False) -> None:
        self.no_grad = no_grad
        self._forms: list[Form] = []
        self._steps: list[_Step] = []
        self._nodes: list[_Node] = []
        self._num_edges = 0
        self._returned: set[int] = set()
        self._bound: dict[str, int] = {}
        self._names: list[tuple[str, int]] = []
        self._gathered: list[Tensor] = []
        self._lent: list[Tensor] = []

    def _add(self, form: Form, what: str, size: int) -> None:
        self._forms.append(form)
        self._names.append((what, size))

    def _edge(self) -> int:
        self._num_edges += 1
        return self._num_edges

    def weight(self, elements: Form, size: int, *, trained: bool = False) -> Tensor:
        """A parameter or a table: alive anyway."""
        trained = trained and not self.no_grad
        return Tensor(-1, elements, size, self._edge(), trained, is_leaf=trained)

    def input(self, elements: Form, size: int, *, needs_grad: bool) -> Tensor:
        """What the block is given, storage 0 being the hidden state."""
        self._add(scaled(elements, size), LAYER_INPUT, size)
        return Tensor(len(self._forms) - 1, elements, size, self._edge(), needs_grad)

    def shared(self, elements: Form, size: int, *, needs_grad: bool) -> Tensor:
        """What all layers read: alive anyway, and so is the gradient gathered from later layers."""
        found = Tensor(-1, elements, size, self._edge(), needs_grad)
        if needs_grad:
            self._gathered.append(found)
        return found

    def lend(self, *tensors: Tensor) -> None:
        """Later blocks read `tensors`, and their gradients wait when this one goes backward."""
        self._lent += tensors
        self._gathered += [one for one in tensors if one.needs_grad]

    @property
    def lent(self) -> Form:
        return total(one.form for one in self._lent)

    def cached(self, tensor: Tensor) -> Tensor:
        """The same in a cache that is counted elsewhere, one head after the other."""
        return replace(tensor, storage=-1, edge=self._edge(), joined=True)

    @property
    def gathered(self) -> Form:
        """Gradients that later blocks have left."""
        return total(one.form for one in self._gathered)

    def op(
        self,
        reads: Sequence[Tensor],
        elements: Form,
        size: int,
        *,
        saves: Sequence[Tensor] = (),
        saves_result: bool = False,
        keeps: Sequence[Form] = (),
        passes: bool = False,
        inner: Form = NOTHING,
        inner_backward: Form = NOTHING,
        detached: bool = False,
        hidden: bool = False,
        reshapes: bool = False,
        joined: bool = False,
        what: str = "",
    ) -> Tensor:
        """One operator that makes a new tensor.

        Args:
            saves: inputs that its backward needs, where a gradient flows at all.
            saves_result: so is the result.
            keeps: further tensors that it makes and keeps for backward.
            passes: the gradient is handed on as it is, where the dtype is the same.
            inner: bytes that the forward takes and gives back beside the result.
            inner_backward: so for the backward, beside the gradients it returns.
            detached: no gradient flows.
            hidden: what it saves is outside of autograd's hooks, so checkpointing can't see it.
            reshapes: the gradients it returns are views, as those of a product of matrices are that
                reads its input as rows.
            what: its name, for what is kept of it.
        """
        result = Tensor(len(self._forms), elements, size, self._edge(), joined=joined)
        self._add(result.form, what, size)
        made = [result.storage]
        inputs = () if detached else tuple(one for one in reads if one.needs_grad)
        if inputs:
            result.needs_grad = True
            kept = [one.storage for one in saves if one.storage >= 0]
            if saves_result:
                kept.append(result.storage)
            for form in keeps:
                made.append(len(self._forms))
                kept.append(len(self._forms))
                self._add(form, what, 0)
            packs = bool(saves or saves_result or keeps) and not hidden
            step = len(self._steps)
            self._nodes.append(
                _Node(
                    step, (result,), inputs, kept, packs, passes, inner_backward, hidden, reshapes
                )
            )
        self._steps.append(_Step([one.storage for one in reads if one.storage >= 0], made, inner))
        return result

    def view(self, tensor: Tensor, *, copies_gradient: bool = False) -> Tensor:
        """The same storage in another shape.

        Args:
            copies_gradient: the gradient's layout is not that of the tensor.
        """
        if not copies_gradient or not tensor.needs_grad:
            return tensor
        result = replace(tensor, edge=self._edge())
        self._nodes.append(_Node(len(self._steps), (result,), (tensor,), (), False, False, NOTHING))
        return result

    def in_place(self, tensor: Tensor, added: Tensor | None = None) -> Tensor:
        """Written over: by the sum with `added`, or by a product with what lives anyway."""
        read = [tensor] if added is None else [tensor, added]
        step = len(self._steps)
        self.hold(*read)
        inputs = [one for one in read if one.needs_grad]
        if not inputs:
            return tensor
        result = replace(tensor, edge=self._edge(), needs_grad=True)
        is_sum = added is not None  # a product's backward reads its factor
        self._nodes.append(_Node(step, (result,), inputs, (), not is_sum, is_sum, NOTHING))
        return result

    def parts(
        self, tensor: Tensor, elements: Sequence[Form], *, inner: Form = NOTHING
    ) -> tuple[Tensor, ...]:
        """Views of parts of `tensor`, whose gradient is put together from theirs."""
        found = tuple(replace(tensor, elements=one, edge=self._edge()) for one in elements)
        if tensor.needs_grad:
            self._nodes.append(_Node(len(self._steps), found, (tensor,), (), False, False, inner))
        return found

    def hold(self, *tensors: Tensor) -> None:
        """A name still holds `tensors` here."""
        self._steps.append(_Step([one.storage for one in tensors if one.storage >= 0], (), NOTHING))

    def hold_to_end(self, tensor: Tensor, *, name: str = "") -> None:
        """A name of the block's caller, or of the block itself, holds `tensor` until it returns.

        Args:
            name: one that is used again: what it was bound to before lives until here.
        """
        before = self._bound.get(name)
        if before is not None:
            self._returned.discard(before)
            self._steps.append(_Step([before], (), NOTHING))
        if tensor.storage >= 0:
            self._returned.add(tensor.storage)
            if name:
                self._bound[name] = tensor.storage

    def kept(self, *, hidden: bool = False) -> tuple[Kept, ...]:
        """What stays for backward, each storage once, the input among it if it is kept.

        Args:
            hidden: only what checkpointing does not free.
        """
        nodes = [node for node in self._nodes if node.hidden or not hidden]
        found = sorted({storage for node in nodes for storage in node.saved})
        return tuple(Kept(*self._names[one], self._forms[one]) for one in found)

    @property
    def saved(self) -> Form:
        """Bytes of all that is kept."""
        return total(one.form for one in self.kept())

    def forward(self, *, saving: bool, stop: int | None = None) -> tuple[list[Form], Form]:
        """Points of the forward, and what is saved at its end, the input counted in neither.

        Args:
            saving: what autograd keeps stays alive.
            stop: the step that recomputation does not reach.
        """
        steps = self._steps if stop is None else self._steps[:stop]
        last: dict[int, int] = {}  # names hold what they hold, though recomputation ends early
        for index, step in enumerate(self._steps):
            for storage in (*step.reads, *step.makes):
                last[storage] = index
        last |= dict.fromkeys(self._returned, len(self._steps) - 1)
        ends: dict[int, list[int]] = {}
        for storage, index in last.items():
            ends.setdefault(index, []).append(storage)
        seen: set[int] = set()
        kept: set[int] = set()
        if saving:
            for node in self._nodes:
                seen.update(node.saved)
                if not node.hidden:
                    kept.update(node.saved)
        points = []
        live = NOTHING
        for index, step in enumerate(steps):
            for storage in step.makes:
                live = plus(live, self._forms[storage])
            points.append(plus(live, step.inner))
            for storage in ends.get(index, ()):
                if storage not in seen and storage != 0:
                    live = minus(live, self._forms[storage])
        return points, total(self._forms[one] for one in kept if one != 0)

    def backward(
        self, *, recomputed: bool, early_stop: bool = True, accumulated: bool = False
    ) -> list[Form]:
        """Points of the backward, from the gradient of the last result on.

        Args:
            recomputed: the block is checkpointed: the input is alive anyway, and the rest is made
                again as soon as a node asks for it.
            early_stop: recomputation ends with the last tensor that is asked for.
            accumulated: gradients of parameters exist already and are added to.
        """
        walk = _Backward(self, accumulated=accumulated)
        if not recomputed:
            walk.live = plus(walk.live, self.saved)
        else:
            if not early_stop:
                walk.recompute(*self.forward(saving=True))
                walk.hold_results(self._nodes[-1])
        for node in reversed(self._nodes):
            if recomputed and early_stop and node.packs and not walk.is_recomputed:
                makes = self._steps[node.step].makes  # what it saves of these is there when it ran
                ran = any(storage in node.saved for storage in makes)
                walk.recompute(*self.forward(saving=True, stop=node.step + ran))
            walk.run(node, frees_input=not recomputed)
        return walk.points


class _Backward:
    """One pass from the result to the input."""

    def __init__(self, tape: Tape, *, accumulated: bool) -> None:
        self._forms = tape._forms
        self._accumulated = accumulated
        self._holders: dict[int, int] = {}  # nodes that keep a storage
        for node in tape._nodes:
            for storage in set(node.saved):
                self._holders[storage] = self._holders.get(storage, 0) + 1
        result = tape._nodes[-1].results[0]
        self._shares: dict[int, int] = {}  # holders of one gradient's storage
        self._sizes: dict[int, Form] = {}
        self._views: set[int] = set()
        self._next = 0
        self._given = self._new(result.form)
        self._buffers: dict[int, int] = {result.edge: self._given}
        self.live = result.form
        for one in tape._gathered:
            self._buffers[one.edge] = self._new(one.form)
            self.live = plus(self.live, one.form)
        self.points: list[Form] = [self.live]
        self._held = {0}  # not freed by the backward of a checkpointed block
        for node in tape._nodes:
            if node.hidden:
                self._held.update(node.saved)
        self.is_recomputed = False

    def _new(self, form: Form) -> int:
        self._next += 1
        self._sizes[self._next] = form
        self._shares[self._next] = 1
        return self._next

    def _release(self, gradient: int) -> None:
        self._shares[gradient] -= 1
        if not self._shares[gradient]:
            self.live = minus(self.live, self._sizes[gradient])

    def recompute(self, points: list[Form], saved: Form) -> None:
        self.points += [plus(self.live, one) for one in points]
        self.live = plus(self.live, saved)
        self.is_recomputed = True

    def hold_results(self, last: _Node) -> None:
        """Names of a reentrant checkpoint hold its results, and their gradients, to the end.

        Source: torch 2.13 `CheckpointFunction.backward`: `outputs`, `args`.
        """
        self._shares[self._given] += 1
        result = last.results[0].storage
        if result >= 0 and not self._holders.get(result):
            self.live = plus(self.live, self._forms[result])

    def run(self, node: _Node, *, frees_input: bool) -> None:
        """Pass the gradients of `node`'s results on to its inputs."""
        given = [self._buffers.pop(one.edge) for one in node.results if one.edge in self._buffers]
        if not given:
            return
        made: list[tuple[Tensor, int]] = []
        for one in node.inputs:
            if node.passes and self._sizes[given[0]] == one.form:
                self._shares[given[0]] += 1
                made.append((one, given[0]))
            else:
                gradient = self._new(one.form)
                made.append((one, gradient))
                self.live = plus(self.live, one.form)
                if node.reshapes:
                    self._views.add(gradient)
        self.points.append(plus(self.live, node.inner))
        for storage in set(node.saved):
            self._holders[storage] -= 1
            kept = storage in self._held if not frees_input else False
            if not self._holders[storage] and not kept:
                self.live = minus(self.live, self._forms[storage])
        for gradient in given:
            self._release(gradient)
        for one, gradient in made:
            self._deliver(one, gradient)

    def _deliver(self, tensor: Tensor, gradient: int) -> None:
        if tensor.is_leaf:
            if self._accumulated:
                self._release(gradient)
            return
        before = self._buffers.get(tensor.edge)
        if before is None:
            self._buffers[tensor.edge] = gradient
            return
        # Source: torch 2.13 `InputBuffer::accumulate`; a view's base holds the storage, too.
        if self._shares[before] == 1 and before not in self._views:
            self._release(gradient)
            return
        form = tensor.form
        self._buffers[tensor.edge] = self._new(form)
        self.live = plus(self.live, form)
        self.points.append(self.live)
        self._release(before)
        self._release(gradient)
