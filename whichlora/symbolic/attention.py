"""An attention on a tape: projections, positions, the kernel that runs, the output projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from whichlora.spec.layer import Attention, EagerScores, Projection
from whichlora.symbolic.block_attention import attend_in_blocks
from whichlora.symbolic.cache import store
from whichlora.symbolic.deberta import attend_disentangled
from whichlora.symbolic.delta_net import mix_recurrently
from whichlora.symbolic.fused_lora import project_fused, runs_fused
from whichlora.symbolic.gemma4 import project_in_turn
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.joined_qkv import project_joined
from whichlora.symbolic.kernels import (
    ALIGNED_KEYS,
    FUSED,
    Kernel,
    attention_kernel,
    fused_qkv,
    has_mask_per_head,
    masks_keys,
    repeats_keys,
    shares_mask,
)
from whichlora.symbolic.linear_form import (
    NOTHING,
    LinearForm,
    constant,
    per_pair,
    per_sequence,
    per_span,
    per_span_squared,
    per_token,
    plus,
    scaled,
)
from whichlora.symbolic.llama4 import project_and_turn
from whichlora.symbolic.mla import expands_cache, latent_projections
from whichlora.symbolic.operators import OpEmitter, Rows
from whichlora.symbolic.windows import attend_in_windows

# That make a number of each position. Source: `get_llama_4_attn_scale` of modeling_ministral3.py.
_TEMPERATURE_KERNELS = 7


def rotate(
    code: OpEmitter,
    x: Tensor,
    attention: Attention,
    label: str,
    local_variables: list[Tensor] | None = None,
    widened: list[Tensor] | None = None,
) -> Tensor:
    """Rotary positions, of the leading part of each head.

    Args:
        local_variables: collects tensors that local variables hold until attention returns.
        widened: collects copies in fp32 that are held until queries and keys are both rotated.

    Source: `apply_rotary_pos_emb`; with local variables, `StableLmAttention.forward`.
    """
    tape = code.tape
    if attention.wide_rotation and x.size < 4:
        wide = code.cast(x, 4)
        result = rotate(code, wide, attention, label, local_variables)
        if widened is None or attention.wide_rotation == "inline":
            tape.hold(wide)
        else:  # `q, k = q.float(), k.float()`
            widened.append(wide)
        return result
    if attention.rotated_parts > 1:
        return _rotate_by_axis(code, x, attention, label)
    heads = x.elements.per_token // attention.head_dim
    rotated = per_token(heads * attention.rotary_dim)
    unrotated = per_token(heads * (attention.head_dim - attention.rotary_dim))
    whole = x
    passed = None
    if any(unrotated):
        x, passed = tape.parts(x, (rotated, unrotated))
    table = tape.weight(
        per_token(attention.rotary_dim), x.size if attention.tables == "stream" else 4
    )
    cosine_part = code.multiply_rows(x, table)
    # two halves: the gradient of each is laid out over the whole before they are added
    half = scaled(x.elements, x.size // 2)
    turned = tape.op([x], x.elements, x.size, inner=half, inner_backward=scaled(x.elements, x.size))
    sine_part = code.multiply_rows(turned, table)
    result = code.add(cosine_part, sine_part, f"{label}, rotated")
    if local_variables is not None and attention.names_parts and passed is not None:
        local_variables += [whole, result]
    if attention.joins_rotation or passed is not None:
        parts = [result] if passed is None else [result, passed]
        result = tape.op(
            parts,
            whole.elements,
            result.size,
            passes=passed is None,
            joined=attention.joins_rotation,
            what=f"{label}, rotated",
        )
    return result


def _rotate_by_axis(code: OpEmitter, x: Tensor, attention: Attention, label: str) -> Tensor:
    """Each part of the heads by itself.

    Source: transformers 5.23 `apply_multidimensional_rope` of modeling_gemma4.py.
    """
    tape, num_parts = code.tape, attention.rotated_parts
    part = per_token(x.elements.per_token // num_parts)
    of_part = replace(
        attention,
        head_dim=attention.head_dim // num_parts,
        rotary_dim=attention.head_dim // num_parts,
        rotated_parts=1,
    )
    parts = tape.parts(x, (part,) * num_parts)
    turned = [rotate(code, each, of_part, label) for each in parts]
    result = tape.op(turned, x.elements, x.size, what=f"{label}, rotated")
    tape.hold(x, *turned)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Queries, keys and values as a projection returns them.

    Args:
        attention: with the heads that keys and values have now.
        local_variables: tensors that local variables hold until the attention returns.
        gate: on the attention's output.
        is_turned: norms and rotary positions are applied already.
    """

    attention: Attention
    q: Tensor
    k: Tensor
    v: Tensor
    local_variables: tuple[Tensor, ...] = ()
    gate: Tensor | None = None
    is_turned: bool = False


