"""LoRA: a rank-r update B·A beside each frozen target (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.methods.base import AdapterWork, FrozenTensor, Method
from whichlora.methods.lora_starts import (
    START,
    STARTS,
    start_bytes,
    start_notes,
    start_of,
    start_refusal,
    start_settings,
)
from whichlora.methods.operators import counted
from whichlora.spec.dtypes import Dtypes, is_quantised
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.run import ALL_LINEAR, FOUR_BIT_BNB, RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_PLAIN: dict[str, tuple[Any, ...]] = {  # fields of LoraConfig, and what is modelled
    "rank_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "lora_bias": (None, False),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None,),
    "use_qalora": (None, False),
}


# --- parameters


def low_rank_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """A is [r, in_features], B is [out_features, r]. Kind: exact."""
    rank = r * linear.rank_multiple
    return (rank, linear.in_features), (linear.out_features, rank)


# --- operators


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The base's product, and B·A·x scaled and added to it."""
    return around(ops, linear, x, added)


def around(
    ops: OpEmitter,
    linear: Linear,
    x: Tensor,
    join: Callable[[OpEmitter, Linear, Tensor, Tensor], Tensor],
) -> Tensor:
    """What PEFT's LoRA layers do around `join`, which reads the adapter's input, and the result.

    Source: peft 0.21.2 `lora.Linear.forward`, `lora.bnb.Linear4bit.forward`.
    """
    dtypes = ops.dtypes
    quantised = is_quantised(linear, dtypes)
    result = ops.base(linear, x)
    if quantised and dtypes.quant in FOUR_BIT_BNB and dtypes.copies_four_bit:
        result = ops.copy(result)
    argument = wide = x if leaves_cast(linear, dtypes) else widened(ops, linear, x)
    if dtypes.adapters_drop:
        wide = ops.dropout(wide)
    size = result.size
    result = ops.cast(join(ops, linear, wide, result), size)
    ops.tape.hold(argument, x)  # the caller's argument lives as long as the call
    return result


def leaves_cast(linear: Linear, dtypes: Dtypes) -> bool:
    """Whether the layer leaves it to autocast to cast its input, as quantised ones do.

    PEFT asks `torch.is_autocast_enabled()`, which speaks of CUDA only: under the autocast of other
    devices the layer casts its input itself.
    """
    on_cuda = dtypes.backend.torch_device == "cuda"
    return on_cuda and dtypes.under_autocast and is_quantised(linear, dtypes)


