"""What autograd keeps of one layer's forward, tensor by tensor.

Frozen matrices keep nothing; an adapted one keeps the input of A and the rank-r output of A.
Whether targets share that input is the precision mode's doing (`stack.py`). Every line was
compared with saved-tensor hooks on the real libraries; `docs/memory.md` has the derivation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from whichlora.architecture import Attention, Layer, Linear, Mlp, ModelSpec, Norm
from whichlora.methods.base import Method
from whichlora.numeric import Count, largest
from whichlora.stack import Stack
from whichlora.targets import adapted

# Tensors of the MLP's width that the activation keeps. Fused kernels keep their input; the
# Python implementations keep every factor of their products.
_ACTIVATION_SAVED = {"gelu_new": 4, "gelu_fast": 4, "quick_gelu": 2, "relu": 0, "relu2": 1}


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor kept for backward.

    Args:
        per_token: bytes per token of the batch.
        per_token_pair: bytes per token and per token it attends to (quadratic attention).
        constant: bytes whatever the number of tokens.
    """

    what: str
    per_token: Count = 0
    per_token_pair: int = 0
    constant: int = 0


def norm_saved(norm: Norm, stack: Stack) -> Iterator[Saved]:
    """RMSNorm keeps an fp32 copy of its input; LayerNorm its input as it is. Kind: exact."""
    size = norm.width * norm.rows
    if norm.kind == "layer":
        # autocast runs layer_norm in fp32 on CUDA and keeps that copy
        input_bytes = 4 if stack.autocast and stack.device_kind != "cpu" else stack.stream_bytes
        yield Saved(f"{norm.name}: input", input_bytes * size)
        yield Saved(f"{norm.name}: mean and reciprocal deviation", 8 * norm.rows)
        return
    yield Saved(f"{norm.name}: fp32 input", 4 * size)
    yield Saved(f"{norm.name}: reciprocal root mean square", 4 * norm.rows)
    if stack.trains_base and norm.weight:
        yield Saved(f"{norm.name}: normalised output", stack.stream_bytes * size)


def fused_qkv(attention: Attention) -> Linear | None:
    """The projection that returns q, k and v in one tensor, if there is one."""
    width = attention.q_width + attention.k_width + attention.v_width
    return next((one for one in attention.linears if one.out_features == width), None)


def attention_saved(attention: Attention, stack: Stack) -> Iterator[Saved]:
    """Queries, keys, values, and what the kernel keeps to recompute the probabilities.

    Kind: exact for softmax attention without its own dropout; recurrent and convolutional blocks
    are a lower bound (their projections only).
    """
    size = stack.compute_bytes
    q, k, v = attention.q_width, attention.k_width, attention.v_width
    heads = attention.num_attention_heads
    if attention.kind != "softmax":
        yield Saved(f"{attention.kind} mixing: projections", size * (2 * q + k + v))
        return
    for norm in attention.norms:
        yield from norm_saved(norm, stack)
    if fused_qkv(attention) and attention.position == "rope":
        # rotation makes new q and k; v stays a view that keeps the whole projection alive
        yield Saved("value view of the fused projection", size * (q + k + v))
        v = 0
    expanded = stack.padded or stack.attn == "eager"
    if expanded and attention.num_key_value_heads < heads:
        k = heads * attention.head_dim
        v = heads * attention.v_head_dim
    yield Saved("query", size * q)
    yield Saved("key and value", size * (k + v))
    if stack.attn == "eager":
        yield Saved("softmax in fp32", per_token_pair=4 * heads)
        if size != 4:
            yield Saved("probabilities", per_token_pair=size * heads)
        if attention.softcap is not None:
            yield Saved("tanh of the soft cap", per_token_pair=size * heads)
        return
    yield Saved("attention output", size * attention.out_width)
    yield Saved("log-sum-exp", 4 * heads)
    if stack.padded and stack.attn == "sdpa":
        yield Saved("additive mask", per_token_pair=size)


def mlp_saved(mlp: Mlp, stack: Stack, *, active: int = 1) -> Iterator[Saved]:
    """Input of the activation, its output, and the other factor of a gated product."""
    size = stack.mlp_bytes * active * mlp.width
    kept = _ACTIVATION_SAVED.get(mlp.activation, 1)
    yield Saved("activation: input", size * kept)
    if mlp.gated:
        yield Saved("gated product: both factors", 2 * size)


def inputs_saved(layer: Layer, targets: tuple[str, ...], stack: Stack) -> Iterator[Saved]:
    """Inputs of trained or adapted matrices, and adapter dropout.

    Kind: exact. An attention output is kept by the attention itself; it costs again only where
    a cast makes a copy of it.
    """
    linears = layer.linears if stack.trains_base else adapted(layer, targets)
    attention_out = {
        attention.linears[-1].name for attention in layer.attentions if attention.linears
    }
    seen: set[str] = set()
    for linear in linears:
        width = linear.active * linear.in_features
        is_out = linear.name in attention_out
        if stack.trains_base and stack.mode != "Q":
            if linear.reads not in seen and not (is_out and stack.attn != "eager"):
                yield Saved(f"{linear.name}: input", stack.compute_bytes * width)
            seen.add(linear.reads)
            continue
        if stack.lora_dropout and not stack.trains_base:
            yield Saved(f"{linear.name}: dropped input", stack.input_bytes * width)
            yield Saved(f"{linear.name}: dropout mask", stack.dropout_mask_bytes * width)
        elif stack.shared_inputs:
            if linear.reads not in seen and not is_out:
                yield Saved(f"{linear.name}: input", stack.input_bytes * width)
            seen.add(linear.reads)
        elif not (is_out and stack.mode == "Q"):
            yield Saved(f"{linear.name}: own copy of the input", stack.input_bytes * width)


