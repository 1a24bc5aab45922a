"""DoRA: LoRA for the direction, a trained magnitude (Liu et al. 2024, arXiv:2402.09353)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whichlora.methods import lora
from whichlora.methods.base import AdapterWork
from whichlora.methods.operators import dense_weight, side_kernel
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.run import FOUR_BIT_BNB, RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter


# --- parameters


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """LoRA's factors, and one magnitude per output. Kind: exact."""
    return *lora.low_rank_shapes(linear, r), (1, linear.out_features)


def adapter_widths(linear: Linear, dtypes: Dtypes) -> tuple[int, int, int]:
    """LoRA's factors, and the magnitudes, which a later cast of the adapters leaves alone.

    Source: transformers 5.23, peft 0.21.2 on a CPU: magnitudes of an nf4 base are 16 bit with
    `autocast_adapter_dtype=False`, those of an int8 base are made in fp32.
    """
    factor = dtypes.adapter_bytes
    is_wide = dtypes.narrows_adapters_later and is_quantised(linear, dtypes)
    return factor, factor, 4 if is_wide else factor


def trains_frozen(linear: Linear, dtypes: Dtypes) -> bool:
    """Whether it makes a gradient of a frozen weight: of an fp32 Conv1D under dropout.

    PEFT turns the transposed weight into a parameter, which asks for one; what is cast or expanded
    first is none. Source: peft 0.21.2 `utils.other.transpose`, `DoraLinearLayer.forward`.
    """
    wide = dtypes.base_bytes == dtypes.adapter_bytes == 4 and not is_quantised(linear, dtypes)
    return linear.transposed and bool(dtypes.lora_dropout) and wide


# --- operators


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """LoRA's, with the norm of the adapted weight and the magnitudes between (`_dora_result`).

    The magnitudes are parameters: `memory.gradients.adapter_entries` counts them by
    `adapter_shapes`.
    """
    return lora.around(ops, linear, x, _dora_result)


def _dora_result(ops: OpEmitter, linear: Linear, x: Tensor, result: Tensor) -> Tensor:
    """Source: peft 0.21.2 `DoraLinearLayer.forward`."""
    tape, dtypes, out = ops.tape, ops.dtypes, linear.out_features
    outputs, dense = ops.constant(out), ops.constant(linear.in_features * out)
    autocast_eye, lora_weight = _product_of_factors(ops, linear, x.size)
    weight = _weight_as(ops, linear, x.size)
    scaled = tape.op([lora_weight], dense, x.size)
    adapted = tape.op([weight, scaled], dense, x.size)
    *_, wide = adapter_widths(linear, dtypes)
    magnitude = tape.weight(outputs, wide, trained=True)
    norm = tape.op([adapted], outputs, x.size)
    ratio = tape.op([magnitude, norm], outputs, max(wide, x.size), saves=[norm])
    lora_result = lora.low_rank(ops, linear, x)
    base = _base_result(ops, linear, x, result, weight)
    ratio_minus_one = tape.op([ratio], outputs, ratio.size, passes=True)
    of_base = ops.multiply_rows(base, ratio_minus_one)
    of_adapter = ops.multiply_rows(lora_result, ratio)
    scaled_adapter = ops.scale(of_adapter)
    tape.hold(of_adapter)
    both = ops.add(of_base, scaled_adapter)
    # the graph behind `lora_weight` saved it; of a checkpoint's first forward nothing is saved
    tape.hold(autocast_eye, by_graph=True)
    tape.hold(lora_weight, weight, base, lora_result, ratio, norm, x)
    return ops.add(result, both)


