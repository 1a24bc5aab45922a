"""Weights as small floats in blocks that share a scale: NVFP4 and MXFP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from whichlora.spec.numeric import ceil_div

_SCALE_BYTES = 1  # of a block: an 8-bit float, or an exponent


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatBlocks:
    """One such format.

    Args:
        label: its name in words, and of its members' copies.
        bits: of a weight.
        block: weights that share a scale.
        matrix_bytes: of the scales of a whole matrix.
        units: compute capability of the first units that multiply it, inputs narrowed the same
            way; None where inputs stay in 16 bit, so that weights are unpacked to them.
        rate: what these units do of the peak of 16 bit, where a datasheet does not state it.
    """

    label: str
    bits: int
    block: int
    matrix_bytes: int = 0
    units: float | None = None
    rate: int = 1

    def parts(self, num_weights: int) -> tuple[int, ...]:
        """Bytes of the codes, of the blocks' scales and of those of the matrix.

        Kind: exact; kernels fill up scales to tiles of 128 x 4, which the widths of models divide.
        Source: vLLM 0.33.0 schemes/compressed_tensors_w4a4_nvfp4.py `create_weights`,
        compressed_tensors_w8a8_mxfp8.py; OCP Microscaling Formats 1.0, section 5.3.
        """
        codes: int = ceil_div(self.bits * num_weights, 8)
        scales: int = _SCALE_BYTES * ceil_div(num_weights, self.block)
        return codes, scales, self.matrix_bytes


# Of W4A4 a matrix has its scale, its inputs' and that one's inverse, and their product.
FLOAT_BLOCKS: Mapping[str, FloatBlocks] = {
    "nvfp4": FloatBlocks(label="NVFP4", bits=4, block=16, matrix_bytes=16, units=10.0, rate=4),
    "nvfp4a16": FloatBlocks(label="NVFP4A16", bits=4, block=16, matrix_bytes=4),
    "mxfp8": FloatBlocks(label="MXFP8", bits=8, block=32, units=10.0, rate=2),
}
# ModelOpt's names of them. Source: modelopt.py of vLLM 0.33.0, `LINEAR_ALGOS`.
_OF_MODELOPT = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4a16",
    "MXFP8": "mxfp8",
    "FP8": "fp8",
}
_CACHES: Mapping[str, Literal["fp8", "4-bit"]] = {"FP8": "fp8", "NVFP4": "4-bit"}


def named_by_modelopt(stored: Mapping[str, Any]) -> str:
    """Our name of the storage that ModelOpt states; empty for one not modelled."""
    return _OF_MODELOPT.get(_algorithm(stored), "")


def _algorithm(stored: Mapping[str, Any]) -> str:
    stated = stored.get("quantization")
    inner = stated if isinstance(stated, Mapping) else stored
    return str(inner.get("quant_algo", "")).upper()


def mixes_forms(stored: Mapping[str, Any]) -> bool:
    """Whether a checkpoint holds floats in blocks beside matrices in another narrow form.

    Source: vLLM 0.33.0 modelopt.py `ModelOptMixedPrecisionConfig`.
    """
    if str(stored.get("quant_method", "")).startswith("modelopt"):
        return _algorithm(stored) == "MIXED_PRECISION"
    groups = stored.get("config_groups")
    forms = (
        {named_by_group(each) for each in groups.values()} if isinstance(groups, Mapping) else ()
    )
    return len(forms) > 1


def named_by_group(group: Any) -> str:
    """Our name of a group of compressed-tensors that holds floats in blocks; empty for others.

    Source: vLLM 0.33.0 compressed_tensors.py `_is_nvfp4_format`, `_is_mxfp8`.
    """
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or weights.get("type") != "float":
        return ""
    stated = weights.get("num_bits"), weights.get("group_size")
    inputs = group.get("input_activations")
    if stated == (4, 16):
        same = isinstance(inputs, Mapping) and inputs.get("num_bits") == 4
        return "nvfp4" if same else ("nvfp4a16" if not inputs else "")
    return "mxfp8" if stated == (8, 32) else ""


def cache_named(stored: Mapping[str, Any]) -> Literal["fp8", "4-bit", ""]:
    """What a checkpoint says that keys and values are cached in; empty for another, or none.

    Source: vLLM 0.33.0 utils/torch_utils.py `get_kv_cache_quant_algo_string`.
    """
    stated = stored.get("quantization")
    inner = stated if isinstance(stated, Mapping) else {}
    scheme = inner.get("kv_cache_scheme") or stored.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        if scheme.get("num_bits") == 4:
            return "4-bit"
        return "fp8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else ""
    named = inner.get("kv_cache_quant_algo") or stored.get("kv_cache_quant_algo")
    return _CACHES.get(str(named).upper(), "")
