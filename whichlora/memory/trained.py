"""Which tensors get a gradient: an optimizer treats each by its own size and shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from whichlora.architecture import Linear, ModelSpec
from whichlora.methods.base import Method
from whichlora.numeric import Count
from whichlora.targets import adapted


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """`count` equal trained tensors.

    Args:
        rows, width: the shape, leading dimensions taken together; a vector has one row.
        is_embedding: a looked-up table, whose 8-bit optimizers keep their states in 32 bits.
    """

    rows: Count
    width: Count
    count: int = 1
    is_embedding: bool = False

    @property
    def num_params(self) -> Count:
        """Of one of them."""
        return self.rows * self.width


def trained_tensors(
    model: ModelSpec, targets: tuple[str, ...], method: Method, r: Count
) -> tuple[Trained, ...]:
    """Everything that gets a gradient. Kind: exact but for how norms and biases are divided."""
    return tuple(_of_base(model) if method.trains_base else _of_adapters(model, targets, method, r))


def _of_adapters(
    model: ModelSpec, targets: tuple[str, ...], method: Method, r: Count
) -> Iterator[Trained]:
    linears = [
        (linear, 1 if group.shared else group.count)
        for group in model.groups
        for linear in adapted(group.layer, targets)
    ]
    linears += [
        (linear, 1)
        for linear in model.head_linears
        if linear.rank_multiple and linear.name in targets
    ]
    for linear, count in linears:
        if method.adapter_shapes is None:
            yield Trained(rows=1, width=method.adapter_params(linear, r), count=count)
            continue
        for rows, width in method.adapter_shapes(linear, r):
            yield Trained(rows=rows, width=width, count=count * linear.count)


def _of_base(model: ModelSpec) -> Iterator[Trained]:
    for group in model.groups:
        count = 1 if group.shared else group.count
        in_linears = 0
        for linear in group.layer.linears:
            in_linears += linear.num_weights
            yield _weight(linear, count)
        # norms and biases, most of them as wide as the stream
        rest = group.layer.num_params - in_linears
        yield Trained(rows=1, width=model.hidden_size, count=count * (rest // model.hidden_size))
        yield Trained(rows=1, width=rest % model.hidden_size, count=count)
    around = model.num_params - sum(group.num_params for group in model.groups)
    for embedding in model.embeddings:
        around -= embedding.num_params
        width = embedding.width
        yield Trained(rows=embedding.num_params // width, width=width, is_embedding=True)
    if model.head is not None and not model.head_tied:
        around -= model.head.num_weights
        yield _weight(model.head, 1)
    for linear in model.head_linears:
        around -= linear.num_weights
        yield _weight(linear, 1)
    yield Trained(rows=1, width=around)  # the last norm, a vision tower


def _weight(linear: Linear, count: int) -> Trained:
    if linear.is_module:
        return Trained(
            rows=linear.out_features, width=linear.in_features, count=count * linear.count
        )
    # experts in one parameter
    return Trained(rows=linear.count * linear.out_features, width=linear.in_features, count=count)
