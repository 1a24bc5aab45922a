"""Axolotl's YAML. Defaults are those of Axolotl 0.19."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whichlora.exports.axolotl import (
    ADAPTER,
    BATCH,
    LENGTH,
    PREFERENCES,
    QUANTS,
    TRL,
    WIDE_NORMS,
    WIDENS_NOTHING,
    quantisation,
)
from whichlora.imports.base import Keys, Launch, Tool, method_settings, optimizer, targets
from whichlora.imports.spread import spread_settings
from whichlora.imports.trainer import (
    EVALUATES,
    KERNELS,
    UNMODELLED,
    WITHOUT_EFFECT,
    allocator,
    attention,
    checkpointing,
    known_kernel,
)
from whichlora.imports.trl import FULL_ROWS, PEFT_DEFAULT
from whichlora.parallel import list_strategies
from whichlora.spec.run import ALL_LINEAR, BNB_QUANTS, FP32_PRECISIONS
from whichlora.trainers import liger, trainer_of

_LENGTH_DEFAULT = 512
_ADAPTERS = ("lora", "qlora")
# `utils/schemas/enums.py`, LEGACY_ATTN_FLAG_TO_IMPL
_LEGACY_ATTENTION = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
_FOUR_BIT = "nf4-dq"
# What Axolotl says of other storage beside `adapter: qlora`, and what else to write.
_NO_QLORA: Mapping[str, tuple[str, str]] = {
    "none": ("Require cfg.load_in_4bit to be True for qlora", ", or adapter: lora"),
    "int8": ("Can't load qlora in 8bit", " in place of load_in_8bit, or adapter: lora"),
    "gptq-int4": ("Can't load qlora if gptq", " in place of gptq, or adapter: lora"),
}
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
# A kernel by Liger's own name, and the keys that ask for it.
_LIGER = {
    "rope": ("liger_rope",),
    "rms_norm": ("liger_rms_norm",),
    "swiglu": ("liger_glu_activation", "liger_swiglu"),
    "geglu": ("liger_glu_activation",),
    "cross_entropy": ("liger_cross_entropy",),
    "fused_linear_cross_entropy": ("liger_fused_linear_cross_entropy",),
}
_LIGER_PLUGIN, _CUT_PLUGIN = "LigerPlugin", "CutCrossEntropyPlugin"
_CUT, _CHUNKED = "cut_cross_entropy", "chunked_cross_entropy"
_DIVIDES = (
    "tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel_degree",
    "expert_parallel_size",
)
# `deepspeed_configs` of Axolotl 0.18
_HOST = {"device": "cpu"}
_ZERO_3: Mapping[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
    "stage3_param_persistence_threshold": "auto",
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
}
_DEEPSPEED: Mapping[str, Mapping[str, Any]] = {
    "zero1": {"stage": 1, "overlap_comm": True},
    "zero2": {"stage": 2, "overlap_comm": True, "offload_optimizer": _HOST},
    "zero3": _ZERO_3,
    "zero3_bf16": _ZERO_3,
    "zero3_bf16_cpuoffload_params": {**_ZERO_3, "offload_param": _HOST},
    "zero3_bf16_cpuoffload_all": {
        **_ZERO_3,
        "offload_param": _HOST,
        "offload_optimizer": _HOST,
    },
}
_RL = {rl: library_class for library_class, (rl, _, _) in PREFERENCES.items()}
_SWITCHED_ON = "true"
_RL_LOSSES = {
    "ipo": ("dpo", "ipo"),  # `set_training_args_kwargs` of core/trainers/dpo
    _SWITCHED_ON: ("dpo", ""),
}
_REWARD = "trl.RewardTrainer"


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    settings: dict[str, Any] = {"model": keys.model("base_model")}
    settings |= keys.of_run({**LENGTH, **BATCH}, seq_len=_LENGTH_DEFAULT)
    keys.eval_batch_size = _eval_rows(keys, int(settings["batch_size"]))
    settings["optimizer"] = optimizer(keys, "optimizer", launch.libraries)
    settings |= _checkpointing(keys, launch)
    settings |= _spread(keys, launch) | allocator(launch)
    settings |= _adapter(keys)
    settings |= _precision(keys, trains_base=not keys.word("adapter"))
    settings["attn"] = _attention(keys)
    for name in ("sample_packing", "pretraining_sample_concatenation", "batch_flattening"):
        if str(keys.raw(name)).lower() in ("true", "auto"):
            keys.assume(name, FULL_ROWS)
    settings |= _trainer(keys)
    if settings.get("parallel") == "fsdp":
        keys.assume("fsdp_config", *WIDENS_NOTHING)
    return settings


def _eval_rows(keys: Keys, batch_size: int) -> int:
    """Rows that an evaluation reads at once; 0 without one, as where no key says when.

    Source: Axolotl 0.19 `core/builders/base.py`, `_configure_save_and_eval_strategy`;
    `utils/config/__init__.py`, `normalize_config`.
    """
    if not keys.number("val_set_size", 0.0) and not keys.raw("test_datasets"):
        return 0
    asked = [keys.raw(name) for name in ("eval_steps", "evals_per_epoch", *EVALUATES)]
    if all(not when or str(when).lower() == "no" for when in asked):
        return 0
    return keys.count("eval_batch_size", batch_size)


def _checkpointing(keys: Keys, launch: Launch) -> dict[str, Any]:
    mode = keys.raw("gradient_checkpointing")
    if isinstance(mode, str) and mode.startswith(("offload", "unsloth")):
        keys.assume("gradient_checkpointing", f"{mode[:20]}; assumed: inputs stay on the GPU")
        return {"gradient_checkpointing": True, "use_reentrant": True}
    settings = checkpointing(keys, launch, default=False)
    if settings["gradient_checkpointing"] and not keys.mapping("gradient_checkpointing_kwargs"):
        settings.setdefault("use_reentrant", True)  # `utils/config/__init__.py`
    return settings


def _spread(keys: Keys, launch: Launch) -> dict[str, Any]:
    settings = spread_settings(keys, launch, fsdp_version=1)
    if isinstance(keys.raw("device_map"), str) and not launch.has_launcher:
        in_one_process = [s.name for s in list_strategies().values() if s.launcher == "python"]
        settings["parallel"] = in_one_process[0]
    for name in _DIVIDES:
        if keys.count(name, 1) > 1:
            keys.refuse("parallel", name, "Axolotl's way to divide a model is not predicted")
    return settings


def _check_expanded(keys: Keys) -> None:
    """Expects that the experts of an mxfp4 checkpoint are expanded, since none are trained else."""
    if keys.word("model_quantization_config") != "Mxfp4Config":
        return
    if not keys.mapping("model_quantization_config_kwargs").get("dequantize"):
        name = "model_quantization_config_kwargs"
        keys.assume(name, "the Trainer refuses packed experts; assumed: dequantize: true")


def _quant(keys: Keys, adapter: str) -> str:
    """How the base is stored.

    Source: Axolotl 0.18 `utils/schemas/peft.py`, `validate_adapter`, `validate_qlora`;
    `loaders/model.py`, `_set_quantization_config`.
    """
    stored = {name: quantisation(name) for name in sorted(QUANTS)}
    quant = keys.like(stored, quantisation("none")) or "int8"  # both: 8 bit, but of qlora
    if keys.flag("gptq"):  # the checkpoint's own form
        quant = "gptq-int4"
    if adapter == "qlora" and quant != _FOUR_BIT:
        says, instead = _NO_QLORA[quant]
        text = f"'qlora' is refused by Axolotl ({says!r}); write load_in_4bit: true{instead}"
        keys.refuse("quant", "adapter", text)
        return _FOUR_BIT
    if not adapter and quant in BNB_QUANTS:
        name = "load_in_4bit" if quant == _FOUR_BIT else "load_in_8bit"
        text = "without an adapter is refused by Axolotl; write adapter: qlora or lora, or false"
        keys.refuse("quant", name, text)
    elif adapter == "lora" and quant == _FOUR_BIT:
        keys.assume("load_in_4bit", "of adapter: lora Axolotl quantises nothing; assumed: 16 bit")
        return "none"
    return quant


def _adapter(keys: Keys) -> dict[str, Any]:
    adapter = keys.word("adapter")
    quant = _quant(keys, adapter)
    _check_expanded(keys)
    if not adapter:
        return method_settings(quant, adapts=False, use_dora=False, targets=())
    if adapter not in _ADAPTERS:
        keys.refuse("method", "adapter", f"{adapter[:40]!r} is not predicted; lora and qlora are")
    settings = keys.of_run(ADAPTER)
    if keys.flag("lora_target_linear"):
        names: tuple[str, ...] = (ALL_LINEAR,)
        keys.raw("lora_target_modules")
    else:
        names = targets(keys, "lora_target_modules", default=PEFT_DEFAULT)
    if quant in BNB_QUANTS:
        settings["prepare_kbit"] = False  # in effect: `exports.axolotl.under_axolotl`
    settings["quantize_moe_experts"] = keys.flag("quantize_moe_experts")
    settings["use_rslora"] = keys.flag("peft_use_rslora")
    settings["loraplus_lr_ratio"] = keys.number("loraplus_lr_ratio", 1.0)
    settings["modules_to_save"] = keys.names("lora_modules_to_save")
    if keys.flag("peft_autocast_adapter_dtype", True) is False:
        settings["adapter_dtype"] = "bfloat16"
    dora = keys.flag("peft_use_dora")
    _assume_kernels(keys, default=not settings["lora_dropout"] and not dora and quant != "int8")
    return settings | method_settings(quant, adapts=True, use_dora=dora, targets=names)


def _assume_kernels(keys: Keys, *, default: bool) -> None:
    """Axolotl turns its LoRA kernels on by itself (`check_auto_enable_lora_kernels`)."""
    by_default = default and not _rl(keys) and not keys.flag("trust_remote_code")
    turned_on = [name for name in _LORA_KERNELS if keys.flag(name, by_default)]
    turned_on = [name for name in turned_on if name in keys or name != _LORA_KERNELS[-1]]
    if turned_on:
        keys.assume(turned_on[0], "Axolotl's LoRA kernels are not predicted; assumed: PEFT's code")


def _precision(keys: Keys, *, trains_base: bool) -> dict[str, Any]:
    """Source: `utils/config/__init__.py`, `normalize_config`."""
    bf16, fp16, pure = keys.raw("bf16"), keys.flag("fp16"), keys.flag("bfloat16")
    if bf16 == "full" or (pure and bf16 in (None, False)):
        return {"precision": "bf16-pure" if trains_base else "bf16-no-autocast"}
    if bf16 == "auto" or (bf16 is None and not fp16):
        precision = "auto"
    elif keys.flag("bf16"):
        precision = "bf16"
    elif fp16:
        precision = "fp16"
    else:
        precision = "tf32" if str(keys.raw("tf32")).lower() in ("true", "auto") else "fp32"
    if trains_base and precision not in FP32_PRECISIONS:
        keys.assume("adapter", WIDE_NORMS)
    return {"precision": precision}


def _attention(keys: Keys) -> str:
    kernels = {name: name for name in KERNELS}
    for name, kernel in _LEGACY_ATTENTION.items():
        if keys.flag(name):
            return known_kernel(keys, name, kernel, kernels)
    return attention(keys, "attn_implementation", kernels, default="sdpa")


def _loads_plugin(keys: Keys, plugin: str, key: str = "") -> bool:
    """Whether the file loads `plugin`, without which Axolotl passes over its `key`.

    Source: Axolotl 0.18 `integrations/config.py`, `merge_input_args`.
    """
    if any(name.rpartition(".")[2] == plugin for name in keys.names("plugins")):
        return True
    if key:
        keys.assume(key, f"Axolotl reads it with {plugin} under plugins alone; assumed: it is off")
    return False


def _loss_in_parts(keys: Keys, instead: str) -> dict[str, str]:
    """The loss head where whole logits are never held; empty where nothing asks for it.

    Source: Axolotl 0.18 `integrations/cut_cross_entropy/args.py`, `CutCrossEntropyArgs`: the
    plugin turns its loss on by itself.

    Args:
        instead: what is predicted in its place.
    """
    loads = _loads_plugin(keys, _CUT_PLUGIN, _CUT if keys.flag(_CUT) else "")
    if loads and _CUT not in keys:
        keys.assume("plugins", f"{_CUT_PLUGIN} is not predicted; assumed: {instead}")
    elif (loads and keys.flag(_CUT)) or keys.flag(_CHUNKED):
        name = _CUT if loads and keys.flag(_CUT) else _CHUNKED
        keys.assume(name, f"is not predicted; assumed: {instead}")
    else:
        return {}
    return {"loss_head": "liger"}


def _liger(keys: Keys) -> dict[str, Any]:
    """The kernels of Liger's plugin: those alone that the file names.

    Source: Axolotl 0.19 `integrations/liger/plugin.py`, `LigerPlugin.pre_model_load`.
    """
    on = {name: bool(sum(keys.flag(key) for key in names)) for name, names in _LIGER.items()}
    asking = [key for names in _LIGER.values() for key in names if keys.flag(key)]
    if not asking or not _loads_plugin(keys, _LIGER_PLUGIN, asking[0]):
        return {}
    return {
        "loss_head": "hf",
        "trainer_options": (
            (liger.CONFIG.name, json.dumps(on)),
            (liger.USE.name, True),
        ),
    }


def _rl(keys: Keys) -> str:
    """How it learns preferences; older files have a switch in place of a name."""
    kind = keys.raw("rl")
    if isinstance(kind, bool):
        return _SWITCHED_ON if kind else ""
    return keys.word("rl")


def _trainer(keys: Keys) -> dict[str, Any]:
    rl = _rl(keys)
    if keys.flag("process_reward_model"):
        keys.refuse("trainer", "process_reward_model", "rewards of each step are not predicted")
    kernels = _liger(keys)
    if rl or keys.flag("reward_model"):
        if kernels:
            keys.assume("liger_*", "are not predicted in this trainer; assumed: the model's code")
        _loss_in_parts(keys, "this trainer's own loss")
        return _preferences(keys, rl)
    return {"loss_head": "hf", **kernels, **_loss_in_parts(keys, "Liger's loss")}


def _preferences(keys: Keys, rl: str) -> dict[str, Any]:
    """The trainer of TRL that Axolotl extends, with the options that the file states.

    Source: Axolotl 0.19 `core/builders/rl.py`, `core/builders/causal.py`.
    """
    if rl == _SWITCHED_ON:
        keys.assume("rl", "is a switch, as before Axolotl 0.4; assumed: dpo, which it was")
    rl, loss = _RL_LOSSES.get(rl, (rl, ""))
    of_trl = {"libraries": (("trl", TRL),)}
    if not rl:
        return {"trainer": trainer_of(_REWARD).name, **of_trl}
    if rl not in _RL:
        known = ", ".join((*_RL, "ipo"))
        keys.refuse("trainer", "rl", f"{rl[:40]!r} is not predicted; {known} are")
        return {}
    trainer = trainer_of(_RL[rl])
    _, names, fixed = PREFERENCES[_RL[rl]]
    options = {option.name: option for option in trainer.options}
    stated = {name: value for name, value in fixed.items() if name in options}
    for name, key in names.items():
        if key in keys:
            stated[name] = keys.option(replace(options[name], name=key))
    if loss:
        stated["loss_type"] = loss
    return {"trainer": trainer.name, "trainer_options": tuple(sorted(stated.items())), **of_trl}


TOOL = Tool(
    name="axolotl",
    summary="axolotl train",
    models=frozenset({"base_model"}),
    marks=frozenset(
        {"base_model", "adapter", "sample_packing", "lora_target_linear", "val_set_size"}
        | {"datasets", "num_epochs", "dataset_prepared_path", "load_in_4bit", "load_in_8bit"}
        | {*BATCH, *LENGTH, *ADAPTER}
    ),
    programs=frozenset({"axolotl train", "axolotl.cli.train"}),
    read=_read,
    deepspeed_configs=_DEEPSPEED,
    reads_commands=False,
    epochs=("num_epochs", 1.0),
    without_effect=(
        *WITHOUT_EFFECT,
        *ADAPTER,  # without an adapter
        *("base_model_config", "model_type", "is_*_derived_model", "is_*", "processor_*"),
        *("test_datasets", "shuffle_*", "val_set_size", "chat_template*"),
        *("train_on_inputs", "excess_length_strategy", "pad_to_sequence_len", "special_tokens"),
        *("tokens", "evals_per_epoch", "saves_per_epoch", "early_stopping_patience", "strict"),
        *("lora_model_dir", "lora_fan_in_fan_out", "lora_target_modules", "lora_target_linear"),
        *("lora_modules_to_save", "lora_alpha_pattern", "lora_on_cpu", "lora_mlp_kernel"),
        *("lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"),
        *("peft", "peft_init_lora_weights", "loraplus_lr_embedding", "plugins"),
        *("use_wandb", "use_mlflow", "mlflow_*", "use_comet", "comet_*", "gradio_*", "lr_groups"),
        *("loss_watchdog_*", "eval_sample_packing", "sample_packing_*", "pad_to_multiple_of"),
        *("default_system_message", "eot_tokens", "skip_prepare_dataset", "min_sample_len"),
        *("cosine_*", "embedding_lr*", "auto_resume_from_checkpoints", "ddp", "low_cpu_mem_usage"),
        *("fsdp", "fsdp_final_state_dict_type", "tf32", "local_rank", "world_size", "max_memory"),
        *("gradient_checkpointing_kwargs", "flash_attn_*", "roles_to_train", "train_on_eos"),
        *("mean_resizing_embeddings", "save_safetensors", "use_tensorboard", "generate_samples"),
        *("pretraining_dataset", "push_dataset_to_hub", "hf_use_auth_token", "curriculum_sampling"),
        *("use_swanlab", "swanlab_*", "use_otel_metrics", "otel_*", "use_ray", "ray_*", "eta_min"),
        *("bfloat16", "float16", "total_num_tokens", "lr_quadratic_warmup", "revision_of_model"),
        *("num_labels", "flex_attn_compile_kwargs", "streaming_*", "vllm", "kto_*", "eaft_*"),
        *("simpo_gamma", "orpo_alpha", "dpo_use_weighting", "rl_adapter_ref_model"),
        *("dp_shard_size", "dp_replicate_size", "device_map", "fsdp_config", "max_prompt_len"),
    ),
    unmodelled={
        **UNMODELLED,
        "liger_layer_norm": "the model's own norms",
        "flash_attn_cross_entropy": "the model's own loss",
        "layer_offloading": "layers on the GPU",
        "selective_checkpointing": "checkpointing of whole layers",
        "quantize_moe_experts": "experts in 16 bit",
        "fp8": "16 bit",
        "tiled_mlp": "the model's own MLP",
        "fp32_norms": "norms in the dtype of the weights",
        "batch_size": "gradient_accumulation_steps of the file",
        "unfrozen_parameters": "what is trained without it",
        "lora_rank_pattern": "lora_r everywhere",
        "lora_target_parameters": "adapters on target_modules alone",
        "peft_layers_to_transform": "adapters in every layer",
        "peft_trainable_token_indices": "no trained tokens",
        "bnb_config_kwargs": "double quantisation",
        "relora": "plain LoRA",
        "lisa_n_layers": "what is trained without it",
        "resize_token_embeddings_to_32x": "the vocabulary of the model",
        "gpu_memory_limit": "the GPU's memory",
        "qat": "16 bit",
        "experts_implementation": "the model's own experts",
        "use_scattermoe": "the model's own experts",
        "use_sonicmoe": "the model's own experts",
        "llama4_linearized_experts": "the model's own experts",
        "fused_attn_kernel": "the model's own attention",
        "liger_rms_norm_gated": "the model's own norms",
        "use_eaft": "the usual loss",
        "freeze_mm_modules": "the method of the file",
        "use_kernels": "the model's own code",
        "model_quantization_config": "16 bit",
        "dpo_use_liger_kernel": "TRL's own loss",
        "dpo_padding_free": "rows of full length",
        "dpo_loss_weights": "one loss",
    },
)
