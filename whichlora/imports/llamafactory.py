"""LLaMA-Factory's YAML and arguments. Defaults are those of LLaMA-Factory 0.9.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.exports.llamafactory import (
    ADAPTER,
    ATTENTION,
    FIXED,
    LENGTH,
    QUANTS,
    STAGES,
    quantisation,
)
from whichlora.exports.trainer_keys import BATCH
from whichlora.imports.base import Keys, Launch, Tool, method_settings
from whichlora.imports.spread import is_divided
from whichlora.imports.trainer import (
    UNMODELLED,
    WITHOUT_EFFECT,
    attention,
    autocast,
    checkpoint_dtype,
    precision,
    trainer_settings,
)
from whichlora.imports.trl import FULL_ROWS
from whichlora.spec.run import ALL_LINEAR
from whichlora.trainers import liger

_RANK = 8
_MAX_PIXELS = 768 * 768
_METHOD = "quantization_method"
_FOUR_BIT = {"quantization_type": "nf4", "double_quantization": True}
_KERNELS = {tool: ours for ours, tool in ATTENTION.items()} | {"auto": "sdpa"}
_STAGES = ("sft", "pt")
# `PairwiseTrainer.compute_loss` of train/rm/trainer.py, `CustomPPOTrainer` of train/ppo/trainer.py
_WHY = {
    "rm": ", which train a value head and keep logits and the result of every layer",
    "ppo": ", which write answers and hold a model of rewards",
}
_TYPES = ("lora", "full")
_UNSLOTH = "unsloth"  # the trainer with its kernels
_OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")
_DIVIDES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "hyper_parallel_cp_size",
)
# `examples/deepspeed` of LLaMA-Factory 0.9.5
_HOST = {"device": "cpu"}
_ZERO_2: Mapping[str, Any] = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8}
_ZERO_3: Mapping[str, Any] = {
    "stage": 3,
    "overlap_comm": False,
    **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
_DEEPSPEED: Mapping[str, Mapping[str, Any]] = {
    "ds_z0_config": {"stage": 0},
    "ds_z2_config": _ZERO_2,
    "ds_z2_offload_config": {**_ZERO_2, "offload_optimizer": _HOST},
    "ds_z3_config": _ZERO_3,
    "ds_z3_offload_config": {**_ZERO_3, "offload_optimizer": _HOST, "offload_param": _HOST},
}
_OWN = frozenset({"stage", "finetuning_type", "template", "lora_target", "dataset_dir"})
_OFF = ("0", "false", "no")


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    settings: dict[str, Any] = {"model": keys.model("model_name_or_path")}
    settings |= keys.of_run(LENGTH) | trainer_settings(keys, launch)
    settings |= _checkpointing(keys)
    quant = _quant(keys)
    kind = keys.word("finetuning_type", "lora")
    if kind not in _TYPES:
        keys.refuse(
            "method", "finetuning_type", f"{kind[:40]!r} is not predicted; lora and full are"
        )
    settings |= _adapter(keys, quant, adapts=kind != "full")
    settings |= _precision(keys, launch, settings["model"], trains_base=kind == "full")
    settings["attn"] = attention(keys, "flash_attn", _KERNELS, default="auto")
    settings |= FIXED
    keys.says("loss_head", "enable_liger_kernel", liger.AS_SWITCH)
    if keys.flag("enable_liger_kernel"):
        settings["trainer_options"] = ((liger.USE.name, True),)
    stage = keys.word("stage", "sft")
    if stage in STAGES:
        settings |= _preferences(keys, stage)
    elif stage not in _STAGES:
        known = ", ".join((*_STAGES, *STAGES))
        keys.refuse(
            "trainer",
            "stage",
            f"the steps of LLaMA-Factory's {stage[:40]} are not predicted{_WHY.get(stage, '')}; "
            f"those of {known} are",
        )
    if keys.flag("packing", stage == "pt") or keys.flag("neat_packing"):
        keys.assume("packing", FULL_ROWS)
    for name in _DIVIDES:
        if keys.count(name, 1) > 1:
            keys.refuse("parallel", name, "this way to divide a model is not predicted")
    for name in _OPTIMIZERS:
        if keys.flag(name):
            keys.refuse("optimizer", name, "is not predicted")
    # `find_all_linear_modules`, `get_forbidden_modules`: neither adapted nor trained
    settings["freeze_vision_tower"] = keys.flag("freeze_vision_tower", True)
    if not keys.flag("freeze_multi_modal_projector", True) and settings["freeze_vision_tower"]:
        keys.assume("freeze_multi_modal_projector", "is not predicted; assumed: frozen, too")
    # `hparams/model_args.py`, before the model's own processor
    settings["image_max_pixels"] = keys.count("image_max_pixels", _MAX_PIXELS)
    if launch.trainer == _UNSLOTH:
        keys.read_elsewhere("use_unsloth")
    if _torchrun_of_its_own(launch, settings):
        settings["expandable_segments"] = True
    return settings


def _preferences(keys: Keys, stage: str) -> dict[str, Any]:
    """The trainer of a stage that learns preferences, with the options that the file states."""
    trainer = STAGES[stage]
    stated = tuple(
        sorted(
            (option.name, keys.option(option)) for option in trainer.options if option.name in keys
        )
    )
    if keys.word("ref_model"):
        keys.assume("ref_model", "is another model; assumed: the base itself")
    return {"trainer": trainer.name, "trainer_options": stated}


def _torchrun_of_its_own(launch: Launch, settings: Mapping[str, Any]) -> bool:
    """Whether its launcher sets the allocator, as it does on several GPUs (`launcher.py`)."""
    off = launch.environment.get("OPTIM_TORCH", "1").lower() in _OFF
    return settings.get("gpus", 1) > 1 and not launch.has_launcher and not off


def _checkpointing(keys: Keys) -> dict[str, Any]:
    """Its own keys, in place of the Trainer's."""
    off = "disable_gradient_checkpointing"
    keys.says("gradient_checkpointing", off, {True: False, False: True})
    return {
        "gradient_checkpointing": not keys.flag(off),
        "use_reentrant": keys.flag("use_reentrant_gc", True),
    }


