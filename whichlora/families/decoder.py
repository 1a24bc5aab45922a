"""The decoder layer that Llama made common, and the small differences its descendants have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from whichlora.families.blocks import (
    FeedForward,
    causal_lm,
    mlp,
    norms,
    numbered_layers,
    softmax_attention,
)
from whichlora.families.fields import Fields
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Norm, NormKind, PositionTables, WideRotation

PRE_NORM = ("input_layernorm", "post_attention_layernorm")
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a family differs from Llama, which is the default of every field.

    Args:
        qk_norm: a norm over each query and key "head", over the full projected "width", or
            one weight vector per head ("per_head": statistics per head, weights not shared).
        qkv_names: one name means a fused projection.
        mlp_names: three names are a gated MLP, two a plain one unless `fused_gate_up`.
        layer_norms: names over the hidden state; the first reads the layer's input.
        parallel: attention and MLP read the same normalised input and are added together.
        post_norm: the layer's input is normalised by no norm of its own.
        joins_rotation: heads are put together after the rotation even if all of each rotates.
        names_parts: so of `Attention`, where only a part of each head is rotated.
        wide_rotation, tables, has_temperature: so of `Attention`.
    """

    qkv_names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out_name: str = "o_proj"
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    fused_gate_up: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_kind: NormKind = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    layer_norms: tuple[str, ...] = PRE_NORM
    final_norm: str = "norm"
    qk_norm: Literal["none", "head", "width", "per_head"] = "none"
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_bias: bool = False
    parallel: bool = False
    post_norm: bool = False
    joins_rotation: bool = False
    names_parts: bool = False
    wide_rotation: WideRotation = ""
    tables: PositionTables = "stream"
    has_temperature: bool = False
    activation: str = "hidden_act"


def decoder(
    c: Fields,
    style: Style = Style(),
    *,
    layer_types: list[str] | None = None,
    feed_forward: FeedForward | None = None,
    has_rope: Callable[[int], bool] = lambda _: True,
    layer_fields: dict[str, Any] | None = None,
    sinks: bool = False,
    **spec: Any,
) -> ModelSpec:
    """A causal language model of Llama's shape.

    Args:
        c: the config, with the defaults of its class.
        style: what differs in every layer.
        layer_types: SLIDING or FULL per layer; None when `sliding_window`, if set, holds for all.
        feed_forward: layer number -> its MLP or mixture of experts; None for one MLP everywhere.
        has_rope: layer number -> whether positions are rotated there.
        layer_fields: further fields of every `Layer`.
        sinks: each head has a logit of its own beside those of the keys.
        spec: further fields of the `ModelSpec`.
    """
    hidden = c.size("hidden_size")
    dense = None
    if feed_forward is None:
        dense = mlp(
            hidden=hidden,
            width=c.size("intermediate_size"),
            activation=c.text(style.activation),
            names=style.mlp_names,
            fused=style.fused_gate_up,
            bias=style.mlp_bias,
            reads="attn_in" if style.parallel and len(style.layer_norms) == 1 else "mlp_in",
        )
    layer_norms = norms(
        style.layer_norms,
        width=hidden,
        kind=style.norm_kind,
        weight=style.norm_weight,
        bias=style.norm_bias,
    )

    drops = c.probability("resid_pdrop", "residual_dropout", "hidden_dropout") > 0

    @cache  # most layers are alike
    def attention_of(slides: bool, rotates: bool) -> Attention:
        return _attention(c, style, slides=slides, rotates=rotates, sinks=sinks)

    def attention(number: int) -> Attention:
        slides = layer_types is None or layer_types[number] == SLIDING
        return attention_of(slides, has_rope(number))

    layers = numbered_layers(
        c,
        attention,
        feed_forward or (lambda _: (dense, None)),
        norms=layer_norms,
        parallel=style.parallel,
        post_norm=style.post_norm,
        dropouts=(hidden,) * 2 if drops else (),
        **(layer_fields or {}),
    )
    final = norms(
        (style.final_norm,),
        width=hidden,
        kind=style.norm_kind,
        weight=style.norm_weight,
        bias=style.norm_bias,
    )
    if c.probability("embd_pdrop", "embedding_dropout"):
        spec.setdefault("embedding_dropouts", (hidden,))
    spec.setdefault("logit_softcap", c.number_or_none("final_logit_softcapping"))
    return causal_lm(c, layers, final_norms=final, head_bias=style.head_bias, **spec)


def _attention(c: Fields, style: Style, *, slides: bool, rotates: bool, sinks: bool) -> Attention:
    hidden = c.size("hidden_size")
    heads = c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", fallback=heads)
    head_dim = c.size("head_dim", fallback=hidden // heads)
    rotary_dim = int(head_dim * c.rotary_fraction) if rotates else 0
    softcap = c.number_or_none("attn_logit_softcapping")
    return softmax_attention(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        names=style.qkv_names,
        out_name=style.out_name,
        qkv_bias=style.qkv_bias,
        out_bias=style.out_bias,
        norms=_qk_norms(style, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
        position="rope" if rotates else "none",
        rotary_dim=rotary_dim,
        sliding_window=c.size_or_none("sliding_window") if slides else None,
        softcap=softcap,
        eager="sinks" if sinks else "scaled",
        other_params=heads if sinks else 0,
        dropout=c.probability("attention_dropout"),
        # SDPA's kernels have neither a soft cap nor sinks
        sdpa="fused" if softcap is None and not sinks else "eager",
        names_parts=style.names_parts,
        wide_rotation=style.wide_rotation,
        tables=style.tables,
        has_temperature=style.has_temperature,
        joins_rotation=rotates and (style.joins_rotation or rotary_dim < head_dim),
    )


def _qk_norms(style: Style, *, heads: int, kv_heads: int, head_dim: int) -> tuple[Norm, ...]:
    if style.qk_norm == "none":
        return ()
    kind: NormKind = "layer" if style.norm_kind == "layer" else style.norm_kind
    norms = []
    for name, rows in zip(style.qk_norm_names, (heads, kv_heads), strict=True):
        if style.qk_norm == "head":
            width, count = head_dim, rows
        else:  # "per_head" holds as many weights as one norm over the whole width
            width, count = rows * head_dim, 1
        norms.append(
            Norm(
                name=name,
                kind=kind,
                width=width,
                rows=count,
                weight=style.norm_weight,
                bias=style.qk_norm_bias,
                separate=rows if kind == "layer" and style.qk_norm == "per_head" else 0,
            )
        )
    return tuple(norms)


def every_nth_full(c: Fields, n: int) -> list[str]:
    """`layer_types` as listed, else every n-th layer attends to all tokens."""
    count = c.layers()
    listed = c.items("layer_types", length=count)
    if listed is not None:
        return listed
    return [FULL if n and (i + 1) % n == 0 else SLIDING for i in range(count)]


def late_sliding(c: Fields) -> list[str]:
    """Qwen's rule: a window, if switched on at all, starts at layer `max_window_layers`."""
    count = c.layers()
    if not c.flag("use_sliding_window"):
        return [FULL] * count
    listed = c.items("layer_types", length=count)
    if listed is not None:
        return listed
    first = c.count("max_window_layers")
    return [SLIDING if i >= first else FULL for i in range(count)]
