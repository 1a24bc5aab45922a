"""VeRA: two random matrices shared by all targets, and two trained vectors for each.

Kopiczko et al. 2024, arXiv:2310.11454; peft 0.21.2 `tuners/vera`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.methods.base import AdapterWork, FrozenTensor, Method
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.run import FOUR_BIT_BNB, RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """One factor per rank, one per output."""
    return (1, r), (1, linear.out_features)


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """A and B as large as the largest target; the others read a part. `VeraModel._find_dim`."""
    if not linears:
        return ()
    width = max(linear.in_features for linear, _ in linears)
    rows = max(linear.out_features for linear, _ in linears)
    return (
        FrozenTensor(name="vera_A", dims="r, largest in_features", rows=r, width=width),
        FrozenTensor(name="vera_B", dims="largest out_features, r", rows=rows, width=r),
    )


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """`vera.Linear.forward`: the result plus lambda_b * (B (lambda_d * (A x)))."""
    tape, dtypes = ops.tape, ops.dtypes
    result = ops.base(linear, x)
    size = result.size
    if is_quantised(linear, dtypes) and dtypes.quant in FOUR_BIT_BNB:
        result = ops.copy(result)
    wide = ops.cast(x, dtypes.adapter_bytes, f"{linear.name}: own copy of the input")
    dropped = wide
    if dtypes.lora_dropout:
        dropped = ops.dropout(wide)
    inner = _product(ops, dropped, linear.in_features, ops.rows.of_rank(1), f"{linear.name}: A·x")
    by_rank = tape.weight(ops.per_rank(1), dtypes.adapter_bytes, trained=True)
    inner = ops.multiply_rows(inner, by_rank)
    outputs = ops.rows.of(linear.out_features)
    outer = _product(ops, inner, linear.out_features, outputs, f"{linear.name}: B·A·x")
    by_output = tape.weight(ops.constant(linear.out_features), dtypes.adapter_bytes, trained=True)
    result = ops.add(result, ops.multiply_rows(outer, by_output), f"{linear.name}: result")
    result = ops.cast(ops.cast(result, size), x.size)  # orig_dtype, then previous_dtype
    tape.hold(wide, x)
    return result


def _product(ops: OpEmitter, x: Tensor, width: int, elements: Any, what: str) -> Tensor:
    """With a part of a shared matrix, which autocast copies for every product anew."""
    shared = ops.tape.weight(ops.per_rank(width), ops.dtypes.adapter_bytes)
    part = ops.autocast(shared, f"{what}, part of the shared matrix, cast")
    narrow = ops.autocast(x)
    saves = [part] if x.needs_grad else []
    return ops.tape.op([narrow, part], elements, narrow.size, saves=saves, reshapes=True, what=what)


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """The products with A and B, neither of which is trained."""
    both = linear.in_features + linear.out_features
    return AdapterWork(token_flops=2 * r * both)


def peft_config(run: RunConfig) -> dict[str, Any]:
    targets = run.target_modules
    return {
        "r": run.r,
        "vera_dropout": run.lora_dropout,
        "target_modules": targets[0] if targets == ("all-linear",) else list(targets),
    } | ({"modules_to_save": list(run.modules_to_save)} if run.modules_to_save else {})


def read_peft(config: Any) -> Mapping[str, Any]:
    if config.bias != "none":
        raise ConfigError(f"VeraConfig.bias={config.bias!r} is not modelled")
    return {
        "r": config.r,
        "lora_dropout": float(config.vera_dropout),
        "modules_to_save": tuple(sorted(config.modules_to_save or ())),
    }


METHOD = Method(
    name="outside-vera",
    summary="trained vectors around two shared random matrices",
    peft_class="peft.VeraConfig",
    peft_config=peft_config,
    read_peft=read_peft,
    parameter_prefix="vera_lambda_",
    ignores=frozenset({"lora_alpha", "use_rslora", "loraplus_lr_ratio", "bias"}),
    adapter_shapes=adapter_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
)
