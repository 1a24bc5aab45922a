"""What FSDP shards together: the parameters of each unit, gathered and reduced as one.

Source: accelerate 1.15 `fsdp2_prepare_model`: every block is a unit, the embedding is one, the last
norm with the head is one, and what is left belongs to the root. A parameter is divided along its
first dimension, which is padded to a multiple of the ranks (torch 2.13 `_fsdp_param.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

from whichlora.memory.entries import Fact
from whichlora.memory.gradients import (
    ADAPTERS,
    FROZEN_ADAPTERS,
    SAVED_MODULES,
    Trained,
)
from whichlora.memory.images import TowerStep
from whichlora.memory.step import TrainingStep
from whichlora.memory.weights import (
    EMBEDDING_WEIGHTS,
    LAYER_WEIGHTS,
    OTHER_WEIGHTS,
    quantised_state_bytes,
)
from whichlora.parallel.base import Spread
from whichlora.spec.dtypes import Dtypes, is_quantised, resolve_dtypes
from whichlora.spec.layer import Layer, LayerGroup, Linear
from whichlora.spec.numeric import Count, ceil_div
from whichlora.spec.run import FOUR_BIT_BNB, RunConfig
from whichlora.spec.targets import adapted, adapted_linears
from whichlora.spec.tower import Tower


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """`count` equal parameters of one unit.

    Args:
        rows: the first dimension, along which they are divided.
        flat: it is a part of one vector of the whole unit, which is divided without padding.
        rest_bytes, compute_bytes: of one element, as kept between steps and as gathered.
        fact: of the entry that counts them on one device.
    """

    rows: Count
    width: Count
    count: int = 1
    rest_bytes: int
    compute_bytes: int
    trained: bool
    fact: Fact
    flat: bool = False

    @property
    def elements(self) -> Count:
        return self.rows * self.width * self.count

    def padded(self, size: int) -> Count:
        """Elements once the first dimension is a multiple of `size`."""
        if self.flat:
            return self.elements
        return ceil_div(self.rows, size) * size * self.width * self.count

    def shard(self, size: int) -> Count:
        if self.flat:
            return ceil_div(self.elements, size)
        return ceil_div(self.rows, size) * self.width * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered by one message."""

    name: str
    parameters: tuple[Parameter, ...]

    def gathered(self, size: int) -> Count:
        """Bytes of its parameters, unsharded, as kernels read them."""
        return sum(p.padded(size) * p.compute_bytes for p in self.parameters)

    @property
    def kept(self) -> Count:
        """Bytes of its parameters, unsharded, in the dtypes in which they are kept."""
        return sum(p.elements * p.rest_bytes for p in self.parameters)

    def reduced(self, size: int, reduce_bytes: int = 0) -> Count:
        """Bytes of its gradients as they are sent."""
        return sum(
            p.padded(size) * (reduce_bytes or p.compute_bytes) for p in self.parameters if p.trained
        )

    @property
    def gradients(self) -> Count:
        """Bytes of its gradients as the backward makes them."""
        return sum(p.elements * p.compute_bytes for p in self.parameters if p.trained)

    def gradient_shard(self, size: int) -> Count:
        return sum(p.shard(size) * p.rest_bytes for p in self.parameters if p.trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentUnits:
    """Equal units of which each is gathered and reduced on its own.

    Args:
        is_last: nothing is left to compute when its gradients are sent.
        goes_back: their backward runs; is_ahead: else version 2 gathers the last one for nobody.
        runs_again: version 1 frees it once its forward has been repeated, and gathers it once more
            for its backward: leaves of PEFT, and blocks that transformers before 4.53 checkpointed
            from outside, with `use_reentrant`.
        ends_block: nothing after it is repeated, unless all of the block is.
    """

    unit: Unit
    number: int
    is_last: bool = False
    goes_back: bool = True
    is_ahead: bool = False
    runs_again: bool = False
    ends_block: bool = False

    def gathers_in_backward(self, run: RunConfig) -> int:
        """Gathers of all of them in the backward of one micro-step."""
        if self.unit.name in ("head", "root"):  # is not freed after the forward
            return 0
        if not self.goes_back:
            return int(self.is_ahead)
        if not (self.runs_again and run.gradient_checkpointing):
            return self.number
        if self.unit.name == "layer" and not run.use_reentrant:
            return self.number
        is_repeated = run.use_reentrant or not self.ends_block
        return self.number * (1 + is_repeated)


@dataclass(frozen=True, kw_only=True)
class Units:
    """All units of a model.

    Args:
        rest: the step in the dtypes in which parameters are kept.
        step: in the dtypes in which they are gathered.
        storage_bytes: of one element of what holds 4-bit codes, 1 where it is no floating number
            and is not sharded.
        trained_bytes: of one element of a trained parameter between steps; 0: as on one device.
        mixed_bytes: of one element of an adapter once gathered; 0: as kernels read it.
    """

    rest: TrainingStep
    step: TrainingStep
    storage_bytes: int
    trained_bytes: int
    mixed_bytes: int = 0
    flat: bool = False

    def _unit(self, name: str, parameters: Iterable[Parameter]) -> Unit:
        if self.flat:
            parameters = (replace(each, flat=True) for each in parameters)
        return Unit(name=name, parameters=tuple(parameters))

    @cached_property
    def outside(self) -> Unit:
        """What version 1 leaves to the root: everything outside of the blocks."""
        units = (self.embedding, self.head, self.root)
        return Unit(name="root", parameters=tuple(x for unit in units for x in unit.parameters))

    @cached_property
    def blocks(self) -> tuple[Unit, ...]:
        """One of each group of equal layers."""
        return tuple(self._unit("layer", self._of_layer(group)) for group in self.step.model.groups)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(1 if group.shared else group.count for group in self.step.model.groups)

    @cached_property
    def tower_blocks(self) -> tuple[Unit, ...]:
        """So of a vision tower, whose blocks are units, too; none of a model without."""
        tower, trains = self.step.model.tower, self.step.trains_tower
        groups = () if tower is None else tower.stack.groups
        return tuple(
            self._unit("tower_block", self._of_layer(group, OTHER_WEIGHTS, trained=trains))
            for group in groups
        )

    @cached_property
    def tower_counts(self) -> tuple[int, ...]:
        tower = self.step.model.tower
        return () if tower is None else tuple(group.count for group in tower.stack.groups)

    @property
    def is_tied(self) -> bool:
        model = self.step.model
        return model.head is not None and model.head_tied

    @cached_property
    def embedding(self) -> Unit:
        """The looked-up table; empty where it is tied, and belongs to the head's unit."""
        table = self.step.model.embeddings[0]
        parameters = [] if self.is_tied else [self._table(table.rows, table.width)]
        return self._unit("embedding", (*parameters, *self._copies(embedding=True)))

    @cached_property
    def head(self) -> Unit:
        """The last norm and the head."""
        model = self.step.model
        parameters: list[Parameter] = []
        if model.head is not None:
            rows, width = model.head.out_features, model.head.in_features
            parameters.append(self._table(rows, width))
            if model.head.bias:
                parameters.append(self._table(rows, 1))
        if self._norm_is_with_head:
            parameters += self._vectors(sum(n.num_params for n in model.final_norms), OTHER_WEIGHTS)
        return self._unit("head", (*parameters, *self._copies(embedding=False)))

    @property
    def _norm_is_with_head(self) -> bool:
        # `_find_final_norm` looks among the children of `model.model`, which is the whole base
        # model where PEFT wraps it
        return self.step.method.trains_base

    @cached_property
    def root(self) -> Unit:
        """What no other unit has."""
        model, counted = self.step.model, 0
        parameters: list[Parameter] = []
        for table in model.embeddings[1:]:
            if table.kind != "buffer":
                parameters.append(self._table(table.rows, table.width))
                counted += table.num_params
        idle = model.idle_linears if model.tower is None else ()
        for linear in (*model.outer_linears, *idle):
            parameters += self._of_linear(linear, OTHER_WEIGHTS)
            counted += linear.num_params
        counted += model.embeddings[0].num_params
        if model.head is not None:
            counted += model.head.num_params - (model.head.num_weights if self.is_tied else 0)
        counted += sum(group.num_params for group in model.groups)
        if model.tower is not None:
            parameters += self._around_tower(model.tower)
            counted += model.tower.stack.num_params + model.tower.idle_params
        if self._norm_is_with_head:
            counted += sum(norm.num_params for norm in model.final_norms)
        parameters += self._vectors(model.loaded_params - counted, OTHER_WEIGHTS)
        parameters += self._shared_adapters()
        return self._unit("root", parameters)

    def _around_tower(self, tower: Tower) -> Iterator[Parameter]:
        """What no block of a vision tower has, and blocks that no image passes."""
        trains, stack = self.step.trains_tower, tower.stack
        counted = sum(group.num_params for group in stack.groups)
        for linear in stack.head_linears:
            if linear.is_module:  # else a kernel, which is no matrix
                yield from self._of_linear(linear, OTHER_WEIGHTS, trained=trains)
                counted += linear.num_params
            if linear.rank_multiple and linear.name in self.step.targets and not self._trains_base:
                yield from self._of_adapter(linear)
        for rows, width in tower.tables:
            yield self._base(rows, width, 1, OTHER_WEIGHTS, trained=trains)
            counted += rows * width
        yield from self._vectors(stack.num_params - counted, OTHER_WEIGHTS, trained=trains)
        in_idle = 0
        for linear in tower.idle:
            yield from self._of_linear(linear, OTHER_WEIGHTS, trained=False)
            in_idle += linear.num_params
        yield from self._vectors(tower.idle_params - in_idle, OTHER_WEIGHTS, trained=False)

    def all(self) -> Iterator[tuple[Unit, int]]:
        """Every unit with its number."""
        yield self.embedding, 1
        yield from zip(self.blocks, self.counts, strict=True)
        yield from zip(self.tower_blocks, self.tower_counts, strict=True)
        yield self.head, 1
        yield self.root, 1

    def sent(self) -> Iterator[SentUnits]:
        """Units as they are gathered; version 1 has one outside of the blocks, and PEFT's leaves.

        Source: peft 0.21.2 `fsdp_auto_wrap_policy`: every trained leaf is a unit.
        """
        if not self.flat:
            for unit, number in self.all():
                is_last = unit.name == "embedding" or (unit.name == "head" and self.is_tied)
                goes_back = unit.name != "tower_block" or self._tower_goes_back
                tower = self.step.model.tower
                if unit.parameters:
                    yield SentUnits(
                        unit=unit,
                        number=number,
                        is_last=is_last,
                        goes_back=goes_back,
                        is_ahead=tower is not None and not tower.attended,
                    )
            return
        older = self.step.dtypes.libraries.older("transformers", "4.53")
        outside = self.outside
        frozen = tuple(p for p in outside.parameters if p.fact is not ADAPTERS)
        yield SentUnits(unit=replace(outside, parameters=frozen), number=1, is_last=True)
        for leaf in outside.parameters:
            if leaf.fact is ADAPTERS:
                unit = Unit(name="adapter", parameters=(replace(leaf, count=1),))
                yield SentUnits(unit=unit, number=leaf.count)
        tower = self.step.model.tower
        groups = (*self.step.model.groups, *(() if tower is None else tower.stack.groups))
        blocks = (*self.blocks, *self.tower_blocks)
        counts = (*self.counts, *self.tower_counts)
        for place, (group, block, number) in enumerate(zip(groups, blocks, counts, strict=True)):
            layer = group.layer
            in_text = place < len(self.blocks)
            repeats = in_text or self.step.remakes_tower
            goes_back = in_text or self._tower_goes_back
            # dropout and norms save what they read: the forward is repeated up to them
            goes_on = bool(layer.dropouts) or layer.post_norm or len(layer.norms) >= 4
            leaves = [p for p in block.parameters if p.fact is ADAPTERS]
            others = tuple(p for p in block.parameters if p.fact is not ADAPTERS)
            unit = replace(block, parameters=others)
            yield SentUnits(
                unit=unit, number=number, goes_back=goes_back, runs_again=older and repeats
            )
            for number_of_leaf, leaf in enumerate(leaves):
                unit = Unit(name="adapter", parameters=(replace(leaf, count=1),))
                yield SentUnits(
                    unit=unit,
                    number=number * leaf.count,
                    runs_again=repeats,
                    ends_block=number_of_leaf == len(leaves) - 1 and not goes_on,
                )

    @property
    def _tower_goes_back(self) -> bool:
        """Whether blocks of a vision tower have a graph."""
        tower = self.step.model.tower
        return tower is not None and TowerStep.of(self.step, tower).goes_backward

    # --- parameters -----------------------------------------------------------------------------

    @property
    def _trains_base(self) -> bool:
        return self.step.method.trains_base

    def _width(self, width: int, *, trained: bool) -> int:
        return self.trained_bytes or width if trained else width

    def _base(
        self, rows: Count, width: Count, count: int, fact: Fact, *, trained: bool | None = None
    ) -> Parameter:
        trained = self._trains_base if trained is None else trained
        return Parameter(
            rows=rows,
            width=width,
            count=count,
            rest_bytes=self._width(self.rest.dtypes.base_bytes, trained=trained),
            compute_bytes=self.step.dtypes.base_bytes,
            trained=trained,
            fact=fact,
        )

    def _table(self, rows: int, width: int) -> Parameter:
        return Parameter(
            rows=rows,
            width=width,
            rest_bytes=self._width(self.rest.dtypes.embedding_bytes, trained=self._trains_base),
            compute_bytes=self.step.dtypes.embedding_bytes,
            trained=self._trains_base,
            fact=EMBEDDING_WEIGHTS,
        )

    def _copies(self, *, embedding: bool) -> Iterator[Parameter]:
        for module in self.rest.saved_modules:
            if module.is_embedding == embedding:
                yield Parameter(
                    rows=module.rows,
                    width=module.width,
                    rest_bytes=self._width(module.param_bytes, trained=True),
                    compute_bytes=self.step.dtypes.embedding_bytes,
                    trained=True,
                    fact=SAVED_MODULES,
                )

    def _vectors(
        self, elements: int, fact: Fact, *, trained: bool | None = None
    ) -> Iterator[Parameter]:
        """Norms and biases, most of them as wide as the stream."""
        hidden = self.step.model.hidden_size
        whole, remainder = divmod(max(0, elements), hidden)
        if whole:
            yield self._base(hidden, 1, whole, fact, trained=trained)
        if remainder:
            yield self._base(remainder, 1, 1, fact, trained=trained)

    def _of_linear(
        self, linear: Linear, fact: Fact, *, trained: bool | None = None
    ) -> Iterator[Parameter]:
        rows, width = linear.out_features, linear.in_features
        base = partial(self._base, fact=fact, trained=trained)
        if is_quantised(linear, self.step.dtypes):
            if self.storage_bytes > 1:  # else it is not sharded
                codes = ceil_div(ceil_div(rows * width, 2), self.storage_bytes)
                yield Parameter(
                    rows=codes,
                    width=1,
                    count=linear.count,
                    rest_bytes=self.storage_bytes,
                    compute_bytes=self.storage_bytes,
                    trained=False,
                    fact=fact,
                )
        elif not linear.is_module:  # experts in one parameter: the first dimension counts them
            yield base(linear.count, rows * width, 1)
        elif linear.transposed:
            yield base(width, rows, linear.count)
        else:
            yield base(rows, width, linear.count)
        if linear.bias:
            yield base(rows, 1, linear.count)

    def _of_layer(
        self, group: LayerGroup, fact: Fact = LAYER_WEIGHTS, *, trained: bool | None = None
    ) -> Iterator[Parameter]:
        layer = group.layer
        in_linears = 0
        for linear in layer.linears:
            in_linears += linear.num_params
            yield from self._of_linear(linear, fact, trained=trained)
        yield from self._vectors(layer.num_params - in_linears, fact, trained=trained)
        if not self._trains_base:
            yield from self._adapters(layer)

    def _adapters(self, layer: Layer) -> Iterator[Parameter]:
        for linear in adapted(layer, self.step.targets):
            yield from self._of_adapter(linear)

    def _of_adapter(self, linear: Linear) -> Iterator[Parameter]:
        step, rest = self.step, self.rest
        shapes = step.method.adapter_shapes(linear, step.r)
        widths = step.method.adapter_widths(linear, rest.dtypes)
        computed = step.method.adapter_widths(linear, step.dtypes)
        for (rows, width), at_rest, in_compute in zip(shapes, widths, computed, strict=False):
            is_vector = isinstance(rows, int) and rows == 1
            yield Parameter(
                rows=width if is_vector else rows,
                width=1 if is_vector else width,
                count=linear.count,
                rest_bytes=self._width(at_rest, trained=True),
                compute_bytes=self.mixed_bytes or in_compute,
                trained=True,
                fact=ADAPTERS,
            )

    def _shared_adapters(self) -> Iterator[Parameter]:
        step = self.step
        for frozen in step.method.frozen_tensors(adapted_linears(step.model, step.targets), step.r):
            yield Parameter(
                rows=frozen.rows,
                width=frozen.width,
                count=frozen.count,
                rest_bytes=self.rest.dtypes.adapter_bytes,
                compute_bytes=step.dtypes.adapter_bytes,
                trained=False,
                fact=FROZEN_ADAPTERS,
            )

    # --- shares ---------------------------------------------------------------------------------

    def share(self, fact: Fact, size: int) -> Count:
        """Bytes of the parameters of one entry that a rank keeps."""
        return sum(
            number * parameter.shard(size) * parameter.rest_bytes
            for unit, number in self.all()
            for parameter in unit.parameters
            if parameter.fact is fact
        )

    @cached_property
    def unsharded(self) -> int:
        """Bytes of quantised matrices that every rank keeps: scales, and codes of plain bytes."""
        dtypes: Dtypes = self.rest.dtypes
        if dtypes.quant == "none":
            return 0
        return quantised_state_bytes(self.step.model, dtypes, codes=self.storage_bytes <= 1)

    @cached_property
    def trained(self) -> tuple[Trained, ...]:
        """Everything that gets a gradient, as kept between steps."""
        if not self.trained_bytes:
            return self.rest.tensors
        return tuple(replace(x, param_bytes=self.trained_bytes) for x in self.rest.tensors)

    def trained_shards(self, size: int) -> tuple[Trained, ...]:
        """What the optimizer sees of them."""
        return tuple(
            Trained(
                rows=1 if p.flat else ceil_div(p.rows, size),
                width=ceil_div(p.rows * p.width, size) if p.flat else p.width,
                param_bytes=p.rest_bytes,
                count=p.count * number,
                is_embedding=unit.name == "embedding",
            )
            for unit, number in self.all()
            for p in unit.parameters
            if p.trained
        )


_WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How one rank's share is cut.

    Args:
        size: ranks of one group, among which parameters are divided.
        replicas: groups that each hold all.
        reduce_bytes: of one element of gradients as they are sent; 0: as they are computed.
        prefetches: version 1 gathers the next unit of the backward ahead.
        reshards: blocks are freed after the forward.
        syncs_each_batch: gradients are sent in every micro-step.
        offloads: shares of parameters, gradients and states are in host memory.
    """

    units: Units
    size: int
    replicas: int
    reduce_bytes: int
    reshards: bool
    prefetches: bool
    syncs_each_batch: bool
    offloads: bool


def mixed_precision(step: TrainingStep, spread: Spread) -> str:
    """One of "no", "bf16" and "fp16": the dtype in which parameters are gathered.

    Kind: exact. Source: transformers 5.23 `TrainingArguments.mixed_precision`; under version 1
    `update_fsdp_plugin_peft` takes the storage dtype of 4-bit weights.
    """
    if step.dtypes.quant in FOUR_BIT_BNB and spread.options["fsdp_version"] == "1":
        return _MIXED.get(quant_storage(step.run, spread), "no")
    return _of_accelerate(step.run, spread)


def _of_accelerate(run: RunConfig, spread: Spread) -> str:
    stated = spread.options["mixed_precision"]
    if stated is not None:
        return str(stated)
    return run.precision if run.precision in ("bf16", "fp16") else "no"


def syncs_each_batch(run: RunConfig, spread: Spread) -> bool:
    """Whether gradients are sent after every micro-step, so that shards of them alone are kept.

    Kind: exact. Source: `Libraries.fsdp2_syncs_micro_steps`; accelerate 1.15 `Accelerator.no_sync`.
    """
    of_version = spread.options["fsdp_version"] == "2" and run.versions.fsdp2_syncs_micro_steps
    return of_version or bool(spread.options["sync_each_batch"])


def quant_storage(run: RunConfig, spread: Spread) -> str:
    """What holds 4-bit codes: as asked for, else the dtype that is gathered without a cast.

    Kind: exact. Source: torch 2.13 `FlatParamHandle._validate_tensors_to_flatten`, which takes one
    dtype alone, in version 1 that of the norms; `FSDPParam.all_gather_inputs`, which casts.
    """
    stated = spread.options["bnb_4bit_quant_storage"]
    if stated is not None:
        return str(stated)
    if spread.options["fsdp_version"] == "2":
        return _FLOATS.get(_of_accelerate(run, spread), "bfloat16")
    dtypes = resolve_dtypes(run, trains_base=False, device_kind="cuda")
    return "float32" if dtypes.base_bytes == 4 else _FLOATS[dtypes.half]


_FLOATS = {"bf16": "bfloat16", "fp16": "float16"}
_MIXED = {storage: mixed for mixed, storage in _FLOATS.items()}


def sharding_of(rest: TrainingStep, step: TrainingStep, spread: Spread) -> Sharding:
    """The units of `step`, kept in the dtypes of `rest`."""
    options = spread.options
    reduce_dtype = options["reduce_dtype"]
    replicas = int(options["dp_replicate_size"] or 1)  # type: ignore
    four_bit = rest.dtypes.quant in FOUR_BIT_BNB
    mixed = mixed_precision(rest, spread)
    # accelerate widens what is trained, unless a `Params4bit` is there
    widens = mixed != "no" and not four_bit
    return Sharding(
        units=Units(
            rest=rest,
            step=step,
            storage_bytes=_WIDTHS[quant_storage(rest.run, spread)] if four_bit else 0,
            trained_bytes=4 if widens else 0,
            mixed_bytes=_WIDTHS.get(mixed, 0),
            flat=options["fsdp_version"] == "1",
        ),
        size=spread.size * spread.joined // replicas,
        replicas=replicas,
        reduce_bytes=_WIDTHS[str(reduce_dtype)] if reduce_dtype else 0,
        reshards=bool(options["reshard_after_forward"]),
        prefetches=options["backward_prefetch"] == "BACKWARD_PRE",
        syncs_each_batch=syncs_each_batch(step.run, spread),
        offloads=bool(options["offload"]),
    )
