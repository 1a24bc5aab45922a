"""Qwen2-Audio: Whisper's encoder, whose positions are averaged by two, before a language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from whichlora.families.fields import Fields
from whichlora.families.towers import whisper
from whichlora.families.towers.base import Multimodal
from whichlora.families.towers.parts import matrices
from whichlora.spec.numeric import ceil_div
from whichlora.spec.tower import ImageGrid, Tower

_HOP = 160  # samples from one mel frame to the next
_POOLED = 2  # positions of one vector


@dataclass(frozen=True, slots=True)
class PooledClipGrid:
    """A clip is padded, or cut, to `positions`; vectors of the padding are left out.

    Marks of its begin and its end stand around its tokens.

    Kind: exact. Source: transformers 5.23 `WhisperFeatureExtractor.__call__`,
    `Qwen2AudioProcessor._process_audio`, `Qwen2AudioModel.forward`.
    """

    positions: int
    mel_bins: int

    def __call__(self, height: int, width: int) -> ImageGrid:
        """Args: width: samples of the clip."""
        most = whisper.FRAMES * self.positions
        frames = min(ceil_div(width, _HOP), most)
        read = (frames - 1) // whisper.FRAMES + 1  # positions that are no padding
        return ImageGrid(
            crops=1,
            patches=self.positions,
            tokens=max(0, (read - _POOLED) // _POOLED + 1),
            pixels=(1, self.mel_bins, most),
            markers=2,
            projected=self.positions // _POOLED,
            masked=most,
            padding=self.positions - read,
            sides=(1, frames),
        )


def qwen2_audio(audio: Fields, text: Fields) -> Tower:
    """`Qwen2AudioEncoder` and `Qwen2AudioMultiModalProjector`."""
    audio = replace(audio, synonyms={"hidden_size": ("d_model",)})
    width, bins = audio.size("hidden_size"), audio.size("num_mel_bins")
    positions = audio.size("max_source_positions")
    projection = matrices([("linear", width, text.size("hidden_size"))])
    return whisper.encoder(
        audio,
        grid=PooledClipGrid(positions, bins),
        linears=projection,
        copies_gradients=True,  # as `AvgPool1d` lays them out
        fields=("input_features", "feature_attention_mask"),
        projector="qwen2_audio",
        merge=_POOLED,
        holds_narrow=True,
        normalises=False,  # a matrix stands behind the norm
        attended=False,
        returned_width=width,
        returns_normed=True,
        holds_mask=True,
        embeds_first=True,
        strips=True,
    )


_AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "hidden_size": 1280,
    "activation_function": "gelu",
    "max_source_positions": 1500,
}
TYPES: Mapping[str, Multimodal] = {
    "qwen2_audio": Multimodal(
        text="qwen2",
        tied=False,
        part="audio_config",
        scores_all=True,
        images=qwen2_audio,
        defaults=_AUDIO,
    )
}