def widened(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The input in the dtype of the adapter: a copy of its own for each target."""
    return ops.cast(x, ops.dtypes.adapter_bytes, f"{linear.name}: own copy of the input")


def added(
    ops: OpEmitter,
    linear: Linear,
    x: Tensor,
    result: Tensor,
    *,
    trains_a: bool = True,
    trains_b: bool = True,
    between: Callable[[OpEmitter, Tensor], Tensor] | None = None,
) -> Tensor:
    """B·A·x scaled, and added to the base's result."""
    product = low_rank(ops, linear, x, trains_a=trains_a, trains_b=trains_b, between=between)
    product = ops.scale(product)
    if is_quantised(linear, ops.dtypes) and not leaves_cast(linear, ops.dtypes):
        product = ops.cast(product, result.size)
    return ops.add(result, product, f"{linear.name}: result")


def low_rank(
    ops: OpEmitter,
    linear: Linear,
    x: Tensor,
    *,
    trains_a: bool = True,
    trains_b: bool = True,
    between: Callable[[OpEmitter, Tensor], Tensor] | None = None,
) -> Tensor:
    """B·A·x; autocast copies the factors, and the input, to 16 bit.

    Args:
        between: what is done with A·x.
    """
    dtypes, rank = ops.dtypes, linear.rank_multiple
    factors = []
    for width, trained in ((linear.in_features, trains_a), (linear.out_features, trains_b)):
        factor = ops.tape.weight(ops.per_rank(rank * width), dtypes.adapter_bytes, trained=trained)
        factors.append(ops.autocast(factor, f"{linear.name}: adapter, cast"))
    a, b = factors
    narrow = ops.in_rows(ops.autocast(x, f"{linear.name}: own copy of the input"), a)
    inner = ops.tape.op(
        [narrow, a],
        ops.rows.of_rank(rank * linear.active),
        narrow.size,
        saves=[narrow] * trains_a + [a] * x.needs_grad,
        reshapes=True,
        what=f"{linear.name}: A·x",
    )
    if between is not None:
        inner = ops.autocast(between(ops, inner))
    return ops.tape.op(
        [inner, b],
        ops.rows.of(linear.active * linear.out_features),
        inner.size,
        saves=[inner, b] if trains_b else [b],
        reshapes=True,
        what=f"{linear.name}: B·A·x",
    )


def folded(ops: OpEmitter, linear: Linear) -> Tensor:
    """W + B·A of a bare parameter, in one product. Source: peft 0.21.2 `ParamWrapper`."""
    dtypes, rank = ops.dtypes, linear.rank_multiple * linear.count
    factors = []
    for width in (linear.in_features, linear.out_features):
        factor = ops.tape.weight(ops.per_rank(rank * width), dtypes.adapter_bytes, trained=True)
        factors.append(ops.cast(factor, dtypes.base_bytes, f"{linear.name}: adapter, cast"))
    return ops.tape.op(
        factors,
        ops.constant(linear.num_weights),
        dtypes.base_bytes,
        saves=factors,
        inner_backward=factors[0].form,  # scaled out of place
        what=f"{linear.name}: weight with its adapter",
    )


# --- starts


def with_start(run: RunConfig) -> dict[str, Any]:
    return of_start(start_of(run))


def of_start(name: str) -> dict[str, Any]:
    """The fields of LoRA that its start decides."""
    if name == START.default:
        return {}
    start = STARTS[name]
    fields: dict[str, Any] = {
        "start_bytes": lambda linears, dtypes, r: start_bytes(start, linears, dtypes),
        "refuses": partial(start_refusal, name),
        "reads_batches": start.reads_batches,
    }
    return fields | (_with_frozen_b() if start.freezes_b else {})


def _with_frozen_b() -> dict[str, Any]:
    """MiCA (arXiv:2604.01694) freezes B. Source: peft 0.21.2 `MiCALinearVariant`."""

    def frozen_b(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
        return tuple(
            FrozenTensor(
                name=f"{linear.name}: lora_B",
                dims="out_features, r",
                rows=linear.out_features,
                width=low_rank_shapes(linear, r)[0][0],
                count=count * linear.count,
            )
            for linear, count in linears
        )

    def without_b(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
        return around(ops, linear, x, partial(added, trains_b=False))

    return {
        "adapter_shapes": lambda linear, r: low_rank_shapes(linear, r)[:1],
        "frozen_tensors": frozen_b,
        "forward": without_b,
        "folded": None,
        "work": partial(work_of_one_factor, frozen=1),
    }


# --- work


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """The modules around A and B, whose own products are counted for every method.

    Kind: exact. Source: peft 0.21.2 `LoraLayer.__init__`.
    """
    return AdapterWork(modules=10)


def work_of_one_factor(linear: Linear, dtypes: Dtypes, r: Count, *, frozen: int) -> AdapterWork:
    """Both products, and the gradient of one factor alone.

    Args:
        frozen: place of the other one among `low_rank_shapes`.

    Kind: exact.
    """
    shapes = low_rank_shapes(linear, r)
    without, trained = (rows * width for rows, width in (shapes[frozen], shapes[1 - frozen]))
    both = 2 * (without + trained)
    products = counted(linear, trained, forward_flops=both, backward_flops=both + 2 * trained)
    return replace(work(linear, dtypes, r), **products)


# --- PEFT


def peft_config(run: RunConfig) -> dict[str, Any]:
    """Arguments of `peft.LoraConfig`; the caller resolves target groups but all-linear."""
    targets = run.target_modules
    return {
        "r": run.r,
        "lora_alpha": run.lora_alpha,
        "lora_dropout": run.lora_dropout,
        "target_modules": ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        "bias": run.bias,
        **({"use_rslora": True} if run.use_rslora else {}),
        **start_settings(start_of(run)),
    } | ({"modules_to_save": list(run.modules_to_save)} if run.modules_to_save else {})


def read_peft(config: Any) -> Mapping[str, Any] | None:
    """The settings of a `LoraConfig` that no other method here reads."""
    variants = (getattr(config, name, None) for name in ("kasa_config", "velora_config"))
    if config.use_dora or any(variant is not None for variant in variants):
        return None
    stated = config.init_lora_weights
    start = str(stated).lower() if isinstance(stated, bool) else stated
    options = ((START.name, start),) if start != START.default else ()
    return {**read_lora(config), "method_options": options}


def read_lora(config: Any) -> Mapping[str, Any]:
    """The settings of any `LoraConfig`.

    Raises:
        ConfigError: an option that is not modelled.
    """
    for name, accepted in _PLAIN.items():
        value = getattr(config, name, None)
        if value not in accepted:
            raise ConfigError(f"LoraConfig.{name}={value!r} is not modelled")
    return {
        "r": config.r,
        "lora_alpha": max(1, round(config.lora_alpha)),
        "lora_dropout": float(config.lora_dropout),
        "bias": config.bias,
        "use_rslora": bool(config.use_rslora),
        "modules_to_save": tuple(sorted(config.modules_to_save or ())),
    }


# --- what a user must know


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    texts = experts_notes(adapts_experts and bool(run.lora_dropout))
    if run.phase == "finetune" and (run.use_rslora or run.loraplus_lr_ratio != 1):
        texts += ("rsLoRA and LoRA+ take the bytes and the time of plain LoRA",)
    return texts + start_notes(run)


def experts_notes(refused: bool) -> tuple[str, ...]:
    """That PEFT will not build the adapters of experts."""
    if not refused:
        return ()
    return (
        "PEFT 0.21 refuses DoRA and dropout on experts; leave them out with "
        "target_modules attention",
    )


METHOD = Method(
    name="lora",
    summary="low-rank adapters on a 16-bit base",
    peft_class="peft.LoraConfig",
    peft_config=peft_config,
    read_peft=read_peft,
    parameter_prefix="lora_",
    adapts_head=True,
    adapts_table=True,
    adapter_shapes=low_rank_shapes,
    forward=forward,
    folded=folded,
    options=(START,),
    with_options=with_start,
    work=work,
    rate_source="LoRA Without Regret",
    notes=notes,
)
