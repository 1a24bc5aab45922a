"""WaveFT: the update of each weight is the inverse wavelet transform of a few trained numbers.

Bilican et al. 2025, arXiv:2505.12532; peft 0.21.2 `tuners/waveft`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from whichlora.methods.base import RANK_SETTINGS, AdapterWork, Method, no_shapes
from whichlora.methods.operators import counted, parameter, product, side_kernel
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
    name="n_frequency", summary="trained coefficients of each weight's spectrum", default=2592
)
_IDWT = Option(
    name="use_idwt", summary="transform them; else they are entries of the update", default=True
)
_OPTIONS = (_FREQUENCIES, _IDWT, Option(name="scaling", summary="of the update", default=25.0))
_INDEX = 8
_SMALL_KERNELS = 16  # that mask the indices outside of the weight, and make the filters


def adapter_shapes(
    linear: Linear, r: Count, *, frequencies: int = 2592
) -> tuple[tuple[Count, Count], ...]:
    """One vector, whatever the weight's size. Kind: exact."""
    return ((1 + 0 * r, frequencies),)


def forward(
    ops: OpEmitter, linear: Linear, x: Tensor, *, frequencies: int = 2592, transforms: bool = True
) -> Tensor:
    """The result plus a product with the dense update; workspaces of cuDNN are left out.

    Source: peft 0.21.2 `WaveFTLinear.forward`, `get_delta_weight`, `waverec2d`.
    """
    tape, what = ops.tape, linear.name
    width, rows = linear.in_features, linear.out_features
    result = ops.base(linear, x)
    if transforms:  # of even sides
        width, rows = width + width % 2, rows + rows % 2
    dense = ops.constant(rows * width)
    stored = parameter(ops, ops.constant(frequencies))
    # indices live on the host, and each forward copies them
    places = ops.constant(2 * frequencies * _INDEX)
    if transforms:
        for _ in range(_SMALL_KERNELS):
            side_kernel(ops, ops.constant(frequencies), _INDEX)
    # its backward picks from a gradient
    spectrum = tape.op(
        [stored], dense, stored.size, keeps=[places], picks=True, what=f"{what}: places"
    )
    bands = spectrum
    if transforms:
        # backward, each of four bands is put into zeros of half the matrix, and those into zeros of
        # all of it, which are summed up
        whole = rows * width * stored.size
        of_one_band = (
            *ops.short_lived(whole // 2),
            *ops.short_lived(whole),
            *ops.short_lived(whole),  # the sum of both
        )
        zeros = (*of_one_band * 3, ops.constant(whole * 3 // 2))
        stacked = tape.op([spectrum], dense, stored.size, inner_backward=zeros)
        # autocast narrows a convolution, which saves its input; on a CPU oneDNN lays out that
        # gradient of four channels in blocks of 16 (`nChw16c`), beside the one that it returns
        narrow = ops.autocast(stacked, f"{what}: bands, cast")
        blocked = ops.constant(4 * rows * width * narrow.size * (ops.dtypes.device_kind == "cpu"))
        bands = tape.op(
            [narrow],
            dense,
            narrow.size,
            saves=[narrow],
            inner_backward=blocked,
            what=f"{what}: transform's input",
        )
        tape.hold(stacked)
    update = ops.scale(bands)
    tape.hold(spectrum, bands)
    wide = ops.cast(x, update.size, f"{what}: own copy of the input")
    added = product(ops, wide, update, ops.rows.of(linear.out_features), f"{what}: dense update")
    result = ops.add(result, added, f"{what}: result")
    tape.hold(update, wide, x)
    return ops.cast(result, x.size)


def work(
    linear: Linear, dtypes: Dtypes, r: Count, *, frequencies: int = 2592, transforms: bool = True
) -> AdapterWork:
    """A second dense product, and its matrix made in every forward and gone back through.

    Source: `waverec2d`: a transposed convolution of four bands with 2 by 2 filters.
    """
    num_weights = linear.in_features * linear.out_features
    return AdapterWork(
        **counted(
            linear, frequencies, forward_flops=2 * num_weights, backward_flops=4 * num_weights
        ),
        weight_flops=linear.count * 8 * num_weights * transforms,
        backward_weight_flops=linear.count * 8 * num_weights * transforms,
    )


def refuses(linear: Linear, quant: str, *, frequencies: int = 2592) -> str:
    """Source: peft 0.21.2 `WaveFTLayer.update_layer`."""
    if frequencies > linear.in_features * linear.out_features:
        return f"n_frequency is above the number of its weights, got {frequencies}"
    if linear.transposed:
        return "its update of a Conv1D is not predicted; use method lora"
    return ""


def with_options(run: RunConfig) -> dict[str, Any]:
    frequencies = _FREQUENCIES.whole(run.method_options)
    transforms = _IDWT.flag(run.method_options)
    return {
        "adapter_shapes": partial(adapter_shapes, frequencies=frequencies),
        "forward": partial(forward, frequencies=frequencies, transforms=transforms),
        "work": partial(work, frequencies=frequencies, transforms=transforms),
        "refuses": partial(refuses, frequencies=frequencies),
    }


_FIELDS = PeftFields(
    options=_OPTIONS,
    plain={
        "n_frequency_pattern": ({},),
        "proportional_parameters": (False,),
        "wavelet_family": ("db1",),
    },
)

METHOD = Method(
    name="waveft",
    summary="a few wavelet coefficients of each update",
    peft_class="peft.WaveFTConfig",
    peft_config=_FIELDS.config,
    read_peft=_FIELDS.read,
    keeps_input_dtype=True,
    parameter_prefix="waveft_",
    ignores=RANK_SETTINGS,
    options=_OPTIONS,
    with_options=with_options,
    refuses=refuses,
    adapter_shapes=adapter_shapes,
    autocast_shapes=no_shapes,
    forward=forward,
    work=work,
)
