"""Which tensors get a gradient: an optimizer treats each by its own size and shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from whichlora.memory.entries import Entry, Fact, Group, Tensor, listed
from whichlora.memory.weights import masked_head_params
from whichlora.methods.base import FrozenTensor, Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes, runs_adapter
from whichlora.spec.layer import Layer, Linear, Norm
from whichlora.spec.numeric import Count
from whichlora.spec.run import ALL_LINEAR, FOUR_BIT_BNB, RunConfig
from whichlora.spec.targets import adapted, adapted_linears, linears_around, tower_linears


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """`count` equal trained tensors.

    Args:
        param_bytes: width of one element, of its gradient too.
        rows, width: the shape, leading dimensions taken together; a vector has one row.
        is_embedding: a looked-up table, whose 8-bit optimizers keep their states in 32 bits.
        is_stored: a checkpoint has it.
    """

    rows: Count
    width: Count
    param_bytes: int
    count: int = 1
    is_embedding: bool = False
    is_stored: bool = True

    @property
    def num_params(self) -> Count:
        """Of one of them."""
        return self.rows * self.width


def trained_params(
    model: ModelSpec,
    targets: tuple[str, ...],
    method: Method,
    r: Count,
    *,
    modules_to_save: tuple[str, ...] = (),
    bias: str = "none",
) -> Count:
    """Trainable parameters: all of them, or adapters and copied modules.

    Kind: exact. Source: peft 0.21.2 `PeftModel.get_nb_trainable_parameters`.
    """
    if method.trains_base:
        return model.trainable_params + masked_head_params(model) + 0 * r
    total: Count = 0 * r
    for module in saved_modules(model, modules_to_save, param_bytes=0):
        total = total + module.num_params
    for vector in trained_biases(model, targets, bias, param_bytes=0):
        total = total + vector.num_params * vector.count
    for outer in method.outer_tensors(model):
        total = total + outer.num_trained
    for shared in method.shared_tensors(adapted_linears(model, targets), r):
        total = total + shared.num_params
    for norm, count in trained_norms(model, targets):
        total = total + norm.num_params * count
    for group in model.groups:
        of_layer: Count = 0 * r
        for linear in adapted(group.layer, targets):
            of_layer = of_layer + method.adapter_params(linear, r)
        total = total + of_layer * (1 if group.shared else group.count)
    for linear in linears_around(model):
        if linear.rank_multiple and linear.name in targets:
            total = total + method.adapter_params(linear, r)
    return total


def cached_params(
    model: ModelSpec,
    targets: tuple[str, ...],
    method: Method,
    r: Count,
    *,
    modules_only: bool = False,
) -> Count:
    """Parameters of the adapters that autocast casts once and caches.

    Args:
        modules_only: adapters of bare parameters are laid out anew before they are cast.

    Kind: exact. Source: `Method.autocast_shapes`; torch 2.13 `autocast_mode.cpp`, `cached_cast`.
    """
    shapes = method.autocast_shapes or method.adapter_shapes
    total: Count = 0 * r
    for linear, count in adapted_linears(model, targets):
        is_cached = linear.active > 0 and (linear.is_module or not modules_only)
        is_cached = is_cached and not linear.looked_up  # `with_adapter` of token_embeddings.py
        for rows, width in shapes(linear, r):
            total = total + count * linear.count * rows * width * is_cached
    for shared in method.shared_tensors(adapted_linears(model, targets), r):
        total = total + shared.num_params * shared.is_factor
    return total


ADAPTERS = Fact(
    part="adapters",
    what="adapter weights",
    shape="[trained_params]",
    dtype="adapter_bytes",
    why="trained beside the frozen weights",
    source="peft LoraLayer.update_layer",
)
FROZEN_ADAPTERS = Fact(
    part="adapters",
    what="frozen matrices of the adapters",
    shape="[those that the method lists]",
    dtype="adapter_bytes",
    why="read by the adapters, and not trained",
    source="the method's own file",
)
SAVED_MODULES = Fact(
    part="adapters",
    what="trained copies of modules",
    shape="[vocab_size, hidden_size]",
    dtype="embedding_bytes",
    count="len(modules_to_save)",
    why="modules_to_save: trained as a whole, beside the frozen original",
    source="peft ModulesToSaveWrapper",
)


def adapter_entries(
    model: ModelSpec,
    run: RunConfig,
    dtypes: Dtypes,
    method: Method,
    targets: tuple[str, ...],
    r: Count,
) -> list[Entry]:
    """Weights of adapters, on modules that text never runs (a vision tower) too, and of copies."""
    num_bytes = gradient_bytes(_of_adapters(model, targets, method, r, dtypes)) + 0 * r
    # PEFT replaces modules by name, in a vision tower too: `.grad` of those stays None
    for linear in _idle_adapted(model, run, targets):
        num_bytes = num_bytes + method.adapter_bytes(linear, dtypes, r)
    serves = run.phase == "inference"
    outer = (tensor for tensor in _outer(model, method, dtypes) if tensor.is_stored or not serves)
    norms = _norm_copies(model, targets, dtypes)
    num_bytes = num_bytes + gradient_bytes(outer) + gradient_bytes(norms)
    copied = gradient_bytes(saved_modules(model, run.modules_to_save, dtypes.copy_bytes))
    frozen = method.frozen_tensors(adapted_linears(model, targets), r)
    num_bytes = num_bytes + frozen_outer_bytes(model, method, dtypes, training=not serves)
    return [
        Entry(ADAPTERS, num_bytes),
        listed(FROZEN_ADAPTERS, *(_frozen_group(tensor, dtypes) for tensor in frozen)),
        Entry(SAVED_MODULES, copied + 0 * r),
    ]


def _frozen_group(frozen: FrozenTensor, dtypes: Dtypes) -> Group:
    element_bytes = frozen.bytes_of_one(dtypes)
    tensor = Tensor(
        frozen.name,
        constant=frozen.rows * frozen.width * element_bytes,
        dims=frozen.dims,
        element_bytes=element_bytes,
    )
    return Group(tensors=(tensor,), count=frozen.count, tokens=0, span=0)


def _idle_adapted(model: ModelSpec, run: RunConfig, targets: tuple[str, ...]) -> tuple[Linear, ...]:
    """Matrices that get an adapter and no gradient, since nothing passes them."""
    idle = model.idle_linears if model.tower is None else model.tower.idle
    every = ALL_LINEAR in run.target_modules
    return tuple(
        linear for linear in idle if linear.rank_multiple and (every or linear.name in targets)
    )


def trained_tensors(
    model: ModelSpec,
    targets: tuple[str, ...],
    method: Method,
    r: Count,
    *,
    dtypes: Dtypes,
    modules_to_save: tuple[str, ...] = (),
    bias: str = "none",
) -> tuple[Trained, ...]:
    """Everything that gets a gradient. Kind: exact but for how norms and biases are divided."""
    if method.trains_base:
        return tuple(base_tensors(model, dtypes.base_bytes))
    return (
        *_of_adapters(model, targets, method, r, dtypes, running=True),
        *_outer(model, method, dtypes),
        *_norm_copies(model, targets, dtypes),
        *saved_modules(model, modules_to_save, dtypes.copy_bytes),
        *trained_biases(model, targets, bias, dtypes.base_bytes),
    )


def outer_bytes(dtypes: Dtypes) -> int:
    """Bytes of one element of what is trained outside of the layers: it is made in fp32.

    Kind: exact. Source: peft 0.21.2 `PromptEmbedding`, `PromptEncoder`: no dtype is named, and
    `cast_adapter_dtype` widens alone.
    """
    narrowed_by_name = dtypes.narrows_adapters_later or dtypes.quant in FOUR_BIT_BNB
    return dtypes.adapter_bytes if narrowed_by_name else 4


def frozen_outer_bytes(
    model: ModelSpec, method: Method, dtypes: Dtypes, *, training: bool = False
) -> int:
    """Bytes of tensors beside those that are trained outside of the layers.

    Kind: exact. Source: peft 0.21.2 `CartridgeEncoder.frozen_embedding`, saved with the others.
    """
    frozen = (
        tensor
        for tensor in method.outer_tensors(model)
        if tensor.frozen and not (training and tensor.served_only)
    )
    return sum(tensor.num_params for tensor in frozen) * 4  # casts go by what is trained


def _outer(model: ModelSpec, method: Method, dtypes: Dtypes) -> Iterator[Trained]:
    for tensor in method.outer_tensors(model):
        if tensor.frozen:
            continue
        yield Trained(
            rows=tensor.rows,
            width=tensor.width,
            param_bytes=outer_bytes(dtypes),
            is_stored=not tensor.training_only,
        )


def trained_norms(model: ModelSpec, targets: tuple[str, ...]) -> Iterator[tuple[Norm, int]]:
    """Norms of which PEFT trains a copy, and how many there are of each. Kind: exact.

    Source: peft 0.21.2 `LNTuningLayer.update_layer`, which copies the module.
    """
    for group in model.groups:
        for norm in group.layer.norms:
            if norm.name in targets:
                yield norm, 1 if group.shared else group.count
    for norm in model.final_norms:
        if norm.name in targets:
            yield norm, 1


def _norm_copies(model: ModelSpec, targets: tuple[str, ...], dtypes: Dtypes) -> Iterator[Trained]:
    for norm, count in trained_norms(model, targets):
        for is_there in (norm.weight, norm.bias):
            if is_there:
                yield Trained(rows=1, width=norm.width, count=count, param_bytes=dtypes.base_bytes)


def saved_modules(
    model: ModelSpec, modules_to_save: tuple[str, ...], param_bytes: int
) -> Iterator[Trained]:
    """The embedding and the head that PEFT copies and trains, in the dtype of the base.

    A head of labels is copied without being asked for.

    Kind: exact. Source: peft 0.21.2 `ModulesToSaveWrapper`, `cast_adapter_dtype`,
    `PeftModelForSequenceClassification.__init__`.
    """
    # `ModulesToSaveWrapper.update` makes a `copy.deepcopy` of the module, and `original_module`
    # stays. `cast_adapter_dtype` widens only what is in a `BaseTunerLayer`, which the copy is not
    embedding, head = model.embeddings[0], model.head
    if embedding.name in modules_to_save:
        yield Trained(
            rows=embedding.rows, width=embedding.width, param_bytes=param_bytes, is_embedding=True
        )
    if head is not None and head.name in modules_to_save:
        yield _weight(head, 1, param_bytes)
        if head.bias:
            yield Trained(rows=1, width=head.out_features, param_bytes=param_bytes)
    for linear in copied_linears(model, modules_to_save):
        yield _weight(linear, 1, param_bytes)
        if linear.bias:
            yield Trained(rows=1, width=linear.out_features, param_bytes=param_bytes)


def copied_linears(model: ModelSpec, modules_to_save: tuple[str, ...]) -> tuple[Linear, ...]:
    """Matrices of a head for labels that PEFT copies: with the task's type, or as it is told.

    Kind: exact. Source: peft 0.21.2 `PeftModelForSequenceClassification.__init__`.
    """
    head = model.label_head
    if head is None or not (head.copied or head.projection.name in modules_to_save):
        return ()
    whole = head.transform is not None and head.transform.in_head
    return head.linears if whole else (head.projection,)


def trained_biases(
    model: ModelSpec, targets: tuple[str, ...], bias: str, param_bytes: int
) -> Iterator[Trained]:
    """Biases of the base that PEFT trains: "all", or those of adapted matrices ("lora_only").

    Kind: exact. Source: peft 0.21.2 `BaseTuner._mark_only_adapters_as_trainable`.
    """
    # "all": `requires_grad` of every parameter whose name ends in ".bias", those of norms too;
    # "lora_only": of `bias` of each adapted module, the base's own vector
    if bias == "none":
        return
    for group in model.groups:
        count = 1 if group.shared else group.count
        layer = group.layer
        for linear in layer.linears if bias == "all" else adapted(layer, targets):
            if linear.bias:
                width, each = linear.out_features, count * linear.count
                yield Trained(rows=1, width=width, count=each, param_bytes=param_bytes)
        if bias == "all":
            inner = layer.inner_norms
            yield from _of_norms(layer.norms + inner, count, param_bytes)
    if bias == "all":
        yield from _of_norms(model.embedding_norms + model.final_norms, 1, param_bytes)
        if model.head is not None and model.head.bias:
            yield Trained(rows=1, width=model.head.out_features, param_bytes=param_bytes)


def _of_norms(norms: Iterable[Norm], count: int, param_bytes: int) -> Iterator[Trained]:
    for norm in norms:
        if norm.bias:
            yield Trained(rows=1, width=norm.width, count=count, param_bytes=param_bytes)


def gradient_bytes(tensors: Iterable[Trained]) -> Count:
    """A gradient is as wide as its parameter; also the bytes of the parameters themselves.

    Kind: exact. Source: torch 2.13 `AccumulateGrad`.
    """
    return sum(tensor.param_bytes * tensor.num_params * tensor.count for tensor in tensors)


def unwanted_gradient_bytes(
    layer: Layer, targets: tuple[str, ...], method: Method, dtypes: Dtypes
) -> int:
    """Gradients of frozen weights of one layer, which live as long as the graph. Kind: exact.

    Source: `Method.trains_frozen`.
    """
    return dtypes.base_bytes * sum(
        linear.num_weights
        for linear in adapted(layer, targets)
        if method.trains_frozen(linear, dtypes)
    )


def _of_adapters(
    model: ModelSpec,
    targets: tuple[str, ...],
    method: Method,
    r: Count,
    dtypes: Dtypes,
    *,
    running: bool = False,
) -> Iterator[Trained]:
    """Args: `running`: only those that get a gradient."""
    for linear, count in adapted_linears(model, targets):
        if running and not runs_adapter(linear, dtypes):
            continue
        widths = method.adapter_widths(linear, dtypes)
        for (rows, width), param_bytes in zip(
            method.adapter_shapes(linear, r), widths, strict=False
        ):
            yield Trained(
                rows=rows, width=width, count=count * linear.count, param_bytes=param_bytes
            )
    for shared in method.shared_tensors(adapted_linears(model, targets), r):
        yield Trained(
            rows=shared.rows,
            width=shared.width,
            count=shared.count,
            param_bytes=dtypes.adapter_bytes,
        )


def base_tensors(model: ModelSpec, param_bytes: int) -> Iterator[Trained]:
    """The parameters of the base, trained or not.

    Kind: exact but for how norms and biases are divided. Source: `ModelSpec`.
    """
    hidden = model.hidden_size
    for group in model.groups:
        count = 1 if group.shared else group.count
        in_linears = 0
        for linear in group.layer.linears:
            if linear.active:
                in_linears += linear.num_weights
                yield _weight(linear, count, param_bytes)
        # norms and biases, most of them as wide as the stream
        whole, remainder = divmod(group.layer.trained_params - in_linears, hidden)
        yield Trained(rows=1, width=hidden, count=count * whole, param_bytes=param_bytes)
        yield Trained(rows=1, width=remainder, count=count, param_bytes=param_bytes)
    around = (
        model.loaded_params
        - model.idle_params
        + masked_head_params(model)
        - sum(group.num_params for group in model.groups)
    )
    for embedding in model.embeddings:
        around -= embedding.num_params
        if not embedding.trains:
            continue
        yield Trained(
            rows=embedding.rows, width=embedding.width, param_bytes=param_bytes, is_embedding=True
        )
    if model.head is not None and not model.head_tied:
        around -= model.head.num_weights
        yield _weight(model.head, 1, param_bytes)
    if model.masked_head is not None and not model.masked_head.tied:
        words = Trained(
            rows=model.vocab_size, width=model.masked_head.width, param_bytes=param_bytes
        )
        around -= model.vocab_size * model.masked_head.width
        yield words
    trains_tower = model.tower is not None and model.tower.trained
    for linear in (*model.outer_linears, *(tower_linears(model) if trains_tower else ())):
        around -= linear.num_weights
        yield _weight(linear, 1, param_bytes)
    yield Trained(rows=1, width=around, param_bytes=param_bytes)  # the last norm, a vision tower


def _weight(linear: Linear, count: int, param_bytes: int) -> Trained:
    rows, width = linear.out_features, linear.in_features
    if not linear.is_module:  # experts in one parameter
        return Trained(rows=linear.count * rows, width=width, count=count, param_bytes=param_bytes)
    return Trained(rows=rows, width=width, count=count * linear.count, param_bytes=param_bytes)
