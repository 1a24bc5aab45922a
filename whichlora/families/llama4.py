"""Llama 4 (text): rotated attention in chunks, full attention without rotation, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.families.blocks import causal_lm, mlp, moe, norms, softmax_attention
from whichlora.families.decoder import FULL, PRE_NORM
from whichlora.families.fields import Fields
from whichlora.families.llama import LLAMA
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Layer, Linear, Moe, Norm

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama4_text": LLAMA
    | {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
    },
}


def _attention(c: Fields, *, rotates: bool, chunked: bool) -> Attention:
    heads, head_dim = c.size("num_attention_heads"), c.size("head_dim")
    kv_heads, bias = c.size("num_key_value_heads", fallback=heads), c.flag("attention_bias")
    shape: dict[str, Any] = {"kind": "rms_offset", "width": head_dim, "weight": False}
    qk_norms = (
        Norm(name="q_norm", rows=heads, **shape),
        Norm(name="k_norm", rows=kv_heads, **shape),
    )
    return softmax_attention(
        hidden=c.size("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        norms=qk_norms if rotates and c.flag("use_qk_norm") else (),
        position="rope" if rotates else "none",
        rotary_dim=head_dim if rotates else 0,
        # no query sees a key of another chunk: masks and caches are those of a window
        sliding_window=c.size("attention_chunk_size") if chunked else None,
        dropout=c.probability("attention_dropout"),
        flash=False,
        projection="complex_by_head",
        has_temperature=not rotates and c.flag("attn_temperature_tuning"),
        wide_softmax=False,
    )


def _experts(c: Fields) -> Moe:
    hidden, width, activation = (
        c.size("hidden_size"),
        c.size("intermediate_size"),
        c.text("hidden_act"),
    )
    num_experts = c.size("num_local_experts")
    routed = moe(
        hidden=hidden,
        width=width,
        activation=activation,
        num_experts=num_experts,
        experts_per_token=c.size("num_experts_per_tok"),
        shared=mlp(hidden=hidden, width=width, activation=activation, act="shared_act"),
        router=Linear(
            name="router",
            in_features=hidden,
            out_features=num_experts,
            reads="mlp_in",
            is_subclass=True,
            is_refused=True,  # it returns two tensors, which PEFT's layer can add nothing to
        ),
        by_score=True,
    )
    linears = tuple(replace(linear, active=num_experts) for linear in routed.expert.linears)
    return replace(routed, expert=replace(routed.expert, linears=linears))


def _sparse_layers(c: Fields) -> frozenset[int]:
    """Numbers of the layers with experts: as listed, or every so many."""
    if c.get("moe_layers") is not None:
        return c.indices("moe_layers")
    step = c.size("interleave_moe_layer_step")
    return frozenset(range(step - 1, c.layers(), step))


def _llama4(c: Fields) -> ModelSpec:
    hidden, count = c.size("hidden_size"), c.layers()
    interval = c.size("no_rope_layer_interval")
    rope = c.items("no_rope_layers", length=count) if c.get("no_rope_layers") else None
    if rope is None:  # 1 means "with rope", the name notwithstanding
        rope = [(i + 1) % interval != 0 for i in range(count)]
    types = c.items("layer_types", length=count)
    if types is None:
        types = ["chunked_attention" if turned else FULL for turned in rope]
    sparse = _sparse_layers(c)
    dense = mlp(
        hidden=hidden, width=c.size("intermediate_size_mlp"), activation=c.text("hidden_act")
    )
    experts = _experts(c) if sparse else None  # MobileLLM-R1 has none
    layers = [
        Layer(
            attentions=(_attention(c, rotates=bool(rope[i]), chunked=types[i] != FULL),),
            mlp=None if i in sparse else dense,
            moe=experts if i in sparse else None,
            norms=norms(PRE_NORM, width=hidden, kind="rms"),
            names_attention=True,
        )
        for i in range(count)
    ]
    return causal_lm(c, layers, final_norms=norms(("norm",), width=hidden, kind="rms"))


BUILDERS = {"llama4_text": _llama4}