def _quant(keys: Keys) -> str:
    """Source: LLaMA-Factory 0.9.5 `hparams/model_args.py`; to 0.9.1 bnb is "bitsandbytes"."""
    bits = keys.count("quantization_bit", 0)
    method = keys.word(_METHOD, "bnb")
    if bits and method not in ("bnb", "bitsandbytes"):
        keys.refuse("quant", _METHOD, f"{method[:40]!r} is not predicted; bnb is")
        return "none"
    if not bits:
        for name in filter(keys.__contains__, (_METHOD, *_FOUR_BIT)):
            keys.assume(name, "has no effect without quantization_bit")
            break
    defaults: dict[str, Any] = {"quantization_bit": 0} | (_FOUR_BIT if bits == 4 else {})
    written = {name: {**quantisation(name)} for name in sorted(QUANTS)}
    for storage in written.values():
        storage.pop(_METHOD, None)
    quant = keys.like(written, defaults)
    if quant is None:
        name = "quantization_type" if bits == 4 else "quantization_bit"
        text = f"{keys.raw(name)!r:.40} is not predicted; nf4 and fp4 in 4 bit are, and 8 bit"
        keys.refuse("quant", name, text)
    return quant or "none"


def _adapter(keys: Keys, quant: str, *, adapts: bool) -> dict[str, Any]:
    if not adapts:
        return method_settings(quant, adapts=False, use_dora=False, targets=())
    rank = keys.count("lora_rank", _RANK)
    settings = keys.of_run(ADAPTER, r=_RANK, lora_alpha=2 * rank)
    names = keys.names("lora_target") or ("all",)
    settings["use_rslora"] = keys.flag("use_rslora")
    settings["loraplus_lr_ratio"] = keys.number("loraplus_lr_ratio", 1.0)
    settings["modules_to_save"] = keys.names("additional_target")
    return settings | method_settings(
        quant,
        adapts=True,
        use_dora=keys.flag("use_dora"),
        targets=(ALL_LINEAR,) if names == ("all",) else names,
    )


