"""VeLoRA: LoRA that keeps a compressed copy of each input for the gradient of A.

Miles et al. 2024, arXiv:2405.17991; peft 0.21.2 `VeloraLinearVariant`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.methods import lora
from whichlora.methods.base import AdapterWork, FrozenTensor
from whichlora.methods.operators import side_kernel
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_GROUPS = Option(
    name="num_groups", summary="numbers that are kept of each token's input", default=64
)
_START = Option(
    name="init_type",
    summary="what inputs are projected on",
    default="batch_average",
    choices=("batch_average", "batch_average_once", "random"),
)
_OPTIONS = (_GROUPS, _START)


def frozen_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, groups: int = 64
) -> tuple[FrozenTensor, ...]:
    """The vector that each group of an input is projected on. Kind: exact."""
    return tuple(
        FrozenTensor(
            name=f"{linear.name}: lora_velora_embed",
            dims="in_features / num_groups",
            rows=1 + 0 * r,
            width=-(-linear.in_features // groups),
            count=count * linear.count,
        )
        for linear, count in linears
    )


def forward(
    ops: OpEmitter, linear: Linear, x: Tensor, *, groups: int = 64, averages: bool = True
) -> Tensor:
    """LoRA's, but for what is kept of the input."""
    return lora.around(ops, linear, x, partial(_added, groups=groups, averages=averages))


def _added(
    ops: OpEmitter,
    linear: Linear,
    x: Tensor,
    result: Tensor,
    *,
    groups: int,
    averages: bool,
) -> Tensor:
    """Source: peft 0.21.2 `VeloraFunction`, `_compress_activations`, `_reconstruct_activations`."""
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    rank, rows = linear.rank_multiple, ops.rows.of
    a, b = (
        tape.weight(ops.per_rank(rank * width), dtypes.adapter_bytes, trained=True)
        for width in (linear.in_features, linear.out_features)
    )
    size = dtypes.compute_bytes if dtypes.under_autocast else x.size
    whole = rows(size * linear.active * linear.in_features)
    narrow_a = ops.autocast(a, f"{what}: adapter, cast")
    kept = rows(size * linear.active * groups)
    _project(ops, linear, x, size, groups=groups, averages=averages)
    inner = tape.op(
        [x, narrow_a],
        ops.rows.of_rank(rank * linear.active),
        size,
        keeps=[kept],
        inner=whole if size != x.size else (),  # autocast's copies of the input, one by one
        inner_backward=[whole, whole],
        what=f"{what}: compressed input",
    )
    narrow_b = ops.autocast(b, f"{what}: adapter, cast")
    outer = tape.op(
        [inner, narrow_b],
        rows(linear.active * linear.out_features),
        size,
        saves=[inner, narrow_b],
        reshapes=True,
        what=f"{what}: B·A·x",
    )
    return ops.add(result, ops.scale(outer), f"{what}: result")


def _project(
    ops: OpEmitter, linear: Linear, x: Tensor, size: int, *, groups: int, averages: bool
) -> None:
    """Kernels beside the product: the vector is made and scaled, and the input projected on it."""
    vector = ops.constant(-(-linear.in_features // groups))
    if averages:  # its mean, its norm, whether that is zero, and the quotient
        side_kernel(ops, vector, x.size, x)
        for _ in range(3):
            side_kernel(ops, vector, x.size)
    if size != x.size:  # autocast's copies of the input, and of the vector
        side_kernel(ops, ops.rows.of(linear.active * linear.in_features), size, x)
        side_kernel(ops, vector, size)
    side_kernel(ops, vector, size)


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """LoRA's, and inputs projected in the forward; what makes them again is no product of matrices.

    Kind: exact. Source: operators of `VeloraFunction`.
    """
    projected = 2 * linear.active * linear.in_features
    return replace(
        lora.work(linear, dtypes, r), token_flops=projected, backward_token_flops=-projected
    )


def refuses(linear: Linear, quant: str) -> str:
    """Source: peft 0.21.2 `lora.bnb.Linear4bit.resolve_lora_variant`."""
    if linear.is_stored_in(quant):
        return f"PEFT's VeLoRA is for weights that are not quantised, not {quant}; use method qlora"
    if not linear.is_module:
        return "PEFT's VeLoRA is for linear layers, and for no experts in one parameter"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    groups = _GROUPS.whole(run.method_options)
    averages = _START.of(run.method_options) == _START.default
    return {
        "frozen_tensors": partial(frozen_tensors, groups=groups),
        "forward": partial(forward, groups=groups, averages=averages),
    }


def peft_config(run: RunConfig) -> dict[str, Any]:
    own = {option.name: option.of(run.method_options) for option in _OPTIONS}
    return lora.peft_config(replace(run, method_options=())) | {"velora_config": own}


def read_peft(config: Any) -> Mapping[str, Any] | None:
    stated = getattr(config, "velora_config", None)
    if stated is None or config.use_dora:
        return None
    if stated.scale != 1:
        raise ConfigError(f"VeloraConfig.scale={stated.scale!r} is not modelled")
    values = ((option, getattr(stated, option.name)) for option in _OPTIONS)
    options = sorted((option.name, value) for option, value in values if value != option.default)
    return {**lora.read_lora(config), "method_options": tuple(options)}


METHOD = replace(
    lora.METHOD,
    adapts_table=False,
    name="velora",
    summary="LoRA that keeps compressed inputs for the gradient of A",
    peft_config=peft_config,
    read_peft=read_peft,
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    frozen_tensors=frozen_tensors,
    forward=forward,
    folded=None,
    work=work,
)
