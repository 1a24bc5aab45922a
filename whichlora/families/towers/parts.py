"""What towers are put together from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from whichlora.families.blocks import mlp, softmax_attention
from whichlora.families.fields import Fields
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention, Layer, LayerGroup, Linear, Norm, NormKind


def matrices(
    shapes: Iterable[tuple[str, int, int]], *, count: int = 1, bias: bool = True
) -> tuple[Linear, ...]:
    """Matrices by name, input and output, `count` of each."""
    return tuple(
        Linear(name=name, in_features=into, out_features=out, reads="tower", count=count, bias=bias)
        for name, into, out in shapes
    )


def dense(in_features: int, out_features: int) -> int:
    """Parameters of a matrix with a bias."""
    return in_features * out_features + out_features


def self_attention(width: int, heads: int, **overrides: Any) -> Attention:
    """Every patch sees every other of its image, or of its window; positions are looked up."""
    settings: dict[str, Any] = {"position": "none", "qkv_bias": True, "out_bias": True}
    return softmax_attention(
        hidden=width, heads=heads, cached=False, causal=False, **(settings | overrides)
    )


def packed_attention(vision: Fields, width: int, **overrides: Any) -> Attention:
    """That of patches of all images in one row, by one matrix, with rotated positions."""
    heads = vision.size("num_heads")
    return self_attention(
        width,
        heads,
        names=("qkv",),
        out_name="proj",
        position="rope",
        rotary_dim=width // heads,
        wide_rotation="named",
        packed=True,
        **overrides,
    )


def rotation_bytes(vision: Fields, width: int) -> int:
    """Of the cosines and sines of one patch, in fp32."""
    return 2 * 4 * (width // vision.size("num_heads"))


def block(
    attention: Attention,
    *,
    width: int,
    wide: int,
    activation: str,
    norm: NormKind,
    names: tuple[str, ...],
    bias: bool = True,
) -> Layer:
    """A norm before attention and one before the MLP."""
    norms = tuple(
        Norm(name=name, kind=norm, width=width, bias=norm == "layer") for name in ("norm1", "norm2")
    )
    fed = mlp(hidden=width, width=wide, activation=activation, names=names, bias=bias)
    return Layer(attentions=(attention,), mlp=fed, norms=norms)


def stack(
    vision: Fields,
    groups: tuple[LayerGroup, ...],
    *,
    width: int,
    linears: tuple[Linear, ...],
    other_params: int,
    embeds_in_steps: bool = False,
    embedding_norms: tuple[Norm, ...] = (),
) -> ModelSpec:
    """The blocks of a tower and what is around them.

    Args:
        embeds_in_steps: the first block reads something else than the embedded patches.
    """
    return ModelSpec(
        name=vision.name,
        model_type="vision tower",
        task="encoder",
        hidden_size=width,
        vocab_size=1,
        groups=groups,
        embeddings=(),
        head_linears=linears,
        other_params=other_params,
        embeds_in_steps=embeds_in_steps,
        embedding_norms=embedding_norms,
    )
