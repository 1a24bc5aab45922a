"""BEFT: a trained bias is added to the result of each layer.

Huang et al. 2025, arXiv:2509.15974; peft 0.21.2 `tuners/beft`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whichlora.methods.base import RANK_SETTINGS, AdapterWork, Method, no_shapes
from whichlora.methods.operators import counted, parameter
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter


def adapter_shapes(linear: Linear, r: Count) -> tuple[tuple[Count, Count], ...]:
    """One number per output. Kind: exact."""
    return ((1, linear.out_features + 0 * r),)


def forward(ops: OpEmitter, linear: Linear, x: Tensor) -> Tensor:
    """The result plus the bias, in the width of the result. Source: `beft.Linear.forward`."""
    result = ops.base(linear, x)
    size = result.size
    bias = parameter(ops, ops.constant(linear.out_features))
    summed = ops.cast(ops.add(result, bias, f"{linear.name}: result"), size)
    ops.tape.hold(result, x)  # `result` is the base's until the cast is done
    return summed


def work(linear: Linear, dtypes: Dtypes, r: Count) -> AdapterWork:
    """No product, so that what is counted for trained parameters is taken off."""
    return AdapterWork(**counted(linear, linear.out_features, forward_flops=0, backward_flops=0))


_FIELDS = PeftFields()

METHOD = Method(
    name="beft",
    summary="a trained bias for each layer",
    peft_class="peft.BeftConfig",
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    parameter_prefix="beft_",
    merges=False,  # where a target has no bias, PEFT refuses to merge
    serve="as-trained",
    ignores=RANK_SETTINGS,
    takes_conv1d=False,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
    work=work,
)
