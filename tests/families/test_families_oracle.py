"""The families against transformers and PEFT, on the meta device: no weight is allocated."""

from __future__ import annotations

import importlib
import json
import os
import random
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.families import FAMILIES, build, known_types
from whichlora.memory.training import trained_params
from whichlora.memory.weights import masked_head_params
from whichlora.methods import get_method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import LayerGroup
from whichlora.spec.run import ALL_LINEAR
from whichlora.spec.targets import resolve_targets
from whichlora.store.models import list_models
from whichlora.store.paths import data_folder

pytestmark = pytest.mark.oracle
os.environ["HF_HUB_OFFLINE"] = "1"

# Where the blocks of a model live; what lies outside is embeddings, head, pooler, vision tower.
STACKS = ("layers", "h", "block", "blocks", "layer", "albert_layers")
R = 8
NO_AUTO_CLASS = {
    "mllama_text_model",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "glm4v_text",
    "glm4v_moe_text",
}  # never a model by themselves
# `for_model` knows the classes of transformers only, by which the hub's are of these types
IN_TRANSFORMERS = {"internlm3": "llama", "kimi_k2": "deepseek_v3"}


def smallest() -> dict[str, str]:
    """One file of the database for each model type: that with the fewest parameters."""
    records = sorted(list_models(), key=lambda record: -record.params)
    return {record.model_type: record.hub_id.replace("/", "--") for record in records}


SMALLEST = smallest()
# Types that PEFT's test leaves out come last, so that a type has the same place in both lists.
TYPES = sorted(SMALLEST, key=lambda model_type: (model_type not in FAMILIES, model_type))


@lru_cache(maxsize=1)  # by their module scope the tests of one type follow each other
def load(model_type: str) -> tuple[ModelSpec, Any]:
    """The type's spec and the module that transformers builds from the same config."""
    file = data_folder("models_db") / f"{SMALLEST[model_type]}.json"
    entry = json.loads(file.read_text(encoding="utf-8"))
    spec = build(entry["config"], name=entry["hub_id"])
    return spec, module(entry["config"], spec.task)


def module(config: dict[str, Any], task: str) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    auto = {
        "causal-lm": "AutoModelForCausalLM",
        "seq2seq-lm": "AutoModelForSeq2SeqLM",
        "encoder": "AutoModel",
    }[task]
    if config["model_type"] == "whisper":
        auto = "AutoModelForSpeechSeq2Seq"
    if {"text_config", "vision_config"} & set(config):
        auto = "AutoModelForImageTextToText"
    if config["model_type"] == "qwen2_audio":
        auto = "AutoModelForMultimodalLM"
    if config["model_type"] == "gemma3n":
        pytest.importorskip("timm")  # has its vision tower
    config = {**config}
    model_type = IN_TRANSFORMERS.get(config["model_type"], config["model_type"])
    config.pop("model_type")
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(
            transformers.AutoConfig.for_model(model_type, **config)
        )


def in_layers(name: str) -> bool:
    of_tower = any(word in name for word in ("visual", "vision", "audio_tower"))
    if name.startswith(("model.", "vision_model.")) and of_tower:
        return False
    parts = name.split(".")
    return any(part in STACKS and following.isdigit() for part, following in pairwise(parts))


def real_linears(model: Any) -> Counter[tuple[str, int, int, bool]]:
    """Leaf name, shape and bias of every matrix module in the layers, with its multiplicity."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    counts: Counter[tuple[str, int, int, bool]] = Counter()
    for name, leaf in model.named_modules():
        if not in_layers(name):
            continue
        short = name.rpartition(".")[2]
        if isinstance(leaf, Conv1D):
            counts[short, leaf.nx, leaf.nf, True] += 1
        elif isinstance(leaf, nn.Linear):
            counts[short, leaf.in_features, leaf.out_features, leaf.bias is not None] += 1
    return counts


def every_group(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """Those that run with images, and of an encoder of sound, part of its decoder's class."""
    of_sound = spec.tower.stack.groups if spec.tower and spec.tower.hears else ()
    return (spec.for_images or spec).groups + (of_sound if of_sound and spec.tower.attended else ())


def described_linears(spec: ModelSpec) -> Counter[tuple[str, int, int, bool]]:
    counts: Counter[tuple[str, int, int, bool]] = Counter()
    for group in every_group(spec):
        copies = 1 if group.shared else group.count
        for x in group.layer.linears:
            if x.is_module:
                counts[x.name, x.in_features, x.out_features, x.bias] += x.count * copies
    return counts


