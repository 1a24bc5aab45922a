"""(IA)³: one trained factor per output, or per input of the feedforward's last matrix.

Liu et al. 2022, arXiv:2205.05638; peft 0.21.2 `tuners/ia3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.methods.base import (
    PEFT_COMPARISON,
    RANK_SETTINGS,
    AdapterWork,
    Method,
    adapted_modules,
    given,
    no_shapes,
    read_options,
)
from whichlora.methods.operators import counted
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import FOUR_BIT_BNB, RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_FEEDFORWARD = Option(
    name="feedforward_modules",
    summary="targets whose inputs are scaled in place of their outputs, joined with +",
    default=None,
    kind=str,
)


def _scales_inputs(linear: Linear, names: tuple[str, ...]) -> bool:
    """Source: peft 0.21.2 `IA3Model._check_target_module_feedforward`, which compares ends."""
    return any(linear.name.endswith(name) for name in names)


def _feedforward(run: RunConfig) -> tuple[str, ...]:
    stated = _FEEDFORWARD.of(run.method_options)
    return tuple(str(stated).split("+")) if stated else ()


def adapter_shapes(
    linear: Linear, r: Count, *, names: tuple[str, ...] = ()
) -> tuple[tuple[Count, Count], ...]:
    """One factor per output, or per input. Kind: exact."""
    inputs = _scales_inputs(linear, names)
    return ((1, (linear.in_features if inputs else linear.out_features) + 0 * r),)


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, names: tuple[str, ...] = ()) -> Tensor:
    """Source: `ia3.Linear.forward`, and `ia3.bnb`, whose layers keep the width of the product."""
    tape, dtypes = ops.tape, ops.dtypes
    quantised = is_quantised(linear, dtypes)
    # `ia3_scaling = 1`, times the factors: a product of its own, which keeps neither
    inputs = _scales_inputs(linear, names)
    width = ops.constant(linear.in_features if inputs else linear.out_features)
    factors = tape.weight(width, dtypes.adapter_bytes, trained=True)
    scaling = ops.scale(factors)
    size = x.size
    argument = x
    if quantised and not dtypes.under_autocast:
        argument = ops.cast(x, 4, f"{linear.name}: fp32 input")
    if inputs:
        wide = argument if quantised else ops.cast(x, dtypes.adapter_bytes)
        scaled = ops.multiply_rows(wide, scaling, row_last=True)
        result = ops.base(linear, scaled if quantised else ops.cast(scaled, size))
    else:
        result = ops.base(linear, argument)
        scaled = ops.multiply_rows(result, scaling, row_last=True)
        result = scaled if quantised else ops.cast(scaled, result.size)
    if quantised and dtypes.quant in FOUR_BIT_BNB:
        result = ops.copy(result)
    tape.hold(scaling, argument, x)
    return result


def work(linear: Linear, dtypes: Dtypes, r: Count, *, names: tuple[str, ...] = ()) -> AdapterWork:
    """No product, so that what is counted for trained parameters is taken off."""
    ((_, params),) = adapter_shapes(linear, r, names=names)
    return AdapterWork(**counted(linear, params, forward_flops=0, backward_flops=0))


def with_options(run: RunConfig) -> dict[str, Any]:
    names = _feedforward(run)
    return given(adapter_shapes, forward, work, names=names)


def peft_config(run: RunConfig) -> dict[str, Any]:
    return {"feedforward_modules": list(_feedforward(run))} | adapted_modules(run)


def read_peft(config: Any) -> Mapping[str, Any]:
    names = config.feedforward_modules
    if isinstance(names, str):
        raise ConfigError(f"IA3Config.feedforward_modules={names!r}: a pattern is not modelled")
    settings = dict(read_options(config, ()))
    if names:
        settings["method_options"] = ((_FEEDFORWARD.name, "+".join(sorted(names))),)
    return settings


METHOD = Method(
    name="ia3",
    summary="a trained factor per output of each layer",
    peft_class="peft.IA3Config",
    peft_config=peft_config,
    read_peft=read_peft,
    parameter_prefix="ia3_",
    widens_result=True,
    ignores=RANK_SETTINGS,
    options=(_FEEDFORWARD,),
    with_options=with_options,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
    work=work,
    learning_rate=1e-3,
    rate_source=PEFT_COMPARISON,
)
