"""DBRX: a fused projection and experts kept as three flat matrices."""

from __future__ import annotations

from typing import Any

from whichlora.families.blocks import causal_lm, norms, softmax_attention
from whichlora.families.fields import Fields
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Layer, Linear, Mlp, Moe

DEFAULTS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
}
SYNONYMS = {
    "dbrx": {
        "hidden_size": ("d_model",),
        "num_hidden_layers": ("n_layers",),
        "num_attention_heads": ("n_heads",),
        "max_position_embeddings": ("max_seq_len",),
    }
}


def _dbrx(c: Fields) -> ModelSpec:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    attn = c.part("attn_config", defaults={"kv_n_heads": 1})
    ffn = c.part(
        "ffn_config", defaults={"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1}
    )
    num_experts, top_k = ffn.size("moe_num_experts"), ffn.size("moe_top_k")
    width = ffn.size("ffn_hidden_size")
    shape: dict[str, Any] = {"count": num_experts, "active": top_k, "is_module": False}
    expert = Mlp(
        width=width,
        gated=True,
        activation="silu",
        linears=(
            Linear(name="w1", in_features=hidden, out_features=width, reads="expert_in", **shape),
            Linear(name="v1", in_features=hidden, out_features=width, reads="expert_in", **shape),
            Linear(name="w2", in_features=width, out_features=hidden, reads="expert_act", **shape),
        ),
    )
    experts = Moe(
        num_experts=num_experts,
        experts_per_token=top_k,
        expert=expert,
        router=Linear(name="layer", in_features=hidden, out_features=num_experts, reads="mlp_in"),
        routing="softmax",
        one_by_one=True,
    )
    head_dim = hidden // heads
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=attn.size("kv_n_heads"),
        head_dim=head_dim,
        names=("Wqkv",),
        out_name="out_proj",
        rotary_dim=head_dim,
    )
    layer = Layer(
        attentions=(attention,),
        moe=experts,
        norms=norms(("norm_1", "norm_2"), width=hidden, kind="layer"),
    )
    return causal_lm(
        c,
        [layer] * c.layers(),
        final_norms=norms(("norm_f",), width=hidden, kind="layer"),
        embedding_name="wte",
    )


BUILDERS = {"dbrx": _dbrx}
