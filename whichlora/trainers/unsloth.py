"""Unsloth's `FastLanguageModel` under TRL's `SFTTrainer`: LoRA and QLoRA with its own kernels.

Inputs of checkpointed layers go to the host, LoRA matrices of a block run in one function, and the
loss makes no whole logits. Experts are stored in 4 bit, and run in grouped products.

Source: unsloth 2026.10.9 `models/llama.py`, `FastLlamaModel`; `kernels/fast_lora.py`,
`kernels/rms_layernorm.py`, `kernels/rope_embedding.py`; unsloth_zoo 2026.10.9
`gradient_checkpointing.py`, `fused_losses/fused_linear.py`, `training_utils.py`,
`temporary_patches/moe_utils.py`, `moe_utils_bnb4bit.py`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.kernels import FusedKernels
from whichlora.spec.options import Option
from whichlora.spec.run import LossHead, RunConfig, autocast_precision
from whichlora.trainers import sft
from whichlora.trainers.base import always, never

CHECKPOINTING = Option(
    name="use_gradient_checkpointing",
    summary="unsloth: inputs of layers go to the host; true: PyTorch's",
    default="unsloth",
    choices=("unsloth", "true"),
)
OFFLOADED_EMBEDDING = Option(
    name="offload_embedding",
    summary="true: the token table lies in host memory; auto: only where memory is tight",
    default="auto",
    choices=("auto", "true", "false"),
)
# `FastLanguageModel.from_pretrained` of loader.py hands other types to code that it compiles; the
# attention of Gemma 2 is written out.
_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# `FastModel` quantises the experts of these, and runs them in grouped products. It compiles their
# layers, which are counted as transformers and PEFT write them.
_MIXTURES = ("mixtral", "qwen3_moe")
_METHODS = ("lora", "qlora")
_QUANTS = ("none", "nf4-dq", "nf4")


def _kernels(run: RunConfig, model_type: str) -> FusedKernels:
    """Refuses other types of models, whose code is not that of these kernels.

    Raises:
        ConfigError: a type that Unsloth runs by its compiler.
    """
    if model_type in _MIXTURES:
        return FusedKernels(experts=True)
    if model_type not in _TYPES:
        raise ConfigError(
            f"trainer: unsloth is predicted for {', '.join((*_TYPES, *_MIXTURES))}; it compiles "
            f"{model_type}, or runs other code for it; use trainer sft"
        )
    return FusedKernels(norm="in_place", rope="apart", adapters=True)


def _loss_of(run: RunConfig, model_type: str) -> LossHead:
    return run.loss_head


def _narrow_copies(dtypes: Dtypes) -> Dtypes:
    """Adapters are fp32, and cast inside the functions: nobody keeps a copy of them or of inputs.

    Without flash-attention its kernel is that of xformers, with keys and values repeated. A mask
    of padding is dropped in training (llama.py, line 1433). What it compiles has PEFT's own layers.
    Source: `prepare_model_for_training` with `float32_mixed_precision`; `get_lora_parameters`;
    `utils/attention_dispatch.py`, `select_attention_backend`.
    """
    # `FastLanguageModel.from_pretrained` has a device_map where nobody gives one: "sequential"
    dtypes = replace(dtypes, loads_at_once=True)
    if not dtypes.kernels.adapters:
        return dtypes
    return replace(
        dtypes,
        attn="sdpa-efficient" if dtypes.attn == "sdpa" else dtypes.attn,
        mode="P",
        padded=False,
        autocast=False,
        shared_inputs=True,
        input_bytes=2,
        dropped_bytes=2,
        adapter_product_bytes=2,
    )


def _offloads(run: RunConfig) -> bool:
    return run.trainer_option(CHECKPOINTING.name) != "true"


def _hosts_embedding(run: RunConfig) -> bool:
    """Source: unsloth 2026.10.9 `models/vision.py`, `offload_input_embedding`; tied ones stay."""
    return run.trainer_option(OFFLOADED_EMBEDDING.name) == "true"


def _check(run: RunConfig) -> None:
    faults = (
        (run.method not in _METHODS, "method", run.method, "lora or qlora"),
        (run.quant not in (None, *_QUANTS), "quant", run.quant, "none or nf4-dq"),
        (autocast_precision(run.precision) != run.precision, "precision", run.precision, "bf16"),
        (run.precision in ("fp32", "tf32"), "precision", run.precision, "bf16"),
        (run.attn == "eager", "attn", run.attn, "sdpa"),
        (bool(run.prepare_kbit), "prepare_kbit", "true", "false"),
        (run.base_dtype != "auto", "base_dtype", run.base_dtype, "auto"),
        (run.compute_dtype != "auto", "compute_dtype", run.compute_dtype, "auto"),
        (run.bias != "none", "bias", run.bias, "none"),
        (run.quantize_moe_experts, "quantize_moe_experts", "true", "false: it always does"),
        (bool(run.modules_to_save), "modules_to_save", "set", "none of them"),
        (run.parallel.gpus > 1, "gpus", run.parallel.gpus, "1"),
    )
    for is_wrong, name, value, accepted in faults:
        if is_wrong:
            raise ConfigError(f"{name}: trainer unsloth is predicted with {accepted}, got {value}")


def _notes_of(run: RunConfig, model_type: str) -> tuple[str, ...]:
    if model_type in _MIXTURES:
        return (
            "Unsloth's products of experts were traced; it compiles the layers around them, which "
            "take at most what is counted",
        )
    return ("Unsloth's LoRA functions were traced; its other code is known by its sources",)


def _notes(run: RunConfig) -> tuple[str, ...]:
    notes = []
    if run.trainer_option(OFFLOADED_EMBEDDING.name) == "auto":
        notes.append(
            "offload_embedding auto moves an untied token table to the host where memory is tight, "
            "and is predicted without; true always does"
        )
    if run.quant not in (None, "none"):
        notes.append(
            "Unsloth loads its own 4-bit upload of a model where there is one; those that end in "
            "-unsloth-bnb-4bit keep some matrices in 16 bit: name it, or its config.json"
        )
    return tuple(notes)


TRAINER = replace(
    sft.TRAINER,
    takes_images=False,
    name="unsloth",
    summary="Unsloth's FastLanguageModel with its kernels, under TRL's SFTTrainer",
    steps="whichlora.tracer.like_unsloth:measure_unsloth",
    library_class="unsloth.FastLanguageModel",
    makes_adapters=False,
    options=(CHECKPOINTING, OFFLOADED_EMBEDDING),
    loss_heads=("unsloth-fused",),
    checkpoints=always,
    keeps_base=always,
    narrows_adapters=never,
    narrowed_names=lambda run: (),
    kernels=_kernels,
    loss_of=_loss_of,
    notes_of=_notes_of,
    narrow_copies=_narrow_copies,
    reentrant=True,
    offloads=_offloads,
    hosts_embedding=_hosts_embedding,
    quantises_experts=True,
    names_experts=True,
    check=_check,
    notes=_notes,
)
