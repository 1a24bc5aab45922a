"""Encoders: BERT, RoBERTa, ELECTRA, DistilBERT, ALBERT, DeBERTa-v2 and ModernBERT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.families.blocks import group, mlp, norms, softmax_attention
from whichlora.families.fields import Fields
from whichlora.families.labels import (
    SPANS,
    LabelHeads,
    of_encoder,
    projection,
    transform,
    with_dense_head,
    with_pooler,
)
from whichlora.spec.architecture import Embedding, MaskedHead, ModelSpec
from whichlora.spec.layer import Attention, Layer, LayerGroup, Linear, Norm

BERT: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "roberta": BERT | {"vocab_size": 50265},
    "xlm-roberta": BERT,
    "camembert": BERT,
    "electra": BERT
    | {
        "embedding_size": 128,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_attention_heads": 4,
    },
    "distilbert": BERT | {"type_vocab_size": 0, "qa_dropout": 0.1},
    "albert": BERT
    | {
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_attention_heads": 64,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.1,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    },
    "deberta-v2": BERT
    | {
        "vocab_size": 128100,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "type_vocab_size": 0,
        "relative_attention": False,
        "max_relative_positions": -1,
        "position_buckets": -1,
        "position_biased_input": True,
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "pooler_hidden_act": "gelu",
    },
    "modernbert": BERT
    | {
        "vocab_size": 50368,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_pooling": "cls",
    },
}
SYNONYMS = {
    "distilbert": {
        "hidden_size": ("dim",),
        "intermediate_size": ("hidden_dim",),
        "num_hidden_layers": ("n_layers",),
        "num_attention_heads": ("n_heads",),
        "hidden_act": ("activation",),
        "hidden_dropout_prob": ("dropout",),
        "attention_probs_dropout_prob": ("attention_dropout",),
    }
}


def self_attention(
    c: Fields,
    names: Sequence[str] = ("query", "key", "value"),
    out: str = "dense",
    **overrides: Any,
) -> Attention:
    """Attention over a whole text; `overrides` are further fields of `Attention`, or its widths."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    fields: dict[str, Any] = {
        "position": "none",
        "qkv_bias": True,
        "out_bias": True,
        "dropout": c.probability("attention_probs_dropout_prob"),
        "wide_softmax": False,
        **overrides,
    }
    return softmax_attention(
        hidden=hidden,
        heads=heads,
        names=names,
        out_name=out,
        causal=False,
        cached=False,
        **fields,
    )


def encoder_layer(
    c: Fields,
    attention: Attention,
    *,
    mlp_names: Sequence[str] = ("dense", "dense"),
    norm_names: Sequence[str] = ("LayerNorm", "LayerNorm"),
) -> Layer:
    hidden = c.size("hidden_size")
    block = mlp(
        hidden=hidden,
        width=c.size("intermediate_size"),
        activation=c.text("hidden_act"),
        names=mlp_names,
        bias=True,
    )
    return Layer(
        attentions=(attention,),
        mlp=block,
        norms=norms(norm_names, width=hidden, kind="layer", bias=True),
        post_norm=True,
        dropouts=(hidden,) * 2 if c.probability("hidden_dropout_prob") else (),
    )


def masked_head(
    c: Fields,
    width: int,
    *,
    names: tuple[str, str] = ("dense", "LayerNorm"),
    activation: str = "",
    bias: bool = True,
    norm_bias: bool = True,
    widens_logits: bool = False,
) -> MaskedHead:
    """Source: `BertPredictionHeadTransform` and its kin in transformers 5.23."""
    linear, norm = names
    return MaskedHead(
        width=width,
        linear=Linear(
            name=linear,
            in_features=c.size("hidden_size"),
            out_features=width,
            reads="last_hidden",
            bias=bias,
        ),
        activation=activation or c.text("hidden_act"),
        norm=Norm(name=norm, kind="layer", width=width, bias=norm_bias),
        widens_logits=widens_logits,
    )


def encoder(
    c: Fields,
    layers: Sequence[Layer],
    *,
    width: int | None = None,
    pooler: bool = False,
    positions: bool = True,
    **overrides: Any,
) -> ModelSpec:
    """An encoder without a head, as `AutoModel` builds it; `width` is that of the embeddings."""
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")
    width = width or hidden
    tables = [("word_embeddings", vocab)]
    if positions:
        tables.append(("position_embeddings", c.size("max_position_embeddings")))
    if types := c.size_or_none("type_vocab_size"):
        tables.append(("token_type_embeddings", types))
    spec: dict[str, Any] = {
        "groups": group(layers, stack="encoder"),
        "embeddings": tuple(Embedding(name=n, rows=rows, width=width) for n, rows in tables),
        "embedding_norms": norms(("LayerNorm",), width=width, kind="layer", bias=True),
        "other_params": hidden * hidden + hidden if pooler else 0,
        "embedding_dropouts": (width,) if c.probability("hidden_dropout_prob") else (),
        **overrides,
    }
    if "masked_head" not in spec:
        spec["masked_head"] = masked_head(c, width)
    if pooler:
        spec["masked_head"] = replace(spec["masked_head"], lost_params=spec["other_params"])
    return ModelSpec(
        name=c.name,
        model_type=c.text("model_type"),
        task="encoder",
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=c.size("max_position_embeddings"),
        dtype=c.dtype,
        config=c.values,
        **spec,
    )


