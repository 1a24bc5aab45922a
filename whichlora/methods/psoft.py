"""PSOFT: a trained rotation of rank r between two frozen factors of each weight.

Wu et al. 2025, arXiv:2505.11235; peft 0.21.2 `tuners/psoft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    AdapterWork,
    FrozenTensor,
    Method,
    no_shapes,
    rank_fault,
)
from whichlora.methods.operators import (
    counted,
    decomposed_bytes,
    dropped,
    frozen_product,
    parameter,
    product,
    side_kernel,
)
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.linear_form import LinearForm
    from whichlora.symbolic.operators import OpEmitter

_ROTATES = Option(name="psoft_orth", summary="the matrix between is a rotation", default=True)
_MAG_B = Option(name="psoft_mag_b", summary="its rows are scaled by a trained vector", default=True)
_MAG_A = Option(name="psoft_mag_a", summary="so are its columns", default=True)
_SERIES = Option(
    name="use_cayley_neumann", summary="the rotation by a series, not by a solver", default=False
)
_TERMS = Option(name="num_cayley_neumann_terms", summary="terms of that series", default=5)
_SVD = Option(
    name="psoft_svd",
    summary="how the factors are made; changes loading, and no step",
    default="full",
    choices=("full", "lowrank"),
)
_OPTIONS = (_ROTATES, _MAG_B, _MAG_A, _SERIES, _TERMS, _SVD)
_FP32 = 4  # the factors, whatever the adapters are
_INDEX = 8


def adapter_shapes(
    linear: Linear, r: Count, *, rotates: bool = True, vectors: int = 2
) -> tuple[tuple[Count, Count], ...]:
    """The triangle of a skew matrix [r, r], or all of it, and its scales. Kind: exact."""
    matrix = (1 + 0 * r, r * (r - 1) // 2) if rotates else (r, r)
    return (matrix, *[(1 + 0 * r, r)] * vectors)


def frozen_tensors(
    linears: Sequence[tuple[Linear, int]], r: Count, *, rotates: bool = True
) -> tuple[FrozenTensor, ...]:
    """A and B in fp32, and where the elements of the triangle are. Kind: exact."""
    tensors = []
    for linear, count in linears:
        stored: list[tuple[str, str, Count, Count, int]] = [
            ("A", "r, in_features", r, linear.in_features, _FP32),
            ("B", "out_features, r", linear.out_features, r, _FP32),
        ]
        if rotates:
            stored.append(("rows, cols", "2, r (r - 1) / 2", 2 + 0 * r, r * (r - 1) // 2, _INDEX))
        tensors += [
            FrozenTensor(
                name=f"{linear.name}: {name}",
                dims=dims,
                rows=rows,
                width=width,
                count=count * linear.count,
                element_bytes=size,
            )
            for name, dims, rows, width, size in stored
        ]
    return tuple(tensors)


def forward(
    ops: OpEmitter,
    linear: Linear,
    x: Tensor,
    *,
    r: int = 32,
    rotates: bool = True,
    vectors: int = 2,
    terms: int = 0,
) -> Tensor:
    """The result plus B (R - 1) A x. Source: peft 0.21.2 `psoft.Linear.forward`."""
    tape, what = ops.tape, linear.name
    result = base = ops.base(linear, x)
    of_rank = ops.rows.of_rank(1)
    a, b = (
        tape.weight(ops.per_rank(width), _FP32)
        for width in (linear.in_features, linear.out_features)
    )
    wide = ops.cast(x, _FP32, f"{what}: own copy of the input")
    inputs = dropped(ops, wide)
    inner = frozen_product(ops, inputs, a, of_rank, f"{what}: A·x")
    matrix = _matrix(ops, r=r, rotates=rotates, vectors=vectors, terms=terms)
    argument = inner
    if ops.dtypes.device_kind == "cpu":  # `OrthLayer.forward` multiplies in fp32 there
        argument = ops.cast(inner, _FP32)
    rotation = ops.cast(matrix, argument.size)
    rotated = product(ops, argument, rotation, of_rank, f"{what}: R·A·x")
    tape.hold(matrix)
    difference = ops.add(rotated, inner)
    update = frozen_product(
        ops, difference, b, ops.rows.of(linear.out_features), f"{what}: B·(R - 1)·A·x"
    )
    summed = ops.add(result, ops.scale(update), f"{what}: result")
    tape.hold(base)
    result = ops.cast(summed, result.size)
    tape.hold(wide, inputs, inner, rotated, update, x)
    return result


def _matrix(ops: OpEmitter, *, r: int, rotates: bool, vectors: int, terms: int) -> Tensor:
    """R, scaled by rows and columns. Source: peft 0.21.2 `OrthLayer.get_matrix`."""
    tape, square = ops.tape, ops.constant(r * r)
    stored = parameter(ops, ops.constant(r * (r - 1) // 2 if rotates else r * r))
    matrix = stored
    if rotates:
        side_kernel(ops, square, stored.size)  # zeros, into which the triangle is put
        upper = tape.op([stored], square, stored.size)
        skew = tape.op([upper], square, stored.size)
        matrix = _series(ops, skew, square, terms) if terms else _solved(ops, skew, square)
    for place in range(vectors):
        scales = parameter(ops, ops.constant(r))
        matrix = ops.multiply_rows(matrix, scales, row_last=place == 1)
    return ops.cast(matrix, stored.size) if rotates and not terms else matrix


def _solved(ops: OpEmitter, skew: Tensor, square: LinearForm) -> Tensor:
    """(1 + Q)(1 - Q)^-1, whose backward reads the factors of the solver."""
    wide = ops.cast(skew, _FP32)
    side_kernel(ops, square, _FP32)  # the identity
    less, more = (ops.tape.op([wide], square, _FP32, passes=True) for _ in range(2))
    factors = ops.constant(_FP32 * square.constant)
    return ops.tape.op(
        [less, more], square, _FP32, saves=[less], saves_result=True, keeps=[factors]
    )


def _series(ops: OpEmitter, skew: Tensor, square: LinearForm, terms: int) -> Tensor:
    """As `oft` has it, in one block."""
    result = ops.tape.op([], square, skew.size)
    power = skew
    for number in range(1, terms):
        if number > 1:
            power = product(ops, power, skew, square, "power of the skew matrix")
        result = ops.tape.in_place(result, power)
    ops.tape.hold(skew)
    return result


def work(
    linear: Linear,
    dtypes: Dtypes,
    r: Count,
    *,
    rotates: bool = True,
    vectors: int = 2,
    terms: int = 0,
) -> AdapterWork:
    """Three narrow products, and a small matrix built in every forward.

    Kind: exact, but that a solver of [r, r] takes about 3 r^3 operations.
    Source: operators of `psoft.Linear.forward`, `OrthLayer.get_matrix`.
    """
    both = linear.in_features + linear.out_features
    params = (r * (r - 1) // 2 if rotates else r * r) + vectors * r
    through = 2 * r * (both + r)
    built = (2 * max(terms - 2, 0) + 3 * (not terms)) * rotates
    return AdapterWork(
        **counted(linear, params, forward_flops=through, backward_flops=through + 2 * r * r),
        weight_flops=linear.count * built * r * r * r,
        backward_weight_flops=linear.count * 2 * built * r * r * r,
    )


def start_bytes(
    linears: Sequence[tuple[Linear, int]], dtypes: Dtypes, r: Count, *, method: str = "full"
) -> Count:
    """What decomposing the largest weight takes. Source: `PsoftLayer._compute_svd_factors`."""
    if method == "full":
        return max((decomposed_bytes(linear, dtypes) for linear, _ in linears), default=0)
    largest = max((linear.in_features * linear.out_features for linear, _ in linears), default=0)
    return 4 * (dtypes.base_bytes != 4) * largest  # `svd_lowrank` makes thin factors


def refuses(linear: Linear, quant: str, *, r: int = 1) -> str:
    """Source: peft 0.21.2 `PsoftLayer.update_layer`, `psoft.layer.dispatch_default`."""
    if linear.is_stored_in(quant):
        return f"PEFT decomposes weights of 16 or 32 bits, not {quant}; use quant none"
    return rank_fault(linear, r)


def with_options(run: RunConfig) -> dict[str, Any]:
    stated = run.method_options
    rotates = _ROTATES.flag(stated)
    vectors = _MAG_A.flag(stated) + _MAG_B.flag(stated)
    terms = _TERMS.whole(stated) if _SERIES.of(stated) else 0
    shape: dict[str, Any] = {"rotates": rotates, "vectors": vectors}
    return {
        "adapter_shapes": partial(adapter_shapes, **shape),
        "frozen_tensors": partial(frozen_tensors, rotates=rotates),
        "forward": partial(forward, r=run.r, terms=terms, **shape),
        "work": partial(work, terms=terms, **shape),
        "start_bytes": partial(start_bytes, method=_SVD.text(stated)),
        "refuses": partial(refuses, r=run.r),
    }


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    """Source: peft 0.21.2 `_build_psoft_ab_cache_buffers`, whose `contiguous()` copies no rows."""
    if run.phase != "finetune" or _SVD.text(run.method_options) != "full":
        return ()
    return (
        "psoft: with psoft_svd full, a matrix decomposed on a GPU keeps all its right singular "
        "vectors in fp32, which is not counted; psoft_svd=lowrank keeps r of them",
    )


_FIELDS = PeftFields(
    r="r",
    alpha="psoft_alpha",
    dropout="psoft_dropout",
    options=_OPTIONS,
    plain={"cayley_neumann_eps": (None,)},
)

METHOD = Method(
    name="psoft",
    summary="a trained rotation between two frozen factors of each weight",
    peft_class="peft.PsoftConfig",
    peft_defaults=(("r", 32), ("psoft_alpha", 32), ("psoft_dropout", 0.0)),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    parameter_prefix="psoft_",
    ignores=LORA_SETTINGS,
    options=_OPTIONS,
    with_options=with_options,
    one_rank=True,
    refuses=refuses,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    work=work,
    start_bytes=start_bytes,
    merging=lambda base_bytes: 2 * base_bytes,
    notes=notes,
)
