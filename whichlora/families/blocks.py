"""The blocks that families are put together from: projections, MLPs, experts and whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from whichlora.families.fields import Fields
from whichlora.spec.architecture import Embedding, ModelSpec
from whichlora.spec.layer import Attention, Layer, LayerGroup, Linear, Mlp, Moe, Norm, NormKind

FeedForward = Callable[[int], tuple[Mlp | None, Moe | None]]
"""The number of a layer -> its MLP or its mixture of experts."""


def qkv_linears(
    *,
    hidden: int,
    q_width: int,
    kv_width: int,
    names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    bias: bool = False,
) -> tuple[Linear, ...]:
    """The input projections of an attention: three matrices, or one fused under one name."""
    widths = (q_width + 2 * kv_width,) if len(names) == 1 else (q_width, kv_width, kv_width)
    return tuple(
        Linear(name=name, in_features=hidden, out_features=width, reads="attn_in", bias=bias)
        for name, width in zip(names, widths, strict=True)
    )


def softmax_attention(
    *,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    out_name: str = "o_proj",
    qkv_bias: bool = False,
    out_bias: bool = False,
    cached: bool = True,
    cross: bool = False,
    **overrides: Any,
) -> Attention:
    """Softmax attention with plain projections; `overrides` are further fields of `Attention`.

    Args:
        kv_heads: without it, each head has keys and values of its own.
        head_dim: without it, the heads split the hidden state.
    """
    kv_heads, head_dim = kv_heads or heads, head_dim or hidden // heads
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    linears = qkv_linears(
        hidden=hidden, q_width=q_width, kv_width=kv_width, names=names, bias=qkv_bias
    )
    if cross:  # queries come from the decoder, keys and values from the encoder's output
        reads = ("cross_in", "encoder_out", "encoder_out")
        linears = tuple(
            replace(linear, reads=label) for linear, label in zip(linears, reads, strict=True)
        )
    out = Linear(
        name=out_name,
        in_features=q_width,
        out_features=hidden,
        reads="cross_out" if cross else "attn_out",
        bias=out_bias,
    )
    return Attention(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        linears=(*linears, out),
        cross=cross,
        **{"cache_elements": 2 * kv_width if cached else 0, **overrides},
    )


def mlp(
    *,
    hidden: int,
    width: int,
    activation: str,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    fused: bool = False,
    bias: bool = False,
    reads: str = "mlp_in",
    act: str = "mlp_act",
    extra: tuple[Linear, ...] = (),
    norms: tuple[Norm, ...] = (),
    dropout: bool = False,
) -> Mlp:
    """A feed-forward block: gated with three names (or two and `fused`), plain with two."""
    *inputs, down = names
    gated = fused or len(inputs) == 2
    in_width = 2 * width if fused else width
    return Mlp(
        width=width,
        gated=gated,
        activation=activation,
        linears=(
            *(
                Linear(name=name, in_features=hidden, out_features=in_width, reads=reads, bias=bias)
                for name in inputs
            ),
            Linear(name=down, in_features=width, out_features=hidden, reads=act, bias=bias),
            *extra,
        ),
        norms=norms,
        dropout=dropout,
    )


def moe(
    *,
    hidden: int,
    width: int,
    activation: str,
    num_experts: int,
    experts_per_token: int,
    bias: bool = False,
    router: Linear | None = None,
    shared: Mlp | None = None,
    other_params: int = 0,
    **overrides: Any,
) -> Moe:
    """Routed experts as transformers 5 stores them: two 3-D parameters, not modules.

    bitsandbytes passes them by, and so does PEFT but for the types in `experts`; the router is a
    bare parameter too unless `router` says otherwise. `overrides` are further fields of `Moe`.
    """
    shape: dict[str, Any] = {"count": num_experts, "active": experts_per_token, "is_module": False}
    expert = Mlp(
        width=width,
        gated=True,
        activation=activation,
        linears=(
            Linear(
                name="gate_up_proj",
                in_features=hidden,
                out_features=2 * width,
                reads="expert_in",
                bias=bias,
                **shape,
            ),
            Linear(
                name="down_proj",
                in_features=width,
                out_features=hidden,
                reads="expert_act",
                bias=bias,
                **shape,
            ),
        ),
    )
    return Moe(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert=expert,
        router=router or bare_router(hidden, num_experts, bias=bias),
        shared=shared,
        other_params=other_params,
        **overrides,
    )


def bare_router(hidden: int, num_experts: int, *, bias: bool = False) -> Linear:
    """A router whose weight is a parameter of its own class, so that PEFT does not see it."""
    return Linear(
        name="gate",
        in_features=hidden,
        out_features=num_experts,
        reads="mlp_in",
        bias=bias,
        is_module=False,
    )


def norms(
    names: Iterable[str], *, width: int, kind: NormKind, weight: bool = True, bias: bool = False
) -> tuple[Norm, ...]:
    """Norms over the hidden state, in forward order."""
    return tuple(
        Norm(name=name, kind=kind, width=width, weight=weight, bias=bias) for name in names
    )


def mlp_in_every_layer(c: Fields, *, bias: bool = False) -> FeedForward:
    """A gated MLP of the config's width, the same in every layer."""
    block = mlp(
        hidden=c.size("hidden_size"),
        width=c.size("intermediate_size"),
        activation=c.text("hidden_act"),
        bias=bias,
    )
    return lambda _: (block, None)


