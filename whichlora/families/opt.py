"""OPT: learned positions, ReLU, and for 350M an embedding narrower than the stack."""

from __future__ import annotations

from whichlora.families.blocks import causal_lm, mlp, norms, softmax_attention
from whichlora.families.fields import Fields
from whichlora.spec.architecture import Embedding, ModelSpec
from whichlora.spec.layer import Layer, Linear, Norm

POSITION_OFFSET = 2  # OPTLearnedPositionalEmbedding keeps two rows for padding

DEFAULTS = {
    "opt": {
        "vocab_size": 50272,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "activation_function": "relu",
        "max_position_embeddings": 2048,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
        "dropout": 0.1,
    },
    "biogpt": {
        "vocab_size": 42384,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "activation_dropout": 0.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}


def _opt(c: Fields) -> ModelSpec:
    hidden, heads, vocab = (
        c.size("hidden_size"),
        c.size("num_attention_heads"),
        c.size("vocab_size"),
    )
    bias, affine = c.flag("enable_bias"), c.flag("layer_norm_elementwise_affine")
    attention = softmax_attention(
        hidden=hidden,
        heads=heads,
        out_name="out_proj",
        qkv_bias=bias,
        out_bias=bias,
        position="none",
        dropout=c.probability("attention_dropout"),
    )
    layer = Layer(
        attentions=(attention,),
        mlp=mlp(
            hidden=hidden,
            width=c.size("ffn_dim"),
            activation=c.text("activation_function"),
            names=("fc1", "fc2"),
            bias=bias,
        ),
        norms=norms(
            ("self_attn_layer_norm", "final_layer_norm"),
            width=hidden,
            kind="layer",
            weight=affine,
            bias=affine,
        ),
        post_norm=not c.flag("do_layer_norm_before"),
        dropouts=(hidden,) * 2 if c.probability("dropout") else (),
    )
    width = c.size("word_embed_proj_dim", fallback=hidden)
    around: tuple[Linear, ...] = ()
    if width != hidden:
        around = (
            Linear(name="project_in", in_features=width, out_features=hidden, reads="embedding"),
            Linear(name="project_out", in_features=hidden, out_features=width, reads="stack_out"),
        )
    final: tuple[Norm, ...] = ()
    if c.flag("do_layer_norm_before") and not c.flag("_remove_final_layer_norm"):
        final = norms(("final_layer_norm",), width=hidden, kind="layer", weight=affine, bias=affine)
    return causal_lm(
        c,
        [layer] * c.layers(),
        final_norms=final,
        embeddings=(
            Embedding(name="embed_tokens", rows=vocab, width=width),
            Embedding(
                name="embed_positions",
                rows=c.size("max_position_embeddings") + POSITION_OFFSET,
                width=hidden,
            ),
        ),
        head=Linear(name="lm_head", in_features=width, out_features=vocab, reads="head_in"),
        head_linears=around,
    )


def _biogpt(c: Fields) -> ModelSpec:
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")
    attention = softmax_attention(
        hidden=hidden,
        heads=c.size("num_attention_heads"),
        out_name="out_proj",
        qkv_bias=True,
        out_bias=True,
        position="none",
        dropout=c.probability("attention_probs_dropout_prob"),
    )
    drops = c.probability("hidden_dropout_prob") > 0
    layer = Layer(
        attentions=(attention,),
        mlp=mlp(
            hidden=hidden,
            width=c.size("intermediate_size"),
            activation=c.text("hidden_act"),
            names=("fc1", "fc2"),
            bias=True,
            dropout=c.probability("activation_dropout") > 0,
        ),
        norms=norms(
            ("self_attn_layer_norm", "final_layer_norm"), width=hidden, kind="layer", bias=True
        ),
        dropouts=(hidden,) * 2 if drops else (),
    )
    positions = c.size("max_position_embeddings") + POSITION_OFFSET
    return causal_lm(
        c,
        [layer] * c.layers(),
        final_norms=norms(("layer_norm",), width=hidden, kind="layer", bias=True),
        embeddings=(
            Embedding(name="embed_tokens", rows=vocab, width=hidden),
            Embedding(name="embed_positions", rows=positions, width=hidden),
        ),
        head=Linear(
            name="output_projection", in_features=hidden, out_features=vocab, reads="head_in"
        ),
        embedding_dropouts=(hidden,) if drops else (),
    )


BUILDERS = {"opt": _opt, "biogpt": _biogpt}
