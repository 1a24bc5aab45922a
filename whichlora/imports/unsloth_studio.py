"""YAML of Unsloth Studio and of `unsloth train --config`, whose steps are those of Unsloth.

Source: unsloth 2026.8 unsloth_cli/config.py, studio/backend/assets/configs/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports import unsloth
from whichlora.imports.base import Keys, Launch, Tool
from whichlora.imports.trainer import UNMODELLED
from whichlora.store.hub import load_model

_TYPE, _MODEL = "training.training_type", "model"
_LENGTH, _ROWS = 2048, 2
_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
_TOWER = "finetune_vision_layers"
# Its keys, and what the script hands to Unsloth's functions and TRL's config.
_NAMES: Mapping[str, str] = {
    _MODEL: "from_pretrained.model",
    "training.max_seq_length": "max_length",
    "training.load_in_4bit": "from_pretrained.load_in_4bit",
    "training.batch_size": "per_device_train_batch_size",
    "training.gradient_accumulation_steps": "gradient_accumulation_steps",
    "training.optim": "optim",
    "training.packing": "packing",
    "training.gradient_checkpointing": "get_peft_model.use_gradient_checkpointing",
}
_ADAPTERS: Mapping[str, str] = {
    "lora.lora_r": "get_peft_model.r",
    "lora.lora_alpha": "get_peft_model.lora_alpha",
    "lora.lora_dropout": "get_peft_model.lora_dropout",
    "lora.target_modules": "get_peft_model.target_modules",
    "lora.use_rslora": "get_peft_model.use_rslora",
    "lora.use_dora": "get_peft_model.use_dora",
}
_DEFAULTS: Mapping[str, Any] = {
    "Trainer": "SFTTrainer",
    "max_length": _LENGTH,
    "per_device_train_batch_size": _ROWS,
    "gradient_accumulation_steps": 4,
    "optim": "adamw_8bit",
}


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    is_full = keys.word(_TYPE, "lora") == "full"
    script = keys.renamed(_NAMES if is_full else {**_NAMES, **_ADAPTERS})
    defaults = dict(_DEFAULTS)
    if is_full:
        defaults["from_pretrained.full_finetuning"] = True
    else:
        defaults |= {"get_peft_model.r": 64, "get_peft_model.lora_alpha": 16}
        defaults["get_peft_model.target_modules"] = _TARGETS
    if not is_full and _sees(keys.model(_MODEL)):
        defaults[f"get_peft_model.{_TOWER}"] = keys.flag(f"lora.{_TOWER}", True)
    return unsloth.TOOL.read(script.over(defaults), launch)


def _sees(name: str) -> bool:
    """Whether it is a model that Studio loads with its tower of images."""
    try:
        return bool(name) and load_model(name).tower is not None
    except ConfigError:
        return False


TOOL = Tool(
    name="unsloth-studio",
    summary="a YAML file of Unsloth Studio",
    models=frozenset({"training"}),
    marks=frozenset({"training", "lora", "logging", "data"}),
    programs=frozenset(),
    read=_read,
    reads_commands=False,
    epochs=("training.num_epochs", 3.0),
    steps="training.max_steps",
    sections=frozenset({"training", "lora", "logging", "data", "inference"}),
    without_effect=(
        *("logging.*", "data.*", "inference.*", *_ADAPTERS),
        *("training.output_dir", "training.learning_rate", "training.warmup_*"),
        *("training.save_steps", "training.eval_steps", "training.weight_decay"),
        *("training.random_seed", "training.train_on_completions", "training.lr_scheduler_type"),
        *("lora.finetune_*", "lora.vision_all_linear", "lora.use_loftq"),
    ),
    unmodelled=UNMODELLED,
)
