"""MiSS: one trained matrix that sums of the input's shards are multiplied with.

Kang and Yin 2024, arXiv:2409.15371; peft 0.21.2 `tuners/miss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    AdapterWork,
    Method,
    adapted_modules,
    read_options,
    stated_options,
)
from whichlora.methods.operators import (
    base_result,
    counted,
    dense_weight,
    dropped,
    parameter,
    product,
    widened,
)
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_KIND = Option(
    name="init_weights",
    summary="bat: each block of a weight is multiplied; mini: a narrow matrix is repeated",
    default="true",
    choices=("true", "false", "bat", "mini"),
)
_MINI = Option(name="mini_r", summary="outputs that share a column, of mini", default=1)


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """[r, out_features], whatever the input's width. Kind: exact."""
    return ((r, linear.out_features),)


def _narrow_shapes(mini_r: int, linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    return ((r, mini_r + 0 * r),)


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, r: int = 1, mini_r: int = 0) -> Tensor:
    """The result plus the matrix times sums of the input's shards. Source: `MissLinear.forward`."""
    what = f"{linear.name}: shards·M"
    result = base_result(ops, linear, x)
    matrix = parameter(ops, ops.per_rank(mini_r or linear.out_features))
    if mini_r:
        matrix = ops.tape.op([matrix], ops.per_rank(linear.out_features), matrix.size)
    whole = x
    if linear.in_features % r:  # the last shard is filled up
        filled = linear.in_features + r - linear.in_features % r
        whole = ops.tape.op([x], ops.rows.of(filled), x.size, what=f"{linear.name}: filled input")
    wide = widened(ops, linear, whole)
    sums = ops.tape.op([dropped(ops, wide)], ops.rows.of_rank(1), wide.size)
    update = product(ops, sums, matrix, ops.rows.of(linear.out_features), what)
    result = ops.cast(ops.add(result, update, f"{linear.name}: result"), x.size)
    ops.tape.hold(wide, whole, matrix, x)
    return result


# --- bat


def bat_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """[out_features / r, r, r]. Kind: exact where r divides both widths, which PEFT asks for."""
    return ((linear.out_features, r),)


def bat_forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """A product with the weight W + W·M + M, block by block. Source: `MissLinear.forward`.

    Both `get_delta_weight` and its sum make a matrix as large as the weight.
    """
    tape, dtypes = ops.tape, ops.dtypes
    elements = ops.constant(linear.in_features * linear.out_features)
    dense = ops.copy(dense_weight(ops, linear))
    if dense.size == dtypes.base_bytes and dense.storage < 0:
        dense = tape.op([dense], elements, dense.size)
    blocks = parameter(ops, ops.per_rank(linear.out_features))
    wide = ops.cast(dense, dtypes.adapter_bytes)
    arranged = tape.op([wide], elements, wide.size)
    narrow, factor = ops.autocast(arranged), ops.autocast(blocks)
    multiplied = tape.op([narrow, factor], elements, narrow.size, saves=[narrow], reshapes=True)
    delta = ops.add(multiplied, blocks)
    laid_out = tape.op([delta], elements, delta.size)
    weight = ops.add(dense, laid_out)
    argument = ops.cast(x, weight.size, f"{linear.name}: own copy of the input")
    result = product(ops, argument, weight, ops.rows.of(linear.out_features), f"{linear.name}: bat")
    result = ops.cast(result, x.size)
    tape.hold(dense, weight, argument, x)
    return result


def bat_work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """Products of blocks that build the weight in every forward, and the gradient of it."""
    num_weights = linear.in_features * linear.out_features
    return AdapterWork(
        replaces_base=True,
        **counted(linear, linear.out_features * r, forward_flops=0, backward_flops=2 * num_weights),
        weight_flops=linear.count * 2 * r * num_weights,
        backward_weight_flops=linear.count * 2 * r * num_weights,
        expansions=1,
    )


# --- options


def _kind(run: RunConfig) -> str:
    return _KIND.text(run.method_options)


def with_options(run: RunConfig) -> dict[str, Any]:
    kind = _kind(run)
    if kind == "bat":
        return {
            "adapter_shapes": bat_shapes,
            "forward": bat_forward,
            "work": bat_work,
            "refuses": partial(refuses, r=run.r, divides=True),
        }
    fields: dict[str, Any] = {"forward": partial(forward, r=run.r)}
    if kind == "mini":
        mini_r = _MINI.whole(run.method_options)
        fields["forward"] = partial(forward, r=run.r, mini_r=mini_r)
        fields["adapter_shapes"] = partial(_narrow_shapes, mini_r)
        fields["autocast_shapes"] = lambda linear, r: ()
        fields["refuses"] = partial(refuses, r=run.r, mini_r=mini_r)
    else:
        fields["refuses"] = partial(refuses, r=run.r)
    return fields


def refuses(
    linear: Linear, quant: str, *, r: int = 1, divides: bool = False, mini_r: int = 1
) -> str:
    """Source: peft 0.21.2 `MissModel._create_new_module`, `MissLayer.update_layer`."""
    if r > linear.in_features:
        return f"r is above in_features, {linear.in_features}, got {r}"
    if divides and (linear.in_features % r or linear.out_features % r):
        return f"init_weights bat needs widths that r divides, got {r}; use another r"
    if linear.out_features % mini_r:
        return f"mini_r must divide out_features, {linear.out_features}, got {mini_r}"
    if divides and linear.is_stored_in(quant):
        return f"its expanded copies of {quant} weights are not predicted; use quant none"
    return ""


def peft_config(run: RunConfig) -> dict[str, Any]:
    config: dict[str, Any] = {"r": run.r, "miss_dropout": run.lora_dropout}
    kind = _kind(run)
    if kind != _KIND.default:
        config["init_weights"] = False if kind == "false" else kind
    return config | stated_options(run, (_MINI,)) | adapted_modules(run)


def read_peft(config: Any) -> Mapping[str, Any]:
    settings = dict(read_options(config, (_MINI,)))
    kind = config.init_weights
    kind = str(kind).lower() if isinstance(kind, bool) else kind
    if kind != _KIND.default:
        pairs = (*settings["method_options"], (_KIND.name, kind))
        settings["method_options"] = tuple(sorted(pairs))
    return {"r": config.r, "lora_dropout": float(config.miss_dropout), **settings}


METHOD = Method(
    name="miss",
    summary="one matrix for the summed shards of each input",
    peft_class="peft.MissConfig",
    peft_defaults=(("r", 64), ("miss_dropout", 0.0), ("init_weights", True)),
    peft_config=peft_config,
    read_peft=read_peft,
    keeps_input_dtype=True,
    parameter_prefix="miss_",
    ignores=LORA_SETTINGS | {"lora_alpha"},
    options=(_KIND, _MINI),
    with_options=with_options,
    one_rank=True,
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    forward=forward,
)