def _product_of_factors(ops: OpEmitter, linear: Linear, size: int) -> tuple[Tensor, Tensor]:
    """B·A as a dense matrix, and the identity that is sent through both factors for it."""
    width = linear.in_features
    eye = ops.tape.op([], ops.constant(width * width), ops.dtypes.adapter_bytes)
    autocast_eye = ops.autocast(eye)
    a, b = (
        ops.tape.weight(ops.per_rank(linear.rank_multiple * features), autocast_eye.size)
        for features in (width, linear.out_features)
    )
    dense = ops.constant(width * linear.out_features)
    # A sent through gives its transpose, which is gone before the product is there
    side_kernel(ops, a.elements, a.size, autocast_eye)
    product = ops.tape.op([a, b], dense, autocast_eye.size)
    ops.tape.hold(eye)
    return autocast_eye, ops.cast(product, size)


def _weight_as(ops: OpEmitter, linear: Linear, size: int) -> Tensor:
    """The base's weight in the dtype of the input, expanded if it is quantised."""
    stored = dense_weight(ops, linear)
    weight = ops.cast(stored, size)
    ops.tape.hold(stored)
    return weight


def _base_result(
    ops: OpEmitter, linear: Linear, x: Tensor, result: Tensor, weight: Tensor
) -> Tensor:
    """The base's result without its bias; with dropout made again, of the dropped input."""
    tape, dtypes, outputs = ops.tape, ops.dtypes, ops.rows.of(linear.out_features)
    if dtypes.lora_dropout:
        used = ops.autocast(weight)
        narrow = ops.autocast(x)
        reads, saves = [narrow], [used]
        if trains_frozen(linear, dtypes):
            dense = ops.constant(linear.in_features * linear.out_features)
            used = ops.autocast(tape.weight(dense, dtypes.base_bytes, trained=True))
            reads, saves = [narrow, used], [used, narrow]
        return tape.op(reads, outputs, narrow.size, saves=saves, reshapes=True)
    if not linear.bias:
        return result
    # a 4-bit matrix narrows its bias to the dtype of its product, for good
    four_bit = is_quantised(linear, dtypes) and dtypes.quant in FOUR_BIT_BNB
    bias_bytes = dtypes.four_bit_bytes if four_bit else dtypes.base_bytes
    return tape.op([result], outputs, max(result.size, bias_bytes), passes=True)


# --- work


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """LoRA's, and B·A as a matrix in every forward, beside which a quantised weight is expanded."""
    plain = lora.work(linear, dtypes, r)
    # with dropout the base product is made again, of the dropped input
    again = 2 * linear.active * linear.in_features * linear.out_features
    return replace(
        plain,
        token_flops=again if dtypes.lora_dropout else 0,
        weight_flops=weight_flops(linear, r),
        expansions=1,
    )


def weight_flops(linear: Linear, r: Count) -> Count:
    """B·A as a dense matrix: an identity [in, in] is sent through both factors.

    Kind: exact. Nothing flows back: the norm is a constant of the gradient.
    """
    both = linear.in_features + linear.out_features
    return linear.count * 2 * r * linear.in_features * both


def merging(base_bytes: int) -> int:
    """Bytes per weight while an adapter is merged: B·A, its sum with the base, the scaled sum.

    A clone of the base lives beside them, which the norm was taken of.
    Kind: exact. Source: peft 0.21.2 `DoraLinearVariant.merge_unsafe`, `_unmerged_base_weight`.
    """
    return 3 * 4 + base_bytes


# --- PEFT


def peft_config(run: RunConfig) -> dict[str, Any]:
    return lora.peft_config(run) | {"use_dora": True}


def read_peft(config: Any) -> Mapping[str, Any] | None:
    return lora.read_lora(config) if config.use_dora else None


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    plain = lora.notes(run, adapts_experts=False)
    return lora.experts_notes(adapts_experts) + plain


METHOD = replace(
    lora.METHOD,
    adapts_table=False,
    name="dora",
    options=(),
    with_options=lambda run: {},
    summary="LoRA with a trained magnitude per output",
    peft_config=peft_config,
    read_peft=read_peft,
    stays_wide="magnitude",
    widens_result=True,
    adapter_shapes=adapter_shapes,
    adapter_widths=adapter_widths,
    trains_frozen=trains_frozen,
    forward=forward,
    work=work,
    merging=merging,
    notes=notes,
)
