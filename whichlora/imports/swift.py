"""ms-swift's commands: `swift sft`, `swift pt` and `swift rlhf`. Defaults are those of 4.6.

Source: swift/arguments (sft_args.py, tuner_args.py, base_args/), swift/trainers/arguments.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.exports.axolotl import TRL
from whichlora.imports.base import Keys, Launch, Tool, method_settings, targets
from whichlora.imports.trainer import (
    EVALUATES,
    UNMODELLED,
    WITHOUT_EFFECT,
    attention,
    autocast,
    checkpoint_dtype,
    compute_dtype,
    dtype,
    liger_options,
    precision,
    trainer_settings,
)
from whichlora.imports.trl import FULL_ROWS
from whichlora.spec.run import ALL_LINEAR, FOUR_BIT_BNB
from whichlora.spec.targets import PATTERN
from whichlora.trainers import get_trainer

_PIXELS = "max_pixels"
_PROCESSES = "NPROC_PER_NODE"
_PROMPT, _ANSWER = 512, 512  # of a trainer that writes answers; the second is its default
_ROWS_OF_A_STEP = 16  # which `gradient_accumulation_steps` makes where it is missing
_TUNERS = ("tuner_type", "train_type", "sft_type")  # of 4, 3 and 2
_MODELS = ("model", "model_id_or_path")
_KERNELS = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flash_attn": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
}
# `rlhf_type` → our trainer of the TRL class that its trainer extends
_PREFERENCES = {"dpo": "dpo", "kto": "kto", "orpo": "orpo", "cpo": "cpo", "grpo": "grpo"}
# `task_type` → what its steps hold; 3.6 swift/plugin/loss.py, `generative_reranker_loss`
_HOLDS = {
    "generative_reranker": "; steps of 3.6 hold logits of all tokens of a text and its negatives, "
    "as those of the next token without --from, --batch-size 1 and the number of negatives"
}
_OPTIMIZERS = ("default", "lorap", "multimodal")  # of the Trainer, in groups
_COMPUTES = "bnb_4bit_compute_dtype"
_NOT_PREDICTED = "is not predicted"
_DIVIDES = ("sequence_parallel_size", "zero_hpz_partition_size", "deepspeed_autotp_size")
# swift/config/zero*.json, fsdp2.json
_HOST = {"device": "cpu"}
_ZERO: Mapping[str, Any] = {
    "overlap_comm": False,
    "allgather_bucket_size": 2e8,
    "reduce_bucket_size": 2e8,
}
_ZERO_3: Mapping[str, Any] = {
    "stage": 3,
    "overlap_comm": False,
    **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    **{f"zero{stage}": {**_ZERO, "stage": stage} for stage in (0, 1, 2)},
    "zero2_offload": {**_ZERO, "stage": 2, "offload_optimizer": _HOST},
    "zero3": _ZERO_3,
    "zero3_offload": {**_ZERO_3, "offload_optimizer": _HOST, "offload_param": _HOST},
}
# 2.5 swift/llm/utils/argument.py, `deepspeed_mapping`
_DEEPSPEED = {
    **_CONFIGS,
    **{f"default-{name}": _CONFIGS[name] for name in ("zero2", "zero3")},
    **{f"{name}-offload": _CONFIGS[f"{name}_offload"] for name in ("zero2", "zero3")},
}
# Arguments of 2 → those of 4; 2.5 swift/llm/utils/argument.py, `handle_compatibility`, and
# model.py, `get_model_tokenizer_with_flash_attn`
_OF_TWO = {
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "lora_dropout_p": "lora_dropout",
    "lora_target_modules": "target_modules",
}
_DTYPES_OF_TWO = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FSDP: Mapping[str, Mapping[str, Any]] = {
    "fsdp2": {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True}
}


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    _take_words_of_two(keys)
    name = keys.model(*_MODELS)
    launch = _with_process(keys, launch)
    settings: dict[str, Any] = {"model": name}
    settings |= _length(keys) | _task(keys) | _pixels(keys, launch)
    settings |= trainer_settings(keys, launch, checkpoints=True, batch_size=1, evaluated=_eval_rows)
    settings |= _accumulation(keys, settings)
    settings |= _reentrant(settings)
    settings |= _over_gpus(launch, settings)
    if settings.get("parallel") == "ddp":
        _refuse_several_each(keys, launch)
    quant = _quant(keys)
    settings |= _adapter(keys, quant)
    settings |= _precision(keys, launch, name)
    if quant in FOUR_BIT_BNB:
        narrow = "bfloat16" if settings["precision"].startswith("bf16") else "float32"
        settings |= compute_dtype(keys, _COMPUTES, settings["precision"], default=narrow)
    settings["attn"] = attention(keys, "attn_impl", _KERNELS, default="sdpa")
    settings |= {"loss_head": "hf", "prepare_kbit": False}
    settings |= liger_options(keys)
    if launch.program == "swift rlhf":
        settings |= _preferences(keys)
    elif keys.flag("use_logits_to_keep", True) and launch.program != "swift pt":
        keys.assume("use_logits_to_keep", "leaves the prompt out of the logits; assumed: no prompt")
    if keys.flag("packing"):
        keys.assume("packing", FULL_ROWS)
    if keys.flag("use_galore") or keys.word("optimizer", "default") not in _OPTIMIZERS:
        keys.refuse(
            "optimizer", "optimizer" if "optimizer" in keys else "use_galore", _NOT_PREDICTED
        )
    if keys.count("lisa_activated_layers", 0):
        keys.refuse("method", "lisa_activated_layers", _NOT_PREDICTED)
    for name in _DIVIDES:
        if keys.count(name, 1) > 1:
            keys.refuse("parallel", name, "this way to divide a run is not predicted")
    settings["freeze_vision_tower"] = keys.flag("freeze_vit", True)
    if keys.flag("freeze_llm"):
        keys.refuse("method", "freeze_llm", "training without the language model is not predicted")
    if not keys.flag("freeze_aligner", True) and settings["freeze_vision_tower"]:
        keys.assume("freeze_aligner", "is not predicted; assumed: frozen, too")
    return settings


def _take_words_of_two(keys: Keys) -> None:
    """Give the arguments of ms-swift 2 their names of today."""
    named = {name: keys.file(old) for old, name in _OF_TWO.items() if old in keys}
    if width := _DTYPES_OF_TWO.get(str(keys.raw("dtype")).lower()):
        named["torch_dtype"] = width
    if "use_flash_attn" in keys:
        named["attn_impl"] = "flash_attn" if keys.flag("use_flash_attn") else "eager"
    keys.take(named)


def _eval_rows(keys: Keys) -> int:
    """Rows that an evaluation reads at once; 0 without one. It evaluates when it saves.

    Source: swift/arguments/sft_args.py, `_init_eval_strategy`, and below it for no rows;
    base_args/data_args.py, `__post_init__`. The default of the split was 0.01 before 3.6.
    """
    held_out = [name for name in ("val_dataset", "cached_val_dataset") if name in keys]
    for name in held_out:
        keys.read_elsewhere(name)
    with contextlib.suppress(ConfigError):  # a variable of the shell
        splits = keys.number("split_dataset_ratio", 0.0) > 0 and not keys.flag("streaming")
        said = [keys.word(name) for name in (*EVALUATES, "save_strategy")]
        if (held_out or splits) and next(filter(None, said), "steps").lower() != "no":
            return keys.count("per_device_eval_batch_size", 1)
    return 0


def _length(keys: Keys) -> dict[str, int]:
    """Empty where rows may be as long as the model reads."""
    return keys.of_run({"max_length": "seq_len"}) if "max_length" in keys else {}


def _pixels(keys: Keys, launch: Launch) -> dict[str, int]:
    """Source: swift/template/vision_utils.py: the variable, or its argument, shrinks images."""
    for name in (_PIXELS, _PIXELS[:-1]):  # argparse takes the start of an option for it
        if name in keys:
            return {"image_max_pixels": keys.count(name, 0)}
    stated = launch.environment.get(_PIXELS.upper(), "")
    return {"image_max_pixels": int(stated)} if stated.isdecimal() else {}


def _task(keys: Keys) -> dict[str, Any]:
    """What is learned: the next token, or labels of texts."""
    kind = keys.word("task_type", "causal_lm")
    if kind == "seq_cls":
        return {"task": "sequence-classification"}
    if kind != "causal_lm":
        text = f"{kind[:40]!r} is not read; causal_lm and seq_cls are{_HOLDS.get(kind, '')}"
        keys.refuse("task", "task_type", text)
    return {}


def _accumulation(keys: Keys, settings: Mapping[str, Any]) -> dict[str, int]:
    """Source: swift/trainers/arguments.py, `TrainArgumentsMixin.__post_init__`."""
    if "gradient_accumulation_steps" in keys:
        return {}
    rows = settings["batch_size"] * settings.get("gpus", 1)
    return {"gradient_accumulation_steps": max(1, math.ceil(_ROWS_OF_A_STEP / rows))}


def _reentrant(settings: Mapping[str, Any]) -> dict[str, bool]:
    """Source: swift/trainers/mixin.py, `_fix_gradient_checkpointing`."""
    if "use_reentrant" in settings:
        return {}
    return {"use_reentrant": settings.get("parallel") != "ddp"}


def _is_one_process(launch: Launch) -> bool:
    processes = launch.environment.get(_PROCESSES)
    sees_more = processes == "1" and _visible(launch) > 1
    return (processes is None or sees_more) and not launch.has_launcher


def _visible(launch: Launch) -> int:
    """GPUs that the command lets its processes see; 0 is not said."""
    devices = launch.environment.get("CUDA_VISIBLE_DEVICES", "")
    return len([device for device in devices.split(",") if device.strip()])


def _refuse_several_each(keys: Keys, launch: Launch) -> None:
    """Refuse processes of which each spreads its model over several GPUs.

    Source: ms-swift 3.6 swift/llm/model/register.py, `get_default_device_map`, and `is_mp`.
    """
    processes = launch.environment.get(_PROCESSES, "")
    if processes.isdecimal() and 1 < int(processes) < _visible(launch):
        each = _visible(launch) // int(processes)
        text = (
            f"{processes} processes on {_visible(launch)} GPUs spread a model over {each} each; "
            f"--parallel device-map --gpus {each} is one of them without DDP's copies"
        )
        keys.refuse("parallel", _PROCESSES, text)


def _with_process(keys: Keys, launch: Launch) -> Launch:
    """The launch of one process under DeepSpeed, which has one GPU.

    Source: ms-swift 4.6 swift/arguments/sft_args.py, `_init_deepspeed`: several raise an error.
    """
    if launch.gpus is not None or "deepspeed" not in keys or not _is_one_process(launch):
        return launch
    keys.assume("deepspeed", "one process without NPROC_PER_NODE; assumed: on one GPU")
    return replace(launch, gpus=1)


def _over_gpus(launch: Launch, settings: Mapping[str, Any]) -> dict[str, str]:
    """One process spreads the layers of its model over the GPUs that it sees."""
    if _is_one_process(launch) and settings.get("parallel") == "ddp":
        return {"parallel": "device-map"}
    return {}


def _quant(keys: Keys) -> str:
    """Source: swift/arguments/base_args/quant_args.py, `get_quantization_config`."""
    method, bits = keys.word("quant_method"), keys.count("quant_bits", 0)
    bits = bits or keys.count("quantization_bit", 0)  # of 2
    if method in ("", "bnb") and bits == 8:
        return "int8"
    if method in ("", "bnb") and bits == 4:
        kind = keys.word("bnb_4bit_quant_type", "nf4")
        twice = keys.flag("bnb_4bit_use_double_quant", True)
        stored = f"{kind}-dq" if twice else kind
        if stored in FOUR_BIT_BNB:
            return stored
        keys.refuse("quant", "bnb_4bit_quant_type", f"{stored[:40]!r} is not predicted")
    elif method not in ("", "awq", "gptq", "gptq_v2") or bits not in (0, 2, 3, 4, 8):
        keys.refuse("quant", "quant_method", "this storage of the base is not predicted")
    return "none"


def _adapter(keys: Keys, quant: str) -> dict[str, Any]:
    name = next((name for name in _TUNERS if name in keys), _TUNERS[0])
    kind = keys.word(name, "lora")
    if kind not in ("lora", "full"):
        keys.refuse("method", name, f"{kind[:40]!r} is not read; lora and full are")
    if kind == "full":
        return method_settings(quant, adapts=False, use_dora=False, targets=())
    table = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
    settings = keys.of_run(table, r=8, lora_alpha=32, lora_dropout=0.05)
    settings["bias"] = keys.word("lora_bias", "none")
    settings["use_rslora"] = keys.flag("use_rslora")
    settings["loraplus_lr_ratio"] = keys.number("lorap_lr_ratio", 1.0)
    settings["modules_to_save"] = keys.names("modules_to_save")
    if any(name.startswith("all-") for name in settings["modules_to_save"]):
        keys.refuse("modules_to_save", "modules_to_save", "name the modules that are trained whole")
    if keys.raw("lora_dtype") is not None:
        settings["adapter_dtype"] = dtype(keys, "lora_dtype", default="float32")
    if "target_parameters" in keys:
        keys.refuse("target_modules", "target_parameters", "parameters are not read")
    names = targets(keys, "target_modules", default=(ALL_LINEAR,)) if _names(keys) else ()
    if "target_regex" in keys:
        names = (PATTERN + keys.word("target_regex"),)
    dora = keys.flag("use_dora")
    return settings | method_settings(
        quant, adapts=True, use_dora=dora, targets=names or (ALL_LINEAR,)
    )


def _names(keys: Keys) -> bool:
    """Whether the command names the layers that are adapted."""
    return "target_modules" in keys and keys.names("target_modules") != ("ALL",)  # of 2


def _precision(keys: Keys, launch: Launch, model: str) -> dict[str, Any]:
    """That of the checkpoint, of one in float32 bfloat16.

    Source: swift/arguments/base_args/model_args.py, `_init_mixed_precision`; `get_model_info`.
    """
    stored = checkpoint_dtype(model)
    weights = "float16" if stored == "float16" else "bfloat16"
    if "torch_dtype" in keys:
        weights = dtype(keys, "torch_dtype", default=weights, model=model)
    elif not stored:
        keys.assume("torch_dtype", "is missing; assumed: a checkpoint in bfloat16")
    mixed = autocast(keys, launch, default="bf16" if weights == "bfloat16" else "fp16")
    return precision(keys, mixed, weights, narrows_adapters=False)


def _preferences(keys: Keys) -> dict[str, Any]:
    """The trainer of `rlhf_type`, which extends TRL's of that name."""
    kind = keys.word("rlhf_type", "dpo")
    if kind not in _PREFERENCES:
        known = ", ".join(_PREFERENCES)
        keys.refuse("trainer", "rlhf_type", f"{kind[:40]!r} is not predicted; {known} are")
        return {}
    keys.assume(
        "rlhf_type", f"{kind}; assumed: the steps of TRL {TRL}, which holds whole logits, too"
    )
    trainer = get_trainer(_PREFERENCES[kind])
    stated = sorted((each.name, keys.option(each)) for each in trainer.options if each.name in keys)
    settings: dict[str, Any] = {
        "trainer": trainer.name,
        "trainer_options": tuple(stated),
        "libraries": (("trl", TRL),),
    }
    for option in trainer.options:
        if option.name == "max_completion_length":  # beside `max_length`, which is of the prompt
            answer = keys.count(option.name, _ANSWER)
            settings["seq_len"] = keys.count("max_length", _PROMPT) + answer
    return settings


