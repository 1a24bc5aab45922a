"""Queries, keys and values of one matrix, whose adapters are one, too, as LitGPT writes them.

The adapters of queries, keys and values drop their input once. What they add is as wide as all
three, with zeros where one has no adapter.

Source: litgpt 0.5.13 model.py `CausalSelfAttention.forward`, `apply_rope`; lora.py
`LoRAQKVLinear.forward`, `zero_pad`, `conv1d`. Releases before 0.5.5 lay queries out between their
keys and values, and repeat keys before they are rotated, which keeps the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from whichlora.spec.layer import Attention, Linear
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.linear_form import per_token
from whichlora.symbolic.operators import OpEmitter

Rotate = Callable[[OpEmitter, Tensor, Attention, str], Tensor]


def project_joined(
    code: OpEmitter, attention: Attention, x: Tensor, rotate: Rotate
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """What the one matrix returns, and queries, keys and values of every head.

    Args:
        rotate: makes the rotary positions of whole heads.
    """
    tape = code.tape
    joint = _joint(code, attention.linears[:3], x)
    widths = (attention.q_width, attention.k_width, attention.v_width)
    q, k, v = tape.parts(joint, tuple(per_token(width) for width in widths))
    if attention.norms:
        q_norm, k_norm = attention.norms
        q, k = code.norm(q_norm, q), code.norm(k_norm, k)
    q = _turned(code, attention, q, "query", rotate)
    k = _turned(code, attention, k, "key", rotate)
    return joint, (q, _for_every_head(code, attention, k), _for_every_head(code, attention, v))


def _joint(code: OpEmitter, linears: Sequence[Linear], x: Tensor) -> Tensor:
    """One product of all matrices, and what the adapters of some of them add to it."""
    tape, dtypes = code.tape, code.dtypes
    whole = replace(
        linears[0], name="qkv", out_features=sum(linear.out_features for linear in linears)
    )
    result = code.base(whole, x)
    adapted = [linear for linear in linears if code.adapts(linear)]
    if not adapted:
        return result
    dropped = code.dropout(x) if dtypes.adapters_drop else x
    width = sum(linear.out_features for linear in adapted)
    a, b = (
        code.autocast(
            tape.weight(code.per_rank(count), dtypes.adapter_bytes, trained=True),
            "qkv: adapter, cast",
        )
        for count in (len(adapted) * whole.in_features, width)
    )
    narrow = code.autocast(dropped, "qkv: own copy of the input")
    inner = tape.op(
        [narrow, a],
        code.rows.of_rank(len(adapted)),
        narrow.size,
        saves=[narrow] + [a] * x.needs_grad,
        reshapes=True,
        what="qkv: A·x",
    )
    outer = tape.op(
        [inner, b],
        code.rows.of(width),
        inner.size,
        saves=[inner, b],
        reshapes=True,
        what="qkv: B·A·x",
    )
    elements, padded = code.rows.of(whole.out_features), outer
    if len(adapted) < len(linears):
        # torch 2.13 derivatives.yaml: the gradient of `index_copy` asks its source for a shape
        padded = tape.op([outer], elements, outer.size, saves=[outer], what="qkv: B·A·x")
    added = tape.op([padded], elements, outer.size)
    joint = code.add(result, added, "qkv: result")
    tape.hold(x, result, outer, added)
    return joint


def _turned(code: OpEmitter, attention: Attention, x: Tensor, label: str, rotate: Rotate) -> Tensor:
    """The leading part of each head rotated in fp32, and cast back before it joins the rest."""
    heads = x.elements.per_token // attention.head_dim
    rotated = heads * attention.rotary_dim
    whole, size = x, x.size
    parts = []
    if attention.rotary_dim < attention.head_dim:
        x, *parts = code.tape.parts(x, (per_token(rotated), per_token(_left(x, rotated))))
    of_part = replace(attention, head_dim=attention.rotary_dim, joins_rotation=False)
    turned = code.cast(rotate(code, x, of_part, label), size, f"{label}, rotated")
    return code.tape.op(
        [turned, *parts],
        whole.elements,
        size,
        passes=not parts,
        joined=True,
        what=f"{label}, rotated",
    )


def _left(x: Tensor, rotated: int) -> int:
    return x.elements.per_token - rotated


def _for_every_head(code: OpEmitter, attention: Attention, x: Tensor) -> Tensor:
    """Keys or values once per query head."""
    heads = attention.num_attention_heads
    if attention.num_key_value_heads == heads:
        return x
    every = per_token(heads * attention.head_dim)
    return code.tape.op([x], every, x.size, joined=True, what="keys or values, repeated")
