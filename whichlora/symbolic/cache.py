"""Quantising the keys and values of a layer, on a tape, as transformers' `QuantizedCache` does it.

Source: transformers 5.23 `cache_utils.QuantizedLayer`, `Fp8QuantizedLayer`; optimum-quanto 0.2.7
`MaxOptimizer`, `quantize_affine`, `pack_weights`; hqq 0.2.8 `Quantizer.quantize`,
`optimize_weights_proximal_legacy`.
"""

from __future__ import annotations

from functools import lru_cache

from whichlora.methods.base import NO_ADAPTERS
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import ceil_div
from whichlora.spec.run import CacheFormat
from whichlora.symbolic.autograd import Tape
from whichlora.symbolic.graph import Tensor
from whichlora.symbolic.linear_form import LinearForm, constant, maximal, per_token, scaled
from whichlora.symbolic.operators import OpEmitter


def store(code: OpEmitter, *states: Tensor, num_heads: int) -> None:
    """Quantise keys and values of so many heads; codes and scales stay in the cache."""
    cache = code.dtypes.stores
    if cache is None:
        return
    for state in states:
        if cache.backend == "fp8":
            _to_fp8(code, state)
            continue
        by_head = state.joined or num_heads == 1
        laid_out = state if by_head else code.copy(state)  # `contiguous()`
        quantise = _to_quanto if cache.backend == "quanto" else _to_hqq
        quantise(code, laid_out, cache)
        code.tape.hold(laid_out)


def _to_fp8(code: OpEmitter, x: Tensor) -> None:
    tape = code.tape
    size = tape.op([x], x.elements, x.size)  # the amplitude
    tape.hold(size)
    wide = code.cast(x, 4)
    scaled_ = tape.op([wide], x.elements, 4)
    _keep(tape, tape.op([scaled_], x.elements, 1))


def _groups(x: Tensor, cache: CacheFormat) -> LinearForm:
    assert cache.group_size is not None
    return per_token(ceil_div(x.elements.per_token, cache.group_size))


def _to_quanto(code: OpEmitter, x: Tensor, cache: CacheFormat) -> None:
    tape, groups = code.tape, _groups(x, cache)
    low, high = (tape.op([x], groups, x.size) for _ in range(2))
    scale = tape.op([tape.op([low, high], groups, x.size)], groups, x.size)
    shift = tape.op([low], groups, x.size)
    tape.hold(low, high)
    moved = tape.op([x, shift], x.elements, x.size)
    rounded = code.scale(tape.op([moved, scale], x.elements, x.size))
    codes = tape.op([code.scale(rounded)], x.elements, 1)  # clamped, and narrowed
    tape.hold(rounded)
    _pack(tape, codes, cache)
    _keep(tape, scale, shift)


def _to_hqq(code: OpEmitter, x: Tensor, cache: CacheFormat) -> None:
    """Twice through the loop that fits the zeros: the second time holds the results of the first.

    On torch's "cuda" in fp16, elsewhere in fp32.
    """
    tape, dtypes, groups = code.tape, code.dtypes, _groups(x, cache)
    wide = code.cast(x, 4)
    indices = scaled(groups, 8)
    low, high = (tape.op([wide], groups, 4, inner=indices) for _ in range(2))
    spread = tape.op([low, high], groups, 4)
    scale = tape.op([spread], groups, 4, inner=scaled(groups, 4))
    zero = tape.op([low, scale], groups, 4, inner=scaled(groups, 4))
    size = 2 if dtypes.backend.torch_device == "cuda" else 4
    fitted, fitted_scale, fitted_zero = code.cast(wide, size), code.cast(scale, size), zero
    before: list[Tensor] = []
    for _ in range(2):
        codes = code.scale(_affine(code, fitted, fitted_scale, fitted_zero))
        difference = tape.op([codes, fitted_zero], x.elements, size)
        restored = tape.op([difference, fitted_scale], x.elements, size)
        error = tape.op([fitted, restored], x.elements, size)
        shrunk = tape.op([error], x.elements, size)
        power = tape.op([shrunk], x.elements, size)
        tape.hold(code.scale(power), power)
        tape.hold(code.scale(error), shrunk)  # its sign
        target = tape.op([fitted, shrunk], x.elements, size)
        projected = tape.op([target, fitted_scale], x.elements, size)
        fitted_zero = tape.op([codes, projected], groups, size, inner=scaled(x.elements, size))
        tape.hold(shrunk, *before)
        before = [codes, restored]
        tape.hold(code.scale(tape.op([fitted, restored], x.elements, size)))  # how far it is
    tape.hold(fitted, *before)
    codes = tape.op([code.scale(_affine(code, wide, fitted_scale, fitted_zero))], x.elements, 1)
    tape.hold(wide, low, high, spread, scale, zero)
    _pack(tape, codes, cache)
    _keep(
        tape, *(tape.op([parameter], groups, x.size) for parameter in (fitted_scale, fitted_zero))
    )


def _affine(code: OpEmitter, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    size = max(x.size, scale.size)
    product = code.tape.op([x, scale], x.elements, size)
    return code.tape.op([product, zero], x.elements, size)


def _pack(tape: Tape, codes: Tensor, cache: CacheFormat) -> None:
    """Several codes in one byte: each part is shifted, then joined."""
    packed = per_token(codes.elements.per_token * cache.nbits // 8)
    result = tape.op([], packed, 1)
    part = tape.op([codes], packed, 1)
    tape.hold(codes, part)
    _keep(tape, result)


def _keep(tape: Tape, *stored: Tensor) -> None:
    for tensor in stored:
        tape.hold_to_end(tensor)


@lru_cache(maxsize=512)
def quantising_points(width: int, element_bytes: int, dtypes: Dtypes) -> tuple[LinearForm, ...]:
    """Points of quantising one tensor of keys or values that lies as it should, per token.

    Args:
        stack: with the format in `stores`.

    Kind: exact.
    """
    tape = Tape()
    code = OpEmitter(tape, dtypes, (), NO_ADAPTERS)
    store(code, tape.weight(per_token(width), element_bytes), num_heads=1)
    tape.hold(tape.op([], constant(0), 1))
    points = tape.forward(saving=False)
    return maximal(points)
