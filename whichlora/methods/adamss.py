"""AdaMSS: low-rank updates of clusters of each weight's rows, within its largest directions.

Zheng et al. 2025, NeurIPS (AdaMSS); peft 0.21.2 `tuners/adamss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import (
    LORA_SETTINGS,
    AdapterWork,
    FrozenTensor,
    Method,
    given,
    no_shapes,
    rank_fault,
)
from whichlora.methods.operators import counted, frozen_product, parameter, product
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_CLUSTERS = Option(name="num_subspaces", summary="clusters of each weight's rows", default=5)
_RANK = Option(name="subspace_rank", summary="rank of the update of one cluster", default=1)
_OPTIONS = (_CLUSTERS, _RANK)
_INDEX = 8


def adapter_shapes(
    linear: Linear, r: Count, *, clusters: int = 5, rank: int = 1
) -> tuple[tuple[Count, Count], ...]:
    """A of each cluster is [rank, r], B is [its rows, rank].

    Kind: exact where every cluster has at least `subspace_rank` rows, which its values decide.
    """
    clusters = min(clusters, linear.out_features)
    return *[(rank + 0 * r, r)] * clusters, (linear.out_features + 0 * r, rank)


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """The directions of the inputs, and of the bias as one more of them. Kind: exact."""
    return tuple(
        FrozenTensor(
            name=f"{linear.name}: newB",
            dims="r, in_features (+ 1)",
            rows=r,
            width=linear.in_features + linear.bias,
            count=count * linear.count,
        )
        for linear, count in linears
    )


def forward(
    ops: OpEmitter, linear: Linear, x: Tensor, *, clusters: int = 5, rank: int = 1
) -> Tensor:
    """The result plus the updates of all clusters, scattered to their outputs.

    Source: peft 0.21.2 `adamss.Linear.forward`. Clusters are counted as equally large, which
    changes no sum.
    """
    tape, size, what = ops.tape, ops.dtypes.base_bytes, linear.name
    wide, tall = linear.in_features, linear.out_features
    rows = ops.rows.of(tall)
    narrow = argument = ops.cast(x, size, f"{what}: own copy of the input")
    if linear.bias:  # the gradient of the input is a view of that with a column of ones
        whole = ops.rows.of(wide + 1)
        ones = tape.op([], ops.rows.of(1), size)
        inputs = [replace(narrow, elements=whole), ones]
        argument = tape.op(inputs, whole, size, passes=True)
        tape.hold(ones)
    base = ops.base(linear, narrow)
    directions = tape.weight(ops.per_rank(wide + linear.bias), ops.dtypes.adapter_bytes)
    frozen = ops.cast(directions, size)
    inner = frozen_product(ops, argument, frozen, ops.rows.of_rank(1), f"{what}: newB·x")
    chunks, factors = [], []
    clusters = min(clusters, tall)
    for number in range(clusters):
        height = tall * (number + 1) // clusters - tall * number // clusters
        factors = [
            ops.cast(parameter(ops, elements), size)
            for elements in (ops.per_rank(rank), ops.constant(height * rank))
        ]
        a, b = factors
        narrowed = product(ops, inner, a, ops.rows.of(rank), f"{what}: A·newB·x")
        chunks.append(product(ops, narrowed, b, ops.rows.of(height), f"{what}: B·A·newB·x"))
    update = tape.op([replace(c, elements=rows) for c in chunks], rows, size, passes=True)
    # stored on the host, and copied to another device in every forward
    places = ops.constant(tall * (ops.dtypes.device_kind != "cpu"))
    index = tape.op([], places, _INDEX, what=f"{what}: places of outputs")
    zeros = tape.op([], rows, size)
    scattered = tape.op([update, zeros], rows, size, saves=[index], what=f"{what}: places")
    result = ops.add(base, scattered, f"{what}: result")
    tape.hold(base)
    result = ops.cast(result, x.size)
    tape.hold(narrow, argument, inner, *factors, *chunks, index, scattered, x)
    return result


def work(
    linear: Linear, dtypes: Dtypes, r: Count, *, clusters: int = 5, rank: int = 1
) -> AdapterWork:
    """One narrow product with frozen directions, and two for each cluster.

    Kind: exact. Source: operators of `adamss.Linear.forward`.
    """
    wide, tall = linear.in_features + linear.bias, linear.out_features
    clusters = min(clusters, tall)
    params = clusters * rank * r + tall * rank
    of_clusters = 2 * params
    return AdapterWork(
        **counted(
            linear,
            params,
            forward_flops=2 * r * wide + of_clusters,
            backward_flops=2 * r * wide + 2 * of_clusters,
        ),
    )


def start_bytes(linears: Sequence[tuple[Linear, int]], dtypes: Dtypes, r: Count) -> Count:
    """The largest weight in fp32, and with its bias as a column. Source: `update_layer`."""
    return max(
        (
            linear.out_features
            * (linear.in_features + linear.bias)
            * (dtypes.base_bytes * linear.bias + 4 * (dtypes.base_bytes != 4))
            for linear, _ in linears
        ),
        default=0,
    )


def refuses(linear: Linear, quant: str, *, r: int = 1) -> str:
    """Source: peft 0.21.2 `AdamssModel._create_new_module`, `AdamssLayer.update_layer`."""
    if linear.is_stored_in(quant):
        return f"PEFT decomposes the stored weight, which is none in {quant}; use quant none"
    return rank_fault(linear, r)


def with_options(run: RunConfig) -> dict[str, Any]:
    clusters, rank = (option.whole(run.method_options) for option in _OPTIONS)
    fields = given(adapter_shapes, forward, work, clusters=clusters, rank=rank)
    return fields | {"refuses": partial(refuses, r=run.r)}


_FIELDS = PeftFields(
    r="r", options=_OPTIONS, plain={"use_asa": (False,), "use_dynamic_rank": (False,)}
)

METHOD = Method(
    name="adamss",
    summary="low-rank updates of clusters of each weight's rows",
    peft_class="peft.AdamssConfig",
    peft_defaults=(("r", 100),),
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="adamss_",
    ignores=LORA_SETTINGS | {"lora_alpha", "lora_dropout"},
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
)
