"""Unsloth's `FastLanguageModel` under TRL's `SFTTrainer`: LoRA and QLoRA with its own kernels.

Inputs of checkpointed layers go to the host, LoRA matrices of a block run in one function, and the
loss makes no whole logits. Experts are stored in 4 bit, and run in grouped products. Of other types
`FastModel` and `FastVisionModel` compile the code of transformers, and replace its loss, its
LayerNorm, its checkpoints and PEFT's forward.

Source: unsloth 2026.10.9 `models/llama.py`, `FastLlamaModel`; `kernels/fast_lora.py`,
`kernels/rms_layernorm.py`, `kernels/rope_embedding.py`; unsloth_zoo 2026.10.9
`gradient_checkpointing.py`, `fused_losses/fused_linear.py`, `training_utils.py`,
`temporary_patches/moe_utils.py`, `moe_utils_bnb4bit.py`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.kernels import FusedKernels, LogitTiles
from whichlora.spec.options import Option
from whichlora.spec.run import LossHead, RunConfig, autocast_precision
from whichlora.spec.tower import Tower
from whichlora.spec.versions import ByRelease
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
WHOLE_LOGITS = Option(
    name="return_logits",
    summary="UNSLOTH_RETURN_LOGITS=1: logits of all tokens are made",
    default=False,
)
EMBEDDING_RATE = Option(
    name="embedding_learning_rate",
    summary="rate of an embedding or a head trained whole, in 8 bit by an 8-bit optimizer",
    default=0.0,
)
_WHOLE = ("embed_tokens", "lm_head")
# `FastLanguageModel.from_pretrained` of loader.py hands other types to code that it compiles; the
# attention of Gemma 2 is written out.
_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# `FastModel` quantises the experts of these, and runs them in grouped products. It compiles their
# layers, which are counted as transformers and PEFT write them.
_MIXTURES = ("mixtral", "qwen3_moe")
# `FastModel` and `FastVisionModel` compile these, whose layers are those of transformers; Gemma 3
# and 4 have layers of its own in fp16 (temporary_patches/gemma.py).
_COMPILED = ("mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "mistral3")
_WIDENED = "qwen3_5"  # FORCE_FLOAT32 of models/loader.py, where there is no bf16
OWN_TYPES = frozenset((*_TYPES, *_MIXTURES))
_METHODS = ("lora", "qlora")

# What releases did for those that are compiled: unsloth_zoo compiler.py
# `cross_entropy_replacement`, `patch_lora_forwards`; unsloth models/vision.py
# `requires_grad_for_gradient_checkpointing`; unsloth_zoo gradient_checkpointing.py
# `UnslothCheckpointFunction`, which first kept all on the GPU. The loss is Apple's cut cross
# entropy; 2025.10.10 takes that of _LOGITS beside torch 2.8 and later.
_CUT_LOGITS: ByRelease[LogitTiles] = (
    ("0", LogitTiles(tiles="registers", head_gradient=True)),
    ("2025.1.1", LogitTiles(tiles="registers")),
)
_CUTS: ByRelease[str] = (("0", "99"), ("2025.10.10", "2.8"))  # of torch, up to there
_PATCHES_ADAPTERS: ByRelease[bool] = (("0", False), ("2025.1.1", True))
_HOOKS_TOWERS: ByRelease[bool] = (("0", False), ("2025.1.1", True))
_OFFLOADS_COMPILED: ByRelease[bool] = (("0", False), ("2025.1.1", True))
# What releases did. Source: github.com/unslothai/unsloth and unsloth-zoo at the commit that sets
# `__version__`; what it says of unsloth_zoo is that of its day.
# The loss: whole logits in 16 bit (models/llama.py, `fast_cross_entropy_loss`); 2024.11.8 takes
# Apple's cut cross entropy, which before 25.1.1 (of the day of 2025.1.1) makes a gradient of a
# frozen head; 2024.12.5 does not below 1,025 tokens (RETURN_LOGITS); 2025.8.5 has chunks of
# `target_gb=1` (`unsloth_fused_ce_loss`), 2025.10.10 of half of the free memory and for any number
# of tokens. The half is 4 GiB at most from 2026.7.1 on, and is taken as 4 GiB before.
_LOGITS: ByRelease[LogitTiles] = (
    ("0", LogitTiles(whole=None)),
    ("2024.11.8", LogitTiles(tiles="registers", head_gradient=True)),
    ("2024.12.5", LogitTiles(tiles="registers", whole=1024, head_gradient=True)),
    ("2025.1.1", LogitTiles(tiles="registers", whole=1024)),
    ("2025.8.5", LogitTiles(tiles="chunks", chunk_gib=1, whole=1024)),
    ("2025.10.10", LogitTiles(tiles="chunks", chunk_gib=4)),
    ("2026.7.1", LogitTiles(tiles="chunks", chunk_gib=4, chunks_up=True)),
    ("2026.10.9", LogitTiles()),
)
# kernels/utils.py: `matmul_lora` adds by `addmm_`; `fast_dequantize` has WEIGHT_BUFFERS.
_ADDS_APART: ByRelease[bool] = (("0", True), ("2025.3.1", False))
_KEEPS_EXPANDED: ByRelease[bool] = (("0", False), ("2025.2.1", True))
# `LlamaRotaryEmbedding` of each attention: of all positions, of 4 * 8192 (`current_rope_size`);
# one for all layers beside transformers 4.48, which came between 2025.1.5 and 2025.2.1.
_ROPE_POSITIONS: ByRelease[int] = (("0", 2**63), ("2024.7", 32_768), ("2025.2", 0))
# "unsloth" of `use_gradient_checkpointing`; its buffers on the GPU: none (`hidden_states.to("cpu")`
# of `Unsloth_Offloaded_Gradient_Checkpointer`), GPU_BUFFER, GPU_BUFFERS_B too.
_OFFLOADS: ByRelease[bool] = (("0", False), ("2024.4", True))
_STAGING_BUFFERS: ByRelease[int] = (("0", 0), ("2025.3.2", 1), ("2026.5", 2))
# Copies that are trained whole: `.to(torch.float32)` before 2024.10.7; then as the model, and fp32
# where that is fp16. `offload_input_embeddings` of their originals.
_WIDENS_COPIES: ByRelease[bool] = (("0", True), ("2024.10.7", False))
_MAPS_ORIGINALS: ByRelease[bool] = (("0", False), ("2024.5", True))
_GROUPED_EXPERTS = "2026.5"  # moe_utils_bnb4bit.py
_TRACED = "2026.5"  # functions as of the release that was traced
_QUANTS = ("none", "nf4-dq", "nf4")


def kernels(run: RunConfig, model_type: str) -> FusedKernels:
    """Refuses other types of models, whose code is not that of these kernels.

    Raises:
        ConfigError: a type that Unsloth runs by its compiler, or a release without such products.
    """
    versions = run.versions
    if model_type in _MIXTURES:
        if run.modules_to_save:
            raise ConfigError(
                f"modules_to_save: trainer unsloth is predicted with none of them for {model_type}"
            )
        if versions.older("unsloth", _GROUPED_EXPERTS):
            raise ConfigError(
                f"libraries: unsloth={versions.unsloth} runs the experts of {model_type} by other "
                f"code, which is not predicted; give {_GROUPED_EXPERTS} or later"
            )
        return FusedKernels(experts=True)
    if model_type in _COMPILED:
        return _compiled(run, model_type)
    if model_type not in _TYPES:
        known = ", ".join((*_TYPES, *_MIXTURES, *_COMPILED))
        raise ConfigError(
            f"trainer: unsloth is predicted for {known}; it compiles {model_type}, or runs other "
            "code for it; use trainer sft"
        )
    return FusedKernels(
        norm="in_place",
        rope="apart",
        adapters=True,
        adds_apart=versions.value_of("unsloth", _ADDS_APART),
        keeps_expanded=versions.value_of("unsloth", _KEEPS_EXPANDED),
        rope_positions=versions.value_of("unsloth", _ROPE_POSITIONS),
        logits=_logits_of(run),
    )


def _compiled(run: RunConfig, model_type: str) -> FusedKernels:
    """Raises: ConfigError: what it trains whole there is not read."""
    if run.modules_to_save:
        raise ConfigError(
            f"modules_to_save: trainer unsloth is predicted with none of them for {model_type}"
        )
    cuts = run.versions.older("torch", run.versions.value_of("unsloth", _CUTS))
    tiles = run.versions.value_of("unsloth", _CUT_LOGITS if cuts else _LOGITS)
    if run.trainer_option(WHOLE_LOGITS.name):
        tiles = LogitTiles(whole=None)
    return FusedKernels(narrow_layer_norm=True, logits=tiles)


def _logits_of(run: RunConfig) -> LogitTiles:
    """Raises: ConfigError: a trained head under a loss in registers, or of few tokens."""
    if run.trainer_option(WHOLE_LOGITS.name):
        return LogitTiles(whole=None)
    tiles = run.versions.value_of("unsloth", _LOGITS)
    if _WHOLE[1] in run.modules_to_save and tiles.whole not in (0, None):
        raise ConfigError(
            f"modules_to_save: how unsloth={run.versions.unsloth} trains {_WHOLE[1]} is not "
            "predicted; give return_logits=true, as its notebooks do, or 2025.10.10 or later"
        )
    return tiles


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
    if dtypes.kernels.narrow_layer_norm:
        patches = dtypes.libraries.value_of("unsloth", _PATCHES_ADAPTERS)
        return _without_casts(dtypes) if patches else dtypes
    if not dtypes.kernels.adapters:
        return dtypes
    is_wide = dtypes.half == "fp16" or dtypes.libraries.value_of("unsloth", _WIDENS_COPIES)
    return replace(
        dtypes,
        copied_bytes=4 if is_wide else 0,
        attn="sdpa-efficient" if dtypes.attn == "sdpa" else dtypes.attn,
        mode="P",
        padded=False,
        autocast=False,
        adapter_product_bytes=2,
    )


def _without_casts(dtypes: Dtypes) -> Dtypes:
    """Adapters read 16 bit as it is under autocast, and their weights are cast inside a product.

    Source: unsloth_zoo 2025.1.1 compiler.py `COMPILED_LORA_FORWARD`: `addmm` under autocast.
    """
    if not dtypes.under_autocast or dtypes.half_bytes > 2:
        return dtypes
    return replace(dtypes, mode="P", autocast=False, adapter_product_bytes=2)


def _offloads(run: RunConfig) -> bool:
    if run.trainer_option(CHECKPOINTING.name) == "true":
        return False
    return run.versions.value_of("unsloth", _OFFLOADS_COMPILED if run.images else _OFFLOADS)


def _own_model(model: ModelSpec, run: RunConfig) -> ModelSpec:
    """Adapts blocks of a tower, and no matrix around them.

    Source: unsloth_zoo 2026.10.9 peft_utils.py `get_peft_regex`: attention and MLPs of blocks.
    """
    if model.tower is None or model.model_type not in _COMPILED:
        return model
    stack = model.tower.stack
    around = tuple(replace(linear, adapter_rank=0) for linear in stack.head_linears)
    return replace(model, tower=replace(model.tower, stack=replace(stack, head_linears=around)))


def _hooks_tower(run: RunConfig, tower: Tower, is_adapted: bool) -> bool:
    return is_adapted and run.versions.value_of("unsloth", _HOOKS_TOWERS)


def _staging_buffers(run: RunConfig) -> int:
    return run.versions.value_of("unsloth", _STAGING_BUFFERS)


def _hosts(run: RunConfig) -> frozenset[str]:
    """The frozen table, and originals of what is trained whole, which a file on the disk has.

    Source: unsloth 2026.10.9 `models/vision.py`, `offload_input_embedding`; tied ones stay;
    `models/_utils.py`, `offload_to_disk`: a mapped file; 2024.5 on.
    """
    hosted = set(run.modules_to_save if _is_offloading(run) else ())
    if run.trainer_option(OFFLOADED_EMBEDDING.name) == "true":
        hosted |= {_WHOLE[0]} - set(run.modules_to_save)  # which comes back to be trained
    return frozenset(hosted)


def _is_offloading(run: RunConfig) -> bool:
    to_disk = run.versions.value_of("unsloth", _MAPS_ORIGINALS)
    return bool(run.gradient_checkpointing) and _offloads(run) and to_disk


def _narrows_states(run: RunConfig) -> bool:
    """Source: `_create_unsloth_optimizer`, which asks bitsandbytes for no 32 bits."""
    return bool(run.trainer_option(EMBEDDING_RATE.name))


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
        (run.parallel.gpus > 1, "gpus", run.parallel.gpus, "1"),
    )
    for is_wrong, name, value, accepted in faults:
        if is_wrong:
            raise ConfigError(f"{name}: trainer unsloth is predicted with {accepted}, got {value}")


def _notes_of(run: RunConfig, model_type: str) -> tuple[str, ...]:
    if model_type in _COMPILED:
        told: tuple[str, ...] = (
            f"Unsloth compiles the layers of {model_type}, which take at most what is counted; its "
            "other code is known by its sources",
        )
        if model_type == _WIDENED and run.precision == "fp16":
            told += (f"Unsloth may run {model_type} in fp32 between products in fp16: not counted",)
        return told
    if model_type in _MIXTURES:
        return (
            "Unsloth's products of experts were traced; it compiles the layers around them, which "
            "take at most what is counted",
        )
    if run.versions.older("unsloth", _TRACED):
        return (
            f"Unsloth {run.versions.unsloth} is known by its sources, and by what its notebooks "
            "print on a T4",
        )
    return ("Unsloth's LoRA functions were traced; its other code is known by its sources",)


def _notes(run: RunConfig) -> tuple[str, ...]:
    notes = []
    if not run.versions.value_of("unsloth", _OFFLOADS):
        notes.append(f"Unsloth {run.versions.unsloth} has PyTorch's checkpoints alone")
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
    takes_images=True,
    own_model=_own_model,
    hooks_tower=_hooks_tower,
    rewrites_checkpoints=True,
    name="unsloth",
    also_called={"FastLanguageModel": ""},
    summary="Unsloth's FastLanguageModel with its kernels, under TRL's SFTTrainer",
    steps="whichlora.tracer.like_unsloth:measure_unsloth",
    library_class="unsloth.FastLanguageModel",
    config_class="",  # its class loads a model and trains nothing: `--to unsloth` writes a script
    makes_adapters=False,
    options=(CHECKPOINTING, OFFLOADED_EMBEDDING, WHOLE_LOGITS, EMBEDDING_RATE),
    loss_heads=("unsloth-fused",),
    defaults=None,  # bf16, its own checkpointing, and what is tuned for memory
    dated_by="",
    keeps_base=always,
    narrows_adapters=never,
    narrowed_names=lambda run: (),
    kernels=kernels,
    loss_of=_loss_of,
    notes_of=_notes_of,
    narrow_copies=_narrow_copies,
    reentrant=True,
    offloads=_offloads,
    staging_buffers=_staging_buffers,
    hosts=_hosts,
    trains_whole=frozenset(_WHOLE),
    narrows_embedding_states=_narrows_states,
    quantises_experts=True,
    names_experts=True,
    check=_check,
    notes=_notes,
)
