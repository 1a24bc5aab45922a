"""Multi-head latent attention on a tape, up to its queries, keys and values.

Source: transformers 5.23 `DeepseekV2Attention`, `DeepseekV3Attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whichlora.spec.layer import Attention
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.linear_form import per_token, plus, scaled
from whichlora.symbolic.operators import OpEmitter, Rows
from whichlora.symbolic.sparse_keys import mask_other_keys


def latent_projections(
    code: OpEmitter,
    attention: Attention,
    x: Tensor,
    local_variables: list[Tensor],
    rotate: Callable[[OpEmitter, Tensor, Attention, str], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys as they are multiplied, values as part of what they are projected with.

    Args:
        local_variables: collects tensors that local variables hold until the attention returns.
        rotate: as Llama does it.
    """
    tape = code.tape
    *q_linears, kv_down, kv_up, _ = (linear for linear in attention.linears if linear.active)
    *q_norms, kv_norm = attention.norms
    heads, rotary = attention.num_attention_heads, attention.rotary_dim
    q = code.linear(q_linears[0], x)
    if q_norms:
        q_latent = code.norm(q_norms[0], q)
        q = code.linear(q_linears[1], q_latent)
    plain = attention.head_dim - rotary
    q_plain, q_turned = tape.parts(q, (per_token(heads * plain), per_token(heads * rotary)))
    compressed = code.linear(kv_down, x)
    latent, k_turned = tape.parts(compressed, (per_token(kv_norm.width), per_token(rotary)))
    latent = code.norm(kv_norm, latent)
    if attention.projection == "latent_halves":
        whole = replace(attention, head_dim=rotary)
        before = (q_turned, k_turned)
        q_turned = rotate(code, q_turned, whole, "query")
        k_turned = rotate(code, k_turned, whole, "key")
        tape.hold(*before)
    else:
        turn = _turn_complex if attention.projection == "latent_complex" else _turn_interleaved
        q_turned, k_turned = turn(code, q_turned), turn(code, k_turned)
    rows = code.rows
    if code.decoding and expands_cache(attention):
        rows = Rows(keys=True)
        tape.hold(latent, k_turned)  # until the cache has copied them, and hands out its own
        latent, k_turned = (
            tape.cached(state, rows.of(state.elements.per_token), written=True)
            for state in (latent, k_turned)
        )
    query = tape.op([q_plain, q_turned], q.elements, q.size, joined=True, what="query")
    expanded = replace(code, rows=rows).linear(kv_up, latent)
    k_plain, value = tape.parts(
        expanded, (rows.of(heads * plain), rows.of(heads * attention.v_head_dim))
    )
    # written in place part by part: each backward copies the whole gradient first
    width = rows.of(attention.k_width)
    key = tape.op(
        [k_plain, k_turned],
        width,
        expanded.size,
        joined=True,
        inner_backward=scaled(width, expanded.size),
        what="key",
    )
    if attention.sparse is None:
        local_variables += [q, compressed, latent, q_turned, k_turned]
        return query, key, value
    local_variables += [q, compressed, q_latent, q_turned]
    if code.dtypes.training:  # else they name those of the cache
        local_variables += [latent, k_turned]
    chosen = mask_other_keys(code, attention, x, q_latent, rotate, _turn_interleaved)
    tape.hold(query, key, value, *local_variables)
    local_variables += chosen
    return query, key, value


def expands_cache(attention: Attention) -> bool:
    """Whether the cache keeps latents, of which keys and values are made anew in each forward."""
    is_latent = attention.projection.startswith("latent")
    return is_latent and attention.cache_elements < attention.k_width


def _turn_interleaved(code: OpEmitter, x: Tensor) -> Tensor:
    """Every second column against its neighbour: four products of half the width."""
    tape = code.tape
    half = per_token(x.elements.per_token // 2)
    products = []
    for _ in range(4):
        (part,) = tape.parts(x, (half,))
        products.append(tape.op([part], half, x.size))
    even, odd = code.add(products[0], products[1]), code.add(products[2], products[3])
    return tape.op([even, odd], x.elements, x.size)


def _turn_complex(code: OpEmitter, x: Tensor) -> Tensor:
    wide = code.cast(x, 4)
    copied = code.copy(wide)
    inner = plus(copied.form, copied.form)
    turned = code.tape.op([copied], x.elements, 4, inner_backward=inner)
    return code.cast(turned, x.size)
