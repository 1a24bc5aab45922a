"""Python scripts and notebooks that train with Unsloth's `FastLanguageModel`, or one beside it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports import python
from whichlora.imports.base import Keys, Launch, Tool
from whichlora.imports.python_calls import ENVIRONMENT
from whichlora.imports.trainer import UNMODELLED
from whichlora.imports.trl import COMPLETION
from whichlora.spec.checkpoint import stored_quant
from whichlora.spec.run import ALL_LINEAR, ATTENTION, FOUR_BIT_BNB, RunConfig
from whichlora.spec.versions import Libraries
from whichlora.store.hub import load_model
from whichlora.trainers import Trainer, get_trainer, unsloth, unsloth_grpo

_ADAPTS, _TOWER = "get_peft_model", "get_peft_model.finetune_vision_layers"
_CHOSEN = f"{_ADAPTS}.target_modules"
_LOADS = "from_pretrained"
_FAST = f"{_LOADS}.{unsloth_grpo.FAST.name}"
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Classes that run its own code, and whose steps these are.
_OF_KERNELS = {
    **dict.fromkeys(("SFTTrainer", "UnslothTrainer", "Trainer"), "unsloth"),
    "GRPOTrainer": "unsloth-grpo",
}
_OFFLOADED = f"{_LOADS}.{unsloth.OFFLOADED_EMBEDDING.name}"
_SEEING = ("FastModel", "FastVisionModel")
_USUAL_LENGTH = 2048
_PROMPT_TOKENS = 512  # where the answers' are computed
_STANDBY = f"{ENVIRONMENT}.{unsloth_grpo.STANDBY.name}"
_PARTS = tuple(
    f"{_ADAPTS}.finetune_{part}" for part in ("language_layers", "attention_modules", "mlp_modules")
)
_CHECKPOINTS = "use_gradient_checkpointing"
_EMBEDDING_RATE = "embedding_learning_rate"


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    trainer, quant = _trainer(keys, launch), _quant(keys)
    has_other = trainer is None and bool(launch.pins)  # Unsloth patches those that are installed
    if has_other:
        launch = replace(launch, libraries=Libraries())
    sees = _TOWER in keys or keys.word(_LOADS) in _SEEING  # which adapt all
    targets = _usual_targets(keys, sees=sees)
    adapter = python.adapter_settings(keys, _ADAPTS, quant, r=16, lora_alpha=16, targets=targets)
    if adapter is not None and keys.flag(f"{_LOADS}.full_finetuning"):
        keys.assume(_ADAPTS, "has no effect beside full_finetuning; assumed: all weights")
        adapter = None
    if adapter is not None and _whole(keys):
        whole = _whole(keys)
        left = tuple(name for name in adapter["target_modules"] if name not in whole)
        saved = (*adapter["modules_to_save"], *whole)
        adapter |= {"target_modules": left, "modules_to_save": tuple(dict.fromkeys(saved))}
    settings = python.script_settings(keys, launch, quant, adapter, is_trl=True)
    settings |= _answers_at_once(keys, settings) | _upload(keys, quant, trainer)
    if sees:
        settings["freeze_vision_tower"] = not keys.flag(_TOWER, True)
    if _wraps_targets(settings):
        told = "Unsloth has adapters in the vision tower, too; assumed: in the text alone"
        keys.assume(_CHOSEN, told)
        settings["freeze_vision_tower"] = True
    if trainer is None:
        if settings["gradient_checkpointing"] is None:  # `get_peft_model` turns it on
            usual = "false" if _embeds(keys) else "unsloth"
            settings["gradient_checkpointing"] = _checkpoints(keys, usual) != "false"
        plain = "base_dtype" not in settings and not settings.get("modules_to_save")
        if settings["precision"] == "bf16" and plain:
            settings["precision"] = "auto"  # it asks the GPU
        settings |= python.steps_of(keys, python.called_trainer(keys))
        return settings | {"libraries": ()} if has_other else settings
    return settings | _own_steps(keys, trainer, settings.get("seq_len", _USUAL_LENGTH))


def _trainer(keys: Keys, launch: Launch) -> Trainer | None:
    """Unsloth's; None where TRL's is taken for it: of what its kernels are not predicted for."""
    called, what = keys.word("Trainer", "Trainer"), ""
    trainer = get_trainer(_OF_KERNELS.get(called, "unsloth"))
    if called not in _OF_KERNELS:
        what = f"{called[:40]} under Unsloth"
    elif keys.flag(f"{_LOADS}.full_finetuning"):
        what = "Unsloth with all weights"
    else:
        what = _other_code(trainer, python.model_name(keys), _trained_whole(keys))
    if what and keys.flag(_FAST):
        text = f"{what} with an engine inside it is not predicted"
        keys.refuse("trainer", "Trainer", text)
    if what:
        current = f" {Libraries().trl}" if launch.pins else ""
        told = f"TRL{current}'s trainer without its kernels, which takes more"
        keys.assume(_LOADS, f"{what}; assumed: {told}")
    return None if what else trainer


def _usual_targets(keys: Keys, *, sees: bool) -> tuple[str, ...]:
    """Those of a script that names none; some of its switches leave attention or MLPs out.

    Source: unsloth_zoo 2026.10.9 peft_utils.py `get_peft_regex`.
    """
    language, attention, mlp = (keys.flag(name, True) for name in _PARTS)
    if not language:
        keys.refuse("target_modules", _PARTS[0], "adapters of the tower alone are not predicted")
    elif not (attention or mlp):
        keys.refuse("target_modules", _PARTS[2], "adapts nothing")
    if attention == mlp:
        return (ALL_LINEAR,) if sees else _TARGETS
    return (ATTENTION,) if attention else _TARGETS[4:]


def _upload(keys: Keys, quant: str, trainer: Trainer | None) -> dict[str, Any]:
    """Its own copy in 4 bit of a checkpoint in mxfp4, which bitsandbytes can't quantise.

    Source: unsloth 2026.10.9 models/mapper.py:1050; its patches quantise experts, too.
    """
    name = python.model_name(keys)
    if quant not in FOUR_BIT_BNB or keys.asked_model:
        return {}
    with contextlib.suppress(ConfigError):
        if stored_quant(load_model(name).config) == "mxfp4":
            copy = f"unsloth/{name.rpartition('/')[2]}-unsloth-bnb-4bit"
            keys.assume(f"{_LOADS}.load_in_4bit", f"Unsloth loads {copy} in place of {name}")
            experts = {} if trainer is not None else {"quantize_moe_experts": True}
            return {"model": load_model(copy).name, **experts}
    return {}


def _wraps_targets(settings: Mapping[str, Any]) -> bool:
    """Whether names that are adapted are wrappers in the vision tower, which PEFT refuses.

    Source: unsloth 2026.10.9 models/vision.py:5306, which has PEFT adapt the matrix inside.
    """
    with contextlib.suppress(ConfigError):
        tower = load_model(settings["model"]).tower
        wrapped = set(tower.wraps if tower is not None else ())
        return not wrapped.isdisjoint(settings.get("target_modules", ()))
    return False


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
    in_four = keys.flag(f"{_LOADS}.load_in_4bit", not (flags or _embeds(keys)))
    if "load_in_fp8" in flags:
        text = "is not predicted; assumed: a base in 16 bit, which takes more"
        keys.assume(f"{_LOADS}.load_in_fp8", text)
    if "load_in_8bit" in flags:
        return "int8"
    return "nf4-dq" if in_four and "full_finetuning" not in flags else "none"


def _embeds(keys: Keys) -> bool:
    """Whether it loads a model of texts' embeddings: in 16 bit, without checkpoints.

    Source: unsloth 2026.10.9 models/sentence_transformer.py:2454, :2463, :3107.
    """
    return keys.word(_LOADS) == "FastSentenceTransformer"


def _answers(keys: Keys, trainer: Trainer, seq_len: int) -> dict[str, str | float | bool]:
    """Options of a trainer that writes answers, by itself or with an engine."""
    rest = max(seq_len - _PROMPT_TOKENS, seq_len // 2)
    stated = dict(python.steps_of(keys, trainer, {COMPLETION: rest})["trainer_options"])
    if not keys.flag(_FAST):
        return stated
    stated[unsloth_grpo.FAST.name] = True
    for option in (unsloth_grpo.SHARE, unsloth_grpo.RANK, unsloth_grpo.CONTEXT):
        key = f"{_LOADS}.{option.name}"
        if key in keys and not keys.is_unread(key):
            stated[option.name] = keys.renamed({key: option.name}).option(option)
    standby = keys.raw(_STANDBY)
    if standby is not None:  # any text but "0" is true
        stated[unsloth_grpo.STANDBY.name] = str(standby) != "0"
    return stated


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


def _own_steps(keys: Keys, trainer: Trainer, seq_len: int) -> dict[str, Any]:
    """Its own checkpointing, kernels and precision."""
    (option,) = (each for each in trainer.options if each.name == _CHECKPOINTS)
    asked = _checkpoints(keys, str(option.default))
    checkpoints = asked != "false"
    options: dict[str, str | float | bool] = {_CHECKPOINTS: asked} if checkpoints else {}
    if _trained_whole(keys) and _EMBEDDING_RATE in keys:
        options[_EMBEDDING_RATE] = keys.number(_EMBEDDING_RATE, 0.0)
    if _OFFLOADED in keys:
        options[unsloth.OFFLOADED_EMBEDDING.name] = str(keys.raw(_OFFLOADED)).lower()
    if trainer.writes_answers:
        options |= _answers(keys, trainer, seq_len)
    return {
        "trainer": trainer.name,
        "gradient_checkpointing": checkpoints,
        "trainer_options": tuple(sorted(options.items())),
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
        *python.SAMPLING,
        *("use_vllm", "vllm_*"),  # it sets them
        *(f"{_LOADS}.{name}" for name in ("auto_model", "load_in_16bit", "fast_inference")),
        *(f"{_LOADS}.{name}" for name in ("max_lora_rank", "max_seq_length", "fix_tokenizer")),
        *(f"{_LOADS}.gpu_memory_utilization", _OFFLOADED),
        *(f"{_ADAPTS}.{name}" for name in ("random_state", "loftq_config", "max_seq_length")),
        *(f"{_ADAPTS}.task_type", _EMBEDDING_RATE),
    ),
    unmodelled={
        **UNMODELLED,
        f"{_LOADS}.float8_kv_cache": "a cache in 16 bit, which takes more",
    },
)
