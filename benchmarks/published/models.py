"""Architectures as the sources call them, also of models that the database does not have."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from whichlora import families
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer
from whichlora.store.models import find_model

POWERLM_3B = {  # ibm/PowerLM-3b config.json
    "model_type": "granite",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 40,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "vocab_size": 49152,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
FSDP_QLORA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
STABLELM_ALPHA_3B = {  # stabilityai/stablelm-base-alpha-3b config.json
    "model_type": "gpt_neox",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "vocab_size": 50688,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}
_LADDER = {  # of nntile's studies: width, heads, layers, tokens, all of them positions
    "xs": (1536, 24, 12, 768),
    "s": (2048, 16, 12, 1024),
    "m": (3072, 24, 12, 1536),
    "l": (4096, 32, 12, 2048),
    "xl": (5760, 45, 6, 2880),
}
_LADDER_T5 = {"xs": (9, 5), "s": (5, 8), "m": (9, 5), "l": (7, 6), "xl": (3, 3)}
_QWEN1 = {  # hidden, layers, heads, half of the remote code's intermediate_size, vocabulary
    "1_8B": (2048, 24, 16, 5504, 151936),
    "7B": (4096, 32, 32, 11008, 151936),
    "14B": (5120, 40, 40, 13696, 152064),
    "72B": (8192, 80, 64, 24576, 152064),
}
_REWRITTEN = {  # by Unsloth, which divides what Phi-3 has in one matrix
    "unsloth/Phi-3.5-mini-instruct": ("microsoft/Phi-3.5-mini-instruct", "llama"),
    "unsloth/Phi-3-medium-4k-instruct": ("microsoft/Phi-3-medium-4k-instruct", "mistral"),
    "unsloth/phi-4": ("microsoft/phi-4", "llama"),
}
_ELSEWHERE = {
    "unsloth/Qwen2-7B": "Qwen/Qwen2-7B",
    "TheBloke/Mistral-7B-OpenOrca-AWQ": "mistralai/Mistral-7B-v0.1",
    "bigcode/octocoder": "bigcode/starcoder",
    "Qwen/Qwen2.5-1.5B-Instruct": "Qwen/Qwen2.5-1.5B",
    "TheBloke/Mistral-7B-v0.1-GPTQ": "mistralai/Mistral-7B-v0.1",
    "ybelkada/test-mistral-7b-v0.1-awq": "mistralai/Mistral-7B-v0.1",
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": "mistralai/Mixtral-8x7B-v0.1",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "TheBloke/Llama-2-7B-GPTQ": "meta-llama/Llama-2-7b-hf",
    "NousResearch/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    "TheBloke/LLaMa-7B-GPTQ": "huggyllama/llama-7b",
    "TheBloke/vicuna-7B-v1.5-GPTQ": "meta-llama/Llama-2-7b-hf",
    "IlyasMoutawwakil/vicuna-7b-v1.5-awq-gemv": "meta-llama/Llama-2-7b-hf",
    "IlyasMoutawwakil/vicuna-7b-v1.5-awq-gemm": "meta-llama/Llama-2-7b-hf",
    "OpenBuddy/openbuddy-zephyr-7b-v14.1": "mistralai/Mistral-7B-v0.1",
    "GLM-4-32B-0414": "zai-org/GLM-4-32B-0414",
    "GLM-4-9B-0414": "zai-org/GLM-4-9B-0414",
}


def _qwen1_layer(layer: Layer) -> Layer:
    """Qwen2's layer with the matrices that Qwen's first code has: q, k and v in one."""
    attention, mlp = layer.attentions[0], layer.mlp
    assert mlp is not None
    query, output = attention.linears[0], attention.linears[-1]
    fused = replace(query, name="c_attn", out_features=3 * query.out_features)
    gate, up, down = mlp.linears
    return replace(
        layer,
        attentions=(replace(attention, linears=(fused, replace(output, name="c_proj"))),),
        mlp=replace(
            mlp,
            linears=(
                replace(gate, name="w2"),
                replace(up, name="w1"),
                replace(down, name="c_proj"),
            ),
        ),
    )


def _qwen1(size: str) -> ModelSpec:
    hidden, layers, heads, width, vocab = _QWEN1[size]
    spec = families.build(
        {
            "model_type": "qwen2",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": width,
            "vocab_size": vocab,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
        name=f"Qwen/Qwen-{size}",
    )
    return replace(
        spec,
        groups=tuple(replace(group, layer=_qwen1_layer(group.layer)) for group in spec.groups),
    )


def _nntile(family: str, size: str) -> ModelSpec:
    """`torch_nntile/examples/overhead_*/*.json` of nntile/nntile: 2,048 tokens, no dropout."""
    is_small = (family, size) == ("llama", "xl")
    hidden, heads, layers, tokens = (5120, 40, 6, 2560) if is_small else _LADDER[size]
    config = {"model_type": family, "vocab_size": 2048, "max_position_embeddings": tokens}
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": 4 * hidden}
    if family == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": tokens}
        sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    elif family == "gpt_neo":
        sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads}
        sizes |= {"attention_types": [[["global"], layers]]}
    elif family == "gpt_neox":
        sizes |= {"rotary_pct": 0.5, "tie_word_embeddings": False}
    elif family == "llama":
        sizes |= {"num_key_value_heads": heads, "tie_word_embeddings": False}
    elif family == "t5":
        encoder, decoder = _LADDER_T5[size]
        sizes = {"d_model": hidden, "d_kv": hidden // heads, "d_ff": 4 * hidden}
        sizes |= {"num_heads": heads, "num_layers": encoder, "num_decoder_layers": decoder}
        sizes |= {"dropout_rate": 0.0, "feed_forward_proj": "relu"}
    else:
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config |= {"max_position_embeddings": tokens + 2 * (family == "roberta")}
    return families.build(config | sizes, name=f"nntile/{family}_{size}")


@cache
def model_of(label: str) -> ModelSpec | None:
    """The architecture that a source calls `label`; None where neither file nor facts have it."""
    if label == "ibm/PowerLM-3b":
        return families.build(POWERLM_3B, name=label)
    if label == "stabilityai/stablelm-base-alpha-3b":
        return families.build(STABLELM_ALPHA_3B, name=label)
    if label.startswith("nntile/"):
        return _nntile(*label.removeprefix("nntile/").rsplit("_", 1))
    if label.startswith("random Llama 1B"):
        return families.build(FSDP_QLORA_1B, name="random-llama-1b")
    if label in _REWRITTEN:
        original, model_type = _REWRITTEN[label]
        spec = find_model(original)
        assert spec is not None
        # tables of LongRope have the positions that the model was first trained on
        positions = spec.config.get("original_max_position_embeddings")
        positions = positions or spec.config["max_position_embeddings"]
        changed = {"model_type": model_type, "max_position_embeddings": positions}
        return families.build({**spec.config, **changed}, name=label)
    first = re.fullmatch(r"Qwen/Qwen-(1_8B|7B|14B|72B)(-Chat)?(-Int[48])?", label)
    if first:
        return _qwen1(first[1])
    name = _ELSEWHERE.get(label) or re.sub(r"-(GPTQ-Int[48]|AWQ)$", "", label)
    spec = find_model(name)
    if spec and label.startswith("Qwen/Qwen2-"):  # the database has the base models' 131,072
        return replace(spec, max_position_embeddings=32_768)
    return spec