def _precision(keys: Keys, launch: Launch, model: str, *, trains_base: bool) -> dict[str, Any]:
    """Source: `hparams/parser.py`, `model/adapter.py`: what is trained is widened to fp32."""
    mixed = autocast(keys, launch)
    # of a model that is divided under autocast, accelerate or DeepSpeed decides
    widens = trains_base and (mixed == "no" or not is_divided(keys, launch))
    if keys.flag("pure_bf16"):
        return {"precision": "bf16-pure"}
    stored = checkpoint_dtype(model)
    if mixed == "no" and not widens and not stored:
        keys.assume("bf16", "is off, as is fp16; assumed: a checkpoint in bfloat16")
    # `infer_optim_dtype` of extras/misc.py: of a checkpoint that is not in bfloat16, float16
    is_half = mixed == "no" and stored not in ("", "bfloat16")
    weights = "float32" if widens else "float16" if is_half else "bfloat16"
    return precision(keys, mixed, weights, narrows_adapters=trains_base)


TOOL = Tool(
    name="llamafactory",
    summary="llamafactory-cli train",
    models=frozenset({"model_name_or_path"}),
    marks=_OWN
    | {"flash_attn", "quantization_bit", "pure_bf16", "dataset", "preprocessing_num_workers"}
    | {"model_name_or_path", *BATCH, *LENGTH, *ADAPTER},
    programs=frozenset({"llamafactory-cli train", "llamafactory.launcher", "llamafactory.cli"}),
    read=_read,
    deepspeed_configs=_DEEPSPEED,
    commands_have=_OWN,
    without_effect=(
        *WITHOUT_EFFECT,
        *ADAPTER,  # of full fine-tuning
        *("lora_target", "use_dora", "use_rslora", "additional_target", "create_new_adapter"),
        *("dataset", "template", "train_on_prompt", "mask_history", "mix_strategy", "media_dir"),
        *("max_samples", "val_size", "overwrite_cache", "preprocessing_*", "tokenized_path"),
        *("plot_loss", "ddp_*", "report_to", "compute_accuracy", "early_stopping_steps"),
        *("image_*", "video_*", "audio_*", "use_audio_in_video", "adapter_name_or_path"),
        *("interleave_probs", "buffer_size"),
        *("enable_thinking", "preserve_thinking", "default_system", "tool_format", "predict_*"),
        *("swanlab_*", "use_swanlab", "export_*", "infer_*", "vllm_*", "generation_*", "top_p"),
        *("low_cpu_mem_usage", "print_param_status", "ray_*", "cache_dir", "pref_*", "kto_*"),
        *(
            "quantization_type",
            "double_quantization",
            "quantization_method",
            "loraplus_lr_embedding",
        ),
        *("dpo_label_smoothing", "simpo_gamma", "ref_model_*", "do_sample", "ld_alpha"),
        *(
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
            "galore_*",
            "apollo_*",
            "badam_*",
            "pissa_iter",
        ),
        *("pissa_convert", "temperature", "max_new_tokens", "data_shared_file_system", "tf32"),
        *("disable_shuffling", "use_kv_cache", "split_special_tokens", "ignore_pad_token_for_loss"),
    ),
    unmodelled={
        **UNMODELLED,
        "use_unsloth": f"the model's own code, which takes more (--trainer {_UNSLOTH})",
        "use_unsloth_gc": "checkpointing of PyTorch",
        "upcast_layernorm": "norms in the dtype of the weights",
        "upcast_lmhead_output": "the output of the head as it is",
        "shift_attn": "attention over the whole row",
        "mixture_of_depths": "all tokens in all layers",
        "use_llama_pro": "the layers of the model",
        "resize_vocab": "the vocabulary of the model",
        "rope_scaling": "the length of the file",
        "pissa_init": "LoRA's own start",
        "fp8": "16 bit",
        "use_kt": "the model on the GPU",
        "use_mca": "transformers' Trainer",
        "use_megatron_bridge": "transformers' Trainer",
        "use_v1_kernels": "the model's own code",
        "freeze_trainable_layers": "the method of the file",
        "pref_bco_weight": "no loss of BCO",
        "use_asft_loss": "the usual loss",
        "use_dft_loss": "the usual loss",
        "use_eaft_loss": "the usual loss",
        "freeze_language_model": "a trained language model",
    },
)
