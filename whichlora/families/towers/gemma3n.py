"""Gemma 3n's towers of images and sound, as numbers of parameters: neither is passed yet."""

from __future__ import annotations

from collections.abc import Mapping

from whichlora.errors import ConfigError
from whichlora.families.fields import Fields
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import matrices
from whichlora.spec.layer import Linear

# Of convolutions alone, so that no matrix takes an adapter. Source: timm 1.0.31
# `mobilenetv5_300m_enc`.
_ENCODERS = {"mobilenetv5_300m_enc": 294_126_912}
_KERNEL = 3 * 3  # of a convolution of sound
_WIDENED = 4  # how often wider a feed-forward half is: `Gemma3nAudioConformerFeedForward`
_NORMS = 9  # of a block


def _audio(around: Fields) -> Fields | None:
    stated = around.get("audio_config")
    return None if stated is None else around.part("audio_config", defaults=_AUDIO)


def _embedder(modal: Fields, text: Fields) -> int:
    """`Gemma3nMultimodalEmbedder`: a table of its own tokens, norms of both kinds, a projection."""
    width = modal.size("hidden_size")
    return width * (modal.size("vocab_size") + 2 + text.size("hidden_size"))


def _linears(vision: Fields, around: Fields) -> tuple[Linear, ...]:
    """Those of `Gemma3nAudioEncoder`, and the last of each embedder."""
    hidden, audio = around.size("hidden_size"), _audio(around)
    into = [(_PROJECTION, vision.size("hidden_size"), hidden)]
    if audio is None:
        return matrices(into, bias=False)
    width, wide = audio.size("hidden_size"), _WIDENED * audio.size("hidden_size")
    inside = [("ffw_layer_1", width, wide), ("ffw_layer_2", wide, width)] * 2
    inside += [(name, width, width) for name in ("pos_proj", "q_proj", "k_proj", "v_proj", "post")]
    inside += [("linear_start", width, 2 * width), ("linear_end", width, width)]
    into += [(_PROJECTION, width, hidden)]
    into += [("input_proj_linear", _subsampled(audio), width)]
    depth = audio.layers("conf_num_hidden_layers")
    return (*matrices(inside, count=depth, bias=False), *matrices(into, bias=False))


def _subsampled(audio: Fields) -> int:
    """Numbers of a frame after two convolutions, each of which halves what it hears."""
    _, channels = audio.items("sscp_conv_channel_size", length=2) or (0, 0)
    return int(channels * (audio.size("input_feat_size") // 4))


def _count(vision: Fields, around: Fields) -> int:
    name = vision.text("architecture")
    if name not in _ENCODERS:
        raise ConfigError(
            f"{vision.name}: vision_config.architecture is {name!r}; known of gemma3n is "
            f"{', '.join(_ENCODERS)}"
        )
    total = _ENCODERS[name] + _embedder(vision, around)
    audio = _audio(around)
    if audio is None:
        return total
    width = audio.size("hidden_size")
    first, second = audio.items("sscp_conv_channel_size", length=2) or (0, 0)
    convolutions = _KERNEL * (first + first * second) + first + second  # with a norm each
    scale = width // audio.size("conf_num_attention_heads")
    of_block = (_NORMS + audio.size("conf_conv_kernel_size")) * width + scale
    in_linears = sum(
        linear.num_params for linear in _linears(vision, around) if linear.name != _PROJECTION
    )
    encoder = in_linears + convolutions + audio.layers("conf_num_hidden_layers") * of_block
    return int(total + encoder + _embedder(audio, around))


_PROJECTION = "embedding_projection"
_AUDIO = {
    "hidden_size": 1536,
    "vocab_size": 128,
    "input_feat_size": 128,
    "conf_num_attention_heads": 8,
    "conf_num_hidden_layers": 12,
    "conf_conv_kernel_size": 5,
    "sscp_conv_channel_size": [128, 32],
}
TYPES: Mapping[str, Multimodal] = {
    "gemma3n": Multimodal(
        text="gemma3n_text",
        tied=True,
        causal=True,
        counted=lambda vision, around: (_count(vision, around), _linears(vision, around)),
        defaults={"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "vocab_size": 128},
        around={"audio_config": None},
    )
}
