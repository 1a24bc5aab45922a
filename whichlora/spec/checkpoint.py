"""How the published checkpoint of a model is stored: the `quantization_config` of its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.spec.architecture import Linear, ModelSpec
from whichlora.spec.run import BNB_QUANTS, Quant


def stored_quant(config: Mapping[str, Any]) -> Quant | None:
    """Our name of the storage that a model's config states; None for none, or one not modelled."""
    match config.get("quantization_config"):
        case {"quant_method": "gptq", "bits": 4}:
            return "gptq-int4"
        case {"quant_method": "gptq", "bits": 8}:
            return "gptq-int8"
        case {"quant_method": "awq", "bits": 4}:
            return "awq-int4"
        case {"quant_method": "mxfp4"}:
            return "mxfp4"
        case {"quant_method": "fp8"}:
            return "fp8"
        case {"quant_method": "bitsandbytes", "load_in_8bit": True}:
            return "int8"
        case {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}:
            nested = config["quantization_config"].get("bnb_4bit_use_double_quant")
            return "nf4-dq" if nested else "nf4"
        case {"quant_method": "bitsandbytes", "load_in_4bit": True}:
            return "fp4"
    return None


def shipped_quant(model: ModelSpec) -> Quant | None:
    """As `stored_quant`, also where the database knows it beside the config."""
    stored = stored_quant(model.config)
    return "fp8" if stored is None and model.stored == "fp8" else stored


def is_expanded(config: Mapping[str, Any], quant: str) -> bool:
    """Whether loading expands the checkpoint's mxfp4 experts, to hold them as `quant` says.

    Source: transformers 5.23 `Mxfp4Config(dequantize=True)`, which training needs:
    `Mxfp4HfQuantizer.is_trainable` is False.
    """
    return stored_quant(config) == "mxfp4" and quant == "none"


def refuses_bitsandbytes(config: Mapping[str, Any], quant: str) -> bool:
    """Whether transformers refuses `quant` beside what the checkpoint is stored in.

    Source: transformers 5.23 `AutoHfQuantizer.merge_quantization_configs`.
    """
    return stored_quant(config) == "mxfp4" and quant in BNB_QUANTS


def packed_experts(model: ModelSpec) -> list[Linear]:
    """The matrices that mxfp4 packs: experts of the class of gpt-oss, in one parameter each.

    Source: transformers 5.23 `replace_with_mxfp4_linear`, which looks for `GptOssMLP` alone.
    """
    return [
        linear
        for layer, _ in model.layers()
        if layer.moe is not None and layer.moe.clamped
        for linear in layer.moe.expert.linears
    ]
