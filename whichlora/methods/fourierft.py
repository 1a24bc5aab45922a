"""FourierFT: the update of each weight is the inverse Fourier transform of a few trained numbers.

Gao et al. 2024, arXiv:2405.03003; peft 0.21.2 `tuners/fourierft`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whichlora.methods.base import RANK_SETTINGS, AdapterWork, Method, given, no_shapes
from whichlora.methods.operators import counted, product, widened
from whichlora.methods.peft_fields import PeftFields
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    from whichlora.symbolic.graph import Tensor
    from whichlora.symbolic.operators import OpEmitter

_FREQUENCIES = Option(
    name="n_frequency", summary="trained coefficients of each weight's spectrum", default=1000
)
_OPTIONS = (_FREQUENCIES,)
_FP32 = 4
_COMPLEX = 8  # bytes of one complex number of two fp32
_INDEX = 8


def adapter_shapes(
    linear: Linear, r: Count, *, frequencies: int = 1000
) -> tuple[tuple[Count, Count], ...]:
    """One vector, whatever the weight's size. Kind: exact."""
    return ((1 + 0 * r, frequencies),)


def forward(ops: OpEmitter, linear: Linear, x: Tensor, *, frequencies: int = 1000) -> Tensor:
    """The result plus a product with the dense update.

    Source: peft 0.21.2 `FourierFTLinear.forward`, `get_delta_weight`.
    """
    tape, dtypes, what = ops.tape, ops.dtypes, linear.name
    num_weights = linear.in_features * linear.out_features
    dense = ops.constant(num_weights)
    result = ops.base(linear, x)
    stored = tape.weight(ops.constant(frequencies), dtypes.adapter_bytes, trained=True)
    places = ops.constant(2 * frequencies * _INDEX)
    # its backward picks from a gradient
    spectrum = tape.op([stored], dense, _FP32, keeps=[places], picks=True, what=f"{what}: places")
    # `ifft2` makes its input complex, and `.real` of its result is a view
    widened_spectrum = tape.op([spectrum], dense, _COMPLEX)
    transformed = tape.op([widened_spectrum], dense, _COMPLEX)
    scaled = tape.op([transformed], dense, _FP32, inner_backward=ops.constant(_FP32 * num_weights))
    tape.hold(spectrum)
    update = ops.cast(scaled, dtypes.adapter_bytes)
    wide = widened(ops, linear, x)
    added = product(ops, wide, update, ops.rows.of(linear.out_features), f"{what}: dense update")
    result = ops.add(result, added, f"{what}: result")
    result = ops.cast(result, x.size)
    tape.hold(update, wide, x)
    return result


def work(linear: Linear, dtypes: Dtypes, r: Count, *, frequencies: int = 1000) -> AdapterWork:
    """A second dense product; a Fourier transform takes the time of the bytes that it moves."""
    num_weights = linear.in_features * linear.out_features
    return AdapterWork(
        **counted(
            linear, frequencies, forward_flops=2 * num_weights, backward_flops=4 * num_weights
        ),
    )


def refuses(linear: Linear, quant: str, *, frequencies: int = 1000) -> str:
    """Source: peft 0.21.2 `FourierFTLayer.update_layer`."""
    if frequencies > linear.in_features * linear.out_features:
        return f"n_frequency is above the number of its weights, got {frequencies}"
    if linear.transposed:
        return "its update of a Conv1D is not predicted; use method lora"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    frequencies = _FREQUENCIES.whole(run.method_options)
    return given(adapter_shapes, forward, work, refuses, frequencies=frequencies)


_FIELDS = PeftFields(options=_OPTIONS, plain={"n_frequency_pattern": ({},)})

METHOD = Method(
    name="fourierft",
    summary="a few Fourier coefficients of each update",
    peft_class="peft.FourierFTConfig",
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="fourierft_",
    ignores=RANK_SETTINGS,
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
    work=work,
)