def adapters_saved(
    layer: Layer, targets: tuple[str, ...], stack: Stack, method: Method, r: Count
) -> Iterator[Saved]:
    """The rank-r output of A, and what the method keeps beyond LoRA."""
    if method.trains_base:
        return
    rank_bytes = 4 if stack.mode in ("C", "F") else 2
    for linear in adapted(layer, targets):
        yield Saved(f"{linear.name}: A·x", rank_bytes * r * linear.active)
        extra = method.saved_bytes_per_token(linear, stack)
        constant = method.saved_bytes(linear, stack)
        if extra or constant:
            yield Saved(f"{linear.name}: {method.name}", extra, constant=constant)


def layer_saved(
    layer: Layer, targets: tuple[str, ...], stack: Stack, method: Method, r: Count
) -> tuple[Saved, ...]:
    """Everything that one layer keeps for backward."""
    saved: list[Saved] = []
    for norm in layer.norms:
        saved.extend(norm_saved(norm, stack))
    for attention in layer.attentions:
        saved.extend(attention_saved(attention, stack))
    if layer.mlp is not None:
        saved.extend(mlp_saved(layer.mlp, stack))
    if layer.moe is not None:
        moe = layer.moe
        saved.extend(mlp_saved(moe.expert, stack, active=moe.experts_per_token))
        hidden = moe.router.in_features
        saved.append(
            Saved("experts: gathered tokens", stack.compute_bytes * moe.experts_per_token * hidden)
        )
        saved.append(Saved("router: probabilities", 4 * moe.num_experts))
        if moe.shared is not None:
            saved.extend(mlp_saved(moe.shared, stack))
    saved.extend(inputs_saved(layer, targets, stack))
    saved.extend(adapters_saved(layer, targets, stack, method, r))
    return tuple(saved)


def saved_bytes(saved: Iterable[Saved], *, tokens: Count, span: Count) -> Count:
    """Bytes of `saved` for `tokens` tokens that each attend over `span` tokens."""
    total = 0 * tokens
    for one in saved:
        total = total + tokens * (one.per_token + one.per_token_pair * span) + one.constant
    return total


def layer_backward_transient(
    layer: Layer, targets: tuple[str, ...], stack: Stack, method: Method, hidden_size: int
) -> tuple[int, int]:
    """Alive on top of the saved tensors at the worst point of a layer's backward.

    Returns:
        Bytes per token, and bytes per token and attended token (eager attention: the gradients
        of the probabilities and of the fp32 softmax).

    Kind: exact for mode A with every matrix adapted, within 3 % for P and A with attention
    only, upper bound for Q. Source: live-bytes traces over sweeps of h and f.
    """
    width = 0
    if layer.mlp is not None:
        width = layer.mlp.width
    if layer.moe is not None:
        width = max(width, layer.moe.expert.width * layer.moe.experts_per_token)
    hidden, scale = hidden_size, stack.compute_bytes
    names = {linear.name for linear in adapted(layer, targets)}
    down = layer.mlp.linears[-1].name if layer.mlp is not None else ""
    if stack.mode == "Q":
        per_token = 12 * width + 10 * hidden
    elif stack.mode == "A":
        if down in names:
            per_token = 6 * width + 10 * hidden
        else:
            per_token = max(6 * width + 22 * hidden // 10, 16 * hidden)
    else:
        per_token = max(2 * scale * width + 11 * scale * hidden // 10, 71 * scale * hidden // 10)
    pair = 0
    if stack.attn == "eager":
        heads = max((one.num_attention_heads for one in layer.attentions), default=0)
        pair = heads * (4 + scale)
    return per_token, pair


def method_transient_bytes(
    model: ModelSpec, targets: tuple[str, ...], stack: Stack, method: Method
) -> int:
    """The largest temporary that the method makes of a whole weight (DoRA's norm)."""
    return max(
        (
            method.transient_bytes(linear, stack)
            for layer, _ in model.layers()
            for linear in adapted(layer, targets)
        ),
        default=0,
    )


def layer_forward_bytes(
    layer: Layer, hidden_size: int, stack: Stack, *, tokens: Count, span: Count
) -> Count:
    """Working set of one layer's forward without gradients, for the whole batch.

    The larger of the MLP (its projections and the product) and of attention, over the residual
    stream and the fp32 copy of the hidden state.
    Kind: exact for Llama-like layers (6f + 8h at 16 bit), elsewhere an estimate.
    """
    size = stack.compute_bytes
    stream = (2 * size + 4) * hidden_size
    width = 0
    if layer.mlp is not None:
        width = layer.mlp.width * (3 if layer.mlp.gated else 2)
    if layer.moe is not None:
        expert = layer.moe.expert
        factors = 3 if expert.gated else 2
        width = max(width, expert.width * layer.moe.experts_per_token * factors)
    mixing, pair = 0, 0
    for attention in layer.attentions:
        q, k, v = attention.q_width, attention.k_width, attention.v_width
        mixing = max(mixing, size * (2 * q + 2 * k + v + attention.out_width))
        if stack.attn == "eager" and attention.kind == "softmax":
            pair = max(pair, attention.num_attention_heads * (4 + size))
    in_mlp = tokens * (stream + size * width)
    in_attention = tokens * (stream + mixing) + tokens * span * pair
    return largest(in_mlp, in_attention)


def forward_bytes(model: ModelSpec, stack: Stack, *, tokens: Count, span: Count) -> Count:
    """Working set of the layer whose forward needs most."""
    return largest(
        *(
            layer_forward_bytes(layer, model.hidden_size, stack, tokens=tokens, span=span)
            for layer, _ in model.layers()
        ),
        0 * tokens,
    )