def real_norms(model: Any) -> Counter[tuple[str, int]]:
    """Leaf name and elements of every norm with weights in the layers."""
    counts: Counter[tuple[str, int]] = Counter()
    whole: tuple[str, ...] = ()  # StableLM's norms per head, a list of norms counted as one
    for name, leaf in model.named_modules():
        kind = type(leaf).__name__
        elements = sum(p.numel() for p in leaf.parameters())
        if not (in_layers(name) and "Norm" in kind and elements) or name.startswith(whole or "-"):
            continue
        if kind.endswith("PerHead"):
            whole += (f"{name}.",)
        elif any(leaf.children()):
            continue
        counts[name.rpartition(".")[2], elements] += 1
    return counts


def described_norms(spec: ModelSpec) -> Counter[tuple[str, int]]:
    counts: Counter[tuple[str, int]] = Counter()
    for group in every_group(spec):
        layer, copies = group.layer, 1 if group.shared else group.count
        for norm in layer.norms + layer.inner_norms:
            if norm.num_params:
                counts[norm.name, norm.num_params] += copies
    return counts


@pytest.mark.parametrize("model_type", TYPES, scope="module")
def test_the_total_equals_that_of_the_real_model(model_type: str) -> None:
    spec, model = load(model_type)
    assert spec.num_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("model_type", TYPES, scope="module")
def test_every_matrix_in_the_layers_is_described_and_no_other(model_type: str) -> None:
    spec, model = load(model_type)
    assert described_linears(spec) == real_linears(model)


@pytest.mark.parametrize("model_type", TYPES, scope="module")
def test_every_norm_in_the_layers_is_described_and_no_other(model_type: str) -> None:
    spec, model = load(model_type)
    assert described_norms(spec) == real_norms(model)


def all_linear_params(spec: ModelSpec) -> int:
    """What we say that PEFT trains for `target_modules="all-linear"` at rank R."""
    targets = resolve_targets(spec, (ALL_LINEAR,))
    return int(trained_params(spec, targets, get_method("lora"), R))


@pytest.mark.sampled(25)
@pytest.mark.parametrize("model_type", [x for x in TYPES if x in FAMILIES], scope="module")
def test_lora_on_all_linear_trains_what_the_description_says(model_type: str) -> None:
    peft = pytest.importorskip("peft")
    spec, model = load(model_type)
    task = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM"}.get(spec.task)
    if task is None:
        pytest.skip("encoders train with the head of their task")
    import torch

    named: Any = "all-linear"
    if any(linear.is_refused for layer, _ in spec.layers() for linear in layer.linears):
        named = list(resolve_targets(spec, (ALL_LINEAR,)))  # as exports do
    config = peft.LoraConfig(r=R, target_modules=named, task_type=task)
    with torch.device("meta"):
        adapted = peft.get_peft_model(model, config)
    load.cache_clear()  # PEFT changed the model in place
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trained == all_linear_params(spec)


