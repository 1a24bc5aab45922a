"""Which operators of a model Liger's kernels replace: `use_liger_kernel` of `TrainingArguments`.

Source: liger-kernel 0.8.5 `transformers/monkey_patch.py`, `MODEL_TYPE_TO_APPLY_LIGER_FN`; rotary
positions, norms and MLPs of each `apply_liger_kernel_to_*`, with the defaults of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from whichlora.errors import ConfigError
from whichlora.spec.kernels import FusedKernels, Kernel

VERSION = "0.8.5"
LigerKernel = Literal[
    "rope", "rms_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy"
]
LIGER_KERNELS: tuple[str, ...] = get_args(LigerKernel)
LOSSES = frozenset({"cross_entropy", "fused_linear_cross_entropy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LigerPatch:
    """What Liger can replace in the models of a type.

    Args:
        gated: its name for the MLP's kernel.
        norm: where the gradient of its RMSNorm goes.
        rope: it has rotary positions for the type.
        experts: the MLP's kernel is one of a mixture, which computes all experts.
        loss: what it computes the loss with where nobody says.
    """

    gated: Literal["swiglu", "geglu"] = "swiglu"
    norm: Kernel = "in_place"
    rope: bool = True
    experts: bool = False
    loss: Literal["cross_entropy", "fused_linear_cross_entropy"] = "fused_linear_cross_entropy"

    @property
    def kernels(self) -> frozenset[str]:
        return LOSSES | {"rms_norm", self.gated} | ({"rope"} if self.rope else set())

    @property
    def usual(self) -> frozenset[str]:
        return (self.kernels - LOSSES) | {self.loss}


# Types that Liger patches, of which only the loss is written down here.
_LOSS_ALONE = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone4", "falcon_h1", "gemma3", "gemma4"),
    *("gemma4_text", "glm4v", "glm4v_moe", "gpt_oss", "hunyuan_v1_moe", "internvl", "llama4"),
    *("llama4_text", "llava", "mllama", "mllama_text_model", "muse_glimmer", "nemotron"),
    *("paligemma", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen3_vl"),
    *("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "smolvlm"),
)
_PATCHES: Mapping[str, LigerPatch] = {
    **dict.fromkeys(("llama", "ministral", "mistral", "qwen2", "qwen3", "smollm3"), LigerPatch()),
    **dict.fromkeys(("phi3", "hunyuan_v1_dense"), LigerPatch()),
    "granite": LigerPatch(loss="cross_entropy"),
    "gemma": LigerPatch(gated="geglu"),
    **dict.fromkeys(("gemma2", "gemma3_text"), LigerPatch(gated="geglu", norm="apart")),
    **dict.fromkeys(("olmo2", "olmo3"), LigerPatch(norm="apart")),
    "glm4": LigerPatch(norm="apart", rope=False),
    **dict.fromkeys(("mixtral", "qwen3_moe"), LigerPatch(experts=True)),
    **dict.fromkeys(_LOSS_ALONE, LigerPatch()),
}


def liger_kernels(model_type: str, config: Mapping[str, bool]) -> frozenset[str]:
    """The predicted kernels that run in a model of this type; none where Liger has none for it.

    Args:
        config: `liger_kernel_config`, whose names that the type lacks Liger passes over.

    Raises:
        ConfigError: two losses.
    """
    return _asked(model_type, config) - _left_out(model_type)


def _asked(model_type: str, config: Mapping[str, bool]) -> frozenset[str]:
    patch = _PATCHES.get(model_type)
    if patch is None:
        return frozenset()
    asked = {name: on for name, on in config.items() if name in patch.kernels}
    on = (patch.usual - set(asked)) | {name for name, wanted in asked.items() if wanted}
    if on >= LOSSES:
        raise ConfigError(
            "liger_kernel_config: Liger takes cross_entropy or fused_linear_cross_entropy, not "
            "both; set one of them to false"
        )
    return frozenset(on)


def _left_out(model_type: str) -> frozenset[str]:
    """Kernels that are not written down here: the stock operators keep as much or more."""
    patch = _PATCHES[model_type] if model_type in _PATCHES else LigerPatch()
    if model_type in _LOSS_ALONE:
        return frozenset(LIGER_KERNELS) - {"fused_linear_cross_entropy"}
    return frozenset({"cross_entropy", *((patch.gated,) if patch.experts else ())})


def liger_notes(model_type: str, config: Mapping[str, bool]) -> tuple[str, ...]:
    """What a user of Liger's kernels must know of models of this type.

    Raises:
        ConfigError: two losses.
    """
    if model_type not in _PATCHES:
        return (f"liger-kernel {VERSION} has no kernels for {model_type}: it replaces nothing",)
    unknown = sorted(_asked(model_type, config) & _left_out(model_type))
    if not unknown:
        return ()
    return (
        f"Liger's {', '.join(unknown)} for {model_type} are predicted as the stock operators, "
        "which keep as much or more",
    )


def fused_kernels(model_type: str, on: frozenset[str]) -> FusedKernels:
    """The kernels among `on` that compute operators of the layers."""
    patch = _PATCHES.get(model_type, LigerPatch())
    return FusedKernels(
        norm=patch.norm if "rms_norm" in on else "none",
        rope="in_place" if "rope" in on else "none",
        gated=patch.gated in on,
    )
