"""Bytes and kernels that a quantised key-value cache moves beside what attention reads.

Counted operator by operator, each reading its inputs and writing its result.
Source: transformers 5.23 `QuantizedLayer`, `Fp8QuantizedLayer`; optimum-quanto 0.2.7
`QBitsDequantizer`, `quantize_affine`, `pack_weights`; hqq 0.2.8 `BitPack`, `Quantizer.quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass

from whichlora.spec.backends import backend_of
from whichlora.spec.run import CacheFormat

HQQ_ROUNDS = 20  # of fitting the zeros; 11 of 12 random tensors took all that it allows
HQQ_ROUND_ELEMENTS = 46  # read or written, of the width that it fits in
HQQ_ROUND_OPS = 24


@dataclass(frozen=True, slots=True)
class Conversion:
    """Between full width and codes: bytes per element, and kernels for one layer's keys and values.

    Args:
        element_bytes: moved per element of keys or values.
        launches: kernels.
    """

    element_bytes: float
    launches: int


def expanding(stored: CacheFormat, element_bytes: int) -> Conversion:
    """One decoding step: every element from its code to full width, joined with the new token.

    Kind: exact, scales and zeros left out. Source: `QBitsDequantizer`; hqq `BitPack`.
    """
    size = element_bytes
    if stored.backend == "fp8":  # joined, widened, scaled in fp32, narrowed
        narrowed = 4 + size if size < 4 else 0
        return Conversion(2 + 5 + 8 + narrowed, 14)
    parts = 8 // stored.nbits  # codes in a byte
    if stored.backend == "quanto":  # unpacked, scaled, shifted in place, joined
        return Conversion(1 / parts + 1 + (1 + size) + 2 * size + 2 * size, 10)
    # each part of a byte masked, shifted and copied; minus the zero, times the scale, joined
    unpacked = 2 + 2 * (parts - 1) / parts + 1 + size
    return Conversion(unpacked + 6 * size, 6 * parts + 6)


def storing(stored: CacheFormat, element_bytes: int, device_kind: str) -> Conversion:
    """Quantising the prompt, or all tokens after another `residual_length` of them.

    Kind: exact for quanto and fp8; HQQ's loop ends where its error grows, here never. Source:
    `quantize_affine`, `pack_weights`; hqq `Quantizer.quantize`.
    """
    size = element_bytes
    if stored.backend == "fp8":  # amplitude, widened, scaled, narrowed
        return Conversion(3 * size + (size + 4 if size < 4 else 0) + 8 + 5, 16)
    parts = 8 // stored.nbits
    if stored.backend == "quanto":  # copied, both ends, five operators to a code, packed
        return Conversion(13 * size + 8 + 1 / parts, 2 * (12 + 3 * parts))
    fitted = 2 if backend_of(device_kind).torch_device == "cuda" else 4
    rounds = HQQ_ROUNDS * HQQ_ROUND_ELEMENTS * fitted
    return Conversion(3 * size + 59 + rounds, 2 * (26 + HQQ_ROUNDS * HQQ_ROUND_OPS))