def numbered_layers(
    c: Fields, attention: Callable[[int], Attention], feed_forward: FeedForward, **fields: Any
) -> list[Layer]:
    """The layers of a decoder, each with the attention and the MLP or experts of its number.

    Args:
        fields: further fields of every `Layer`.
    """
    layers = []
    for number in range(c.layers()):
        block, experts = feed_forward(number)
        layers.append(Layer(attentions=(attention(number),), mlp=block, moe=experts, **fields))
    return layers


def group(
    layers: Sequence[Layer], *, stack: Literal["decoder", "encoder"] = "decoder"
) -> tuple[LayerGroup, ...]:
    """Equal layers counted together, in order of first appearance."""
    places: dict[Layer, list[int]] = {}
    for number, layer in enumerate(layers):
        places.setdefault(layer, []).append(number)
    return tuple(
        LayerGroup(
            layer=layer, count=len(block_numbers), positions=tuple(block_numbers), stack=stack
        )
        for layer, block_numbers in places.items()
    )


def causal_lm(
    c: Fields,
    layers: Sequence[Layer],
    *,
    final_norms: tuple[Norm, ...],
    embedding_name: str = "embed_tokens",
    head_bias: bool = False,
    **overrides: Any,
) -> ModelSpec:
    """A decoder with a token embedding and a head; `overrides`: further fields of `ModelSpec`."""
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")
    token = Embedding(name=embedding_name, rows=vocab, width=hidden)
    head = Linear(
        name="lm_head", in_features=hidden, out_features=vocab, reads="head_in", bias=head_bias
    )
    spec: dict[str, Any] = {
        "embeddings": (token,),
        "head": head,
        "head_tied": c.flag("tie_word_embeddings"),
        "max_position_embeddings": c.size_or_none("max_position_embeddings"),
        **overrides,
    }
    return ModelSpec(
        name=c.name,
        model_type=c.text("model_type"),
        task="causal-lm",
        hidden_size=hidden,
        vocab_size=vocab,
        groups=group(layers),
        final_norms=final_norms,
        dtype=c.dtype,
        config=c.values,
        **spec,
    )


def encoder_decoder(
    c: Fields, encoder: Sequence[Layer], decoder: Sequence[Layer], *, tied: bool, **overrides: Any
) -> ModelSpec:
    """Two stacks with one head; `overrides` are further fields of `ModelSpec`."""
    hidden, vocab = c.size("hidden_size"), c.size("vocab_size")
    spec: dict[str, Any] = {
        "head": Linear(name="lm_head", in_features=hidden, out_features=vocab, reads="head_in"),
        **overrides,
    }
    return ModelSpec(
        name=c.name,
        model_type=c.text("model_type"),
        task="seq2seq-lm",
        hidden_size=hidden,
        vocab_size=vocab,
        groups=group(encoder, stack="encoder") + group(decoder, stack="decoder"),
        head_tied=tied,
        dtype=c.dtype,
        config=c.values,
        **spec,
    )
