"""Further encoders: relatives of BERT with other norms, embeddings or positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.families.bert import (
    BERT,
    after_padding,
    encoder,
    encoder_layer,
    masked_head,
    self_attention,
)
from whichlora.families.blocks import mlp, norms
from whichlora.families.fields import Fields
from whichlora.families.labels import with_dense_head, with_pooler
from whichlora.spec.architecture import Embedding, MaskedHead, ModelSpec
from whichlora.spec.layer import Attention, Layer, Linear, Norm

_NO_TYPES = BERT | {"type_vocab_size": 0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "data2vec-text": BERT,
    "ernie": BERT | {"use_task_id": False, "task_type_vocab_size": 3},
    "layoutlm": BERT | {"max_2d_position_embeddings": 1024},
    "esm": _NO_TYPES
    | {
        "max_position_embeddings": 1026,
        "position_embedding_type": "absolute",
        "emb_layer_norm_before": None,
        "token_dropout": False,
    },
    "mpnet": _NO_TYPES | {"vocab_size": 30527, "relative_attention_num_buckets": 32},
    "roberta-prelayernorm": BERT | {"vocab_size": 50265},
    "xlm-roberta-xl": BERT
    | {
        "vocab_size": 250880,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
    },
    "megatron-bert": BERT
    | {
        "vocab_size": 29056,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "rembert": BERT
    | {
        "vocab_size": 250300,
        "hidden_size": 1152,
        "intermediate_size": 4608,
        "num_hidden_layers": 32,
        "num_attention_heads": 18,
        "input_embedding_size": 256,
        "output_embedding_size": 1664,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": False,
    },
    "nomic_bert": BERT
    | {
        "vocab_size": 30528,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "gte": BERT
    | {
        "vocab_size": 250048,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
    },
    "eurobert": _NO_TYPES
    | {
        "vocab_size": 128256,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_dropout_prob": 0.0,
        "tie_word_embeddings": False,
    },
}

_UNFUSED: dict[str, Any] = {"sdpa": "eager", "flash": False}  # attention written out in the class


def _roberta_head(c: Fields) -> MaskedHead:
    return masked_head(c, c.size("hidden_size"), names=("dense", "layer_norm"), activation="gelu")


def _data2vec(c: Fields) -> ModelSpec:
    layer = encoder_layer(c, self_attention(c))
    head = _roberta_head(c)
    return encoder(c, [layer] * c.layers(), pooler=True, masked_head=head, **after_padding(c))


def _ernie(c: Fields) -> ModelSpec:
    spec = encoder(c, [encoder_layer(c, self_attention(c))] * c.layers(), pooler=True)
    if not c.flag("use_task_id"):
        return spec
    tasks = Embedding(
        name="task_type_embeddings",
        rows=c.size("task_type_vocab_size"),
        width=c.size("hidden_size"),
    )
    return replace(spec, embeddings=(*spec.embeddings, tasks))


def _layoutlm(c: Fields) -> ModelSpec:
    """Words and where they stand on the page; a text without boxes has the same lookups."""
    attention = self_attention(c, flash=False, wide_softmax=True)
    spec = encoder(c, [encoder_layer(c, attention)] * c.layers(), pooler=True)
    places = tuple(
        Embedding(
            name=f"{axis}_position_embeddings",
            rows=c.size("max_2d_position_embeddings"),
            width=c.size("hidden_size"),
        )
        for axis in "xyhw"
    )
    pooler = Linear(
        name="dense",
        in_features=c.size("hidden_size"),
        out_features=c.size("hidden_size"),
        reads="first_token",
        bias=True,
    )
    assert spec.masked_head is not None
    return replace(
        spec,
        embeddings=(*spec.embeddings, *places),
        idle_linears=(pooler,),  # its result is read by nobody who fills masked words
        masked_head=replace(spec.masked_head, lost_params=0),
    )


def _mpnet(c: Fields) -> ModelSpec:
    attention = self_attention(
        c,
        ("q", "k", "v"),
        "o",
        position="relative",
        biases_each_sequence=True,
        returns_probabilities=False,
        **_UNFUSED,
    )
    spec = encoder(
        c,
        [encoder_layer(c, attention)] * c.layers(),
        pooler=True,
        supports_checkpointing=False,
        masked_head=_roberta_head(c),
        **after_padding(c),
    )
    buckets = Embedding(
        name="relative_attention_bias",
        rows=c.size("relative_attention_num_buckets"),
        width=c.size("num_attention_heads"),
    )
    return replace(spec, embeddings=(*spec.embeddings, buckets))


def _esm(c: Fields) -> ModelSpec:
    """Proteins as text: a stack whose attention scales queries before it rotates them."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    rotates = c.text("position_embedding_type") == "rotary"
    rotation: dict[str, Any] = {}
    if rotates:
        rotation = {
            "position": "rope",
            "rotary_dim": hidden // heads,
            "wide_rotation": "inline",
        }
    c = replace(c, values={**c.values, "hidden_act": "erf_gelu"})  # the class has no other
    attention = self_attention(c, projection="scaled", **rotation)
    layer = replace(encoder_layer(c, attention), post_norm=False)
    contacts = Linear(
        name="regression",
        in_features=c.layers() * heads,
        out_features=1,
        reads="probabilities",
        bias=True,
    )

    def norm(name: str) -> tuple[Norm, ...]:
        return norms((name,), width=hidden, kind="layer", bias=True)

    spec = encoder(
        c,
        [layer] * c.layers(),
        pooler=True,
        positions=not rotates,
        embedding_norms=norm("layer_norm") if c.flag("emb_layer_norm_before") else (),
        final_norms=norm("emb_layer_norm_after"),
        embedding_dropouts=(),
        embeds_in_steps=True,  # times the padding mask
        idle_linears=(contacts,),  # read attention's probabilities when contacts are asked for
        masked_head=masked_head(c, hidden, names=("dense", "layer_norm")),
    )
    return replace(spec, other_params=spec.other_params + contacts.num_params)


