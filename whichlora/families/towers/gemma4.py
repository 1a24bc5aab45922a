"""Gemma 4's tower: images keep their shape, and are filled up to one number of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from whichlora.families.blocks import norms
from whichlora.families.fields import Fields
from whichlora.families.gemma import SANDWICH
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import block, matrices, self_attention, stack
from whichlora.spec.layer import Attention, Layer, LayerGroup, Linear, Norm
from whichlora.spec.tower import ImageGrid, Tower

_SOFT_TOKENS = 280  # `max_soft_tokens` of the processor
_AXES = 2
_KERNEL = 3 * 3  # of a convolution of sound
_MARKS = 2  # begin and end
_WRAPPED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def sides(height: int, width: int, *, cell: int, most: int) -> tuple[int, int]:
    """Rows and columns of cells, at most `most` of them, that an image is resized to.

    Kind: exact. Source: transformers 5.23 `get_aspect_ratio_preserving_size`.
    """
    factor = math.sqrt(most * cell**2 / (height * width))
    rows, columns = (math.floor(factor * side / cell) for side in (height, width))
    if not rows:
        return 1, min(width // height, most)
    if not columns:
        return min(height // width, most), 1
    return rows, columns


@dataclass(frozen=True, slots=True)
class PooledGrid:
    """Patches, `pool` squared of which become a token, and padding up to `most` tokens.

    Kind: exact. Source: transformers 5.23 `Gemma4ImageProcessor._preprocess`.
    """

    patch: int
    pool: int
    most: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        rows, columns = sides(height, width, cell=self.patch * self.pool, most=self.most)
        patches = self.most * self.pool**2
        return ImageGrid(
            crops=1,
            patches=patches,
            tokens=rows * columns,
            pixels=(1, patches, 3 * self.patch**2),
            sides=(rows * self.pool, columns * self.pool),
            markers=_MARKS,
            projected=self.most,
            masked=_AXES * patches,
            padding=patches - rows * columns * self.pool**2,
        )


def _attention(vision: Fields) -> Attention:
    head_dim, kv_heads = vision.size("head_dim"), vision.size("num_key_value_heads")
    heads = vision.size("num_attention_heads")
    plain = self_attention(
        vision.size("hidden_size"),
        heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        names=("linear", "linear", "linear"),
        out_name="linear",
        qkv_bias=False,
        out_bias=False,
        position="rope",
        rotary_dim=head_dim,
        rotated_parts=_AXES,
        projection="one_after_other",
        dropout=vision.probability("attention_dropout"),
    )
    rows = {"q_norm": heads, "k_norm": kv_heads, "v_norm": kv_heads}
    return replace(
        plain,
        norms=tuple(
            Norm(name=name, kind="rms_power", width=head_dim, rows=count, weight=name != "v_norm")
            for name, count in rows.items()
        ),
    )


def _layer(vision: Fields) -> Layer:
    """`Gemma4VisionEncoderLayer`, whose matrices PEFT sees inside of `Gemma4ClippableLinear`."""
    width = vision.size("hidden_size")
    layer = block(
        _attention(vision),
        width=width,
        wide=vision.size("intermediate_size"),
        activation=vision.text("hidden_activation"),
        norm="rms_power",
        names=("linear", "linear", "linear"),
        bias=False,
    )
    layer = replace(layer, norms=norms(SANDWICH, width=width, kind="rms_power"))
    return _clamped(layer) if vision.flag("use_clipped_linears") else layer


def _clamped(layer: Layer) -> Layer:
    assert layer.mlp is not None
    (attention,) = layer.attentions
    inside, fed = (
        tuple(replace(linear, clamped=True) for linear in linears)
        for linears in (attention.linears, layer.mlp.linears)
    )
    return replace(
        layer,
        attentions=(replace(attention, linears=inside),),
        mlp=replace(layer.mlp, linears=fed),
    )


def _audio(audio: Fields, hidden: int, *, quantises_last: bool) -> tuple[tuple[Linear, ...], int]:
    """Matrices and parameters of `Gemma4AudioModel` and its embedder, which no image passes."""
    width, depth, out = audio.size("hidden_size"), audio.layers(), audio.size("output_proj_dims")
    first, second = audio.items("subsampling_conv_channels", length=2) or (0, 0)
    inside = [("linear", width, 4 * width), ("linear", 4 * width, width)] * 2
    inside += [("linear", width, width)] * 5 + [("linear", width, 2 * width)]
    inside += [("relative_k_proj", width, width)]
    around = [("input_proj_linear", first // 4 * second, width)]
    (last,) = matrices([("embedding_projection", out, hidden)], bias=False)
    linears = (
        *matrices(inside, count=depth, bias=False),
        *matrices(around, bias=False),
        *matrices([("output_proj", width, out)]),
        replace(last, quantisable=quantises_last),
    )
    convolutions = _KERNEL * (first + first * second) + first + second  # with a norm each
    norms_of_layer = (2 * 2 + 2 + 3) * width
    kernel = audio.size("conv_kernel_size") * width
    scales = width // audio.size("num_attention_heads")  # `per_dim_scale`
    in_layers = depth * (norms_of_layer + kernel + scales)
    return linears, sum(x.num_params for x in linears) + convolutions + in_layers


def gemma4(vision: Fields, text: Fields) -> Tower:
    """`Gemma4VisionModel` and `Gemma4MultimodalEmbedder`, with the audio beside it."""
    width, head_dim = vision.size("hidden_size"), vision.size("head_dim")
    patch, pool = vision.size("patch_size"), vision.size("pooling_kernel_size")
    around = [("input_proj", 3 * patch**2, width)]
    around += [("embedding_projection", width, text.size("hidden_size"))]
    embedder, projection = matrices(around, bias=False)
    # `get_keys_to_not_convert` leaves out what comes last, which a tied head does not
    quantises_last, hears = not text.flag("tie_word_embeddings"), text.get("audio_config")
    idle: tuple[Linear, ...] = ()
    idle_params = 0
    if hears is not None:
        audio = text.part("audio_config", defaults=_AUDIO)
        idle, idle_params = _audio(audio, text.size("hidden_size"), quantises_last=quantises_last)
        quantises_last = True
    return Tower(
        block_class="Gemma4VisionEncoderLayer" if hears is None else "",
        stack=stack(
            vision,
            (LayerGroup(layer=_layer(vision), count=vision.layers(), stack="encoder"),),
            width=width,
            linears=(embedder, replace(projection, quantisable=quantises_last)),
            other_params=_AXES * vision.size("position_embedding_size") * width,
            embeds_in_steps=True,
        ),
        grid=PooledGrid(patch, pool, text.size("vision_soft_tokens_per_image")),
        fields=("pixel_values", "image_position_ids", "mm_token_type_ids"),
        projector="gemma4",
        merge=pool**2,
        idle=idle,
        idle_params=idle_params,
        table_width=2 * head_dim,
        hooked=False,  # `Gemma4VisionModel` names no embedding that is a module
        num_returned=0,
        returned_width=width,
        embedded=(5 * width, 0),  # of the pixels, and of rows, of columns, of both, and masked
        masks_text="windows" if text.get("use_bidirectional_attention") == "vision" else "",
        unfolds=True,
        holds_narrow=False,
        rescales_pixels=True,
        names_embedded=True,
        strips=True,
        wraps=_WRAPPED,
    )


_AUDIO = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "subsampling_conv_channels": [128, 32],
    "conv_kernel_size": 5,
    "output_proj_dims": 1536,
}
_GEMMA4 = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_dropout": 0.0,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
}
TYPES: Mapping[str, Multimodal] = {
    "gemma4": Multimodal(
        text="gemma4_text",
        tied=True,
        causal=True,
        hands_on_cache=True,
        images=gemma4,
        defaults=_GEMMA4,
        around={
            "vision_soft_tokens_per_image": _SOFT_TOKENS,
            "use_bidirectional_attention": None,
            "tie_word_embeddings": True,
            "audio_config": None,
        },
    )
}
