"""How the published checkpoint of a model is stored: the `quantization_config` of its config."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.float_blocks import (
    FLOAT_BLOCKS,
    cache_named,
    mixes_forms,
    named_by_group,
    named_by_modelopt,
)
from whichlora.spec.layer import Attention, Layer, Linear, Mlp
from whichlora.spec.run import BNB_QUANTS, CHECKPOINT_QUANTS, Quant

LOADED_AS_STORED: frozenset[str] = BNB_QUANTS | CHECKPOINT_QUANTS
FP8_BLOCK = 128  # edge of the squares that share a scale in 8-bit floats
# Modules that files leave in 16 bit beside MLPs and experts: what no MLP is in.
_BESIDE_MLPS = re.compile(
    r"lm_head|embed|norm|self_attn|linear_attn|conv1d|visual|vision|(^|[._])gate$|router|^mtp\b"
    r"|e_score_correction_bias"
)


def stored_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What says how a model is stored: in its config, or in that of its text."""
    text = config.get("text_config")
    of_text = text.get("quantization_config") if isinstance(text, Mapping) else None
    stored = config.get("quantization_config") or of_text
    return stored if isinstance(stored, Mapping) else {}


def stored_quant(config: Mapping[str, Any]) -> Quant | None:
    """Our name of the storage that a model's config states; None for none, or one not modelled."""
    match stored_config(config):
        case {"quant_method": "gptq", "bits": 4}:
            return "gptq-int4"
        case {"quant_method": "gptq", "bits": 8}:
            return "gptq-int8"
        case {"quant_method": "awq", "bits": 4}:
            return "awq-int4"
        case {"quant_method": "auto-round", "bits": 4 | 8 as bits, **more}:
            packing = str(more.get("packing_format", "gptq"))  # symmetric ones state none
            return None if "gptq" not in packing else "gptq-int4" if bits == 4 else "gptq-int8"
        case {"quant_method": "mxfp4"}:
            return "mxfp4"
        case {"quant_method": "bitsandbytes", "load_in_8bit": True}:
            return "int8"
        case {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}:
            nested = stored_config(config).get("bnb_4bit_use_double_quant")
            return "nf4-dq" if nested else "nf4"
        case {"quant_method": "bitsandbytes", "load_in_4bit": True}:
            return "fp4"
        case {"quant_method": "fp8"}:
            return "fp8"
        case {"quant_method": "compressed-tensors", "config_groups": {**groups}}:
            return _compressed(groups)
        case {"quant_method": str(method), **stored} if method.startswith("modelopt"):
            return named_by_modelopt(stored) or None  # type: ignore[return-value]
    return None


