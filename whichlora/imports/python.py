"""Python scripts and notebooks that train with transformers' Trainer, TRL or Unsloth."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports.base import Keys, Launch, Tool, method_settings
from whichlora.imports.trainer import (
    KERNELS,
    UNMODELLED,
    WITHOUT_EFFECT,
    attention,
    autocast,
    dtype,
    liger_options,
    precision,
    trainer_settings,
)
from whichlora.imports.trl import FULL_ROWS, PEFT_DEFAULT
from whichlora.spec.run import ALL_LINEAR, BNB_QUANTS, FOUR_BIT_BNB, RunConfig
from whichlora.spec.targets import all_linears
from whichlora.store.hub import load_model
from whichlora.trainers import Trainer, get_trainer, list_trainers

_LENGTH = 2048  # assumed where a script names none
_NAMES = ("model", "model_name", "pretrained_model_name_or_path")
_UNSLOTH = "Fast"  # how its classes begin: FastLanguageModel, FastModel
_UNSLOTH_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Of `from_pretrained`, without effect.
_LOADING = (
    *("device_map", "trust_remote_code", "token", "use_cache", "low_cpu_mem_usage", "cache_dir"),
    *("revision", "auto_model", "quantization_config", "num_labels", "load_in_16bit", "id2label"),
    *("fast_inference", "max_lora_rank", "max_seq_length", "label2id", "use_safetensors"),
    *("local_files_only", "ignore_mismatched_sizes", "fix_tokenizer"),
)
_OUTSIDE = (ALL_LINEAR, "embed_tokens", "lm_head")  # of the layers
_KBIT = "prepare_model_for_kbit_training"


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    loader = keys.word("from_pretrained")
    is_unsloth = loader.startswith(_UNSLOTH)
    trainer = _trainer(keys, is_unsloth=is_unsloth)
    is_trl = trainer.library_class.startswith("trl.") or is_unsloth
    settings: dict[str, Any] = {"model": _model(keys), **_length(keys)}
    settings |= trainer_settings(keys, launch, checkpoints=is_trl)
    settings |= _answers_at_once(keys, settings, is_unsloth=is_unsloth)
    quant = _quant(keys, is_unsloth=is_unsloth)
    adapts = "LoraConfig.r" in keys or "get_peft_model" in keys or _has_lora(keys)
    settings |= _adapter(keys, quant, adapts=adapts, is_unsloth=is_unsloth)
    settings |= _precision(keys, launch, quant, adapts=adapts, is_trl=is_trl)
    prepared = keys.raw(_KBIT)
    settings["prepare_kbit"] = prepared is not None and quant in BNB_QUANTS
    if prepared is True or keys.raw("gradient_checkpointing_enable") is not None:
        settings["gradient_checkpointing"] = True
    settings["attn"] = attention(
        keys,
        "from_pretrained.attn_implementation",
        {name: name for name in KERNELS},
        default="sdpa",
    )
    tower = "get_peft_model.finetune_vision_layers"
    if tower in keys:
        settings["freeze_vision_tower"] = not keys.flag(tower)
    if "Classification" in loader:
        settings["task"] = "sequence-classification"
    if settings.get("parallel") == "ddp" and not launch.has_launcher and _spreads(keys):
        settings["parallel"] = "device-map"
    if keys.flag("packing"):
        keys.assume("packing", FULL_ROWS)
    if trainer.library_class.startswith("unsloth."):
        return settings | _under_unsloth(keys, trainer)
    settings["loss_head"] = trainer.loss_heads[0] if trainer.loss_heads else "hf"
    return settings | _options(keys, trainer)


def _answers_at_once(
    keys: Keys, settings: Mapping[str, Any], *, is_unsloth: bool
) -> dict[str, int]:
    """Unsloth makes a batch of `num_generations` answers where a step has a part of them.

    Source: unsloth `models/rl_replacements.py`, "We will change the batch size".
    """
    is_known = is_unsloth and not keys.is_unread("num_generations")
    answers = keys.count("num_generations", 1) if is_known else 1
    names = ("batch_size", "gradient_accumulation_steps", "gpus")
    if math.prod(settings.get(name, 1) for name in names) % answers == 0:
        return {}
    keys.assume("num_generations", f"Unsloth makes the batch size {answers}, too")
    return {"batch_size": answers}


def _model(keys: Keys) -> str:
    """Empty where the script computes it."""
    names = [f"from_pretrained.{name}" for name in _NAMES]
    known = [name for name in names if name in keys and not keys.is_unread(name)]
    return keys.word(known[0]) if known else ""


def _spreads(keys: Keys) -> bool:
    """Whether one process puts the layers of its model on all GPUs."""
    return keys.word("from_pretrained.device_map") in ("auto", "balanced", "sequential")


def _has_lora(keys: Keys) -> bool:
    return any(f"LoraConfig.{name}" in keys for name in ("lora_alpha", "target_modules"))


def _trainer(keys: Keys, *, is_unsloth: bool) -> Trainer:
    """Whose steps they are, by the class that the script calls."""
    called = keys.word("Trainer", "Trainer")
    if is_unsloth and called in ("SFTTrainer", "UnslothTrainer", "Trainer"):
        return _under_its_kernels(keys)
    by_class = {
        each.library_class.rpartition(".")[2]: each
        for each in list_trainers().values()
        if each.library_class.startswith(("trl.", "transformers."))
    }
    called = "Trainer" if called == "Seq2SeqTrainer" else called
    if is_unsloth and keys.flag("from_pretrained.fast_inference"):
        text = f"{called[:40]} with an engine inside Unsloth is not predicted"
        keys.refuse("trainer", "Trainer", text)
    elif is_unsloth:
        text = f"{called[:40]} under Unsloth; assumed: without its kernels, which takes more"
        keys.assume("Trainer", text)
    if called not in by_class:
        known = ", ".join(by_class)
        text = f"{called[:40]} is taken as transformers' Trainer; known are {known}"
        keys.assume("Trainer", text)
    return by_class.get(called, by_class["Trainer"])


def _under_its_kernels(keys: Keys) -> Trainer:
    """Unsloth's, or TRL's where it trains all weights, or a type that it is not predicted for."""
    trainer, name, what = get_trainer("unsloth"), _model(keys), ""
    if keys.flag("from_pretrained.full_finetuning"):
        what = "Unsloth with all weights"
    with contextlib.suppress(ConfigError):
        model_type = load_model(name).model_type
        try:
            trainer.kernels(RunConfig(model=name), model_type)
        except ConfigError:
            what = f"Unsloth's code for {model_type}"
    if not what:
        return trainer
    keys.assume("from_pretrained", f"{what}; assumed: TRL's SFTTrainer, which takes more")
    return get_trainer("sft")


def _length(keys: Keys) -> dict[str, int]:
    lengths = ("max_length", "max_seq_length", "model_max_length", "from_pretrained.max_seq_length")
    for name in (*lengths, "tokenizer.max_length", "length"):
        if name in keys and not keys.refuse_unread("seq_len", name):
            if name.startswith("tokenizer") and keys.raw("tokenizer.several"):
                keys.assume(name, "is given several times; assumed: the largest")
            return {"seq_len": keys.count(name, _LENGTH)}
        if name in keys:
            return {"seq_len": _LENGTH}
    keys.assume("max_length", f"is missing; assumed: {_LENGTH}")
    return {"seq_len": _LENGTH}


def _quant(keys: Keys, *, is_unsloth: bool) -> str:
    """Source: transformers 5.23 `BitsAndBytesConfig`; unsloth 2026.10 `from_pretrained`."""
    four, eight = "load_in_4bit", "load_in_8bit"
    sources = ("from_pretrained", "BitsAndBytesConfig")
    switches = [f"{source}.{name}" for source in sources for name in (four, eight)]
    if any(keys.refuse_unread("quant", name) for name in switches):
        return "none"
    others = (eight, "load_in_16bit", "full_finetuning", "load_in_fp8")
    asked = [name for name in others if keys.flag(f"from_pretrained.{name}")]
    is_default = is_unsloth and not asked
    in_four = keys.flag(f"from_pretrained.{four}", is_default) and "full_finetuning" not in asked
    in_four = in_four or keys.flag(f"BitsAndBytesConfig.{four}")
    if eight in asked or keys.flag(f"BitsAndBytesConfig.{eight}"):
        return "int8"
    if not in_four:
        return "none"
    if is_unsloth:
        return "nf4-dq"
    kind = keys.word("BitsAndBytesConfig.bnb_4bit_quant_type", "fp4")
    twice = keys.flag("BitsAndBytesConfig.bnb_4bit_use_double_quant")
    stored = f"{kind}-dq" if twice else kind
    if stored not in FOUR_BIT_BNB:
        text = f"{stored[:40]!r} is not predicted; {', '.join(sorted(FOUR_BIT_BNB))} are"
        keys.refuse("quant", "BitsAndBytesConfig.bnb_4bit_quant_type", text)
        return "nf4"
    return stored


def _adapter(keys: Keys, quant: str, *, adapts: bool, is_unsloth: bool) -> dict[str, Any]:
    """Source: peft 0.21 `LoraConfig`; unsloth 2026.10 `get_peft_model`."""
    if not adapts:
        return method_settings(quant, adapts=False, use_dora=False, targets=())
    prefix = "get_peft_model" if is_unsloth else "LoraConfig"
    rank, alpha = (16, 16) if is_unsloth else (8, 8)
    table = {f"{prefix}.{name}": name for name in ("r", "lora_alpha", "lora_dropout")}
    settings = keys.of_run(table, r=rank, lora_alpha=alpha, lora_dropout=0.0)
    settings["bias"] = keys.word(f"{prefix}.bias", "none")
    settings["use_rslora"] = keys.flag(f"{prefix}.use_rslora")
    settings["modules_to_save"] = keys.names(f"{prefix}.modules_to_save")
    default = _UNSLOTH_TARGETS if is_unsloth else PEFT_DEFAULT
    if "get_peft_model.finetune_vision_layers" in keys:  # of FastVisionModel and FastModel
        default = (ALL_LINEAR,)
    chosen = f"{prefix}.target_modules"
    named = default if keys.refuse_unread("target_modules", chosen) else keys.names(chosen)
    named = named or default
    if any(not name.replace("_", "").replace(".", "").replace("-", "").isalnum() for name in named):
        keys.refuse("target_modules", f"{prefix}.target_modules", "a pattern of names is not read")
    switch = f"{prefix}.use_dora"
    dora = not keys.refuse_unread("method", switch) and keys.flag(switch)
    names = _known_layers(keys, chosen, named)
    return settings | method_settings(quant, adapts=True, use_dora=dora, targets=names)


def _known_layers(keys: Keys, key: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """`names` without those that no layer has, which PEFT passes over beside others.

    Source: peft 0.21.2 `BaseTuner.inject_adapter`, which looks for a match of any.
    """
    known: tuple[str, ...] = ()
    with contextlib.suppress(ConfigError):
        layers = {linear.name for linear in all_linears(load_model(_model(keys)))}
        known = tuple(name for name in names if name in (*layers, *_OUTSIDE))
    if known and len(known) < len(names):
        over = ", ".join(name for name in names if name not in known)
        keys.assume(key, f"{over}: no layers of this model; PEFT passes over them")
    return known or names


def _precision(
    keys: Keys, launch: Launch, quant: str, *, adapts: bool, is_trl: bool
) -> dict[str, Any]:
    names = ("from_pretrained.dtype", "from_pretrained.torch_dtype")
    usual = "float32" if "Classification" in keys.word("from_pretrained") else "bfloat16"
    read = [name for name in names if not keys.is_unread(name)]
    weights = dtype(keys, *read, default=usual)
    if not any(name in keys for name in read):
        why = "is missing" if len(read) == len(names) else "is computed"
        keys.assume("from_pretrained.dtype", f"{why}; assumed: a checkpoint in {usual}")
    computed = [name for name in ("bf16", "fp16") if keys.is_unread(name)]
    if computed:
        keys.assume(computed[0], "is computed; assumed: bf16")
    mixed = "bf16" if computed else autocast(keys, launch, default="bf16" if is_trl else "")
    widens = keys.flag("get_peft_model.autocast_adapter_dtype", True)
    narrows = not (adapts and widens) or (is_trl and quant in BNB_QUANTS)
    return precision(keys, mixed, weights, narrows_adapters=narrows)


def _under_unsloth(keys: Keys, trainer: Trainer) -> dict[str, Any]:
    """Its own checkpointing, kernels and precision."""
    names = (
        "get_peft_model.use_gradient_checkpointing",
        "from_pretrained.use_gradient_checkpointing",
    )
    stated = [value for name in names if (value := keys.raw(name)) is not None]
    asked = stated[0] if stated else None
    asked = trainer.options[0].default if asked is None else asked
    checkpoints = str(asked).lower() != "false"
    options = ((trainer.options[0].name, str(asked).lower()),) if checkpoints else ()
    return {
        "trainer": trainer.name,
        "gradient_checkpointing": checkpoints,
        "trainer_options": options,
        "loss_head": trainer.loss_heads[0],
        "prepare_kbit": False,
        "precision": "auto",  # it asks the GPU, whatever the arguments say
    }


def _options(keys: Keys, trainer: Trainer) -> dict[str, Any]:
    if trainer.name in ("sft", "transformers"):
        return liger_options(keys)
    stated = []
    for option in trainer.options:
        if keys.is_unread(option.name):
            keys.assume(option.name, f"is computed; assumed: {option.default}")
        elif option.name in keys:
            stated.append((option.name, keys.option(option)))
    return {"trainer": trainer.name, "trainer_options": tuple(sorted(stated))}


TOOL = Tool(
    name="python",
    summary="a Python script or notebook of transformers, TRL or Unsloth",
    models=frozenset(f"from_pretrained.{name}" for name in _NAMES),
    marks=frozenset({"from_pretrained", "Trainer", "LoraConfig.r", _KBIT}),
    programs=frozenset(),
    read=_read,
    reads_commands=False,
    reads_code=True,
    without_effect=(
        *WITHOUT_EFFECT,
        "tokenizer.several",
        *(f"from_pretrained.{name}" for name in _LOADING),
        *("LoraConfig.task_type", "LoraConfig.inference_mode", "LoraConfig.init_lora_weights"),
        *("BitsAndBytesConfig.*", "get_peft_model", "get_peft_model.random_state"),
        *("get_peft_model.loftq_config", "get_peft_model.max_seq_length"),
        *("get_peft_model.task_type", "tokenizer.max_length", "length", "max_seq_length"),
        *("completion_only_loss", "assistant_only_loss", "chat_template_path", "use_cpu"),
        *("eos_token", "pad_token", "shuffle_dataset"),
    ),
    unmodelled={**UNMODELLED, "from_pretrained.gpu_memory_utilization": "no engine beside it"},
)
