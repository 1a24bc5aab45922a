"""A small autograd: which tensors live at each point of a block's forward and backward.

A block is written as the library writes it, on tensors that have a size and no values. The tape
saves what autograd saves, frees a tensor when nothing holds it, and returns the bytes alive at the
points that can be the peak. Sizes are `LinearForm`s, so that one pass over a block serves every
batch size, length and rank, as numbers or as arrays of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from whichlora.symbolic.backward import Backward
from whichlora.symbolic.graph import (
    LAYER_INPUT,
    NO_INNER,
    Assigned,
    Inner,
    Node,
    PackedEvent,
    SavedTensor,
    Step,
    TapeEvent,
    Temporaries,
    Tensor,
)
from whichlora.symbolic.linear_form import NOTHING, LinearForm, packed, scaled, total, unpacked
from whichlora.symbolic.traffic import KernelCounts, StepTraffic, Traffic

_RIGHT_BEFORE = 4  # kernels


def _has_rank(form: LinearForm) -> bool:
    return bool(form.per_rank_token or form.per_rank or form.per_rank_sequence)


class Tape:
    """Operators in the order of the forward, and the autograd graph that they build.

    A tensor lives until the last operator that reads it. `hold` marks where a local variable, of
    the function or of its caller, still refers to it. Bytes are added up as `packed` forms.

    Args:
        no_grad: nothing gets a gradient, so that operators keep nothing for a backward.
        writes_cache: what is put into a cache is made by the block, and outlives it.
        reads_own: the block goes on with its own keys and values, not with those of the cache.
    """

    def __init__(
        self, *, no_grad: bool = False, writes_cache: bool = False, reads_own: bool = False
    ) -> None:
        self.no_grad = no_grad
        self.writes_cache = writes_cache
        self.reads_own = reads_own
        self.forms: list[int] = []
        self._chunk_size = self._fused_rows = self._group_size = 0
        self.steps: list[Step] = []
        self.nodes: list[Node] = []
        self._num_edges = 0
        self.input_edge = 0
        self.result = 0  # storage that a caller takes over
        self.product: int | None = None  # the first result of a matrix
        self.cached_copies: list[int] = []  # of trained weights, in autocast's cache
        self.in_cache: list[int] = []  # keys and values, which outlive the block
        self._returned: set[int] = set()
        self._bound: dict[str, int] = {}
        self._names: list[tuple[str, int]] = []
        self.gathered_tensors: list[Tensor] = []
        self.further_results: list[int] = []
        self._shared_weights: dict[str, Tensor] = {}
        self._held_by_later_layers: list[Tensor] = []
        self.memory: Tensor | None = None  # an encoder's output, which the block reads
        self._saved_elsewhere: set[int] = set()  # edges of saved tensors that others made
        self._cache_writes: list[tuple[int, int]] = []  # steps, and what they put there
        self._num_kernels = 0
        self._num_inside = 0
        self._touched: dict[int, int] = {}  # storages by the last kernel that reads or writes them

    @contextmanager
    def without_graph(self) -> Iterator[None]:
        """`torch.no_grad()`: weights get no gradient; what else is read must need none."""
        before, self.no_grad = self.no_grad, True
        try:
            yield
        finally:
            self.no_grad = before

    def _add(self, form: int, name: str, size: int) -> None:
        self.forms.append(form)
        self._names.append((name, size))

    def _packed(self, form: LinearForm) -> int:
        if form is NOTHING:
            return 0
        if form.chunk_size:
            self._chunk_size = form.chunk_size
        if form.fused_rows:
            self._fused_rows = form.fused_rows
        if form.group_size:
            self._group_size = form.group_size
        return packed(form)

    def _inner(self, temporaries: Temporaries) -> Inner:
        """The tensors among `temporaries`."""
        if temporaries is NOTHING:
            return NO_INNER
        if isinstance(temporaries, LinearForm):
            temporaries = (temporaries,)
        events: list[PackedEvent] = []
        peaks: list[int] = []
        alive: dict[str | int, tuple[int, int]] = {}  # by the variable or the place
        live = place = 0
        for temporary in temporaries:
            name: str | int = place
            form: LinearForm | None
            if isinstance(temporary, Assigned):
                name, form = temporary
            else:
                form = temporary
            born = None
            if form is not None and any(form):
                born = place, self._packed(form)
                events.append(born)
                live += born[1]
                place += 1
            if name in alive:
                peaks.append(live)
                gone, num_bytes = alive.pop(name)
                events.append((gone, None))
                live -= num_bytes
            if born is not None:
                alive[name] = born
        left = tuple(gone for gone, _ in alive.values())
        return Inner(tuple(events), tuple(dict.fromkeys(peaks)), live, left)

    def _form(self, number: int) -> LinearForm:
        return unpacked(number, self._chunk_size, self._fused_rows, self._group_size)

    def _unpacked(self, points: Sequence[int]) -> list[LinearForm]:
        forms = {point: self._form(point) for point in set(points)}
        return [forms[point] for point in points]

    def _edge(self) -> int:
        self._num_edges += 1
        return self._num_edges

    def weight(self, elements: LinearForm, size: int, *, trained: bool = False) -> Tensor:
        """A parameter or a table: counted elsewhere, so it has no storage on the tape."""
        trained = trained and not self.no_grad
        return Tensor(-1, elements, size, self._edge(), trained, is_leaf=trained)

    def input(self, elements: LinearForm, size: int, *, needs_grad: bool) -> Tensor:
        """An argument of the block; the first, with storage 0, is the hidden state."""
        self._add(self._packed(elements) * size, LAYER_INPUT, size)
        self.input_edge = self._edge()
        return Tensor(len(self.forms) - 1, elements, size, self.input_edge, needs_grad)

    def shared_weight(self, name: str, elements: LinearForm, size: int) -> Tensor:
        """A trained tensor that several layers read, one of each `name` and of its casts.

        `AccumulateGrad` has one node for all of them, so that its gradient waits for the first
        layer's part. Source: torch 2.13 `InputBuffer::accumulate`.
        """
        if name not in self._shared_weights:
            tensor = self.shared(elements, size, needs_grad=not self.no_grad)
            self._shared_weights[name] = tensor
        return self._shared_weights[name]

    def shared(self, elements: LinearForm, size: int, *, needs_grad: bool) -> Tensor:
        """A tensor that all layers read, and the gradient that later layers have summed for it."""
        tensor = Tensor(-1, elements, size, self._edge(), needs_grad)
        if needs_grad:
            self.gathered_tensors.append(tensor)
        return tensor

    def returns_to_later_layers(self, tensor: Tensor, *, gathers: bool) -> None:
        """The block's caller hands `tensor` on to later blocks.

        Args:
            gathers: they have summed its gradient, wanted or not.
        """
        self.hold_to_end(tensor)
        self.further_results.append(tensor.storage)
        if gathers:
            self.gathered_tensors.append(tensor)

    def hold_for_later_layers(self, *tensors: Tensor) -> None:
        """Later blocks read `tensors`; their gradients exist when this block goes backward."""
        self._held_by_later_layers += tensors
        self.gathered_tensors += [tensor for tensor in tensors if tensor.needs_grad]

    @property
    def held_by_later_layers(self) -> LinearForm:
        return total(tensor.form for tensor in self._held_by_later_layers)

    @property
    def unsaved_for_later_layers(self) -> LinearForm:
        """Bytes of the tensors that later layers read and no backward does."""
        storages = self.storages_held(graph=False) - self.saved_storages()
        return self._form(sum(self.forms[storage] for storage in storages))

    @property
    def graph_behind_held(self) -> LinearForm:
        """Bytes that nodes behind the tensors held by later layers have saved, the input's too."""
        storages = self._storages_behind(graph=True) - self.storages_held(graph=False)
        return self._form(sum(self.forms[storage] for storage in storages))

    def storages_held(self, *, graph: bool) -> frozenset[int]:
        """Tensors held by later layers, with `graph` also what nodes that lead to them have saved.

        What a checkpoint recomputes has a graph of its own, which lives as long as one of its
        tensors does. Source: torch 2.13 `torch/utils/checkpoint.py`, `_recomputation_hook`: what
        its hook packs is held by the recomputed node, too. Reentrant, backward frees that node's.
        The input of a checkpoint is left out, which is counted elsewhere.
        """
        return self._storages_behind(graph=graph) - {0}

    def _storages_behind(self, *, graph: bool) -> frozenset[int]:
        storages = {tensor.storage for tensor in self._held_by_later_layers}
        if not graph:
            return frozenset(storages)
        edges = {tensor.edge for tensor in self._held_by_later_layers}
        for node in reversed(self.nodes):
            if any(result.edge in edges for result in node.results):
                edges.update(tensor.edge for tensor in node.inputs)
                storages.update(() if node.hidden else node.saved)
        return frozenset(storages)

    def keep_copy(self, copy: Tensor) -> Tensor:
        """Autocast's cache has `copy`, of a trained weight, until the forward is done."""
        if copy.storage >= 0:
            self.cached_copies.append(copy.storage)
        return copy

    def cached(self, tensor: Tensor, elements: LinearForm, *, written: bool) -> Tensor:
        """Its copy in a cache, laid out head by head; counted elsewhere, or made here.

        Args:
            elements: of the copy, which has earlier tokens, too.
            written: the last step has put it there.
        """
        if written and self.writes_cache:
            copy = self.op([tensor], elements, tensor.size, joined=True)
            self.in_cache.append(copy.storage)
            return tensor if self.reads_own else copy
        if written:
            self._cache_writes.append((len(self.steps) - 1, tensor.packed))
        return replace(tensor, storage=-1, elements=elements, edge=self._edge(), joined=True)

    def keep_to_next(self, name: str) -> None:
        """The caller holds what the variable `name` last was until the next block is done."""
        if name in self._bound:
            self.cached_copies.append(self._bound[name])

    @property
    def gathered(self) -> LinearForm:
        """Gradients that later blocks have summed before this block goes backward."""
        return total(tensor.form for tensor in self.gathered_tensors)

    def op(
        self,
        reads: Sequence[Tensor],
        elements: LinearForm,
        size: int,
        *,
        saves: Sequence[Tensor] = (),
        saves_result: bool = False,
        keeps: Sequence[LinearForm] = (),
        passes: bool = False,
        inner: Temporaries = NOTHING,
        inner_backward: Temporaries = NOTHING,
        casts_gradients: LinearForm = NOTHING,
        detached: bool = False,
        hidden: bool = False,
        reshapes: bool = False,
        overwrites: bool = False,
        sums_wide: bool = False,
        in_turn: bool = False,
        joined: bool = False,
        multiplies: bool = False,
        picks: bool = False,
        what: str = "",
    ) -> Tensor:
        """One operator that makes a new tensor.

        Args:
            saves: inputs that its backward needs, where a gradient flows at all.
            saves_result: its backward needs the result, too.
            keeps: further tensors that it makes for its backward.
            passes: its backward hands on the gradient tensor itself, where the dtype is the same.
            inner: temporaries of the forward beside the result.
            inner_backward: temporaries of the backward beside the gradients that it returns.
            casts_gradients: bytes of those gradients that are cast after the backward has returned;
                the wide ones are among `inner_backward`.
            detached: no gradient flows.
            hidden: its tensors bypass the saved-tensor hooks, so checkpointing does not free them.
            reshapes: the gradients it returns are views, as of a matrix product that reads its
                input as rows.
            overwrites: gradients are written over what it has saved.
            sums_wide: it sums gradients in fp32 before its temporaries exist, and casts the sums at
                its end where the inputs are narrower.
            in_turn: a loop makes its tensors one by one; each is freed before the next, unless it
                is saved.
            multiplies: a matrix product, an attention or the expansion of a quantised weight, whose
                time is counted apart and not by the bytes that it moves. A product with the rank as
                a side is bound by its bytes.
            picks: it reads few elements of its inputs, such as those of the targets.
            what: label of the tensors that it saves.
        """
        result = Tensor(len(self.forms), elements, size, self._edge(), joined=joined)
        self._add(self._packed(elements) * size, what, size)
        new_storages = [result.storage]
        multiplies = (multiplies or reshapes) and not any(
            _has_rank(tensor.elements) for tensor in (result, *reads)
        )
        inputs = () if detached else tuple(tensor for tensor in reads if tensor.needs_grad)
        if inputs:
            result.needs_grad = True
            saved = self._saved(saves, result if saves_result else None)
            further = [self._kept(form, what) for form in keeps]
            new_storages, saved = new_storages + further, saved + further
            num_saved = 0 if hidden else len(saves) + saves_result + len(keeps)
            node = Node(len(self.steps), (result,), inputs, saved, num_saved > 0, passes)
            node.inner = self._inner(inner_backward)
            node.hidden, node.reshapes, node.overwrites = hidden, reshapes, overwrites
            node.casts, node.sums_wide = self._packed(casts_gradients), sums_wide
            node.multiplies, node.picks, node.num_saved = multiplies, picks, num_saved
            node.read_elsewhere = sum(tensor.packed for tensor in saves if tensor.storage < 0)
            self.nodes.append(node)
        read_storages = [tensor.storage for tensor in reads if tensor.storage >= 0]
        self.steps.append(Step(read_storages, new_storages, self._inner(inner), in_turn=in_turn))
        written = sum(self.forms[storage] for storage in new_storages)
        self._run_kernel((() if picks else reads), written, moves=not multiplies)
        self._touched |= dict.fromkeys(new_storages, self._num_kernels)
        return result

    def _saved(self, tensors: Sequence[Tensor], result: Tensor | None) -> list[int]:
        """Storages of what a node saves; those that others made are noted."""
        self._saved_elsewhere.update(tensor.edge for tensor in tensors if tensor.storage < 0)
        saved = [tensor.storage for tensor in tensors if tensor.storage >= 0]
        return saved if result is None else [*saved, result.storage]

    def _kept(self, form: LinearForm, what: str) -> int:
        """A further tensor that an operator keeps."""
        self._add(self._packed(form), what, 0)
        return len(self.forms) - 1

    def _run_kernel(self, reads: Sequence[Tensor], written: int, *, moves: bool = True) -> None:
        """The last step has a kernel, which writes so many packed bytes."""
        step = self.steps[-1]
        step.kernels = 1
        if moves:
            step.kernels += step.inner.kernels
            read = sum(tensor.packed // tensor.repeats for tensor in reads)
            step.moved = read + written + step.inner.moved
            step.passing = step.inner.moved
        self._num_kernels += 1
        for tensor in reads:
            last = self._touched.get(tensor.storage)
            if moves and last is not None and self._num_kernels - last <= _RIGHT_BEFORE:
                step.passing += tensor.packed // tensor.repeats
            if tensor.storage >= 0:
                self._touched[tensor.storage] = self._num_kernels

    def runs_beside(self, count: int) -> None:
        """Further kernels of the last operator, each on a few bytes."""
        self.steps[-1].kernels += count

    def runs(self, count: int) -> None:
        """Further kernels that C++ launches inside the last operator for parts of its result."""
        self._num_inside += count

    def several(
        self, reads: Sequence[Tensor], results: Sequence[LinearForm], size: int, **settings: Any
    ) -> tuple[Tensor, ...]:
        """One function that makes several tensors, and goes backward once for all of them.

        Args:
            results: elements of each, of `size` bytes.
            settings: as of `op`.
        """
        first = self.op(reads, results[0], size, **settings)
        tensors = [first]
        for elements in results[1:]:
            tensors.append(
                Tensor(len(self.forms), elements, size, self._edge(), needs_grad=first.needs_grad)
            )
            self._add(self._packed(elements) * size, str(settings.get("what", "")), size)
        step = self.steps[-1]
        self.steps[-1] = replace(step, makes=[*step.makes, *(t.storage for t in tensors[1:])])
        if first.needs_grad:
            self.nodes[-1].results = tuple(tensors)
        return tuple(tensors)

    def view(self, tensor: Tensor, *, copies_gradient: bool = False) -> Tensor:
        """The same storage in another shape.

        Args:
            copies_gradient: the gradient's layout is not that of the tensor.
        """
        if not copies_gradient or not tensor.needs_grad:
            return tensor
        result = replace(tensor, edge=self._edge())
        self.nodes.append(Node(len(self.steps), (result,), (tensor,), (), False, False))
        return result

    def written_over(self, tensor: Tensor) -> Tensor:
        """The result of a kernel that overwrites `tensor`, and in its backward the gradient."""
        self.hold(tensor)
        if not tensor.needs_grad:
            return tensor
        result = replace(tensor, edge=self._edge())
        self.nodes.append(Node(len(self.steps) - 1, (result,), (tensor,), (), False, True))
        return result

    def behind(self, tensor: Tensor, elements: LinearForm, size: int) -> Tensor:
        """`torch.cat` of trained tensors that exist before all blocks, and `tensor`.

        Their node runs after the backward of all blocks. Until then its view keeps the gradient
        alive.

        Args:
            elements, size: of the result.
        """
        before = Tensor(-1, elements, size, self._edge(), needs_grad=not self.no_grad)
        result = self.op([before, tensor], elements, size, joined=True)
        if result.needs_grad:
            self.nodes[-1].narrows = True
        return result

    def concatenate(self, tensors: Sequence[Tensor], elements: LinearForm) -> Tensor:
        """`torch.cat`, whose backward hands on views of the gradient that it gets."""
        result = self.op(tensors, elements, max(tensor.size for tensor in tensors))
        if result.needs_grad:
            self.nodes[-1].narrows = True
        return result

    def works_before(self, tensor: Tensor, inner: Temporaries) -> Tensor:
        """`tensor`, whose gradient arrives while a backward still holds `inner`."""
        if not tensor.needs_grad:
            return tensor
        result = replace(tensor, edge=self._edge())
        temporaries = self._inner(inner)
        self.nodes.append(Node(len(self.steps), (result,), (tensor,), (), False, True, temporaries))
        return result

    def in_place(
        self, tensor: Tensor, added: Tensor | None = None, *, saves: Sequence[Tensor] = ()
    ) -> Tensor:
        """An in-place sum with `added`, or an in-place product with a parameter or number.

        Args:
            saves: what its backward reads.
        """
        operands = [tensor] if added is None else [tensor, added]
        step = len(self.steps)
        self.hold(*operands)
        self._run_kernel(operands, tensor.packed)
        inputs = [operand for operand in operands if operand.needs_grad]
        if not inputs:
            return tensor
        result = replace(tensor, edge=self._edge(), needs_grad=True)
        is_sum = added is not None  # a product's backward reads its factor
        saved = [operand.storage for operand in saves if operand.storage >= 0]
        packs = bool(saved) or not is_sum
        node = Node(step, (result,), inputs, saved, packs, is_sum)
        node.num_saved = max(len(saves), packs)
        self.nodes.append(node)
        return result

    def write_view(
        self,
        tensor: Tensor,
        value: Tensor,
        part: LinearForm | None = None,
        *,
        replaces: bool = False,
    ) -> Tensor:
        """An in-place sum of `value` and a view of `tensor`, of all its elements or of `part`.

        Args:
            replaces: the view becomes `value`, which is there already: an assignment to a slice.

        Source: torch 2.13 `CopySlices::apply_impl`: a copy of the whole gradient for `tensor`, and
        one of the view's part for the node of the operator, which hands it on or sums it up.
        """
        step = len(self.steps)
        self.hold(tensor, value)
        written = packed(part or tensor.elements) * tensor.size
        self._run_kernel([replace(tensor, elements=part or tensor.elements), value], written)
        inputs = [operand for operand in (tensor, value) if operand.needs_grad]
        if not inputs:
            return tensor
        result = replace(tensor, edge=self._edge(), needs_grad=True)
        elements = tensor.elements if part is None else part
        copied = scaled(elements, tensor.size)
        hands_on = value.needs_grad and value.form == copied
        inner = (NOTHING if hands_on else copied, copied if replaces else NOTHING)
        temporaries = self._inner(inner)
        self.nodes.append(Node(step, (result,), inputs, (), False, False, temporaries))
        return result

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """All of `tensors` in one; their gradients are views of its own."""
        elements = total(tensor.elements for tensor in tensors)
        result = self.op(tensors, elements, tensors[0].size)
        if result.needs_grad:
            self.nodes[-1].narrows = True
        return result

    def parts(
        self, tensor: Tensor, elements: Sequence[LinearForm], *, inner: Temporaries = NOTHING
    ) -> tuple[Tensor, ...]:
        """Views of parts of `tensor`; its gradient is assembled from theirs."""
        views = tuple(replace(tensor, elements=part, edge=self._edge()) for part in elements)
        if tensor.needs_grad:
            temporaries = self._inner(inner)
            self.nodes.append(
                Node(len(self.steps), views, (tensor,), (), False, False, temporaries)
            )
        return views

    def hold(self, *tensors: Tensor, by_graph: bool = False) -> None:
        """A local variable still refers to `tensors` here.

        Args:
            by_graph: nodes that nobody goes back through do, where the forward saves anything.
        """
        storages = [tensor.storage for tensor in tensors if tensor.storage >= 0]
        self.steps.append(Step(storages, (), by_graph=by_graph))

    def returns(self, tensor: Tensor) -> None:
        """The caller takes `tensor` over, so that no step of the block frees it."""
        self.hold(tensor)
        self.result = max(0, tensor.storage)

    def hold_to_end(self, tensor: Tensor, *, name: str = "") -> None:
        """A local variable of the block or of its caller holds `tensor` until the block returns.

        Args:
            name: a variable that is assigned again: its previous tensor lives until here.
        """
        previous = self._bound.get(name)
        if previous is not None:
            self._returned.discard(previous)
            self.steps.append(Step([previous], ()))
        if tensor.storage >= 0:
            self._returned.add(tensor.storage)
            if name:
                self._bound[name] = tensor.storage

    def saved_tensors(self, *, hidden: bool = False) -> tuple[SavedTensor, ...]:
        """Tensors saved for backward, each storage once; the input only where it is saved.

        Args:
            hidden: only tensors that checkpointing does not free.
        """
        storages = sorted(self.saved_storages(hidden=hidden))
        forms = self._unpacked([self.forms[storage] for storage in storages])
        return tuple(
            SavedTensor(*self._names[storage], form)
            for storage, form in zip(storages, forms, strict=True)
        )

    def saved_storages(self, *, hidden: bool = False) -> frozenset[int]:
        """What is saved for backward, or the part of it that checkpointing does not free."""
        nodes = [node for node in self.nodes if node.hidden or not hidden]
        return frozenset(storage for node in nodes for storage in node.saved)

    @property
    def saves_memory(self) -> bool:
        """Whether the output of an encoder is itself saved, not a copy of it."""
        return self.memory is not None and self.memory.edge in self._saved_elsewhere

    @property
    def forward_traffic(self) -> Traffic:
        return self.kernel_counts(self.steps).traffic(self._form)

    def kernel_counts(self, steps: Iterable[Step]) -> KernelCounts:
        staying = {self.result, *self.saved_storages()}
        counts = KernelCounts()
        for step in steps:
            passing = step.passing
            if step.moved:
                passing += sum(
                    self.forms[storage] for storage in step.makes if storage not in staying
                )
            counts.add(step.moved, passing, step.kernels)
        return counts

    def traffic(self, *, recomputed: bool, early_stop: bool = True) -> StepTraffic:
        """Of a forward with a graph, and of its backward. Args: as of `backward`."""
        walk = self.backward_walk(recomputed=recomputed, early_stop=early_stop)
        walk.counts.kernels += self._num_inside * (1 + recomputed)  # all that C++ launches
        num_saved = sum(node.num_saved for node in self.nodes)
        return StepTraffic(
            self.forward_traffic._replace(saves=num_saved),
            walk.repeated.traffic(self._form),
            walk.counts.traffic(self._form),
        )

    @property
    def has_graph(self) -> bool:
        """Whether a gradient flows through any of it."""
        return bool(self.nodes)

    @property
    def num_storages(self) -> int:
        return len(self.forms)

    def unpacked_events(self, events: Iterable[PackedEvent]) -> list[TapeEvent]:
        """`events` with their forms."""
        forms: dict[int | None, LinearForm | None] = {None: None}
        result = []
        for tensor, number in events:
            if number not in forms:
                assert number is not None
                forms[number] = self._form(number)
            result.append(TapeEvent(tensor, forms[number]))
        return result

    @property
    def saved(self) -> LinearForm:
        """Bytes of all saved tensors."""
        return self._form(self._saved_bytes)

    @property
    def _saved_bytes(self) -> int:
        return sum(self.forms[storage] for storage in self.saved_storages())

    def forward(self, *, saving: bool, fills_cache: bool = False) -> list[LinearForm]:
        """Points of the forward, the input left out.

        Args:
            saving: tensors saved for backward stay alive.
            fills_cache: what the block puts into a cache is not there before; elsewhere the cache
                is counted with it.
        """
        points = self.forward_points(saving=saving)
        for write, form in self._cache_writes if fills_cache else ():
            points[:write] = [point - form for point in points[:write]]
        return self._unpacked(points)

    def forward_points(self, *, saving: bool, stop: int | None = None) -> list[int]:
        """Bytes alive at each step of a forward that is not the first."""
        forms = self.forms
        held = self._outliving(saving=saving, again=True, hides=False)
        ends = self._ends(saving=saving)
        points = []
        live = 0
        for index, step in enumerate(self.steps if stop is None else self.steps[:stop]):
            points += [live + peak for peak in step.inner.peaks]
            for storage in step.made(saving=saving):
                live += forms[storage]
            points.append(live + step.inner.left_bytes)
            for storage in ends.get(index, ()):
                if storage not in held:
                    live -= forms[storage]
        return points

    def forward_events(
        self,
        *,
        saving: bool,
        again: bool = False,
        hides: bool = True,
        frees_input: bool = False,
        stop: int | None = None,
    ) -> list[PackedEvent]:
        """Births and deaths of the forward in order.

        Args:
            saving: tensors saved for backward stay alive.
            again: it is a recomputation; of the first forward what autocast's cache has stays.
            hides: what bypasses the saved-tensor hooks stays: the first forward builds a graph.
            frees_input: nobody else holds the input.
            stop: the step before which recomputation stops; what is not saved dies there.
        """
        held = self._outliving(saving=saving, again=again, hides=hides)
        if frees_input and not (saving and 0 in self.saved_storages()):
            held.remove(0)
        if stop is not None and self.result not in (0, *self.saved_storages()):
            held.discard(self.result)  # nobody takes over what the recomputation makes last
        ends = self._ends(saving=saving)
        events: list[PackedEvent] = []
        for index, step in enumerate(self.steps if stop is None else self.steps[:stop]):
            events += [(-1 - place, form) for place, form in step.inner.events]
            events += [(storage, self.forms[storage]) for storage in step.made(saving=saving)]
            events += [(-1 - place, None) for place in step.inner.left]
            events += [(tensor, None) for tensor in ends.get(index, ()) if tensor not in held]
        if stop is None:
            return events
        alive = dict.fromkeys(tensor for tensor, _ in events if tensor not in held)
        for tensor, form in events:
            if form is None:
                alive.pop(tensor, None)
        return events + [(tensor, None) for tensor in alive]

    def _outliving(self, *, saving: bool, again: bool, hides: bool) -> set[int]:
        """Storages that outlive the forward, the input among them."""
        nodes = [node for node in self.nodes if saving or (node.hidden and hides)]
        held = set(() if again else self.cached_copies) | set(self.in_cache)
        if saving and again:
            held |= {tensor.storage for tensor in self._held_by_later_layers}
        return {0, self.result, *held, *(storage for node in nodes for storage in node.saved)}

    def _ends(self, *, saving: bool) -> dict[int, list[int]]:
        """Storages by the step after which nobody reads or names them."""
        last: dict[int, int] = {}
        # local variables hold their tensors, though recomputation ends early
        for index, step in enumerate(self.steps):
            for storage in step.reads if saving or not step.by_graph else ():
                last[storage] = index
            for storage in step.made(saving=saving):
                last[storage] = index
        last |= dict.fromkeys(self._returned, len(self.steps) - 1)
        ends: dict[int, list[int]] = {}
        for storage, index in last.items():
            ends.setdefault(index, []).append(storage)
        return ends

    def backward(
        self,
        *,
        recomputed: bool,
        early_stop: bool = True,
        accumulated: bool = False,
        meets: bool = False,
    ) -> list[LinearForm]:
        """Points of the backward, from the gradient of the last result on.

        Args:
            recomputed: the block is checkpointed: its input is counted elsewhere, and the forward
                runs again as soon as a node unpacks a saved tensor.
            early_stop: recomputation ends with the last tensor that backward needs.
            accumulated: gradients of parameters exist already and are added to.
            meets: they are of another use of the parameters in the same graph.
        """
        walk = self.backward_walk(
            recomputed=recomputed, early_stop=early_stop, accumulated=accumulated, meets=meets
        )
        return self._unpacked(walk.points)

    def backward_walk(
        self,
        *,
        recomputed: bool,
        early_stop: bool = True,
        accumulated: bool = False,
        meets: bool = False,
    ) -> Backward:
        """The backward in order. Args: as of `backward`."""
        walk = Backward(
            self, recomputed=recomputed, early_stop=early_stop, accumulated=accumulated, meets=meets
        )
        if not recomputed:
            walk.live += self._saved_bytes
        elif not early_stop:  # `CheckpointFunction.backward` runs the whole forward first
            walk.recompute(None)
            walk.hold_results(self.nodes[-1])
        for node in reversed(self.nodes):
            # `_checkpoint_hook` of torch 2.13: the first unpack runs the forward, which
            # `_StopRecomputationError` ends with the last saved tensor
            if recomputed and early_stop and node.packs and not walk.is_recomputed:
                makes = self.steps[node.step].makes  # what it saves of these is there when it ran
                ran = any(storage in node.saved for storage in makes)
                walk.recompute(node.step + ran)
            walk.run(node, unpacks_once=recomputed and early_stop)
        walk.drop_hidden()
        walk.drop_held_again()
        return walk
