"""LoRA-FA: LoRA whose A stays as it started, with PEFT's optimizer for B alone.

Zhang et al. 2023, arXiv:2308.03303; peft 0.21.2 `optimizers/lorafa.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from whichlora.methods import lora
from whichlora.methods.base import AdapterWork, FrozenTensor
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """B alone, [out_features, r]. Kind: exact."""
    return (lora.low_rank_shapes(linear, r)[1],)


def frozen_tensors(linears: Sequence[tuple[Linear, int]], r: Count) -> tuple[FrozenTensor, ...]:
    """A of each matrix, [r, in_features]. Kind: exact."""
    return tuple(
        FrozenTensor(
            name=f"{linear.name}: lora_A",
            dims="r, in_features",
            rows=lora.low_rank_shapes(linear, r)[0][0],
            width=linear.in_features,
            count=count * linear.count,
        )
        for linear, count in linears
    )


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """LoRA's, whose input is kept for no gradient: that of A is not asked for."""
    return lora.around(ops, linear, x, partial(lora.added, trains_a=False))


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """LoRA's products but for the gradient of A. Kind: exact."""
    return lora.work_of_one_factor(linear, dtypes, r, frozen=0)


METHOD = replace(
    lora.METHOD,
    adapts_table=False,
    name="lora-fa",
    summary="LoRA with A frozen, and an optimizer that projects the gradient of B",
    optimizer="lora_fa",
    makes_optimizer="peft.optimizers.create_lorafa_optimizer",
    read_peft=lambda config: None,  # a config does not tell
    ignores=frozenset({"loraplus_lr_ratio"}),
    options=(),
    with_options=lambda run: {},
    adapter_shapes=adapter_shapes,
    frozen_tensors=frozen_tensors,
    forward=forward,
    folded=None,
    work=work,
)