# Small sizes for the model types that the database does not have, or has in one variant only.
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
INDEXER = {"q_lora_rank": 20, "index_n_heads": 6, "index_head_dim": 16, "index_topk": 4}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA = {
    "layer_types": ["mamba", "mamba", "attention"] * 2,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "ministral": {"model_type": "ministral"},
    "ministral3": {"model_type": "ministral3"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
    },
    "qwen3-biased": {"model_type": "qwen3", "attention_bias": True},
    "granite": {"model_type": "granite", "mlp_bias": True},
    "smollm3": {"model_type": "smollm3"},
    "llama4_text": {
        "model_type": "llama4_text",
        "intermediate_size_mlp": 56,
        "num_local_experts": 4,
        "attention_chunk_size": 8,
        "interleave_moe_layer_step": 2,
    },
    "olmo": {"model_type": "olmo", "attention_bias": True},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 8},
    "glm": {"model_type": "glm"},
    "glm4": {"model_type": "glm4"},
    "phi3": {"model_type": "phi3", "num_key_value_heads": 4},
    "helium": {"model_type": "helium"},
    "arcee": {"model_type": "arcee", "mlp_bias": True},
    "apertus": {"model_type": "apertus"},
    "exaone4": {"model_type": "exaone4", "sliding_window": 8},
    "exaone4-full": {
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 6,  # without them the class divides by zero
    },
    "ernie4_5": {"model_type": "ernie4_5", "use_bias": True},
    "seed_oss": {"model_type": "seed_oss", "attention_out_bias": True},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense"},
    "cwm": {"model_type": "cwm"},
    "starcoder2": {"model_type": "starcoder2"},
    "stablelm-parallel": {
        "model_type": "stablelm",
        "use_parallel_residual": True,
        "qk_layernorm": True,
        "use_qkv_bias": True,
    },
    "nemotron": {"model_type": "nemotron"},
    "jais2": {"model_type": "jais2"},
    "cohere": {"model_type": "cohere", "use_qk_norm": True},
    "cohere2": {"model_type": "cohere2", "sliding_window": 8},
    "phi": {"model_type": "phi", "qk_layernorm": True},
    "persimmon": {"model_type": "persimmon", "num_key_value_heads": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 2,
        **EXPERTS,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "mlp_only_layers": [1], **EXPERTS},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"model_type": "granitemoe", "num_local_experts": 4},
    "granitemoeshared": {"model_type": "granitemoeshared", "shared_intermediate_size": 40},
    "phimoe": {"model_type": "phimoe", "attention_bias": True, "lm_head_bias": True},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"model_type": "glm4_moe", "use_qk_norm": True, **ROUTED},
    "deepseek_v2": {"model_type": "deepseek_v2", **LATENT, **ROUTED},
    "deepseek_v3": {"model_type": "deepseek_v3", **LATENT, **ROUTED, "q_lora_rank": 20},
    "deepseek_v32": {"model_type": "deepseek_v32", **LATENT, **ROUTED, **INDEXER},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **LATENT, **ROUTED, **INDEXER},
    "glm_moe_dsa-shared": {
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "shared"] * 3,
        **LATENT,
        **ROUTED,
        **INDEXER,
    },
    "glm_moe_dsa-pattern": {
        "model_type": "glm_moe_dsa",
        "index_topk_freq": 3,
        "index_skip_topk_offset": 1,
        **LATENT,
        **ROUTED,
        **INDEXER,
    },
    "kimi_k2": {"model_type": "kimi_k2", **LATENT, **ROUTED, "q_lora_rank": 20},
    "youtu": {"model_type": "youtu", **LATENT},
    "gemma": {"model_type": "gemma"},
    "gemma2": {"model_type": "gemma2"},
    "vaultgemma": {"model_type": "vaultgemma"},
    "gemma3_text": {"model_type": "gemma3_text"},
    "gemma4_text-per-layer": {
        "model_type": "gemma4_text",
        "global_head_dim": 24,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "gemma4_text-experts": {
        "model_type": "gemma4_text",
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "gemma3n_text": {
        "model_type": "gemma3n_text",
        "head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "intermediate_size": [96] * 3 + [128] * 3,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": 40,
        **DELTA,
        **EXPERTS,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **DELTA},
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 40,
        **DELTA,
        **EXPERTS,
    },
    "lfm2": {"model_type": "lfm2", "full_attn_idxs": [1, 4], "conv_bias": True},
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention"] * 3,
        **EXPERTS,
    },
    "iquestcoder": {"model_type": "iquestcoder"},
    "hyperclovax": {"model_type": "hyperclovax", "attention_bias": True, "mlp_bias": True},
    "hyperclovax-plain": {"model_type": "hyperclovax", "use_post_norm": False},
    "nanochat": {"model_type": "nanochat", "attention_bias": True},
    "dots1": {"model_type": "dots1", "n_shared_experts": 1, "first_k_dense_replace": 2, **ROUTED},
    "exaone_moe": {"model_type": "exaone_moe", "sliding_window": 8, **EXPERTS},
    "solar_open": {
        "model_type": "solar_open",
        "attention_bias": True,
        "first_k_dense_replace": 1,  # nobody reads it
        **ROUTED,
    },
    "mellum": {
        "model_type": "mellum",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "mlp_layer_types": ["dense", "sparse"] * 3,
        **EXPERTS,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "use_bias": True,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_layer_interval": 2,
        "moe_layer_end_index": 3,
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **LATENT, **ROUTED, "q_lora_rank": 20},
    "minimax_m2": {
        "model_type": "minimax_m2",
        "rotary_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "hunyuan_v1_moe": {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": 2},
    "flex_olmo": {
        "model_type": "flex_olmo",
        "attention_bias": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "cohere2_moe": {
        "model_type": "cohere2_moe",
        "sliding_window": 8,
        "first_k_dense_replace": 2,
        "prefix_dense_intermediate_size": 56,
        "num_shared_experts": 2,
        "num_experts": 4,
    },
    "granitemoehybrid": {"model_type": "granitemoehybrid", "num_local_experts": 4, **MAMBA},
    "granitemoehybrid-dense": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_proj_bias": True,
        **MAMBA,
    },
    "bamba": {
        "model_type": "bamba",
        "mlp_bias": True,
        "attn_layer_indices": [2, 5],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 48,
        "mamba_n_heads": 4,
        "mamba_d_state": 24,
        "projectors_bias": True,
    },
    "mamba2": {"model_type": "mamba2", "num_heads": 8, "n_groups": 2, "state_size": 24},
    "nemotron_h": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-*EM-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 24,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 32,
        "mlp_bias": True,
    },
    "jamba": {
        "model_type": "jamba",
        "mamba_d_state": 8,
        "mamba_dt_rank": 6,
        "mamba_proj_bias": True,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
    },
    "bitnet": {"model_type": "bitnet"},
    "axk1": {"model_type": "axk1", **LATENT, **ROUTED, "q_lora_rank": 20},
    "minicpm3": {"model_type": "minicpm3", **LATENT, "q_lora_rank": 20},
    "hy_v3": {"model_type": "hy_v3", **EXPERTS},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_bigcode": {"model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_bigcode-heads": {
        "model_type": "gpt_bigcode",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "multi_query": False,
    },
    "gpt_neo": {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 3]]},
    "gptj": {"model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "codegen": {"model_type": "codegen", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "gpt_neox": {"model_type": "gpt_neox", "attention_bias": False},
    "opt-350m": {
        "model_type": "opt",
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
        "ffn_dim": 48,
    },
    "biogpt": {"model_type": "biogpt"},
    "bloom": {"model_type": "bloom", "n_layer": 2, "n_head": 4},
    "falcon": {"model_type": "falcon"},
    "falcon-new": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
    },
    "falcon-alibi": {
        "model_type": "falcon",
        "alibi": True,
        "parallel_attn": False,
        "multi_query": False,
    },
    "mpt": {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4},
    "dbrx": {
        "model_type": "dbrx",
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
}


