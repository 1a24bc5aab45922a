"""Python scripts and notebooks that train with Unsloth's `FastLanguageModel`, or one beside it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports import python
from whichlora.imports.base import Keys, Launch, Tool
from whichlora.imports.trainer import UNMODELLED
from whichlora.spec.run import ALL_LINEAR, RunConfig
from whichlora.store.hub import load_model
from whichlora.trainers import Trainer, get_trainer

_ADAPTS, _TOWER = "get_peft_model", "get_peft_model.finetune_vision_layers"
_CHOSEN = f"{_ADAPTS}.target_modules"
_LOADS = "from_pretrained"
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_OF_KERNELS = ("SFTTrainer", "UnslothTrainer", "Trainer")  # which run its own code
_CHECKPOINTS = "use_gradient_checkpointing"
_EMBEDDING_RATE = "embedding_learning_rate"


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    trainer, quant = _trainer(keys), _quant(keys)
    sees = _TOWER in keys  # of FastVisionModel and FastModel, which adapt all
    targets = (ALL_LINEAR,) if sees else _TARGETS
    adapter = python.adapter_settings(keys, _ADAPTS, quant, r=16, lora_alpha=16, targets=targets)
    if adapter is not None and _whole(keys):
        whole = _whole(keys)
        left = tuple(name for name in adapter["target_modules"] if name not in whole)
        saved = (*adapter["modules_to_save"], *whole)
        adapter |= {"target_modules": left, "modules_to_save": tuple(dict.fromkeys(saved))}
    settings = python.script_settings(keys, launch, quant, adapter, is_trl=True)
    settings |= _answers_at_once(keys, settings)
    if sees:
        settings["freeze_vision_tower"] = not keys.flag(_TOWER)
    if trainer is None:
        if settings["gradient_checkpointing"] is None:  # `get_peft_model` turns it on
            settings["gradient_checkpointing"] = _checkpoints(keys, "unsloth") != "false"
        plain = "base_dtype" not in settings and not settings.get("modules_to_save")
        if settings["precision"] == "bf16" and plain:
            settings["precision"] = "auto"  # it asks the GPU
        return settings | python.steps_of(keys, python.called_trainer(keys))
    return settings | _own_steps(keys, trainer)


def _trainer(keys: Keys) -> Trainer | None:
    """Unsloth's; None where TRL's is taken for it: of what its kernels are not predicted for."""
    trainer, called, what = get_trainer("unsloth"), keys.word("Trainer", "Trainer"), ""
    if called not in _OF_KERNELS:
        what = f"{called[:40]} under Unsloth"
        if keys.flag(f"{_LOADS}.fast_inference"):
            text = f"{called[:40]} with an engine inside Unsloth is not predicted"
            keys.refuse("trainer", "Trainer", text)
    elif keys.flag(f"{_LOADS}.full_finetuning"):
        what = "Unsloth with all weights"
    else:
        what = _other_code(trainer, python.model_name(keys), _trained_whole(keys))
    if what:
        keys.assume(_LOADS, f"{what}; assumed: TRL's trainer without its kernels, which takes more")
    return None if what else trainer


def _whole(keys: Keys) -> tuple[str, ...]:
    """Targets that it trains whole, as modules_to_save. Source: `models/llama.py`, line 4776."""
    if keys.is_unread(_CHOSEN):
        return ()
    return tuple(name for name in keys.names(_CHOSEN) if name in ("embed_tokens", "lm_head"))


def _trained_whole(keys: Keys) -> tuple[str, ...]:
    saved = f"{_ADAPTS}.modules_to_save"
    return (*_whole(keys), *(() if keys.is_unread(saved) else keys.names(saved)))


def _other_code(trainer: Trainer, name: str, whole: tuple[str, ...]) -> str:
    """What Unsloth runs for a type that its kernels are not predicted for; else empty."""
    with contextlib.suppress(ConfigError):
        model = load_model(name)
        if whole and (model.head_tied or not trainer.trains_whole.issuperset(whole)):
            return f"Unsloth with {' and '.join(whole)} trained whole"
        try:
            trainer.kernels(RunConfig(model=name, modules_to_save=whole), model.model_type)
        except ConfigError:
            return f"Unsloth's code for {model.model_type}"
    return ""


def _quant(keys: Keys) -> str:
    """Source: unsloth 2026.10 `FastLanguageModel.from_pretrained`."""
    names = ("load_in_4bit", "load_in_8bit", "load_in_16bit", "load_in_fp8", "full_finetuning")
    if any(keys.refuse_unread("quant", f"{_LOADS}.{name}") for name in names):
        return "none"
    flags = [name for name in names[1:] if keys.flag(f"{_LOADS}.{name}")]
    in_four = keys.flag(f"{_LOADS}.load_in_4bit", not flags)
    if "load_in_8bit" in flags:
        return "int8"
    return "nf4-dq" if in_four and "full_finetuning" not in flags else "none"


def _answers_at_once(keys: Keys, settings: Mapping[str, Any]) -> dict[str, int]:
    """It makes a batch of `num_generations` answers where a step has a part of them.

    Source: unsloth `models/rl_replacements.py`, "We will change the batch size".
    """
    name = "num_generations"
    answers = 1 if keys.is_unread(name) else keys.count(name, 1)
    counts = ("batch_size", "gradient_accumulation_steps", "gpus")
    if math.prod(settings.get(count, 1) for count in counts) % answers == 0:
        return {}
    keys.assume(name, f"Unsloth makes the batch size {answers}, too")
    return {"batch_size": answers}


def _checkpoints(keys: Keys, default: str) -> str:
    """The kind of checkpointing that it is told, or "false"."""
    stated = [keys.raw(f"{call}.{_CHECKPOINTS}") for call in (_ADAPTS, _LOADS)]
    return str(next((value for value in stated if value is not None), default)).lower()


def _own_steps(keys: Keys, trainer: Trainer) -> dict[str, Any]:
    """Its own checkpointing, kernels and precision."""
    (option,) = (each for each in trainer.options if each.name == _CHECKPOINTS)
    asked = _checkpoints(keys, str(option.default))
    checkpoints = asked != "false"
    options: list[tuple[str, str | float]] = [(_CHECKPOINTS, asked)] if checkpoints else []
    if _trained_whole(keys) and _EMBEDDING_RATE in keys:
        options.append((_EMBEDDING_RATE, keys.number(_EMBEDDING_RATE, 0.0)))
    return {
        "trainer": trainer.name,
        "gradient_checkpointing": checkpoints,
        "trainer_options": tuple(sorted(options)),
        "loss_head": trainer.loss_heads[0],
        "prepare_kbit": False,
        "precision": "auto",  # it asks the GPU, whatever the arguments say
    }


TOOL = Tool(
    name="unsloth",
    summary="a Python script or notebook of Unsloth",
    models=python.MODELS,
    marks=python.MODELS | {"Trainer", "import unsloth"},
    programs=frozenset(),
    read=_read,
    reads_commands=False,
    reads_code=True,
    without_effect=(
        *python.IDLE,
        *(f"{_LOADS}.{name}" for name in ("auto_model", "load_in_16bit", "fast_inference")),
        *(f"{_LOADS}.{name}" for name in ("max_lora_rank", "max_seq_length", "fix_tokenizer")),
        *(f"{_ADAPTS}.{name}" for name in ("random_state", "loftq_config", "max_seq_length")),
        *(f"{_ADAPTS}.task_type", _EMBEDDING_RATE),
    ),
    unmodelled={**UNMODELLED, f"{_LOADS}.gpu_memory_utilization": "no engine beside it"},
)
