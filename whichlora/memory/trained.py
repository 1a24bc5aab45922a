"""Which tensors get a gradient: an optimizer treats each by its own size and shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from whichlora.architecture import Layer, Linear, ModelSpec, Norm
from whichlora.memory.weights import masked_head_params
from whichlora.methods.base import Method
from whichlora.numeric import Count
from whichlora.stack import Stack
from whichlora.targets import adapted, adapted_linears


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """`count` equal trained tensors.

    Args:
        param_bytes: width of one element, of its gradient too.
        rows, width: the shape, leading dimensions taken together; a vector has one row.
        is_embedding: a looked-up table, whose 8-bit optimizers keep their states in 32 bits.
    """

    rows: Count
    width: Count
    param_bytes: int
    count: int = 1
    is_embedding: bool = False

    @property
    def num_params(self) -> Count:
        """Of one of them."""
        return self.rows * self.width


def trained_tensors(
    model: ModelSpec,
    targets: tuple[str, ...],
    method: Method,
    r: Count,
    *,
    stack: Stack,
    modules_to_save: tuple[str, ...] = (),
    bias: str = "none",
) -> tuple[Trained, ...]:
    """Everything that gets a gradient. Kind: exact but for how norms and biases are divided."""
    if method.trains_base:
        return tuple(_of_base(model, stack.base_bytes))
    return (
        *_of_adapters(model, targets, method, r, stack.adapter_bytes),
        *saved_modules(model, modules_to_save, stack.embedding_bytes),
        *trained_biases(model, targets, bias, stack.base_bytes),
    )


def saved_modules(
    model: ModelSpec, modules_to_save: tuple[str, ...], param_bytes: int
) -> Iterator[Trained]:
    """The embedding and the head that PEFT copies and trains, in the dtype of the base.

    Kind: exact. Source: peft 0.21.2 `ModulesToSaveWrapper`, `cast_adapter_dtype`.
    """
    embedding, head = model.embeddings[0], model.head
    if embedding.name in modules_to_save:
        yield Trained(
            rows=embedding.rows, width=embedding.width, param_bytes=param_bytes, is_embedding=True
        )
    if head is not None and head.name in modules_to_save:
        yield _weight(head, 1, param_bytes)
        if head.bias:
            yield Trained(rows=1, width=head.out_features, param_bytes=param_bytes)


def trained_biases(
    model: ModelSpec, targets: tuple[str, ...], bias: str, param_bytes: int
) -> Iterator[Trained]:
    """Biases of the base that PEFT trains: "all", or those of adapted matrices ("lora_only").

    Kind: exact. Source: peft 0.21.2 `BaseTuner._mark_only_adapters_as_trainable`.
    """
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
            inner = layer.inner_norms + (layer.mlp.norms if layer.mlp is not None else ())
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
    """A gradient is as wide as its parameter; also the bytes of the parameters themselves."""
    return sum(one.param_bytes * one.num_params * one.count for one in tensors)


def unwanted_gradient_bytes(
    layer: Layer, targets: tuple[str, ...], method: Method, stack: Stack
) -> int:
    """Gradients of frozen weights of one layer, which live as long as the graph. Kind: exact."""
    return stack.base_bytes * sum(
        linear.num_weights
        for linear in adapted(layer, targets)
        if method.trains_frozen(linear, stack)
    )


def _of_adapters(
    model: ModelSpec, targets: tuple[str, ...], method: Method, r: Count, param_bytes: int
) -> Iterator[Trained]:
    for linear, count in adapted_linears(model, targets):
        for rows, width in method.adapter_shapes(linear, r):
            yield Trained(
                rows=rows, width=width, count=count * linear.count, param_bytes=param_bytes
            )


def _of_base(model: ModelSpec, param_bytes: int) -> Iterator[Trained]:
    hidden = model.hidden_size
    for group in model.groups:
        count = 1 if group.shared else group.count
        in_linears = 0
        for linear in group.layer.linears:
            in_linears += linear.num_weights
            yield _weight(linear, count, param_bytes)
        # norms and biases, most of them as wide as the stream
        whole, rest = divmod(group.layer.num_params - in_linears, hidden)
        yield Trained(rows=1, width=hidden, count=count * whole, param_bytes=param_bytes)
        yield Trained(rows=1, width=rest, count=count, param_bytes=param_bytes)
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
    for linear in model.outer_linears:
        around -= linear.num_weights
        yield _weight(linear, 1, param_bytes)
    yield Trained(rows=1, width=around, param_bytes=param_bytes)  # the last norm, a vision tower


def _weight(linear: Linear, count: int, param_bytes: int) -> Trained:
    rows, width = linear.out_features, linear.in_features
    if not linear.is_module:  # experts in one parameter
        return Trained(rows=linear.count * rows, width=width, count=count, param_bytes=param_bytes)
    return Trained(rows=rows, width=width, count=count * linear.count, param_bytes=param_bytes)
