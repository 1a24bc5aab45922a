"""How the published checkpoint of a model is stored: the `quantization_config` of its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.spec.architecture import Linear, ModelSpec
from whichlora.spec.run import BNB_QUANTS, CHECKPOINT_QUANTS, Quant

LOADED_AS_STORED: frozenset[str] = BNB_QUANTS | CHECKPOINT_QUANTS


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
        case {"quant_method": "bitsandbytes", "load_in_8bit": True}:
            return "int8"
        case {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}:
            nested = config["quantization_config"].get("bnb_4bit_use_double_quant")
            return "nf4-dq" if nested else "nf4"
        case {"quant_method": "bitsandbytes", "load_in_4bit": True}:
            return "fp4"
        case {"quant_method": "fp8"}:
            return "fp8"
        case {"quant_method": "compressed-tensors", "config_groups": {**groups}}:
            return "fp8" if groups and all(map(_is_fp8, groups.values())) else None
    return None


def is_loaded_as_stored(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is of GPTQ, AWQ or bitsandbytes: nothing loads it in another form."""
    return stored_quant(config) in LOADED_AS_STORED


def _is_fp8(group: Any) -> bool:
    """Whether a group of compressed-tensors holds 8-bit floats."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return isinstance(weights, Mapping) and (weights.get("type"), weights.get("num_bits")) == (
        "float",
        8,
    )


def stored_group(config: Mapping[str, Any]) -> int | None:
    """Weights that share a scale in a checkpoint of GPTQ or AWQ, where its config says so."""
    if stored_quant(config) not in CHECKPOINT_QUANTS:
        return None
    size = config["quantization_config"].get("group_size")
    return size if isinstance(size, int) and size > 0 else None


def is_gguf(config: Mapping[str, Any]) -> bool:
    """Whether the model is a GGUF file, whose config is what its name says."""
    stored = config.get("quantization_config")
    return isinstance(stored, Mapping) and stored.get("quant_method") == "gguf"


def gguf_type(config: Mapping[str, Any]) -> str:
    """The type of a GGUF file, such as Q4_K_M; empty where its name states none."""
    return str(config["quantization_config"].get("file_type", "")) if is_gguf(config) else ""


def is_made_before(quant: str) -> bool:
    """Whether an engine reads this storage from files; the others it makes as it loads."""
    return quant not in ("none", "nf4", "nf4-dq")


def lacking_storage(config: Mapping[str, Any], quant: str) -> str:
    """The storage that an engine reads from files, where the model's own are not stored so."""
    return quant if is_made_before(quant) and stored_quant(config) != quant else ""


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