def tiny(variant: str) -> dict[str, Any]:
    """The variant's config; a class with spellings of its own takes only those."""
    chosen = VARIANTS[variant]
    model_type = chosen["model_type"]
    if model_type in ("gpt2", "gpt_bigcode", "gptj", "codegen", "mpt", "dbrx"):
        return {"vocab_size": 96, **chosen}
    if model_type == "bloom":
        return {"vocab_size": 96, "hidden_size": 64, **chosen}
    base = dict(TINY)
    if model_type in ("falcon", "flex_olmo", "granitemoehybrid", "lfm2_moe"):
        del base["head_dim"]  # a property there, or not read
    return {**base, **chosen}


def test_every_causal_type_has_a_tiny_variant() -> None:
    described = {variant["model_type"] for variant in VARIANTS.values()}
    bare = {x for x in known_types() if x in FAMILIES}
    others = {
        *("internlm3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),  # Llama, Qwen
        *("qwen3_vl_moe_text", "glm4v_text", "glm4v_moe_text"),
        *("t5", "mt5", "umt5", "bart", "mbart", "plbart", "mvp", "m2m_100", "pegasus", "marian"),
        *("blenderbot", "blenderbot-small", "led"),
        *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert"),
        *("deberta-v2", "modernbert", "data2vec-text", "ernie", "layoutlm", "mpnet", "rembert"),
        *("roberta-prelayernorm", "xlm-roberta-xl", "megatron-bert", "nomic_bert", "gte"),
        *("eurobert", "esm", "t5gemma", "whisper", "mllama_text_model", "longt5"),
        "switch_transformers",
    }
    assert bare - others == described


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tiny_variant_has_the_described_matrices_norms_and_total(variant: str) -> None:
    config = tiny(variant)
    spec = build(config, name=variant)
    model = module(config, spec.task)
    assert described_linears(spec) == real_linears(model)
    assert described_norms(spec) == real_norms(model)
    assert spec.num_params == sum(p.numel() for p in model.parameters())


# What no real config says otherwise, or what the real class can't run.
UNCHANGED = {
    *("vocab_size_per_layer_input", "initializer_range", "use_cache", "return_dict", "torchscript"),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "chunk_size_feed_forward"),
    *("output_attentions", "output_hidden_states", "is_gated_act", "num_ln_in_parallel_attn"),
    "q_lora_rank",  # a rank of 0 is not "none" there
    *("qk_rope_head_dim", "num_local_experts"),  # another key of these configs says the same
}
HIDDEN_WIDE = {"helium", "olmoe", "phi"}  # projections or norms are as wide as the hidden state
HEADS = {"head_dim", "hidden_size", "num_attention_heads"}