def is_loaded_as_stored(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is of GPTQ, AWQ or bitsandbytes: nothing loads it in another form."""
    return stored_quant(config) in LOADED_AS_STORED


def _compressed(groups: Mapping[Any, Any]) -> Quant | None:
    """The storage of compressed-tensors whose groups are all alike; None for one not modelled."""
    blocks = {named_by_group(group) for group in groups.values()}
    if len(blocks) == 1 and "" not in blocks:
        return blocks.pop()  # type: ignore[return-value]
    if blocks - {""}:
        return None
    if groups and all(map(_is_fp8, groups.values())):
        return "fp8"
    return "w4a16" if groups and all(map(_is_int4, groups.values())) else None


def _is_int4(group: Any) -> bool:
    """Whether a group holds symmetric 4-bit integers, and inputs are left as they are."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("input_activations"):
        return False
    stated = tuple(weights.get(name) for name in ("type", "num_bits", "strategy", "symmetric"))
    return stated == ("int", 4, "group", True)


def _is_fp8(group: Any) -> bool:
    """Whether a group of compressed-tensors holds 8-bit floats."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return isinstance(weights, Mapping) and (weights.get("type"), weights.get("num_bits")) == (
        "float",
        8,
    )


def stored_group(config: Mapping[str, Any]) -> int | None:
    """Weights that share a scale, where the config of a checkpoint says so."""
    quant, stored = stored_quant(config), stored_config(config)
    if quant == "w4a16":
        stored = next(iter(stored["config_groups"].values()))["weights"]
    elif quant not in CHECKPOINT_QUANTS:
        return None
    size = stored.get("group_size")
    return size if isinstance(size, int) and size > 0 else None


def scaled_together(config: Mapping[str, Any], quant: str, group: int) -> int:
    """Elements along the width of an MLP that share a scale in files of `quant`; 1 for none.

    These are groups of integers, or the blocks that fp8 states. 1, too, where files leave some of
    an MLP in 16 bit.

    Args:
        group: of integers, where the config does not say it.
    """
    stored = stored_config(config)
    if not all(_BESIDE_MLPS.search(each) for each in left_out(stored)):
        return 1
    sizes = [stored.get("group_size", group)] if quant in (*CHECKPOINT_QUANTS, "w4a16") else []
    if quant in FLOAT_BLOCKS:
        sizes = [FLOAT_BLOCKS[quant].block]
    if quant == stored_quant(config) == "fp8":
        sizes = stored.get("weight_block_size") or []
    return math.lcm(*(size for size in sizes if isinstance(size, int) and size > 0))


def left_out(stored: Mapping[str, Any]) -> list[str]:
    """Names and patterns of modules that files leave in 16 bit."""
    names = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    inner = stored.get("quantization")
    places = [stored, inner if isinstance(inner, Mapping) else {}]
    return [str(each) for place in places for name in names for each in place.get(name) or ()]


def has_fp8_blocks(config: Mapping[str, Any]) -> bool:
    """Whether weights are 8-bit floats whose blocks of 128 x 128 share a scale."""
    block = [FP8_BLOCK, FP8_BLOCK]
    stored = stored_config(config).get("weight_block_size")
    return stored_quant(config) == "fp8" and stored == block


def names_fp8_cache(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint says that keys and values are cached in 8-bit floats."""
    return cache_named(stored_config(config)) == "fp8"


def names_four_bit_cache(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint says that keys and values are cached in 4 bits."""
    return cache_named(stored_config(config)) == "4-bit"


def is_mixed(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint holds matrices in several narrow forms, some of them in blocks."""
    return mixes_forms(stored_config(config))


def is_compressed(config: Mapping[str, Any]) -> bool:
    """Whether llm-compressor wrote the checkpoint, rather than ModelOpt."""
    return stored_config(config).get("quant_method") == "compressed-tensors"


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


# What modules of models are called that have a layer's matrices, and their layers.
_MIXERS = {
    "softmax": ("self_attn", "mixer", "attention"),
    "linear": ("linear_attn",),
    "conv": ("conv",),
}
_STATE_SPACES = ("mixer", "mamba")
_MLPS = ("mlp", "mixer", "feed_forward", "block_sparse_moe")
_LAYERS = ("model", "model.language_model", "language_model.model", "backbone")


def with_unpacked(model: ModelSpec) -> ModelSpec:
    """`model` whose matrices know which of them a packed checkpoint leaves in 16 bit.

    These are its routers, and what its list of exceptions names: by name, or by a pattern.
    Kind: exact where layers of one kind are alike. Source: compressed-tensors 0.17
    `utils/match.py`; vLLM 0.33.0 quantization/compressed_tensors/utils.py `should_ignore_layer`,
    modelopt.py `is_layer_excluded`.
    """
    ignored = left_out(stored_config(model.config))
    exact = {each for each in ignored if each[:3] != "re:" and "*" not in each}
    patterns = [
        re.compile(each[3:] if each[:3] == "re:" else fnmatch.translate(each))
        for each in dict.fromkeys(ignored)
        if each not in exact
    ]
    places = [
        f"{layers}.layers.{number}."
        for layers in _LAYERS
        for number in range(model.num_hidden_layers)
    ]

    def is_left(path: str) -> bool:
        parts = path.split(".")
        parents = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
        if any(f"{place}{parent}" in exact for place in places for parent in parents):
            return True
        return any(pattern.match(place + path) for pattern in patterns for place in places)

    def marked(linears: tuple[Linear, ...], modules: Iterable[str]) -> tuple[Linear, ...]:
        return tuple(
            replace(linear, quantisable=False)
            if any(is_left(f"{each}.{name}") for each in modules for name in _parts(linear.name))
            else linear
            for linear in linears
        )

    def of_mlp(mlp: Mlp, modules: Iterable[str]) -> Mlp:
        return replace(mlp, linears=marked(mlp.linears, tuple(modules)))

    def of_attention(attention: Attention) -> Attention:
        modules = _MIXERS.get(attention.kind, _STATE_SPACES)
        return replace(attention, linears=marked(attention.linears, modules))

    def of_layer(layer: Layer) -> Layer:
        attentions = tuple(map(of_attention, layer.attentions))
        mlp, moe = layer.mlp, layer.moe
        if moe is not None:
            beside = ("shared_experts", "shared_expert")
            shared = moe.shared and of_mlp(
                moe.shared, (f"{each}.{name}" for each in _MLPS for name in beside)
            )
            router = replace(moe.router, quantisable=False)
            expert = of_mlp(moe.expert, (f"{each}.experts.0" for each in _MLPS))
            moe = replace(moe, router=router, shared=shared, expert=expert)
        return replace(layer, attentions=attentions, mlp=mlp and of_mlp(mlp, _MLPS), moe=moe)

    return model.with_layers(of_layer)


def _parts(name: str) -> tuple[str, ...]:
    """Names that a matrix of ours has in files: those of its parts, where it joins two."""
    return ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)


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