# `BertModel.forward` of transformers 4.16 to 4.57 makes `extended_attention_mask`, which eager
# scores get in the dtype of the weights whatever the batch; 5.0 has `create_bidirectional_mask`.
_MASKS: dict[str, Any] = {"masks_keys_until": "5"}


def _bert(c: Fields) -> ModelSpec:
    layer = encoder_layer(c, self_attention(c, **_MASKS))
    return encoder(c, [layer] * c.layers(), pooler=True)


def after_padding(c: Fields) -> dict[str, Any]:
    """Positions that are counted from the one behind that of padding.

    Source: transformers 5.23 `RobertaEmbeddings.create_position_ids_from_input_ids`.
    """
    padding = 1 if c.get("pad_token_id") is None else c.count("pad_token_id")
    return {"positions_of_padding": padding + 1}


def _roberta(c: Fields) -> ModelSpec:
    layer = encoder_layer(c, self_attention(c, **_MASKS))
    return encoder(c, [layer] * c.layers(), pooler=True, **after_padding(c))


def _widened(width: int, hidden: int, name: str) -> tuple[Linear, ...]:
    """The projection from a narrower embedding to the stack."""
    return (
        Linear(name=name, in_features=width, out_features=hidden, reads="embedding", bias=True),
    )


def _electra(c: Fields) -> ModelSpec:
    width, hidden = c.size("embedding_size"), c.size("hidden_size")
    layer = encoder_layer(c, self_attention(c, **_MASKS))
    around = () if width == hidden else _widened(width, hidden, "embeddings_project")
    head = masked_head(c, width, activation="gelu")
    return encoder(c, [layer] * c.layers(), width=width, head_linears=around, masked_head=head)


def _distilbert(c: Fields) -> ModelSpec:
    layer = encoder_layer(
        c,
        self_attention(c, ("q_lin", "k_lin", "v_lin"), "out_lin"),
        mlp_names=("lin1", "lin2"),
        norm_names=("sa_layer_norm", "output_layer_norm"),
    )
    head = masked_head(c, c.size("hidden_size"), names=("vocab_transform", "vocab_layer_norm"))
    return encoder(c, [layer] * c.layers(), masked_head=head)


def _albert(c: Fields) -> ModelSpec:
    width, hidden = c.size("embedding_size"), c.size("hidden_size")
    num_groups, per_group = c.layers("num_hidden_groups"), c.layers("inner_group_num")
    layer = encoder_layer(
        c,
        self_attention(c, **_MASKS),
        mlp_names=("ffn", "ffn_output"),
        norm_names=("LayerNorm", "full_layer_layer_norm"),
    )
    # Each group's weights run several times; groups are equal in shape, so their split is even.
    runs = c.layers() // num_groups
    groups = (LayerGroup(layer=layer, count=runs, stack="encoder", shared=True),)
    return encoder(
        c,
        (),
        width=width,
        pooler=True,
        groups=groups * (num_groups * per_group),
        supports_checkpointing=False,
        head_linears=_widened(width, hidden, "embedding_hidden_mapping_in"),
    )


def _deberta(c: Fields) -> ModelSpec:
    hidden = c.size("hidden_size")
    extra: tuple[Embedding, ...] = ()
    embeddings_norm = norms(("LayerNorm",), width=hidden, kind="layer", bias=True)
    reach = c.size_or_none("max_relative_positions") or c.size("max_position_embeddings")
    rows = 2 * (c.size_or_none("position_buckets") or reach)
    attention = self_attention(
        c,
        ("query_proj", "key_proj", "value_proj"),
        position="relative",
        sdpa="eager",
        flash=False,
        relative_rows=rows,
    )
    if not c.flag("relative_attention"):
        attention = self_attention(c, ("query_proj", "key_proj", "value_proj"), flash=False)
    elif not c.flag("share_att_key"):
        raise ConfigError(
            f"{c.name}: share_att_key is false; only DeBERTa with shared keys (v3 and v2-xlarge) "
            "is described"
        )
    layer = encoder_layer(c, attention)
    spec = encoder(c, [layer] * c.layers(), positions=c.flag("position_biased_input"))
    if c.flag("relative_attention"):
        extra = (Embedding(name="rel_embeddings", rows=rows, width=hidden),)
    if "layer_norm" in str(c.get("norm_rel_ebd")):
        embeddings_norm += norms(("LayerNorm",), width=hidden, kind="layer", bias=True)
    conv = c.size_or_none("conv_kernel_size") or 0
    # DeBERTa-v2-xlarge: one convolution with its norm beside the first layer.
    conv_params = hidden * hidden * conv + 3 * hidden if conv else 0
    return replace(
        spec,
        embeddings=spec.embeddings + extra,
        embedding_norms=embeddings_norm,
        other_params=conv_params,
    )


