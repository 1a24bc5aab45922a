"""LoRA matrices that read one tensor, each group in one function, as Unsloth runs them.

Such a function keeps its input and what it cannot make again, and no product with a factor. The
gradient of the input is written over the input.

Source: unsloth 2026.10.9 `kernels/fast_lora.py`, `LoRA_QKV`, `LoRA_MLP`, `LoRA_W`;
`kernels/utils.py`, `matmul_lora`, `fast_dequantize`. Releases before 2025.3.1 make what an adapter
adds apart: `out += (X @ A) @ (s * B)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from whichlora.spec.dtypes import is_quantised
from whichlora.spec.layer import Linear, Mlp
from whichlora.symbolic.graph import Assigned, Tensor
from whichlora.symbolic.linear_form import LinearForm, constant, per_rank, per_token, scaled
from whichlora.symbolic.operators import OpEmitter

_BESIDE = "beside"  # one tensor at a time


def runs_fused(code: OpEmitter, linears: Sequence[Linear]) -> bool:
    """Whether one function computes `linears`: all of them have adapters."""
    return code.dtypes.kernels.adapters and all(code.adapts(linear) for linear in linears)


def project_fused(code: OpEmitter, linears: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, or one projection, which leaves its input as it is."""
    tape = code.tape
    small, dropped = _product(code, linears[0], x), _dropped(code, x.form)
    is_group = len(linears) > 1
    results = tape.several(
        [x, *_factors(code, linears)],
        [per_token(linear.out_features) for linear in linears],
        x.size,
        saves=[x],
        keeps=_masks(code, linears),
        inner=[*dropped, *_expanded_anew(code, linears), *_added(code, linears[-1]), small],
        inner_backward=[
            _expanded(code, linears),
            small,
            *([x.form] if code.dtypes.kernels.adds_apart else ()),  # added to the input's gradient
            *(_masks(code, linears) if is_group else ()),  # which nothing is written over
        ],
        overwrites=is_group,
        what=f"{', '.join(linear.name for linear in linears)}: result",
    )
    tape.hold(x)
    # the gradient through dropout, and what it is made of, when no matrix is expanded
    first = tape.works_before(results[0], (3 - is_group) * dropped)
    return first, *results[1:]


def feed_fused(code: OpEmitter, mlp: Mlp, x: Tensor) -> Tensor:
    """Gate, up, activation and down; the backward writes over gate, up and the input."""
    tape = code.tape
    gate_linear, _, down_linear = mlp.linears[:3]
    inner = per_token(mlp.width)
    small = _product(code, gate_linear, x)
    linears = mlp.linears[:3]
    beside: list[LinearForm | Assigned] = [
        *_dropped(code, x.form),
        *_expanded_anew(code, linears),
        *_added(code, gate_linear),
        small,
    ]
    gate = tape.op([x], inner, x.size, detached=True, inner=beside, what="gate, up")
    up = tape.op([x], inner, x.size, detached=True, inner=beside, what="gate, up")
    active = tape.op([gate, up], inner, x.size, detached=True)
    (result,) = tape.several(
        [x, gate, up, active, *_factors(code, linears)],
        [per_token(down_linear.out_features)],
        x.size,
        saves=[x, gate, up],
        keeps=_masks(code, linears),
        inner=[
            *_dropped(code, active.form),
            *_expanded_anew(code, linears),
            *_added(code, down_linear),
            small,
        ],
        # the gradient of what `down_proj` reads, beside those that take the place of gate and up
        inner_backward=[
            scaled(inner, x.size),
            *_added_to_gradient(code, linears, scaled(inner, x.size)),
            *(scaled(inner, x.size) for _ in range(2)),
            *([x.form] if code.dtypes.kernels.adds_apart else ()),
            _expanded(code, linears),
            small,
            *_dropped(code, active.form),
            *_masks(code, linears),
        ],
        overwrites=True,
        what=f"{down_linear.name}: result",
    )
    tape.hold(x, active)
    return tape.works_before(result, 3 * _dropped(code, active.form))


def _factors(code: OpEmitter, linears: Sequence[Linear]) -> list[Tensor]:
    return [
        code.tape.weight(
            per_rank(linear.rank_multiple * width), code.dtypes.adapter_bytes, trained=True
        )
        for linear in linears
        for width in (linear.in_features, linear.out_features)
    ]


def _masks(code: OpEmitter, linears: Sequence[Linear]) -> list[LinearForm]:
    """One byte per input of each adapter that drops."""
    if not code.dtypes.adapters_drop:
        return []
    return [per_token(linear.in_features) for linear in linears]


def _dropped(code: OpEmitter, form: LinearForm) -> list[LinearForm]:
    """What dropout makes of a tensor, in the forward and again in the backward."""
    return [form] if code.dtypes.adapters_drop else []


def _added(code: OpEmitter, linear: Linear) -> list[Assigned]:
    """What an adapter adds, as a tensor of its own: when the matrix that was expanded is gone."""
    if not code.dtypes.kernels.adds_apart:
        return []
    added = scaled(per_token(linear.out_features), code.dtypes.half_bytes)
    return [Assigned(_BESIDE, None), Assigned(_BESIDE, added)]


def _added_to_gradient(
    code: OpEmitter, linears: Sequence[Linear], inner: LinearForm
) -> list[Assigned]:
    """So in the backward, of what `down_proj` reads: nothing is written over what is saved yet."""
    if not code.dtypes.kernels.adds_apart:
        return []
    return [Assigned(_BESIDE, form) for form in (_expanded(code, linears), None, inner, None)]


def _expanded_anew(code: OpEmitter, linears: Sequence[Linear]) -> list[Assigned]:
    """A matrix in 16 bit, where a forward does not use a buffer that stays: so with dropout.

    Source: `_matmul_lora_ext`.
    """
    if code.dtypes.kernels.keeps_expanded and not code.dtypes.adapters_drop:
        return []
    return [Assigned(_BESIDE, _expanded(code, linears))]


def _product(code: OpEmitter, linear: Linear, x: Tensor) -> LinearForm:
    """A·x, or its like in the backward, which nobody keeps."""
    return scaled(code.rows.of_rank(linear.rank_multiple), x.size)


def _expanded(code: OpEmitter, linears: Sequence[Linear]) -> LinearForm:
    """The largest of the matrices in 16 bit, one at a time; the forward has room for it elsewhere.

    Kind: exact. Source: `fast_dequantize` without its global buffer.
    """
    sizes = [linear.num_weights for linear in linears if is_quantised(linear, code.dtypes)]
    return constant(max(sizes, default=0) * code.dtypes.half_bytes)
