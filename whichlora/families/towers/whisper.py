"""Whisper's encoder: a clip of sound as mel frames, always padded to the same length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from whichlora.families.blocks import mlp, norms, softmax_attention
from whichlora.families.fields import Fields
from whichlora.families.towers.parts import dense, stack
from whichlora.spec.layer import Attention, Layer, LayerGroup, Linear
from whichlora.spec.tower import ImageGrid, Tower

Side = Literal["encoder", "decoder"]
FRAMES = 2  # of one position: the stride of the second convolution
_KERNEL = 3  # frames that a convolution reads
FRAME_S = 0.01  # from one frame to the next: 160 of 16,000 samples a second


@dataclass(frozen=True, slots=True)
class ClipGrid:
    """Every clip is padded, or cut, to `positions`.

    Kind: exact. Source: transformers 5.23 `WhisperFeatureExtractor.__call__`,
    `WhisperEncoder.forward`, which refuses any other length.
    """

    positions: int
    mel_bins: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        return ImageGrid(
            crops=1,
            patches=self.positions,
            tokens=0,
            attended=self.positions,
            pixels=(1, self.mel_bins, FRAMES * self.positions),
        )


def attention(c: Fields, side: Side, **overrides: Any) -> Attention:
    """`WhisperAttention`, whose keys have no bias."""
    block = softmax_attention(
        hidden=c.size("hidden_size"),
        heads=c.size(f"{side}_attention_heads"),
        out_name="out_proj",
        qkv_bias=True,
        out_bias=True,
        position="none",
        dropout=c.probability("attention_dropout"),
        wide_softmax=False,
        projection="contiguous",
        **overrides,
    )
    linears = tuple(replace(x, bias=x.bias and x.name != "k_proj") for x in block.linears)
    return replace(block, linears=linears)


def layer(c: Fields, side: Side, attentions: dict[str, Attention]) -> Layer:
    """Blocks by the names of the norms before them, and the MLP."""
    hidden = c.size("hidden_size")
    names = (*attentions, "final_layer_norm")
    return Layer(
        attentions=tuple(attentions.values()),
        mlp=replace(
            mlp(
                hidden=hidden,
                width=c.size(f"{side}_ffn_dim"),
                activation=c.text("activation_function"),
                names=("fc1", "fc2"),
                bias=True,
                dropout=c.probability("activation_dropout") > 0,
            ),
            is_inline=True,
        ),
        norms=norms(names, width=hidden, kind="layer", bias=True),
        dropouts=(hidden,) * len(names) if c.probability("dropout") else (),
    )


def encoder(
    c: Fields,
    *,
    linears: tuple[Linear, ...] = (),
    copies_gradients: bool = False,
    **overrides: Any,
) -> Tower:
    """`WhisperEncoder`: two convolutions, blocks and a norm, which a decoder attends to.

    Args:
        linears: matrices behind it.
        copies_gradients: of its blocks.
        overrides: fields of the tower that are others in a class that copies it.
    """
    width, bins = c.size("hidden_size"), c.size("num_mel_bins")
    positions = c.size("max_source_positions")
    block = layer(
        c,
        "encoder",
        {"self_attn_layer_norm": attention(c, "encoder", causal=False, cached=False)},
    )
    block = replace(block, copies_gradients=copies_gradients)
    settings: dict[str, Any] = {
        "grid": ClipGrid(positions, bins),
        "fields": ("input_features",),
        "projector": "whisper",
        "merge": 1,
        "num_returned": 0,
        "copies": 0,
        "holds_narrow": False,
        "normalises": True,
        "attended": True,
        "fused_head": False,
    }
    return Tower(
        stack=stack(
            c,
            (LayerGroup(layer=block, count=c.layers("encoder_layers"), stack="encoder"),),
            width=width,
            linears=linears,
            other_params=dense(_KERNEL * bins, width) + dense(_KERNEL * width, width) + 2 * width,
        ),
        idle_params=positions * width,  # sines, which `WhisperEncoder.__init__` freezes
        # the first convolution's result and its GELU, of twice as many frames
        embedded=(2 * FRAMES * width, 0),
        # both, and the second convolution's result
        embedding_saved=(2 * FRAMES + 1) * width,
        embedding_weights=_KERNEL * width * (FRAMES * bins + width),
        hooked_weights=_KERNEL * width * width,
        window_s=FRAME_S * FRAMES * positions,
        **(settings | overrides),
    )