def _modernbert(c: Fields) -> ModelSpec:
    hidden, heads, count = (
        c.size("hidden_size"),
        c.size("num_attention_heads"),
        c.layers(),
    )
    bias, norm_bias = c.flag("attention_bias"), c.flag("norm_bias")
    every = c.size("global_attn_every_n_layers")
    types = c.items("layer_types", length=count) or [
        "sliding_attention" if i % every else "full_attention" for i in range(count)
    ]
    width = c.size("intermediate_size")
    block = mlp(
        hidden=hidden,
        width=width,
        activation=c.text("hidden_activation"),
        names=("Wi", "Wo"),
        fused=True,
        bias=c.flag("mlp_bias"),
    )
    layers = []
    for number, kind in enumerate(types):
        attention = self_attention(
            c,
            ("Wqkv",),
            "Wo",
            qkv_bias=bias,
            out_bias=bias,
            position="rope",
            dropout=c.probability("attention_dropout"),
            rotary_dim=hidden // heads,
            wide_rotation="inline",
            wide_softmax=True,
            # local_attention is the whole window, half of it to each side
            sliding_window=None if kind == "full_attention" else c.size("local_attention"),
        )
        # the first layer reads the embedding's norm directly
        names = ("attn_norm", "mlp_norm") if number else ("mlp_norm",)
        layers.append(
            Layer(
                attentions=(attention,),
                mlp=block,
                norms=norms(names, width=hidden, kind="layer", bias=norm_bias),
            )
        )

    def norm(name: str) -> tuple[Norm, ...]:
        return norms((name,), width=hidden, kind="layer", bias=norm_bias)

    return encoder(
        c,
        layers,
        embeddings=(Embedding(name="tok_embeddings", rows=c.size("vocab_size"), width=hidden),),
        embedding_norms=norm("norm"),
        final_norms=norm("final_norm"),
        rotates_each_kind=True,
        masked_head=masked_head(
            c,
            hidden,
            names=("dense", "norm"),
            activation=c.text("classifier_activation"),
            bias=c.flag("classifier_bias"),
            norm_bias=norm_bias,
            widens_logits=True,
        ),
    )


def _electra_labels(c: Fields, model: ModelSpec) -> LabelHeads:
    return with_dense_head(c, model, activation="gelu")


def _distilbert_labels(c: Fields, model: ModelSpec) -> LabelHeads:
    # PEFT copies every module whose name ends in `classifier`
    return of_encoder(
        c,
        transform(c, "relu", name="pre_classifier", in_head=True),
        drops_tokens=c.probability("hidden_dropout_prob") > 0,
        drops_spans=c.probability("qa_dropout") > 0,
    )


def _albert_labels(c: Fields, model: ModelSpec) -> LabelHeads:
    pooler = transform(c, "tanh", name="pooler", in_model=True)
    drops = c.probability("classifier_dropout_prob") > 0
    lost = pooler.linear.num_params
    return of_encoder(c, pooler, lost_params=lost, drops_tokens=drops)


def _deberta_labels(c: Fields, model: ModelSpec) -> LabelHeads:
    drops = c.probability("hidden_dropout_prob") > 0
    return of_encoder(c, transform(c, c.text("pooler_hidden_act")), drops_tokens=drops)


def _modernbert_labels(c: Fields, model: ModelSpec) -> LabelHeads:
    """Its transform stands before labels of tokens and spans, too, and is in no head of PEFT's."""
    assert model.masked_head is not None
    assert model.masked_head.linear is not None
    every = transform(
        c,
        c.text("classifier_activation"),
        norm=model.masked_head.norm,
        bias=model.masked_head.linear.bias,
    )
    heads = []
    for task, head in of_encoder(c, every, drops_tokens=False):
        copied = task != SPANS  # its name is `classifier`, where PEFT looks for `qa_outputs`
        out = projection(
            "classifier",
            c.size("hidden_size"),
            bias=True,
            out_features=head.projection.out_features,
            copied=copied,
        )
        averages = head.pools == "before" and c.text("classifier_pooling") == "mean"
        labels = replace(head, projection=out, transform=every, copied=copied, averages=averages)
        heads.append((task, labels))
    return tuple(heads)


LABEL_HEADS = {
    "bert": with_pooler,
    "roberta": with_dense_head,
    "xlm-roberta": with_dense_head,
    "camembert": with_dense_head,
    "electra": _electra_labels,
    "distilbert": _distilbert_labels,
    "albert": _albert_labels,
    "deberta-v2": _deberta_labels,
    "modernbert": _modernbert_labels,
}
BUILDERS = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "electra": _electra,
    "distilbert": _distilbert,
    "albert": _albert,
    "deberta-v2": _deberta,
    "modernbert": _modernbert,
}
