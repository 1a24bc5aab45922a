"""LoKr: the Kronecker product of a small and a low-rank matrix is added to each weight.

Edalati et al. 2022, arXiv:2212.10650; Yeh et al. 2023, arXiv:2309.14859; peft 0.21.2 `tuners/lokr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from whichlora.methods import loha
from whichlora.methods.base import (
    LORA_SETTINGS,
    PEFT_COMPARISON,
    AdapterWork,
    Method,
    adapted_modules,
    given,
    read_options,
    stated_options,
)
from whichlora.methods.operators import counted, parameter, product
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.linear_form import LinearForm
    from whichlora.symbolic.operators import OpEmitter

_BOTH = Option(name="decompose_both", summary="the small matrix has low rank, too", default=False)
_FACTOR = Option(
    name="decompose_factor",
    summary="rows of the small matrix; without it, near the root of the width",
    default=None,
)
_OPTIONS = (_BOTH, _FACTOR)


@lru_cache(maxsize=256)
def factorization(width: int, factor: int | None) -> tuple[int, int]:
    """Two numbers whose product is `width`, the first as large as `factor` allows.

    Kind: exact. Source: peft 0.21.2 `tuners/lokr/layer.py`, `factorization`, which stops at the
    first divisor that is no better.
    """
    if factor is not None and width % factor == 0:
        return factor, width // factor
    most = width if factor is None else factor
    small, large = 1, width
    for divisor in (n for n in range(2, width + 1) if width % n == 0):
        if small >= large or divisor + width // divisor > 1 + width or divisor > most:
            break
        if divisor + width // divisor > small + large and small > 1:
            break
        small, large = divisor, width // divisor
    return min(small, large), max(small, large)


def _matrices(
    linear: Linear, r: int, *, both: bool, factor: int | None
) -> tuple[tuple[int, int, bool], tuple[int, int, bool]]:
    """Rows, width and low rank or not of the two matrices. Source: `LoKrLayer.update_layer`."""
    out_small, out_large = factorization(linear.out_features, factor)
    in_small, in_large = factorization(linear.in_features, factor)
    small_is_low = both and r < max(out_small, in_small) / 2
    return (out_small, in_small, small_is_low), (
        out_large,
        in_large,
        r < max(out_large, in_large) / 2,
    )


def adapter_shapes(
    linear: Linear, r: Count, *, rank: int = 16, both: bool = False, factor: int | None = None
) -> tuple[tuple[Count, Count], ...]:
    """Each matrix whole, or as two factors. Kind: exact for one rank."""
    shapes: list[tuple[Count, Count]] = []
    for rows, width, is_low in _matrices(linear, rank, both=both, factor=factor):
        shapes += [(rows, r), (r, width)] if is_low else [(rows + 0 * r, width)]
    return tuple(shapes)


def autocast_shapes(
    linear: Linear, r: Count, *, rank: int = 16, both: bool = False, factor: int | None = None
) -> tuple[tuple[Count, Count], ...]:
    """The factors, which are multiplied; whole matrices are read by `torch.kron` in fp32."""
    shapes: list[tuple[Count, Count]] = []
    for rows, width, is_low in _matrices(linear, rank, both=both, factor=factor):
        shapes += [(rows, r), (r, width)] if is_low else []
    return tuple(shapes)


def forward(
    ops: OpEmitter,
    linear: Linear,
    x: Tensor,
    *,
    rank: int = 16,
    both: bool = False,
    factor: int | None = None,
) -> Tensor:
    """The result plus a product with the dense update.

    Source: peft 0.21.2 `LoKrLayer.forward`, `get_delta_weight`, `make_kron`.
    """
    tape, what = ops.tape, linear.name
    result = ops.base(linear, x)
    dense = ops.constant(linear.in_features * linear.out_features)
    small, large = (
        _matrix(ops, linear, ops.constant(rows * width), rows, width, is_low)
        for rows, width, is_low in _matrices(linear, rank, both=both, factor=factor)
    )
    size = max(small.size, large.size)
    saves = [small, large]
    # each factor's gradient is a dense product before it is summed up
    twice = ops.constant(2 * size * linear.in_features * linear.out_features)
    kron = tape.op([small, large], dense, size, saves=saves, inner_backward=twice)
    update = ops.scale(kron)
    tape.hold(small, large)
    argument = ops.cast(x, update.size, f"{what}: own copy of the input")
    rows = ops.rows.of(linear.out_features)
    added = product(ops, argument, update, rows, f"{what}: dense update")
    tape.hold(update, argument)
    summed = ops.add(result, added, f"{what}: result")
    tape.hold(x)
    return ops.cast(summed, x.size)


def _matrix(
    ops: OpEmitter, linear: Linear, elements: LinearForm, rows: int, width: int, is_low: bool
) -> Tensor:
    if not is_low:
        return parameter(ops, elements)
    first, second = parameter(ops, ops.per_rank(rows)), parameter(ops, ops.per_rank(width))
    return product(ops, first, second, elements, f"{linear.name}: low-rank matrix")


def work(
    linear: Linear,
    dtypes: Dtypes,
    r: Count,
    *,
    rank: int = 16,
    both: bool = False,
    factor: int | None = None,
) -> AdapterWork:
    """A second dense product; those of small matrices, which build the update, are left out."""
    shapes = adapter_shapes(linear, rank, rank=rank, both=both, factor=factor)
    params = sum(rows * width for rows, width in shapes)
    num_weights = linear.in_features * linear.out_features
    return AdapterWork(
        **counted(linear, params, forward_flops=2 * num_weights, backward_flops=4 * num_weights),
    )


def with_options(run: RunConfig) -> dict[str, Any]:
    factor = _FACTOR.of(run.method_options)
    return given(
        adapter_shapes,
        autocast_shapes,
        forward,
        work,
        rank=run.r,
        both=_BOTH.flag(run.method_options),
        factor=None if factor is None else int(str(factor)),
    )


def peft_config(run: RunConfig) -> dict[str, Any]:
    config = {"r": run.r, "alpha": run.lora_alpha}
    return config | stated_options(run, _OPTIONS) | adapted_modules(run)


def read_peft(config: Any) -> Mapping[str, Any]:
    plain = {"rank_dropout": (0.0,), "module_dropout": (0.0,), "rank_pattern": ({},)}
    settings = dict(read_options(config, (_BOTH,), plain=plain))
    if config.decompose_factor != -1:
        pairs = (*settings["method_options"], (_FACTOR.name, config.decompose_factor))
        settings["method_options"] = tuple(sorted(pairs))
    return {"r": config.r, "lora_alpha": max(1, round(config.alpha)), **settings}


METHOD = Method(
    name="lokr",
    summary="the Kronecker product of a small and a low-rank matrix",
    peft_class="peft.LoKrConfig",
    peft_defaults=(("r", 8), ("alpha", 8), ("decompose_factor", -1)),
    peft_config=peft_config,
    read_peft=read_peft,
    keeps_input_dtype=True,
    parameter_prefix="lokr_",
    ignores=LORA_SETTINGS | {"lora_dropout"},
    options=_OPTIONS,
    with_options=with_options,
    one_rank=True,
    refuses=loha.refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    forward=forward,
    work=work,
    learning_rate=3e-3,
    rate_source=PEFT_COMPARISON,
)