def otherwise(value: Any) -> list[Any]:
    """Other values that a config could have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2, max(1, value // 2), 0] if value > 1 else [1 - value]
    return []


@pytest.mark.sampled(40)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_that_says_one_thing_else_has_the_total_of_the_real_class(variant: str) -> None:
    config = tiny(variant)
    known = module(config, build(config, name=variant).task).config.to_dict()
    kept = UNCHANGED | (HEADS if config["model_type"] in HIDDEN_WIDE else set())
    changes = [
        (key, value)
        for key, default in sorted(known.items())
        if key not in kept and not key.endswith("token_id")
        for value in otherwise(default)
    ]
    for key, value in random.Random(variant).sample(changes, min(12, len(changes))):
        changed = {**config, key: value}
        try:
            spec = build(changed, name=variant)
        except ConfigError:  # said in one line, which other tests read
            continue
        try:
            real = module(changed, spec.task)
        except Exception:  # whatever a class raises is that no such model exists
            continue
        assert spec.num_params == sum(p.numel() for p in real.parameters()), (key, value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_holds_the_described_elements(variant: str) -> None:
    torch = pytest.importorskip("torch")
    config = tiny(variant)
    spec = build(config, name=variant)
    model = module(config, spec.task).to_empty(device="cpu").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = 5  # fewer than any window
    with torch.no_grad():
        output = model(torch.ones(1, tokens, dtype=torch.long), use_cache=True)
    cache = output.get("past_key_values", output.get("cache_params"))  # Mamba's name of it
    held = 0
    for layer in cache.layers:
        for name in ("keys", "values", "indexer_keys"):
            tensor = getattr(layer, name, None)
            held += 0 if tensor is None else tensor.numel()
    expected = sum(
        attention.cache_elements * times
        for layer, times in spec.layers()
        for attention in layer.attentions
    )
    assert held == tokens * expected


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "d_model": 64, "feed_forward_proj": "gated-gelu"},
        {"model_type": "umt5", "d_model": 64, "num_layers": 3},
        {"model_type": "longt5", "d_model": 64, "num_decoder_layers": 3},
        {
            "model_type": "longt5",
            "d_model": 64,
            "encoder_attention_type": "transient-global",
            "feed_forward_proj": "gated-gelu",
        },
        {"model_type": "switch_transformers", "d_model": 64, "router_bias": True},
        {
            "model_type": "switch_transformers",
            "d_model": 64,
            "num_layers": 5,
            "num_decoder_layers": 4,
            "num_sparse_encoder_layers": 0,
            "num_sparse_decoder_layers": 4,
        },
        {"model_type": "mbart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3},
        {"model_type": "bart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3},
        {"model_type": "plbart"},
        {"model_type": "mvp", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3},
        {"model_type": "m2m_100", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3},
        {"model_type": "pegasus", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3},
        {"model_type": "marian", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3},
        {"model_type": "blenderbot", "d_model": 64, "decoder_layers": 3},
        {"model_type": "blenderbot-small", "encoder_layers": 2, "decoder_layers": 3},
        {"model_type": "whisper", "d_model": 48, "encoder_layers": 2, "decoder_layers": 3},
        {"model_type": "camembert", "num_hidden_layers": 2},
        {"model_type": "electra", "num_hidden_layers": 2},
        {"model_type": "albert", "num_hidden_groups": 2, "inner_group_num": 2, "hidden_size": 64},
        {"model_type": "modernbert", "norm_bias": True, "mlp_bias": True, "attention_bias": True},
        {"model_type": "data2vec-text", "num_hidden_layers": 2},
        {"model_type": "ernie", "num_hidden_layers": 2, "use_task_id": True},
        {"model_type": "esm", "vocab_size": 33, "pad_token_id": 1, "num_hidden_layers": 2},
        {
            "model_type": "esm",
            "vocab_size": 33,
            "pad_token_id": 1,
            "num_hidden_layers": 2,
            "position_embedding_type": "rotary",
            "emb_layer_norm_before": True,
        },
        {
            "model_type": "t5gemma",
            "vocab_size": 96,
            "encoder": TINY | {"pad_token_id": 0},
            "decoder": TINY | {"pad_token_id": 0, "num_hidden_layers": 3},
        },
        {"model_type": "layoutlm", "num_hidden_layers": 2},
        {"model_type": "mpnet", "num_hidden_layers": 2},
        {"model_type": "roberta-prelayernorm", "num_hidden_layers": 2},
        {"model_type": "xlm-roberta-xl", "num_hidden_layers": 2},
        {"model_type": "megatron-bert", "num_hidden_layers": 2},
        {"model_type": "rembert", "num_hidden_layers": 2},
        {"model_type": "nomic_bert", "num_hidden_layers": 2},
        {"model_type": "gte", "num_hidden_layers": 2},
        {"model_type": "eurobert", "num_hidden_layers": 2, "num_key_value_heads": 3},
        {"model_type": "deberta-v2", "num_hidden_layers": 2},
        {
            "model_type": "deberta-v2",
            "num_hidden_layers": 2,
            "relative_attention": True,
            "position_buckets": 256,
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "conv_kernel_size": 3,
            "conv_act": "gelu",
        },
    ],
    ids=lambda config: config["model_type"],
)
def test_encoders_and_encoder_decoders_with_other_sizes(config: dict[str, Any]) -> None:
    spec = build(config, name="tiny")
    model = module(config, spec.task)
    assert described_linears(spec) == real_linears(model)
    assert described_norms(spec) == real_norms(model)
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert spec.trainable_params == trained  # Pegasus and Marian freeze their positions


def test_led_trains_all_but_what_tokens_with_global_attention_read() -> None:
    config = {"model_type": "led", "d_model": 64, "encoder_layers": 2, "attention_window": [8, 16]}
    spec = build(config, name="tiny")
    model = module(config, spec.task)
    assert described_linears(spec) == real_linears(model)
    assert described_norms(spec) == real_norms(model)
    named = {name: p.numel() for name, p in model.named_parameters()}
    assert spec.num_params == sum(named.values())
    idle = sum(size for name, size in named.items() if "_global." in name)
    assert idle == 2 * 3 * 65 * 64
    assert spec.trainable_params == spec.num_params - idle


LLAMA4_VISION = {"hidden_size": 64, "intermediate_size": 256, "vision_output_dim": 4096}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma3", "vision_config": {"vision_use_head": False}},
        {"model_type": "gemma3", "vision_config": {"image_size": 896, "patch_size": 14}},
        {"model_type": "gemma4", "vision_config": {"use_clipped_linears": True}},
        {"model_type": "gemma4", "vision_config": {}, "audio_config": {"hidden_size": 96}},
        {"model_type": "mistral3", "vision_config": {"model_type": "pixtral", "patch_size": 14}},
        {"model_type": "qwen2_vl", "vision_config": {"hidden_size": 64}},
        {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 80, "out_hidden_size": 64}},
        {"model_type": "qwen3_vl", "vision_config": {"out_hidden_size": 64}},
        {"model_type": "glm4v", "vision_config": {"out_hidden_size": 64, "depth": 3}},
        {"model_type": "glm4v_moe", "vision_config": {"out_hidden_size": 64, "image_size": 56}},
        {"model_type": "llama4", "vision_config": LLAMA4_VISION},
        {"model_type": "qwen2_audio", "audio_config": {"d_model": 80, "encoder_layers": 3}},
        {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}},
        {"model_type": "llava_next", "vision_config": {"model_type": "clip_vision_model"}},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_multimodal_model_counts_its_vision_tower(config: dict[str, Any]) -> None:
    inner = {"mistral3": "mistral", "llava": "llama", "llava_next": "llama"}
    named = inner.get(config["model_type"])
    text = {} if named is None else {"model_type": named}
    config = {**config, "text_config": {**TINY, **text}}
    spec = build(config, name="tiny")
    model = module(config, spec.task)
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    assert described_linears(spec) == real_linears(model)
    assert idle_linears(spec) == tower_linears(model)


def idle_linears(spec: ModelSpec) -> Counter[tuple[str, int, int, bool]]:
    counts: Counter[tuple[str, int, int, bool]] = Counter()
    assert spec.tower is not None
    for x in (*spec.tower.linears, *spec.tower.idle):  # also where texts alone load none
        counts[x.name, x.in_features, x.out_features, x.bias] += x.count * x.is_module
    return +counts  # without GLM's convolution, which PEFT's names reach


def tower_linears(model: Any) -> Counter[tuple[str, int, int, bool]]:
    """Every matrix module that no text passes."""
    from torch import nn

    return Counter(
        (name.rpartition(".")[2], leaf.in_features, leaf.out_features, leaf.bias is not None)
        for name, leaf in model.named_modules()
        if isinstance(leaf, nn.Linear) and "language_model" not in name and "lm_head" not in name
    )


MLLAMA = {
    "model_type": "mllama",
    "text_config": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "num_hidden_layers": 6, "cross_attention_layers": [1, 4]}
    | {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {"hidden_size": 48, "attention_heads": 4, "intermediate_size": 80}
    | {"num_hidden_layers": 3, "num_global_layers": 2, "image_size": 56, "vision_output_dim": 144}
    | {"intermediate_layers_indices": [0, 2]}
    | {"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]]},
}


def test_layers_that_read_images_alone_are_loaded_beside_those_of_the_text() -> None:
    from torch import nn

    spec = build(MLLAMA, name="tiny")
    model = module(MLLAMA, spec.task)
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    text = model.model.language_model
    loaded = [*text.parameters(), *model.lm_head.parameters()]
    assert spec.loaded_params == sum(p.numel() for p in loaded)
    skipped = [layer for number, layer in enumerate(text.layers) if number in (1, 4)]
    assert spec.idle_params == sum(p.numel() for layer in skipped for p in layer.parameters())
    assert {(x.name, x.in_features, x.out_features, x.count) for x in spec.idle_linears} == {
        (name.rpartition(".")[2], leaf.in_features, leaf.out_features, len(skipped))
        for name, leaf in skipped[0].named_modules()
        if isinstance(leaf, nn.Linear)
    }


def test_a_multimodal_config_with_the_text_at_the_top_is_the_same_model() -> None:
    text = {k: v for k, v in TINY.items() if k != "head_dim"}
    vision = {"vision_config": {"hidden_size": 64}}
    flat = build({"model_type": "qwen2_vl", **text, **vision}, name="tiny")
    nested = build({"model_type": "qwen2_vl", "text_config": text, **vision}, name="tiny")
    assert flat == nested


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - NO_AUTO_CLASS))
def test_flash_attention_and_checkpointing_are_described_as_the_class_has_them(
    model_type: str,
) -> None:
    transformers = pytest.importorskip("transformers")
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    names = (
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        | auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        | auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    # ESM and dots.llm1 have no sizes of their own for some of these
    needed = {"vocab_size": 96, "num_experts_per_tok": 2, "n_routed_experts": 8}
    spec = build({"model_type": model_type, **needed}, name=model_type)
    described = all(attention.flash for layer, _ in spec.layers() for attention in layer.attentions)
    cls = getattr(transformers, names[IN_TRANSFORMERS.get(model_type, model_type)])
    assert described == bool(cls._supports_flash_attn)
    assert spec.supports_checkpointing == bool(cls.supports_gradient_checkpointing)


MASKED = ("bert", "electra", "layoutlm", "mpnet", "rembert", "eurobert", "gte", "megatron-bert")


@pytest.mark.parametrize("model_type", MASKED)
def test_the_head_of_masked_words_is_counted_with_what_it_keeps(model_type: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    spec = build({"model_type": model_type}, name=model_type)
    with torch.device("meta"):
        model = transformers.AutoModelForMaskedLM.from_config(
            transformers.AutoConfig.for_model(model_type)
        )
    counted = spec.num_params + masked_head_params(spec)
    assert counted == sum(p.numel() for p in model.parameters())


_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - NO_AUTO_CLASS))
def test_a_config_that_names_no_dropout_has_that_of_its_class(model_type: str) -> None:
    from transformers import AutoConfig

    model_type = IN_TRANSFORMERS.get(model_type, model_type)
    theirs = AutoConfig.for_model(model_type).get_text_config().to_dict()
    try:
        spec = build({"model_type": model_type}, name=model_type)
    except ConfigError:
        pytest.skip("a bare config is no model")
    named = [float(theirs[key]) for key in _ATTENTION_DROPOUT if theirs.get(key) is not None]
    ours = {attention.dropout for layer, _ in spec.layers() for attention in layer.attentions}
    if named:
        assert ours == {named[0]}


def test_gemma_3n_counts_its_audio_encoder_and_both_embedders() -> None:
    """The images' encoder is timm's, which the oracles do not need: its size is a constant."""
    torch = pytest.importorskip("torch")
    gemma3n = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    transformers = pytest.importorskip("transformers")
    audio = {"hidden_size": 96, "conf_num_hidden_layers": 3, "conf_num_attention_heads": 4}
    config = {"model_type": "gemma3n", "vision_config": {"hidden_size": 80}, "audio_config": audio}
    text = build({**TINY, **VARIANTS["gemma3n_text"]}, name="text")
    spec = build(config | {"text_config": {**TINY, **VARIANTS["gemma3n_text"]}}, name="whole")
    of_audio = transformers.Gemma3nAudioConfig(**audio)
    of_text = transformers.Gemma3nTextConfig(hidden_size=TINY["hidden_size"])
    of_images = transformers.Gemma3nAudioConfig(hidden_size=80)  # the embedder reads its width
    with torch.device("meta"):
        encoder = gemma3n.Gemma3nAudioEncoder(of_audio)
        embedders = [
            gemma3n.Gemma3nMultimodalEmbedder(each, of_text) for each in (of_images, of_audio)
        ]
    modules = (encoder, *embedders)
    added = sum(p.numel() for each in modules for p in each.parameters())
    assert spec.num_params - text.num_params == added + 294_126_912
    described: Counter[tuple[str, int, int, bool]] = Counter()
    for x in spec.idle_linears:
        described[x.name, x.in_features, x.out_features, x.bias] += x.count
    assert described == sum((tower_linears(each) for each in modules), Counter())


KIMI = {
    "model_type": "kimi_k25",
    "text_config": {**TINY, **VARIANTS["kimi_k2"]},
    "vision_config": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    | {"pos_emb_height": 8, "pos_emb_width": 8},
    "projection_hidden_size": 64,
    "tie_word_embeddings": False,
}


def test_kimi_k2_5_counts_its_tower_and_its_experts_are_not_translated() -> None:
    spec = build(KIMI, name="tiny")
    model = module(KIMI, spec.task)
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    assert described_linears(spec) == real_linears(model)
    described: Counter[tuple[str, int, int, bool]] = Counter()
    for x in spec.idle_linears:
        described[x.name, x.in_features, x.out_features, x.bias] += x.count
    assert described == tower_linears(model)
    text = build({**TINY, **VARIANTS["kimi_k2"]}, name="text")
    ranks = [{x.adapter_rank for x in each.groups[-1].layer.linears} for each in (spec, text)]
    assert ranks[0] == {None} != ranks[1]  # PEFT knows its translations by the outer type
    assert not any("Kimi K2" in note for note in spec.notes)  # it has a class


def test_another_encoder_of_images_than_gemma_3ns_is_refused() -> None:
    config = {"model_type": "gemma3n", "vision_config": {"architecture": "resnet50"}}
    with pytest.raises(ConfigError, match=r"'resnet50'; known of gemma3n is mobilenetv5_300m_enc"):
        build(config | {"text_config": {**TINY, **VARIANTS["gemma3n_text"]}}, name="x")


@pytest.mark.parametrize("model_type", ["llava", "glm4v", "mistral3"])
def test_who_ties_the_head_of_a_model_that_sees_is_known(model_type: str) -> None:
    file = data_folder("models_db") / f"{SMALLEST[model_type]}.json"
    known = json.loads(file.read_text(encoding="utf-8"))["config"]
    for outer, inner in ((True, False), (False, True)):
        text = {**known["text_config"], "num_hidden_layers": 2, "tie_word_embeddings": inner}
        config = {**known, "text_config": text, "tie_word_embeddings": outer}
        spec = build(config, name=model_type)
        assert spec.num_params == sum(p.numel() for p in module(config, spec.task).parameters())
