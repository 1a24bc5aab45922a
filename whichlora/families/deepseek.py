"""Multi-head latent attention: DeepSeek V2 and V3, and dense models with the same attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import (
    FeedForward,
    causal_lm,
    mlp_in_every_layer,
    norms,
    numbered_layers,
)
from whichlora.families.decoder import PRE_NORM
from whichlora.families.fields import Fields
from whichlora.families.llama import LLAMA
from whichlora.families.moe import deepseek_feed_forward
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Linear, Norm, Projection, SparseKeys

AS_DEEPSEEK = (
    "transformers has no class of Kimi K2: taken as its DeepseekV3ForCausalLM, which has the same "
    "layers, and not as the repository's own code"
)
MLA = LLAMA | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3 = MLA | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}
_INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
DEFAULTS = {
    "deepseek_v2": MLA
    | {
        "vocab_size": 102400,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": _V3,
    "deepseek_v32": _V3 | {"max_position_embeddings": 163840} | _INDEXER,
    "glm_moe_dsa": MLA
    | _INDEXER
    | {
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "max_position_embeddings": 202752,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "index_n_heads": 32,
        "index_topk_freq": 1,
        "index_skip_topk_offset": 2,
    },
    "kimi_k2": _V3,
    "glm4_moe_lite": MLA
    | {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
    },
    "axk1": MLA
    | {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "max_position_embeddings": 32768,
        "first_k_dense_replace": 1,
        "n_routed_experts": 192,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
    "minicpm3": MLA
    | {
        "vocab_size": 73448,
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": None,
    },
    "youtu": MLA
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}


def latent_attention(c: Fields, projection: Projection) -> Attention:
    """Queries, keys and values from low-rank latents; one rotated key part for all heads.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; names from `DeepseekV3Attention`.
    """
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    nope, rope = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim")
    v_head_dim = c.size("v_head_dim", fallback=hidden // heads)
    kv_rank = c.size("kv_lora_rank")
    q_rank = c.size_or_none("q_lora_rank")
    bias = c.flag("attention_bias")
    q_width = heads * (nope + rope)

    queries: tuple[Linear, ...]
    if q_rank is None:
        queries = (
            Linear(name="q_proj", in_features=hidden, out_features=q_width, reads="attn_in"),
        )
    else:
        queries = (
            Linear(
                name="q_a_proj", in_features=hidden, out_features=q_rank, reads="attn_in", bias=bias
            ),
            Linear(name="q_b_proj", in_features=q_rank, out_features=q_width, reads="q_latent"),
        )
    keys_values = (
        Linear(
            name="kv_a_proj_with_mqa",
            in_features=hidden,
            out_features=kv_rank + rope,
            reads="attn_in",
            bias=bias,
        ),
        Linear(
            name="kv_b_proj",
            in_features=kv_rank,
            out_features=heads * (nope + v_head_dim),
            reads="kv_latent",
        ),
    )
    out = Linear(
        name="o_proj",
        in_features=heads * v_head_dim,
        out_features=hidden,
        reads="attn_out",
        bias=bias,
    )
    latents: tuple[Norm, ...] = (Norm(name="kv_a_layernorm", kind="rms", width=kv_rank),)
    if q_rank is not None:
        latents = (Norm(name="q_a_layernorm", kind="rms", width=q_rank), *latents)
    return Attention(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=nope + rope,
        v_head_dim=v_head_dim,
        linears=(*queries, *keys_values, out),
        norms=latents,
        rotary_dim=rope,
        projection=projection,
        # transformers 5.23 caches the latent and the rotated key; earlier releases cached the
        # expanded keys and values, heads * (nope + rope + v_head_dim).
        cache_elements=kv_rank + rope,
    )


def _sparse_attention(c: Fields, *, interleaved: bool = False, hands_on: bool = False) -> Attention:
    """Latent attention whose queries see the keys that an indexer chooses.

    Source: transformers 5.23 `DeepseekV32Attention`, `DeepseekV32Indexer`.
    """
    dense = latent_attention(c, "latent")
    heads, head_dim = c.size("index_n_heads"), c.size("index_head_dim")
    hidden = c.size("hidden_size")
    widths = (
        ("wq_b", c.size("q_lora_rank"), heads * head_dim, "q_latent"),
        ("wk", hidden, head_dim, "attn_in"),
        ("weights_proj", hidden, heads, "attn_in"),
    )
    linears = (
        Linear(name=name, in_features=read, out_features=width, reads=reads, active=0)
        for name, read, width, reads in widths
    )
    *projections, out = dense.linears
    return replace(
        dense,
        linears=(*projections, *linears, out),
        sparse=SparseKeys(
            num_heads=heads,
            head_dim=head_dim,
            top_k=c.size("index_topk"),
            norm=Norm(name="k_norm", kind="layer", width=head_dim, bias=True),
            interleaved=interleaved,
            hands_on=hands_on,
        ),
        always_masked=True,
        flash=False,
        cache_elements=dense.cache_elements + head_dim,
    )


def _shares_choice(c: Fields) -> list[bool]:
    """Whether each layer sees the keys that the last one with an indexer has chosen.

    Source: transformers 5.23 `GlmMoeDsaConfig.__post_init__`.
    """
    count = c.layers()
    pattern = c.get("index_topk_pattern")
    if c.get("indexer_types") is None and isinstance(pattern, str):
        return [letter == "S" for letter in pattern.ljust(count, "F")[:count]]
    kinds = c.items("indexer_types", length=count)
    if kinds is None and pattern is not None:
        kinds = c.items("index_topk_pattern", length=count)
    if kinds is not None:
        return [kind == "shared" for kind in kinds]
    every, offset = max(c.count("index_topk_freq"), 1), c.count("index_skip_topk_offset")
    return [max(number - offset + 1, 0) % every > 0 for number in range(count)]


def _taking(attention: Attention) -> Attention:
    """`attention` of a layer that has no indexer of its own."""
    assert attention.sparse is not None
    return replace(
        attention,
        linears=tuple(linear for linear in attention.linears if linear.active),
        sparse=replace(attention.sparse, num_heads=0, norm=None),
        cache_elements=attention.cache_elements - attention.sparse.head_dim,
    )


def _model(
    c: Fields,
    feed_forward: FeedForward,
    projection: Projection = "latent",
    *,
    attention: Callable[[int], Attention] | None = None,
    scales_sums: bool = False,
    **spec: Any,
) -> ModelSpec:
    hidden = c.size("hidden_size")
    if attention is None:
        plain = latent_attention(c, projection)
    layers = numbered_layers(
        c,
        attention or (lambda _: plain),
        feed_forward,
        norms=norms(PRE_NORM, width=hidden, kind="rms"),
        scales_sums=scales_sums,
    )
    final = norms(("norm",), width=hidden, kind="rms")
    return causal_lm(c, layers, final_norms=final, **spec)


def _deepseek_v2(c: Fields) -> ModelSpec:
    feed_forward = deepseek_feed_forward(c, "softmax_fp32", bias=c.flag("mlp_bias"))
    return _model(c, feed_forward, "latent_complex")


def _deepseek(c: Fields) -> ModelSpec:
    return _model(c, deepseek_feed_forward(c))


def _deepseek_v32(c: Fields) -> ModelSpec:
    attention = _sparse_attention(c)
    return _model(c, deepseek_feed_forward(c), attention=lambda _: attention)


def _glm_moe_dsa(c: Fields) -> ModelSpec:
    """DeepSeek V3.2, with layers that see what an earlier one has chosen.

    Source: transformers 5.23 `GlmMoeDsaAttention`; arXiv:2603.12201.

    Raises:
        ConfigError: no layer chooses before the first that takes a choice.
    """
    shares = _shares_choice(c)
    if shares[0]:
        raise ConfigError(
            f"{c.name}: indexer_types begins with 'shared', which takes what an earlier layer has "
            "chosen; let the first layer be 'full'"
        )
    first = _sparse_attention(c, interleaved=True, hands_on=True)
    assert first.sparse is not None
    following = replace(first, sparse=replace(first.sparse, follows=True))
    taking = _taking(following)

    def attention(number: int) -> Attention:
        return taking if shares[number] else following if number else first

    return _model(c, deepseek_feed_forward(c), attention=attention)


def _kimi_k2(c: Fields) -> ModelSpec:
    """`DeepseekV3ForCausalLM`, as which Kimi K2.5's config builds its text.

    Source: transformers 5.23 `Kimi_K25Config.__post_init__`.
    """
    return replace(_deepseek(c), notes=(AS_DEEPSEEK,))


def _axk1(c: Fields) -> ModelSpec:
    """DeepSeek V3 with a norm over what the experts return."""
    norm = Norm(name="post_mlp_layernorm", kind="rms", width=c.size("hidden_size"))
    return _model(c, deepseek_feed_forward(c, norm=norm))


def _dense(c: Fields) -> ModelSpec:
    return _model(c, mlp_in_every_layer(c))


def _minicpm3(c: Fields) -> ModelSpec:
    feed_forward = mlp_in_every_layer(c, bias=c.flag("mlp_bias"))
    return _model(c, feed_forward, "latent_halves", scales_sums=True, scales_head_input=True)


BUILDERS = {
    "axk1": _axk1,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek_v32,
    "glm4_moe_lite": _deepseek,
    "glm_moe_dsa": _glm_moe_dsa,
    "kimi_k2": _kimi_k2,
    "minicpm3": _minicpm3,
    "youtu": _dense,
}