def _before_each(
    c: Fields, attention: Attention, names: tuple[str, str], last: str, **overrides: Any
) -> ModelSpec:
    """An encoder whose norms stand before attention and MLP, and one more after the last layer."""
    hidden = c.size("hidden_size")
    drops_mlp = c.text("model_type") != "xlm-roberta-xl"
    layer = replace(
        encoder_layer(c, attention, norm_names=names), post_norm=False, drops_mlp=drops_mlp
    )
    final = norms((last,), width=hidden, kind="layer", bias=True)
    return encoder(c, [layer] * c.layers(), pooler=True, final_norms=final, **overrides)


def _roberta_prelayernorm(c: Fields) -> ModelSpec:
    names, head = ("LayerNorm", "LayerNorm"), _roberta_head(c)
    return _before_each(
        c, self_attention(c), names, "LayerNorm", masked_head=head, **after_padding(c)
    )


def _xlm_roberta_xl(c: Fields) -> ModelSpec:
    names = ("self_attn_layer_norm", "LayerNorm")
    return _before_each(
        c,
        self_attention(c),
        names,
        "LayerNorm",
        embedding_norms=(),
        masked_head=_roberta_head(c),
        **after_padding(c),
    )


def _megatron(c: Fields) -> ModelSpec:
    return _before_each(c, self_attention(c, **_UNFUSED), ("ln", "ln"), "ln", embedding_norms=())


def _rembert(c: Fields) -> ModelSpec:
    """Narrow embeddings before the stack, wide ones after it, unless they are tied."""
    width, hidden = c.size("input_embedding_size"), c.size("hidden_size")
    head = masked_head(c, c.size("output_embedding_size"), names=("dense", "LayerNorm"))
    into = Linear(
        name="embedding_hidden_mapping_in",
        in_features=width,
        out_features=hidden,
        reads="embedding",
        bias=True,
    )
    return encoder(
        c,
        [encoder_layer(c, self_attention(c, **_UNFUSED))] * c.layers(),
        width=width,
        pooler=True,
        head_linears=(into,),
        masked_head=replace(head, tied=c.flag("tie_word_embeddings")),
    )


def _rotated(c: Fields, *, bias: bool, **overrides: Any) -> Attention:
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    head_dim = c.size("head_dim", fallback=hidden // heads)
    return self_attention(
        c,
        ("q_proj", "k_proj", "v_proj"),
        "o_proj",
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        position="rope",
        rotary_dim=head_dim,
        **overrides,
    )


def _gated_after(c: Fields) -> ModelSpec:
    """GTE and Nomic BERT: rotary positions, a gated MLP, norms after the sums."""
    hidden = c.size("hidden_size")
    is_gte = c.text("model_type") == "gte"
    block = mlp(
        hidden=hidden,
        width=c.size("intermediate_size"),
        activation=c.text("hidden_act"),
        dropout=is_gte and c.probability("hidden_dropout_prob") > 0,
    )
    if is_gte:
        *inputs, out = block.linears
        block = replace(block, linears=(*inputs, replace(out, bias=True)))
    names = ("post_attention_layernorm", "post_mlp_layernorm")
    layer = encoder_layer(c, _rotated(c, bias=is_gte), norm_names=names)
    head = masked_head(
        c, hidden, names=("dense", "layer_norm"), activation="gelu" if is_gte else ""
    )
    layers = [replace(layer, mlp=block)] * c.layers()
    return encoder(c, layers, positions=False, masked_head=replace(head, bias=True))


def _eurobert(c: Fields) -> ModelSpec:
    hidden = c.size("hidden_size")
    bias = c.flag("mlp_bias")
    layer = Layer(
        attentions=(
            _rotated(
                c,
                bias=c.flag("attention_bias"),
                kv_heads=c.size("num_key_value_heads", fallback=c.size("num_attention_heads")),
                dropout=c.probability("attention_dropout"),
                wide_softmax=True,
            ),
        ),
        mlp=mlp(
            hidden=hidden,
            width=c.size("intermediate_size"),
            activation=c.text("hidden_act"),
            bias=bias,
        ),
        norms=norms(("input_layernorm", "post_attention_layernorm"), width=hidden, kind="rms"),
    )
    return encoder(
        c,
        [layer] * c.layers(),
        embeddings=(Embedding(name="embed_tokens", rows=c.size("vocab_size"), width=hidden),),
        embedding_norms=(),
        final_norms=norms(("norm",), width=hidden, kind="rms"),
        masked_head=MaskedHead(
            width=hidden, tied=c.flag("tie_word_embeddings"), bias=bias, widens_logits=True
        ),
    )


LABEL_HEADS = {
    **dict.fromkeys(("ernie", "megatron-bert", "rembert"), with_pooler),
    **dict.fromkeys(
        ("data2vec-text", "mpnet", "roberta-prelayernorm", "xlm-roberta-xl"), with_dense_head
    ),
}
BUILDERS = {
    "data2vec-text": _data2vec,
    "ernie": _ernie,
    "layoutlm": _layoutlm,
    "esm": _esm,
    "mpnet": _mpnet,
    "roberta-prelayernorm": _roberta_prelayernorm,
    "xlm-roberta-xl": _xlm_roberta_xl,
    "megatron-bert": _megatron,
    "rembert": _rembert,
    "nomic_bert": _gated_after,
    "gte": _gated_after,
    "eurobert": _eurobert,
}
