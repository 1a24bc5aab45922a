"""One layer of a transformer, written on a tape in the order in which transformers runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from whichlora.architecture import Layer
from whichlora.memory.activations import attention_kernel
from whichlora.memory.attention_code import attend
from whichlora.memory.expert_code import mix_experts
from whichlora.memory.gemma4_code import add_layer_input, feed_both_ways
from whichlora.memory.mlp_code import feed_forward
from whichlora.memory.operators import Code
from whichlora.memory.tape import (
    NOTHING,
    Form,
    Kept,
    Tape,
    Tensor,
    maximal,
    minus,
    per_pair,
    per_token,
)
from whichlora.methods.base import Method
from whichlora.stack import Stack


def feed(code: Code, layer: Layer, y: Tensor, x: Tensor) -> Tensor:
    """What stands between the second norm, which returns `y` for `x`, and the second sum."""
    if layer.moe is None:
        assert layer.mlp is not None
        return feed_forward(code, layer.mlp, y)
    if layer.mlp is None:
        return mix_experts(code, layer.moe, y)
    return feed_both_ways(code, layer, x, y)


def run_layer(code: Code, layer: Layer, x: Tensor) -> Tensor:
    tape, stack = code.tape, code.stack
    drops = bool(layer.dropouts) and stack.training

    def dropped(y: Tensor, drops: bool = drops) -> Tensor:
        if not drops:
            return y
        return code.dropout(y, mask_bytes=y.size if stack.device_kind == "cpu" else 1)

    norms = list(layer.norms)
    attention = layer.attentions[0]
    memory = None
    if len(layer.attentions) > 1:
        widened = norms[0].kind == "layer" and stack.under_autocast and stack.device_kind != "cpu"
        size = 4 if widened else stack.stream_bytes
        memory = tape.shared(x.elements, size, needs_grad=stack.training)
    # an encoder's tokens alone have a padding mask
    by_itself = replace(code, masked=False) if memory is not None else code
    if layer.parallel:
        first = code.norm(norms[0], x)
        mixed = dropped(attend(code, attention, first))
        second = code.norm(norms[1], x) if len(norms) > 1 else first
        fed = dropped(feed(code, layer, second, x))
        result = code.add(code.add(mixed, fed), x)
        tape.hold(mixed, fed, second)
        return result
    if layer.post_norm:
        mixed = dropped(attend(by_itself, attention, x))
        if norms[0].kind == "layer":
            middle = code.norm(norms[0], code.add(mixed, x))
            for cross in layer.attentions[1:]:
                mixed = dropped(attend(code, cross, middle, memory=memory))
                middle = code.norm(norms[1], code.add(mixed, middle))
            fed = dropped(feed(code, layer, middle, middle), drops and layer.drops_mlp)
            return code.norm(norms[-1], code.add(fed, middle))
        middle = code.add(x, code.norm(norms[0], mixed))
        fed = feed(code, layer, middle, middle)
        return code.add(middle, code.norm(norms[1], fed))
    sandwich = len(norms) >= 4
    # T5 gives what dropout returns no name of its own, so that both live
    names_both = norms[0].kind == "rms_mixed"
    read_norms = len(norms) - 1 - sandwich  # ModernBERT's first layer reads its input as it is
    for number, one in enumerate(layer.attentions):
        y = code.norm(norms.pop(0), x) if number or read_norms else x
        if layer.names_norm and not number:
            tape.hold_to_end(y)
        reads_memory = bool(number)
        mixed = attend(code, one, y, memory=memory) if reads_memory else attend(by_itself, one, y)
        y = dropped(mixed)
        if layer.names_attention:
            tape.hold_to_end(y)
        if sandwich:
            y = code.norm(norms.pop(0), y)
        result = code.add(x, code.scale(y) if layer.scales_sums else y)
        tape.hold(x, *([mixed] if names_both else []))
        if layer.scales_sums:
            tape.hold(y)
        x = result
    y = code.norm(norms.pop(0), x)
    mixed = feed(code, layer, y, x)
    y = dropped(mixed, drops and layer.drops_mlp)
    if sandwich:
        y = code.norm(norms.pop(0), y)
    result = code.add(x, code.scale(y) if layer.scales_sums else y)
    tape.hold(x, *([mixed] if names_both else []))
    if layer.scales_sums:
        tape.hold(y)
    if layer.layer_input is not None:
        result = add_layer_input(code, layer.layer_input, result)
    return tape.in_place(result) if layer.scales_result else result


def returned_probabilities(layer: Layer, stack: Stack) -> Form:
    """Attention probabilities of the block before, in the hands of the model's loop. Kind: exact.

    Source: transformers 5.23 `GPTJModel.forward`: `outputs = block(...)`.
    """
    attention = layer.attentions[0]
    if not layer.returns_probabilities or attention_kernel(attention, stack) != "eager":
        return NOTHING
    return per_pair(attention.num_attention_heads * stack.linear_out_bytes)


def stream_bytes(layer: Layer, stack: Stack, *, after_norm: bool) -> int:
    """One element of the layer's input: CUDA's autocast returns fp32 from a LayerNorm.

    Args:
        after_norm: a LayerNorm stands between the embeddings and the first layer.
    """
    ends_in_norm = layer.post_norm and bool(layer.norms) and layer.norms[-1].kind == "layer"
    if (ends_in_norm or after_norm) and stack.under_autocast and stack.device_kind != "cpu":
        return 4
    return stack.stream_bytes


@dataclass(frozen=True, slots=True)
class LayerPoints:
    """Bytes at the points of one layer that can be the largest.

    Args:
        kept: what it keeps for backward; `saved` their sum.
        unsaved: what the first layer keeps less, whose input needs no gradient.
        held: what checkpointing does not free.
        lent: keys and values that checkpointed later layers hold.
        gathered: gradients that later layers have left when its backward begins.
        forward: alive in a forward that keeps `saved`.
        backward: alive in its backward, `saved` and the gradient of its result included.
        recomputed: alive while it is made again and goes backward, its input left out.
    """

    kept: tuple[Kept, ...]
    saved: Form
    unsaved: Form
    held: tuple[Kept, ...]
    lent: Form
    gathered: Form
    forward: tuple[Form, ...]
    backward: tuple[Form, ...]
    recomputed: tuple[Form, ...]


@lru_cache(maxsize=512)
def layer_points(
    layer: Layer,
    hidden_size: int,
    targets: tuple[str, ...],
    stack: Stack,
    method: Method,
    *,
    masked: bool,
    accumulated: bool,
    reentrant: bool,
    checkpointed: bool,
    stream: int,
    ragged: bool = False,
) -> LayerPoints:
    """Args: `stream` as of `stream_bytes`, the others as of the ledger.

    Kind: exact. Source: the code of transformers, peft, bitsandbytes and torch named above.
    """
    tapes = []
    for needs_grad in (True, False):
        tape = Tape()
        code = Code(tape, stack, targets, method, masked, stream, checkpointed, ragged=ragged)
        x = tape.input(per_token(hidden_size), stream, needs_grad=needs_grad)
        tape.hold(run_layer(code, layer, x))
        tapes.append(tape)
    tape, first = tapes
    forward, _ = tape.forward(saving=not checkpointed)
    recomputed = tape.backward(recomputed=True, early_stop=not reentrant, accumulated=accumulated)
    return LayerPoints(
        tape.kept(),
        tape.saved,
        minus(tape.saved, first.saved),
        tape.kept(hidden=True),
        tape.lent,
        tape.gathered,
        maximal(forward),
        maximal(tape.backward(recomputed=False, accumulated=accumulated)),
        maximal(recomputed),
    )


@lru_cache(maxsize=512)
def working_points(
    layer: Layer,
    hidden_size: int,
    targets: tuple[str, ...],
    stack: Stack,
    method: Method,
    *,
    masked: bool,
    stream: int,
    ragged: bool = False,
) -> tuple[Form, ...]:
    """Points of a forward without gradients, the layer's input left out.

    Args:
        targets: names of the matrices with an adapter; none of a merged model.
    """
    tape = Tape(no_grad=True)
    code = Code(tape, stack, targets, method, masked, stream, ragged=ragged)
    x = tape.input(per_token(hidden_size), stream, needs_grad=False)
    tape.hold(run_layer(code, layer, x))
    points, _ = tape.forward(saving=False)
    return maximal(points)
