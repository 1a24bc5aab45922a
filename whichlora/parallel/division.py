"""The model of one rank whose matrices are divided: its share of the heads, features and rows."""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.architecture import Embedding, ModelSpec
from whichlora.spec.layer import Attention, Layer, LayerGroup, Linear, Mlp, Norm
from whichlora.spec.numeric import ceil_div

# Leaves that plans name "colwise" (a part of what they return) and "rowwise" (of what they read).
# Source: `base_model_tp_plan` of the configs of transformers 5.23.
COLUMNS = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "query_key_value",
        "gate_proj",
        "up_proj",
        "fc1",
        "c_fc",
        "dense_h_to_4h",
    }
)
ROWS = frozenset({"o_proj", "dense", "down_proj", "fc2", "c_proj", "dense_4h_to_h"})

# Types of models whose plan has these two styles alone, beside norms over a head, the embedding
# and the head ("colwise_gather_output").
PLANNED = frozenset(
    {
        "cohere",
        "cohere2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "internlm3",
        "llama",
        "ministral3",
        "mistral",
        "olmo",
        "qwen2",
        "qwen3",
        "smollm3",
        "gpt_neox",
        "nemotron",
        "phi",
        "starcoder2",
    }
)
WITHOUT_PLAN = frozenset(
    {
        "albert",
        "bart",
        "bert",
        "bloom",
        "dbrx",
        "deberta-v2",
        "distilbert",
        "electra",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_oss",
        "gptj",
        "lfm2",
        "modernbert",
        "mpt",
        "mt5",
        "opt",
        "roberta",
        "stablelm",
        "t5",
        "xlm-roberta",
    }
)


def divided_linear(linear: Linear, size: int) -> Linear:
    """Source: transformers 5.23 `ColwiseParallel.shard_param`, `RowwiseParallel.shard_param`."""
    if linear.name in COLUMNS:
        return replace(linear, out_features=ceil_div(linear.out_features, size))
    if linear.name in ROWS:
        return replace(linear, in_features=ceil_div(linear.in_features, size))
    return linear


def _divided_linears(linears: tuple[Linear, ...], size: int) -> tuple[Linear, ...]:
    return tuple(divided_linear(linear, size) for linear in linears)


def _divided_attention(attention: Attention, size: int) -> Attention:
    norms = tuple(_per_head(norm, size) for norm in attention.norms)
    return replace(
        attention,
        num_attention_heads=attention.num_attention_heads // size,
        num_key_value_heads=attention.num_key_value_heads // size,
        linears=_divided_linears(attention.linears, size),
        norms=norms,
        cache_elements=attention.cache_elements // size,
    )


def _per_head(norm: Norm, size: int) -> Norm:
    return replace(norm, rows=norm.rows // size)


def _divided_mlp(mlp: Mlp, size: int) -> Mlp:
    return replace(
        mlp, width=ceil_div(mlp.width, size), linears=_divided_linears(mlp.linears, size)
    )


def _divided_layer(layer: Layer, size: int) -> Layer:
    return replace(
        layer,
        attentions=tuple(_divided_attention(attention, size) for attention in layer.attentions),
        mlp=None if layer.mlp is None else _divided_mlp(layer.mlp, size),
    )


def _divided_group(group: LayerGroup, size: int) -> LayerGroup:
    return replace(group, layer=_divided_layer(group.layer, size))


def _divided_table(table: Embedding, size: int) -> Embedding:
    # `init_parallel_plans` of mixin.py adds the token embedding to the plan under this name alone
    if table.name != "embed_tokens":
        return table
    return replace(table, rows=ceil_div(table.rows, size))


def divided_model(model: ModelSpec, size: int) -> ModelSpec:
    """What the first of `size` ranks has of `model`; later ones may have less, never more.

    Norms are whole, logits too: `vocab_size` is.
    Kind: exact. Source: transformers 5.23 `apply_tensor_parallelism`.
    """
    head = model.head
    if head is not None:
        head = replace(head, out_features=ceil_div(head.out_features, size))
    return replace(
        model,
        groups=tuple(_divided_group(group, size) for group in model.groups),
        embeddings=tuple(_divided_table(table, size) for table in model.embeddings),
        head=head,
    )