TOOL = Tool(
    name="swift",
    summary="swift sft, swift pt and swift rlhf of ms-swift",
    models=frozenset(_MODELS),
    marks=frozenset({*_MODELS, *_TUNERS, "lora_rank", "target_modules", "max_length", "attn_impl"}),
    programs=frozenset({"swift sft", "swift pt", "swift rlhf"}),
    read=_read,
    commands_have=frozenset(_TUNERS),
    deepspeed_configs=_DEEPSPEED,
    fsdp_configs=_FSDP,
    without_effect=(
        *WITHOUT_EFFECT,
        *("dataset", "val_dataset", "split_dataset_ratio", "cached_*", "custom_*", "columns"),
        *("check_*", "custom_train_dataset_path", "train_dataset_*", "template_type"),
        *("system", "template", "template_backend", "model_author", "model_name", "model_type"),
        *("use_hf", "load_from_cache_file", "lazy_tokenize", "strict", "shuffle_*", "interleave_*"),
        *("truncation_strategy", "loss_scale", "loss_type", "acc_strategy", "check_model"),
        *(
            "add_version",
            "create_checkpoint_symlink",
            "max_epochs",
            "swanlab_*",
            "self_cognition_*",
        ),
        *("aligner_lr", "vit_lr", "external_plugins", "plugin", "reward_*", "stop_words"),
        *("temperature", "top_p", "top_k", "max_new_tokens", "repetition_penalty", "beta"),
        *("lora_rank", "lora_alpha", "lora_dropout", "target_modules", "freeze_aligner"),
        *("rpo_alpha", "ld_alpha", "desirable_weight", "undesirable_weight", "simpo_gamma"),
        *("resume_only_model", "ignore_args_error", "safe_serialization", "max_shard_size"),
        *("enable_thinking", "agent_template", "packing_*", "streaming", "norm_bbox", "stopping_*"),
        *(
            "bnb_4bit_*",
            "num_labels",
            "problem_type",
            "log_completions",
            "init_weights",
            "use_chat_*",
        ),
        *("padding_side", "response_prefix", "add_non_thinking_prefix", "model_kwargs", "local_*"),
        *(
            "vllm_*",
            "use_vllm",
            "sleep_level",
            "offload_model",
            "offload_optimizer",
            "move_model_*",
        ),
    ),
    unmodelled={
        **UNMODELLED,
        "tuner_backend": "PEFT",
        "freeze_parameters_ratio": "all parameters are trained",
        "freeze_parameters": "all parameters are trained",
        "trainable_parameters": "the parameters of the method",
        "enable_dft_loss": "the usual loss",
        "enable_channel_loss": "the usual loss",
        "router_aux_loss_coef": "no loss of the router",
        "rope_scaling": "the length of the command",
        "vit_gradient_checkpointing": "as the language model",
        "device_map": "whole models on each GPU",
        "experts_impl": "transformers' own",
        "use_flash_ckpt": "no copies on the host",
    },
    reads_files=False,
)