def _project_plain(code: OpEmitter, attention: Attention, x: Tensor, read: Tensor) -> Projected:
    """Source: transformers 5.23 `LlamaAttention.forward`; fused, `GPTNeoXAttention.forward`."""
    if fused_qkv(attention) is not None:
        _, (q, k, v) = _split_projection(code, attention, x)
        return Projected(attention=attention, q=q, k=k, v=v)
    if read is x and runs_fused(code, attention.linears[:3]):
        q, k, v = project_fused(code, attention.linears[:3], x)
    else:
        q, (k, v) = code.linear(attention.linears[0], x), _read(code, attention, read)
    return _by_heads(code, attention, q, k, v)


def _read(code: OpEmitter, attention: Attention, read: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of an encoder's output, which may have a length of its own."""
    _, k_linear, v_linear, _ = attention.linears
    length = attention.memory_len
    reading = replace(code, rows=Rows(in_sequence=length)) if length else code
    return reading.linear(k_linear, read), reading.linear(v_linear, read)


def _by_heads(
    code: OpEmitter,
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None = None,
) -> Projected:
    # the gradient comes back as [batch, heads, seq, head_dim]; a fused kernel's has the layout of
    # what it read, which rotating in place keeps
    rotates = code.dtypes.kernels.rope
    in_place = rotates != "none" and _kernel_of(code, attention) in FUSED
    repeated = repeats_keys(attention, code.dtypes, masked=code.masked, decoding=code.decoding)
    q = code.tape.view(q, copies_gradient=not in_place)
    k = code.tape.view(k, copies_gradient=not in_place or repeated)
    return Projected(attention=attention, q=q, k=k, v=v, gate=gate)


def _project_scaled(code: OpEmitter, attention: Attention, x: Tensor, read: Tensor) -> Projected:
    """Source: transformers 5.23 `EsmSelfAttention.forward`."""
    q, (k, v) = code.linear(attention.linears[0], x), _read(code, attention, read)
    return _by_heads(code, attention, code.scale(q), k, v)


def _project_scaled_keys(
    code: OpEmitter, attention: Attention, x: Tensor, read: Tensor
) -> Projected:
    """Source: transformers 5.23 `FalconH1Attention.forward`."""
    q_linear, k_linear, v_linear, _ = attention.linears
    q, k, v = code.linear(q_linear, x), code.linear(k_linear, read), code.linear(v_linear, read)
    return _by_heads(code, attention, q, code.scale(k), v)


def _project_contiguous(
    code: OpEmitter, attention: Attention, x: Tensor, read: Tensor
) -> Projected:
    """Source: transformers 5.23 `WhisperAttention.forward`."""
    q_linear, k_linear, v_linear, _ = attention.linears
    reading = replace(code, rows=Rows(in_sequence=attention.memory_len)) if read is not x else code
    q = _laid_out(code, code.scale(code.linear(q_linear, x)))
    k = _laid_out(code, reading.linear(k_linear, read))
    v = _laid_out(code, reading.linear(v_linear, read))
    return Projected(attention=attention, q=q, k=k, v=v)


def _laid_out(code: OpEmitter, x: Tensor) -> Tensor:
    """`x` head by head."""
    return code.tape.op([x], x.elements, x.size, joined=True, what="copy, head by head")


def _project_queries_first(
    code: OpEmitter, attention: Attention, x: Tensor, read: Tensor
) -> Projected:
    """Source: transformers 5.23 `MllamaTextCrossAttention.forward`."""
    tape = code.tape
    q_linear, k_linear, v_linear, _ = attention.linears
    q_norm, k_norm = attention.norms
    q = code.norm(q_norm, tape.view(code.linear(q_linear, x), copies_gradient=True))
    if code.decoding:  # the cache has keys and values
        k, v = (
            replace(x, storage=-1, elements=_of_keys(code, attention, width), joined=True)
            for width in (attention.k_width, attention.v_width)
        )
        return Projected(attention=attention, q=q, k=k, v=v, is_turned=True)
    reading = replace(code, rows=Rows(in_sequence=attention.memory_len))
    k, v = reading.linear(k_linear, read), reading.linear(v_linear, read)
    k = reading.norm(k_norm, tape.view(k, copies_gradient=True), rows=reading.rows.of(k_norm.rows))
    return Projected(attention=attention, q=q, k=k, v=v, is_turned=True)


def _project_gated(code: OpEmitter, attention: Attention, x: Tensor, read: Tensor) -> Projected:
    """Source: transformers 5.23 `Qwen3NextAttention.forward`."""
    q_linear, k_linear, v_linear, _ = attention.linears
    joint = code.linear(q_linear, x)
    half = per_token(attention.q_width)  # per head a query and a gate, side by side
    (q,), (gate,) = code.tape.parts(joint, (half,)), code.tape.parts(joint, (half,))
    gate = code.copy(gate)
    k, v = code.linear(k_linear, read), code.linear(v_linear, read)
    return _by_heads(code, attention, q, k, v, gate)


def _split_projection(
    code: OpEmitter, attention: Attention, x: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """What a fused projection returns, and queries, keys and values as views of it."""
    linear = fused_qkv(attention)
    assert linear is not None
    joint = code.linear(linear, x)
    widths = (attention.q_width, attention.k_width, attention.v_width)
    q, k, v = code.tape.parts(joint, tuple(per_token(width) for width in widths))
    return joint, (q, k, v)


def _project_copied(code: OpEmitter, attention: Attention, x: Tensor, read: Tensor) -> Projected:
    """Source: transformers 5.23 `FalconAttention._split_heads`, `CodeGenAttention.forward`."""
    joint, parts = _split_projection(code, attention, x)
    q, k, v = (code.copy(part) for part in parts)
    one_token = replace(code, decoding=False)  # a decoding step copies keys before they are cached
    k, v = _repeated(one_token, attention, k, v)
    every = replace(attention, num_key_value_heads=attention.num_attention_heads)
    return Projected(attention=every, q=q, k=k, v=v, local_variables=(joint,))


def _project_copied_keys(
    code: OpEmitter, attention: Attention, x: Tensor, read: Tensor
) -> Projected:
    """Source: transformers 5.23 `FalconAttention._split_heads` with `multi_query`."""
    _, (q, k, v) = _split_projection(code, attention, x)
    return Projected(attention=attention, q=q, k=code.copy(k), v=code.copy(v))


def _project_joined(code: OpEmitter, attention: Attention, x: Tensor, read: Tensor) -> Projected:
    joint, (q, k, v) = project_joined(code, attention, x, rotate)
    every = replace(attention, num_key_value_heads=attention.num_attention_heads)
    return Projected(attention=every, q=q, k=k, v=v, local_variables=(joint,), is_turned=True)


def _project_latent(code: OpEmitter, attention: Attention, x: Tensor, read: Tensor) -> Projected:
    held: list[Tensor] = []
    q, k, v = latent_projections(code, attention, x, held, rotate)
    return Projected(
        attention=attention, q=q, k=k, v=v, local_variables=tuple(held), is_turned=True
    )


def _project_one_by_one(
    code: OpEmitter, attention: Attention, x: Tensor, read: Tensor
) -> Projected:
    copies = _kernel_of(code, attention) not in FUSED
    q, k, v = project_in_turn(code, attention, x, rotate, copies_gradient=copies)
    return Projected(attention=attention, q=q, k=k, v=v, is_turned=True)


def _project_complex_by_head(
    code: OpEmitter, attention: Attention, x: Tensor, read: Tensor
) -> Projected:
    copies = _kernel_of(code, attention) not in FUSED
    q, k, v = project_and_turn(code, attention, x, copies_gradient=copies)
    return Projected(attention=attention, q=q, k=k, v=v, is_turned=True)


_PROJECTIONS: dict[Projection, Callable[[OpEmitter, Attention, Tensor, Tensor], Projected]] = {
    "plain": _project_plain,
    "scaled": _project_scaled,
    "scaled_keys": _project_scaled_keys,
    "gated": _project_gated,
    "copied": _project_copied,
    "copied_keys": _project_copied_keys,
    "joined": _project_joined,
    "latent": _project_latent,
    "latent_complex": _project_latent,
    "latent_halves": _project_latent,
    "one_by_one": _project_one_by_one,
    "one_by_one_shared": _project_one_by_one,
    "one_after_other": _project_one_by_one,
    "borrowed": _project_one_by_one,
    "complex_by_head": _project_complex_by_head,
    "contiguous": _project_contiguous,
    "queries_first": _project_queries_first,
}
"""The attention functions that a family names in `Attention.projection`.

Each takes what queries are made of, and what keys and values are made of.
"""


def attend(
    code: OpEmitter, attention: Attention, x: Tensor, *, memory: Tensor | None = None
) -> Tensor:
    """Projections, positions, the kernel and the output projection.

    Args:
        memory: the encoder's output, which cross attention takes keys and values from.
    """
    if attention.kind != "softmax":
        return mix_recurrently(code, attention, x)
    if attention.relative_rows:
        return attend_disentangled(code, attention, x)
    if attention.windows is not None:
        return attend_in_windows(code, attention, x)
    if attention.in_blocks:
        return attend_in_blocks(code, attention, x)
    tape = code.tape
    read = x if memory is None else memory
    whole = attention
    projected = _PROJECTIONS[attention.projection](code, attention, x, read)
    attention, q, k, v = projected.attention, projected.q, projected.k, projected.v
    local_variables = list(projected.local_variables)
    if not projected.is_turned:
        q, k = _turned(code, attention, q, k, local_variables)
    k, v = _through_cache(code, attention, k, v)
    bias = None
    if attention.position == "relative":
        bias = _position_bias(code, attention, size=q.size)
    function = _KERNELS[_kernel_of(code, attention, biased=bias is not None)]
    out, weights, steps = function(code, attention, q, k, v, bias)
    tape.hold(q, k, v, *([] if bias is None else [bias]))
    if out.joined:
        out = code.copy(out)
    gate = projected.gate
    if gate is not None:
        open_ = tape.op([gate], gate.elements, gate.size, saves_result=True, what="attention: gate")
        out = code.multiply(out, open_)
        tape.hold(gate)
    if attention.out_norm is not None:
        normed = code.norm(attention.out_norm, out)
        tape.hold(out)
        out = normed
    if runs_fused(code, attention.linears[-1:]):
        (result,) = project_fused(code, attention.linears[-1:], out)
    else:
        result = code.linear(attention.linears[-1], out)
    # local variables of `forward`, which Python drops when it returns
    tape.hold(x, q, k, v, out, *local_variables, *steps)
    # returned also where nobody uses them: `hidden_states, _ = self.self_attn(…)`
    if weights is not None and attention.keeps_probabilities:
        tape.returns_to_later_layers(weights, gathers=False)
    elif weights is not None:
        tape.hold_to_end(weights, name="attention weights")
    wrap = code.method.after_attention
    if wrap is not None and code.adapts(whole.linears[-1]):
        return wrap(code, whole, x, result, lambda query: rotate(code, query, whole, "query"))
    return result


def _kernel_of(code: OpEmitter, attention: Attention, *, biased: bool = False) -> Kernel:
    masked = code.masked or biased
    return attention_kernel(attention, code.dtypes, masked=masked, decoding=code.decoding)


def _turned(
    code: OpEmitter, attention: Attention, q: Tensor, k: Tensor, local_variables: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Queries and keys after their norms and with their positions."""
    if attention.norms:
        q_norm, k_norm = attention.norms
        q, k = code.norm(q_norm, q), code.norm(k_norm, k)
    if attention.position != "rope":
        return q, k
    if code.dtypes.kernels.rope != "none":  # which first lays out parts of one projection
        if fused_qkv(attention) is not None:
            return code.copy(q), code.copy(k)
        if code.dtypes.kernels.rope == "apart":
            tape = code.tape
            return tape.view(q, copies_gradient=True), tape.view(k, copies_gradient=True)
        return code.tape.written_over(q), code.tape.written_over(k)
    before = (q, k)
    widened: list[Tensor] = []
    q = rotate(code, q, attention, "query", local_variables, widened)
    k = rotate(code, k, attention, "key", local_variables, widened)
    after = (q, k, *widened)
    if attention.tables != "fp32":
        q, k = code.cast(q, before[0].size), code.cast(k, before[1].size)
    elif not code.dtypes.training:
        k = code.cast(k, before[1].size)  # the cache's
    code.tape.hold(*before, *after)
    if attention.has_temperature:
        number = code.tape.weight(per_token(1), q.size)
        q = code.multiply_rows(q, number)
        code.tape.runs_beside(_TEMPERATURE_KERNELS)
    return q, k


def _through_cache(
    code: OpEmitter, attention: Attention, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values as `Cache.update` returns them; in training there is no cache."""
    # a cache of latents is expanded anew, so that it hands out nothing that it keeps
    expands = expands_cache(attention)
    hands_out = attention.projection in ("one_by_one", "one_by_one_shared", "borrowed") or (
        attention.cache_elements and not code.dtypes.stores and not expands
    )
    if hands_out and not code.dtypes.training:
        code.tape.hold(k, v)  # until the cache has copied them, and hands out its own
        written = bool(attention.cache_elements)
        widths = (attention.k_width, attention.v_width)
        of_all = code.decoding and not attention.cross  # of every token so far
        forms = [per_pair(width) for width in widths] if of_all else [k.elements, v.elements]
        states = k, v
        k, v = (
            code.tape.cached(state, form, written=written)
            for state, form in zip(states, forms, strict=True)
        )
        if code.tape.writes_cache:
            code.tape.hold(*states)
    store(code, k, v, num_heads=attention.num_key_value_heads)
    if code.dtypes.prefix_tokens and not attention.cross:
        widths = (attention.k_width, attention.v_width)
        k, v = (_behind_prefix(code, attention, *pair) for pair in zip((k, v), widths, strict=True))
    return k, v


def _behind_prefix(code: OpEmitter, attention: Attention, state: Tensor, width: int) -> Tensor:
    """Keys or values behind those that a cache hands each sequence, in the dtype of the base.

    Source: peft 0.21.2 `PeftModel.get_prompt`; transformers 5.23 `DynamicLayer.update`.
    """
    size = max(state.size, code.dtypes.base_bytes)
    whole = code.tape.behind(state, _of_keys(code, attention, width), size)
    code.tape.hold(state)
    code.tape.hold_to_end(whole)  # by the cache, which lives longer
    return whole


def _of_keys(code: OpEmitter, attention: Attention, width: int) -> LinearForm:
    """Elements of a tensor that has `width` for every key."""
    if attention.memory_len:
        of_sequence = width * attention.memory_len
        return per_token(of_sequence) if code.decoding else per_sequence(of_sequence)
    if code.decoding:
        return per_pair(width)
    return plus(per_token(width), per_sequence(width * code.dtypes.prefix_tokens))


def _pairs(code: OpEmitter, attention: Attention, count: int) -> LinearForm:
    """Elements of a tensor that has `count` for every query and key."""
    if attention.memory_len:
        return per_token(count * attention.memory_len)
    return plus(per_pair(count), per_token(count * code.dtypes.prefix_tokens))


Attended = tuple[Tensor, Tensor | None, tuple[Tensor, ...]]
"""A kernel's output, the attention weights that it returns, and further local variables."""


def _position_bias(code: OpEmitter, attention: Attention, *, size: int) -> Tensor:
    """A bias per head and pair of positions, the same for the whole batch.

    In cross attention it is zeros, which T5 makes trainable where it checkpoints.
    Source: transformers 5.23 `T5Attention.forward`, `compute_bias`, `T5Stack.forward`.
    """
    tape, dtypes = code.tape, code.dtypes
    elements = _shared_pairs(attention)
    if attention.biases_each_sequence:
        elements = per_pair(attention.num_attention_heads)
    if attention.biases_each_layer:
        return tape.op([], elements, size) if attention.cross else _looked_up_bias(code, elements)
    if code.makes_bias:
        if attention.cross:
            bias = replace(tape.op([], elements, size), needs_grad=code.checkpointed)
        else:
            bias = _looked_up_bias(code, elements)
        if _adds_in_place(code, attention) and _is_eager(code, attention):  # and the mask
            bias = tape.op([bias], _pairs(code, attention, attention.num_attention_heads), size)
        tape.returns_to_later_layers(bias, gathers=bias.needs_grad or code.reentrant)
        return bias
    if _adds_in_place(code, attention) and _is_eager(code, attention):
        elements = _pairs(code, attention, attention.num_attention_heads)
    if attention.cross:
        return tape.shared(elements, size, needs_grad=code.checkpointed)
    # what `CheckpointFunction` returns needs a gradient, though what it made it of is frozen
    wanted = dtypes.trains_base or code.reentrant
    return tape.shared(elements, dtypes.base_bytes, needs_grad=wanted)


def _is_eager(code: OpEmitter, attention: Attention) -> bool:
    return _kernel_of(code, attention, biased=True) == "eager"


def _shared_pairs(attention: Attention) -> LinearForm:
    """Elements of a tensor that has one for every head, query and key, the same for all rows."""
    heads = attention.num_attention_heads
    if attention.memory_len:
        return per_span(heads * attention.memory_len)
    return per_span_squared(heads)


def _looked_up_bias(code: OpEmitter, elements: LinearForm) -> Tensor:
    """Source: transformers 5.23 `T5Attention.compute_bias`."""
    tape, dtypes = code.tape, code.dtypes
    buckets = tape.op([], per_span_squared(1), 8, inner=per_span_squared(2 * 8))
    table = tape.weight(constant(0), dtypes.base_bytes, trained=dtypes.trains_base)
    return tape.op(
        [table, buckets], elements, dtypes.base_bytes, saves=[buckets], what="position bias"
    )


def _biased_mask(code: OpEmitter, attention: Attention, bias: Tensor) -> Tensor:
    """Bias and mask in one. Source: transformers 5.23 `create_position_bias_mask`."""
    heads = attention.num_attention_heads
    if not code.masked and not attention.causal:
        return bias if attention.cross else code.copy(bias)
    elements = _pairs(code, attention, heads) if code.masked else _shared_pairs(attention)
    masked_gradient = scaled(elements, bias.size)
    masked_bias = code.tape.op(
        [bias], elements, bias.size, inner_backward=masked_gradient, what="position bias, masked"
    )
    return (
        masked_bias if attention.cross else code.copy(masked_bias)
    )  # heads come last in a looked-up bias


def _fused_kernel(
    code: OpEmitter, attention: Attention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> Attended:
    tape, dtypes = code.tape, code.dtypes
    flash = dtypes.attn == "flash_attention_2"  # is never handed fp32
    size = 2 if flash else dtypes.compute_bytes
    heads = attention.num_attention_heads
    packed = attention.packed and not flash
    if packed:  # `torch.split`: gradients of the parts are joined before they go on
        q, k, v = (tape.parts(state, (state.elements,))[0] for state in (q, k, v))
    inputs = [q, k, v]
    written: tuple[Tensor, ...] = ()
    summed = NOTHING
    masked = code.masked or bias is not None
    if repeats_keys(attention, dtypes, masked=masked, decoding=code.decoding):
        if attention.num_key_value_heads > 1:
            written = _repeated(code, attention, k, v)
            inputs = [q, *written]
        else:  # one head is repeated by a view; its gradient comes back for every head
            summed = per_token(heads * (attention.head_dim + attention.v_head_dim) * size)
    if flash or dtypes.under_autocast:
        inputs = [code.cast(operand, size) for operand in inputs]
    # derivatives.yaml of torch 2.13: `_scaled_dot_product_flash_attention` saves query, key, value,
    # output and an fp32 logsumexp per head
    keeps = [per_token(4 * heads)]
    if bias is not None:
        inputs.append(code.cast(_biased_mask(code, attention, bias), size))
    elif code.masked and dtypes.uses_sdpa and not _is_mask_shared(code, attention):
        keeps.append(_mask_elements(code, attention, size))
    is_kept = any(operand.needs_grad for operand in inputs)
    masks = () if is_kept else tuple(keeps[1:])  # else the kernel's alone
    in_ring, in_ring_backward = _ring(attention, inputs, size)
    out = tape.op(
        inputs,
        per_token(attention.out_width),
        size,
        saves=inputs,
        saves_result=True,
        keeps=keeps,
        inner=(in_ring, *masks),
        inner_backward=plus(summed, in_ring_backward),
        # values of another width rule the flash kernel out; the other one writes token by token.
        # `_partial_update` of a ring concatenates along the sequence, on all ranks but the last
        joined=attention.ring > 1 or (q.joined and attention.v_head_dim == attention.head_dim),
        multiplies=True,
        what="attention: output, log-sum-exp, additive mask",
    )
    tape.hold(*written)  # by local variables of `sdpa_attention_forward`, cast or not
    if packed:  # `attn_outputs` names the parts of `attn_output`
        return code.copy(out), None, (out,)
    return out, None, ()


def _mask_elements(code: OpEmitter, attention: Attention, size: int) -> LinearForm:
    """The additive mask, whose rows the memory-efficient kernel wants aligned.

    Kind: exact where the sequence is aligned. Source: torch 2.13 `convert_boolean_attn_mask`,
    `pad_bias`.
    """
    is_aligned = _kernel_of(code, attention) == "efficient"
    if attention.memory_len:
        return per_token(size * _aligned(attention.memory_len, is_aligned))
    before = _aligned(code.dtypes.prefix_tokens, is_aligned)
    return plus(per_pair(size), per_token(size * before))


def _aligned(number: int, is_aligned: bool) -> int:
    return number + (-number % ALIGNED_KEYS) * is_aligned


def _is_mask_shared(code: OpEmitter, attention: Attention) -> bool:
    """Whether all layers read one mask that is counted beside them: none casts it first."""
    return shares_mask(attention, code.dtypes) or has_mask_per_head(attention)


def _ring(
    attention: Attention, inputs: Sequence[Tensor], size: int
) -> tuple[LinearForm, LinearForm]:
    """What attention makes beside its results where keys and values of several ranks pass.

    Forward, of the last rank: all keys and values, two results and the parts of their merging in
    fp32, three log-sum-exps. Backward: gradients in fp32, of keys and values three (the sum, what
    is sent, what comes), what the kernel makes of two steps or, on the first rank, the sum for the
    queries twice, whose second half is new.
    Kind: exact; upper bound for ranks between them. Source: torch 2.13 `_templated_ring_attention`,
    `_SDPAMerger`, `_templated_ring_attention_backward`; rotated by "allgather".
    """
    ranks = attention.ring
    if ranks == 1:
        return NOTHING, NOTHING
    q, *states = (tensor.elements.per_token for tensor in inputs)
    kv = sum(states)
    forward = 16 * attention.out_width + ranks * size * kv + 8 * attention.num_attention_heads
    first = 8 * q + size * q // 2 + (ranks + 2) * size * kv + 12 * kv
    last = 4 * q + 2 * size * q + (ranks + 1) * size * kv + size * kv * 3 // 2 + 12 * kv
    made = size * (q + kv)
    return per_token(forward), per_token(max(first, last) - made)


def _repeated(code: OpEmitter, attention: Attention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`repeat_kv`: keys and values once per query head; a single head is only looked at."""
    heads = attention.num_attention_heads
    if attention.num_key_value_heads == heads:
        return k, v
    tape = code.tape
    if attention.num_key_value_heads == 1:
        (k,) = tape.parts(k, (_of_keys(code, attention, heads * attention.head_dim),))
        (v,) = tape.parts(v, (_of_keys(code, attention, heads * attention.v_head_dim),))
        return replace(k, joined=False, repeats=heads), replace(v, joined=False, repeats=heads)
    return _written_out(code, attention, k, v)


def _written_out(
    code: OpEmitter, attention: Attention, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Copies of keys and values, one per query head, laid out head by head."""
    heads = attention.num_attention_heads
    keys, values = (
        code.tape.op(
            [state],
            _of_keys(code, attention, heads * width),
            state.size,
            joined=True,
            what=f"{name}, repeated",
        )
        for name, state, width in (
            ("keys", k, attention.head_dim),
            ("values", v, attention.v_head_dim),
        )
    )
    return keys, values


def _eager_kernel(
    code: OpEmitter, attention: Attention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> Attended:
    """Source: `eager_attention_forward` of transformers 5.23."""
    tape, dtypes = code.tape, code.dtypes
    heads = attention.num_attention_heads
    scores_shape = _pairs(code, attention, heads)
    q_size = q.size
    k, v = _repeated(code, attention, k, v)
    if attention.eager == "fp32":
        q, k = code.cast(q, 4), code.cast(k, 4)
    named = k, v
    in_place = bias is not None and _adds_in_place(code, attention)
    scores_of = _named_scores if in_place else _SCORES[attention.eager]
    scores, steps = scores_of(code, q, k, scores_shape)
    if attention.softcap is not None:
        divided = code.scale(scores)
        tanh = tape.op([divided], scores_shape, divided.size, saves_result=True, what="soft cap")
        scores = code.scale(tanh)
    if attention.biases_each_sequence or in_place:
        assert bias is not None
        scores = tape.in_place(scores, bias)
    elif bias is not None:
        scores = code.add(scores, bias)
    unmasked = scores
    if in_place:  # the mask is among the bias
        pass
    elif attention.causal or masks_keys(attention, dtypes) or code.masked:
        mask = tape.weight(_pairs(code, attention, 1), code.stream_bytes)  # one for all heads
        scores = code.add(scores, mask)
        if attention.eager == "bounded":
            scores = code.maximum(scores)
    if attention.eager == "sinks":
        probabilities = _softmax_with_sinks(code, attention, scores)
    else:
        probabilities = _softmax(code, attention, scores, q_size)
    if attention.eager == "beside_sum":
        tape.hold(unmasked)
    if attention.eager != "fp32":  # GPT-J gives softmax and its cast a statement each
        tape.hold(scores)
    if attention.dropout and dtypes.training:
        probabilities = code.dropout(probabilities)
    returned = probabilities
    if dtypes.under_autocast:
        probabilities = code.cast(probabilities, dtypes.compute_bytes)
        v = code.cast(v, dtypes.compute_bytes)
    v = _by_head(code, v)
    out = tape.op(
        [probabilities, v],
        per_token(attention.out_width),
        v.size,
        saves=[probabilities, v],
        multiplies=True,
    )
    joined = code.copy(out)
    tape.hold(*named)
    if attention.returns_probabilities:
        return joined, returned, steps
    tape.hold(returned)
    return joined, None, steps


def _adds_in_place(code: OpEmitter, attention: Attention) -> bool:
    """Whether bias and mask are one tensor, which is added to the scores where they are.

    Source: transformers 4.57 `T5Attention.forward`.
    """
    is_old = code.dtypes.libraries.adds_positions_in_place
    return is_old and attention.position == "relative" and not attention.biases_each_sequence


def _factors(code: OpEmitter, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Autocast casts what a product reads, in the graph and for it alone."""
    if not code.dtypes.under_autocast:
        return q, k
    size = code.dtypes.compute_bytes
    return code.cast(q, size), code.cast(k, size)


def _product(
    code: OpEmitter, q: Tensor, k: Tensor, shape: LinearForm
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys as the product reads them, and what it makes."""
    q, k = _by_head(code, q), _by_head(code, k)
    return q, k, code.tape.op([q, k], shape, q.size, saves=[q, k], multiplies=True)


Scores = tuple[Tensor, tuple[Tensor, ...]]
"""Scores before the mask, and tensors that local variables hold until the attention returns."""


def _scaled_scores(code: OpEmitter, q: Tensor, k: Tensor, shape: LinearForm) -> Scores:
    """Source: `eager_attention_forward` of transformers 5.23, `matmul(...) * scaling`."""
    _, _, scores = _product(code, *_factors(code, q, k), shape)
    return code.scale(scores), ()


def _scores_of_scaled_queries(code: OpEmitter, q: Tensor, k: Tensor, shape: LinearForm) -> Scores:
    """Source: transformers 5.23 `MvpAttention.forward`."""
    q, k = _factors(code, q, k)
    _, _, scores = _product(code, code.scale(q), k, shape)
    return scores, ()


def _plain_scores(code: OpEmitter, q: Tensor, k: Tensor, shape: LinearForm) -> Scores:
    """Source: transformers 4.48 `OPTAttention.forward`."""
    _, _, scores = _product(code, *_factors(code, q, k), shape)
    return scores, ()


def _named_scores(code: OpEmitter, q: Tensor, k: Tensor, shape: LinearForm) -> Scores:
    """One `baddbmm` also adds the bias. Source: transformers 5.23 `BloomAttention.forward`."""
    steps = _product(code, *_factors(code, q, k), shape)
    return steps[-1], steps


_SCORES: dict[EagerScores, Callable[[OpEmitter, Tensor, Tensor, LinearForm], Scores]] = {
    "scaled": _scaled_scores,
    "scaled_queries": _scores_of_scaled_queries,
    "beside_sum": _scaled_scores,
    "bounded": _plain_scores,
    "named": _named_scores,
    "fp32": _scaled_scores,
    "sinks": _scaled_scores,
}
"""The functions that a family names in `Attention.eager`."""


def _softmax(code: OpEmitter, attention: Attention, scores: Tensor, size: int) -> Tensor:
    """Probabilities, of `size` bytes each where the class widens the scores itself."""
    dtypes = code.dtypes
    widened = attention.wide_softmax or (dtypes.under_autocast and dtypes.backend.widens_norms)
    # `F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)`: the backward of
    # `_softmax` reads its result, in fp32
    # `softmax` of torch 2.13 has a kernel from fp16 to fp32, and none from bf16
    is_fused = dtypes.fused_fp16_softmax and scores.size == 2
    wide = code.cast(scores, 4) if widened and not is_fused else scores
    softmax = code.softmax(wide, size=4 if widened else None)
    return code.cast(softmax, size, "probabilities") if attention.wide_softmax else softmax


def _softmax_with_sinks(code: OpEmitter, attention: Attention, scores: Tensor) -> Tensor:
    """One more column, in the dtype of the scores. Source: gpt-oss's `eager_attention_forward`."""
    tape, heads = code.tape, attention.num_attention_heads
    shape = plus(_pairs(code, attention, heads), per_token(heads))
    combined = tape.op([scores], shape, scores.size)
    lowered = tape.op([combined], shape, scores.size, passes=True)
    softmax = code.softmax(lowered)
    tape.hold(lowered)
    (probabilities,) = tape.parts(softmax, (_pairs(code, attention, heads),))
    return probabilities


def _by_head(code: OpEmitter, x: Tensor) -> Tensor:
    """Batched products read one head after the other."""
    return x if x.joined else code.copy(x)


def _math_kernel(
    code: OpEmitter, attention: Attention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> Attended:
    """Plain operators in fp32; local variables and casts live until the result exists.

    Source: torch 2.13 `_scaled_dot_product_attention_math`; it returns the probabilities too.
    """
    tape, dtypes = code.tape, code.dtypes
    heads = attention.num_attention_heads
    grouped = attention.num_key_value_heads < heads
    broadcasts = attention.sdpa == "math"  # one key for all heads, repeated by the products
    masked = code.masked or bias is not None
    is_repeated = repeats_keys(attention, dtypes, masked=masked, decoding=code.decoding)
    if is_repeated:
        k, v = _repeated(code, attention, k, v)
    named = k, v
    if dtypes.under_autocast:
        q, k, v = (code.cast(state, dtypes.compute_bytes) for state in (q, k, v))
    size = q.size
    wide = [code.cast(state, 4) for state in (q, k, v)]
    scaled_q = code.scale(wide[0])
    mask = None
    if code.masked:
        mask = tape.op([], _pairs(code, attention, 1), size)
    elif attention.causal and not code.decoding:
        boolean = tape.op([], per_span_squared(1), 1)
        mask = tape.op([boolean], per_span_squared(1), 4)
    key, value = wide[1], wide[2]
    expanded: tuple[Tensor, ...] = ()
    if grouped and not (broadcasts or is_repeated or masked):  # `enable_gqa`
        expanded = key, value = _written_out(code, attention, key, value)
    scaled_k = code.scale(key)
    if attention.num_key_value_heads == 1 and is_repeated:  # an operator wrote what was looked at
        scaled_k = replace(scaled_k, joined=True)
        value = replace(value, joined=size != 4)
    factors = [_by_head(code, scaled_q), scaled_k]
    if broadcasts:
        factors[1] = tape.op([scaled_k], _of_keys(code, attention, heads * attention.head_dim), 4)
    else:
        factors[1] = _by_head(code, scaled_k)
    shape = _pairs(code, attention, heads)
    scores = tape.op(factors, shape, 4, saves=factors, multiplies=True)
    if bias is not None:
        scores = code.add(scores, bias)
    elif mask is not None:
        scores = code.add(scores, tape.weight(mask.elements, 4))
    # `_safe_softmax` looks for -inf in the scores; `softmax_backward_cuda_out` multiplies gradient
    # and result before it reduces the product
    product = scaled(shape, 4) if dtypes.backend.multiplies_before_softmax else NOTHING
    softmax = tape.op(
        [scores],
        shape,
        4,
        saves_result=True,
        inner=shape,
        inner_backward=product,
        what="softmax",
    )
    if attention.dropout and dtypes.training:
        softmax = code.dropout(softmax)
    returned = tape.op([softmax], shape, size, detached=True) if size != 4 else softmax
    if broadcasts:
        value = tape.op([value], _of_keys(code, attention, attention.out_width), 4)
    else:
        value = _by_head(code, value)
    out = tape.op(
        [softmax, value],
        per_token(attention.out_width),
        4,
        saves=[softmax, value],
        multiplies=True,
    )
    out = code.cast(out, size)
    in_kernel = (*wide, *expanded, scaled_q, softmax, returned)
    tape.hold(q, k, v, *in_kernel, *([] if mask is None else [mask]))
    result = code.copy(out)
    tape.hold(*named)
    return result, None, ()


_KERNELS: dict[Kernel, Callable[..., Attended]] = {
    "flash": _fused_kernel,
    "efficient": _fused_kernel,
    "eager": _eager_kernel,
    "math": _math_kernel,
}
