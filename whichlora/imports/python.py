"""Python scripts and notebooks that train with transformers' Trainer or TRL."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports.base import Keys, Launch, Tool, method_settings, names_or_pattern
from whichlora.imports.peft_configs import other_adapter
from whichlora.imports.python_calls import (
    ARGUMENTS,
    EARLIER,
    ENVIRONMENT,
    LOADS,
    MADE,
    is_trainer,
    model_wrappers,
)
from whichlora.imports.python_releases import written_for
from whichlora.imports.python_values import TRAINING
from whichlora.imports.trainer import (
    KERNELS,
    UNMODELLED,
    WITHOUT_EFFECT,
    attention,
    autocast,
    beside_quantised,
    compute_dtype,
    dtype,
    liger_options,
    missing_dtype,
    precision,
    trainer_settings,
)
from whichlora.imports.trl import (
    COMPLETION,
    FULL_ROWS,
    LENGTH_DEFAULT,
    PEFT_DEFAULT,
    PROMPT,
    completed,
    is_uncut,
    other_trainer,
    refuse_other,
)
from whichlora.methods import list_methods
from whichlora.spec.options import OptionValue
from whichlora.spec.run import BNB_QUANTS, FOUR_BIT_BNB
from whichlora.store.hub import load_model
from whichlora.trainers import Trainer, liger, list_trainers, trl
from whichlora.trainers.base import plain_defaults

_LENGTH = 2048  # assumed where a script names none
_NAMES = ("model", "model_name", "pretrained_model_name_or_path")
MODELS = frozenset(f"from_pretrained.{name}" for name in _NAMES)
# Of `from_pretrained`, without effect.
_LOADING = (
    *("device_map", "trust_remote_code", "token", "use_cache", "low_cpu_mem_usage", "cache_dir"),
    *("revision", "num_labels", "id2label", "label2id", "use_safetensors"),
    *("local_files_only", "ignore_mismatched_sizes", "max_memory", "use_auth_token"),
)
IDLE = (
    *WITHOUT_EFFECT,
    *(f"from_pretrained.{name}" for name in _LOADING),
    *("LoraConfig.task_type", "LoraConfig.inference_mode", "LoraConfig.init_lora_weights"),
    *("BitsAndBytesConfig.*", "tokenizer.*"),
    f"{LOADS}.{MADE}",
    *("length", "max_seq_length", "completion_only_loss", "assistant_only_loss", "use_cpu"),
    *("chat_template_path", "eos_token", "pad_token", "shuffle_dataset", "batch_sampler"),
    f"{ENVIRONMENT}.*",
)
# Of a trainer that writes answers: how tokens are chosen, and what becomes of rewards.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "reward_*", "epsilon*"),
    *("delta", "log_completions", "num_completions_to_print", "scale_rewards", "loss_type"),
    *("mask_truncated_completions", "importance_sampling_level", "vllm_sampling_params"),
    *("vllm_server_*", "vllm_importance_*", "max_prompt_length", "generation_kwargs"),
)
_OF_TOKENIZER, _PADS = "tokenizer.model_max_length", "tokenizer.padding"
_WIDE = "float32"
_OF_UNSLOTH = "Fast"  # FastLanguageModel and others, which choose the dtype by the GPU
_THRESHOLD = "BitsAndBytesConfig.llm_int8_threshold"
_LIBRARIES = ("transformers", trl.LIBRARY, "sentence_transformers")  # whose classes are read
_KBIT = "prepare_model_for_kbit_training"
_COMPUTES = "BitsAndBytesConfig.bnb_4bit_compute_dtype"
_QUANTISED = "from_pretrained.quantization_config"


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    trainer = called_trainer(keys)
    arguments = keys.word(ARGUMENTS)
    launch, older = written_for(keys, launch, trainer, arguments)
    quant = _quant(keys)
    outliers = keys.of_run({_THRESHOLD: "llm_int8_threshold"}) if quant == "int8" else {}
    adapter = adapter_settings(keys, "LoraConfig", quant, r=8, lora_alpha=8, targets=PEFT_DEFAULT)
    if adapter is None:
        adapter = other_adapter(keys, quant)
    keys.read_elsewhere("get_peft_model")
    if adapter is None and "get_peft_model" in keys:
        keys.refuse("method", "get_peft_model", "its config is none of PEFT's that are predicted")
    settings = script_settings(
        keys,
        launch,
        quant,
        adapter,
        is_trl=trainer.library == trl.LIBRARY,
        plain_arguments=arguments.endswith(TRAINING),
        usual_length=LENGTH_DEFAULT if trainer.length_argument else None,
    )
    if quant in FOUR_BIT_BNB:
        settings |= compute_dtype(keys, _COMPUTES, settings["precision"], default=_WIDE)
    settings |= {"libraries": tuple(sorted(older.items()))} if older else {}
    return settings | outliers | steps_of(keys, trainer)


def script_settings(
    keys: Keys,
    launch: Launch,
    quant: str,
    adapter: Mapping[str, Any] | None,
    *,
    is_trl: bool,
    plain_arguments: bool = False,
    usual_length: int | None = None,
) -> dict[str, Any]:
    """What every library is handed alike.

    Args:
        adapter: settings of the adapters; None trains all weights.
        is_trl: whether a trainer of TRL is called.
        plain_arguments: whether it is handed transformers' arguments, whose defaults it keeps:
            `SFTConfig(**args.to_dict())`, trl/trainer/sft_trainer.py.
        usual_length: what the trainer cuts rows to where nobody says; None: nothing.
    """
    for name in (ARGUMENTS, *(f"Trainer.{each}" for each in keys.under("Trainer"))):
        keys.read_elsewhere(name)
    if EARLIER in keys:
        told = f"{', '.join(keys.names(EARLIER))} comes before {keys.word('Trainer')}"
        keys.assume("Trainer", f"{told}; assumed: the last one alone")
    settings: dict[str, Any] = {"model": model_name(keys)}
    settings |= _length(keys, launch, usual_length, writes=_writes(keys))
    by_config = is_trl and not plain_arguments  # TRL's own defaults count
    settings |= trainer_settings(keys, launch, checkpoints=None if by_config else False)
    turns_on = is_trl and plain_arguments and launch.libraries.trl_checkpoints
    if turns_on and "gradient_checkpointing" not in keys:
        text = "is off by default in TrainingArguments; SFTConfig turns it on"
        keys.assume("gradient_checkpointing", text)
    if adapter is None:
        adapter = method_settings(quant, adapts=False, use_dora=False, targets=())
    settings |= adapter
    adapts = list_methods()[adapter["method"]].peft_class != ""
    settings |= _precision(keys, launch, quant, adapts=adapts, is_trl=is_trl, autocasts=by_config)
    prepared = keys.raw(_KBIT)
    if prepared is not None or not is_trl or "get_peft_model" in keys:  # else TRL's trainer does
        settings["prepare_kbit"] = prepared is not None and quant in BNB_QUANTS
    if prepared is True or keys.raw("gradient_checkpointing_enable") is not None:
        settings["gradient_checkpointing"] = True
    settings["attn"] = attention(
        keys,
        "from_pretrained.attn_implementation",
        {name: name for name in KERNELS},
        default="sdpa",
    )
    if "Classification" in keys.word("from_pretrained"):
        settings["task"] = "sequence-classification"
    if settings.get("parallel") == "ddp" and not launch.has_launcher and _spreads(keys):
        settings["parallel"] = "device-map"
    if keys.flag("packing"):
        keys.assume("packing", FULL_ROWS)
    return settings


def model_name(keys: Keys) -> str:
    """Empty where the script computes it."""
    names = [name for name in (f"{LOADS}.{each}" for each in _NAMES) if name in keys]
    readable = [name for name in names if keys.asked_model or not keys.is_unread(name)]
    if readable or keys.asked_model:
        return keys.model(*readable)
    for name in filter(keys.is_unread, names):
        keys.refuse_several("model", name)
    return ""


def _spreads(keys: Keys) -> bool:
    """Whether one process puts the layers of its model on all GPUs."""
    name = "from_pretrained.device_map"
    placed = None if keys.is_unread(name) else keys.raw(name)
    if isinstance(placed, Mapping):
        if len({str(device) for device in placed.values()}) > 1:
            keys.assume(name, "places parts by name; assumed: as device_map auto divides them")
            return True
        placed = next(iter(placed.values()), None)
    if isinstance(placed, int):
        text = f"puts the model on GPU {placed} alone, and leaves the others idle; assumed: a "
        keys.assume(
            name, f"{text}process for each GPU, as torchrun starts with the local rank here"
        )
    return placed in ("auto", "balanced", "sequential")


def called_trainer(keys: Keys) -> Trainer:
    """Whose steps they are, by the class that the script calls."""
    called = keys.word("Trainer", "Trainer")
    by_class = {
        each.class_name: each for each in list_trainers().values() if each.library in _LIBRARIES
    }
    called = "Trainer" if called == "Seq2SeqTrainer" else called
    if called not in by_class and other_trainer(called):
        refuse_other(keys, "Trainer", other_trainer(called))
    elif called not in by_class:
        known = ", ".join(by_class)
        text = f"{called[:40]} is taken as transformers' Trainer; known are {known}"
        keys.assume("Trainer", text)
    return by_class.get(called, by_class["Trainer"])


def steps_of(
    keys: Keys, trainer: Trainer, computed: Mapping[str, OptionValue] = MappingProxyType({})
) -> dict[str, Any]:
    """The trainer with its options.

    Args:
        computed: what is assumed of options that the script computes, in place of their defaults.
    """
    settings: dict[str, Any] = {"trainer": trainer.name}
    own = [option for option in trainer.options if option not in (liger.USE, liger.CONFIG)]
    if not own:
        return settings | liger_options(keys)
    stated: list[tuple[str, OptionValue]] = []
    for option in own:
        if keys.is_unread(option.name):
            value = computed.get(option.name, option.default)
            keys.assume(option.name, f"is computed; assumed: {value}")
            if option.name in computed:
                stated.append((option.name, computed[option.name]))
        elif option.name in keys:
            stated.append((option.name, keys.option(option)))
    return settings | {"trainer_options": tuple(sorted(stated))}


def _writes(keys: Keys) -> bool:
    """Whether the trainer that is called writes answers to prompts."""
    called = keys.word("Trainer", "Trainer")
    return any(each.class_name == called and each.writes_answers for each in _trl_trainers())


def _trl_trainers() -> list[Trainer]:
    return [each for each in list_trainers().values() if each.library == trl.LIBRARY]


def _length(keys: Keys, launch: Launch, usual: int | None, *, writes: bool) -> dict[str, int]:
    """Tokens of a row; empty where the script does not say.

    Args:
        writes: rows are prompts, to which answers of a stated length are written.
    """
    if writes and COMPLETION in keys and not any(map(keys.is_unread, (COMPLETION, PROMPT))):
        return {"seq_len": completed(keys, _LENGTH)}
    lengths = ("max_length", "max_seq_length", "model_max_length", "from_pretrained.max_seq_length")
    for name in (*lengths, "tokenizer.max_length", _OF_TOKENIZER, "length"):
        if name in keys and not keys.refuse_unread("seq_len", name):
            if name == "tokenizer.max_length" and keys.raw("tokenizer.several"):
                keys.assume(name, "is given several times; assumed: the largest")
            return {"seq_len": keys.count(name, _LENGTH)}
        if name in keys:
            return {"seq_len": _LENGTH}
    if COMPLETION in keys and not any(map(keys.is_unread, (COMPLETION, PROMPT))):
        return {"seq_len": completed(keys, _LENGTH)}
    if usual is not None and is_uncut(keys, launch):
        return {}
    if usual is not None:
        if not keys.states_none("max_seq_length"):
            keys.assume("max_length", f"is missing; assumed: {usual}, to which TRL cuts rows")
        return {"seq_len": usual}
    return _all_positions(keys) if keys.raw(_PADS) == "max_length" else {}


def _all_positions(keys: Keys) -> dict[str, int]:
    """What a tokenizer pads to that is told no length: all that its model has positions for."""
    with contextlib.suppress(ConfigError):
        model = load_model(model_name(keys))
        most = model.longest_row or model.max_position_embeddings
        if most is not None:
            keys.assume(_PADS, f"is max_length without a length; assumed: the model's {most}")
            return {"seq_len": most}
    return {}


def _quant(keys: Keys) -> str:
    """Source: transformers 5.23 `BitsAndBytesConfig`, `from_pretrained` of older releases."""
    sources = ("from_pretrained", "BitsAndBytesConfig")
    four, eight = ([f"{source}.load_in_{bits}bit" for source in sources] for bits in (4, 8))
    if any(keys.refuse_unread("quant", name) for name in (*four, *eight)):
        return "none"
    in_four, in_eight = ([name for name in names if keys.flag(name)] for names in (four, eight))
    kind = keys.word("BitsAndBytesConfig.bnb_4bit_quant_type", "fp4")
    twice = keys.flag("BitsAndBytesConfig.bnb_4bit_use_double_quant")
    if _QUANTISED in keys and not keys.under("BitsAndBytesConfig"):
        keys.refuse("quant", _QUANTISED, "is no BitsAndBytesConfig that the script makes")
    keys.read_elsewhere(_QUANTISED)
    if not in_four:
        return "int8" if in_eight else "none"
    stored = f"{kind}-dq" if twice else kind
    if stored not in FOUR_BIT_BNB:
        text = f"{stored[:40]!r} is not predicted; {', '.join(sorted(FOUR_BIT_BNB))} are"
        keys.refuse("quant", "BitsAndBytesConfig.bnb_4bit_quant_type", text)
        return "nf4"
    return stored


def adapter_settings(
    keys: Keys, call: str, quant: str, *, r: int, lora_alpha: int, targets: tuple[str, ...]
) -> dict[str, Any] | None:
    """The adapters that `call` describes; None where the script has no such call.

    Args:
        r, lora_alpha, targets: of the library, where the call does not say.
    """
    names = ("r", "lora_alpha", "lora_dropout", "target_modules")
    if keys.raw(call) is None and not any(f"{call}.{name}" in keys for name in names):
        return None
    table = {f"{call}.{name}": name for name in names[:3]}
    settings = keys.of_run(table, r=r, lora_alpha=lora_alpha, lora_dropout=0.0)
    settings["bias"] = keys.word(f"{call}.bias", "none")
    settings["use_rslora"] = keys.flag(f"{call}.use_rslora")
    settings["modules_to_save"] = keys.names(f"{call}.modules_to_save")
    chosen, switch = f"{call}.target_modules", f"{call}.use_dora"
    named = () if keys.refuse_unread("target_modules", chosen) else names_or_pattern(keys, chosen)
    dora = not keys.refuse_unread("method", switch) and keys.flag(switch)
    return settings | method_settings(quant, adapts=True, use_dora=dora, targets=named or targets)


def _precision(
    keys: Keys, launch: Launch, quant: str, *, adapts: bool, is_trl: bool, autocasts: bool
) -> dict[str, Any]:
    names = ("from_pretrained.dtype", "from_pretrained.torch_dtype")
    read = [name for name in names if not keys.is_unread(name)]
    width, reason = _missing_dtype(keys, launch, quant)
    weights = dtype(keys, *read, default=width, model=model_name(keys))
    if not any(name in keys for name in read):
        why = "is missing" if len(read) == len(names) else "is computed"
        keys.assume("from_pretrained.dtype", f"{why}; assumed: {reason}")
    computed = [name for name in ("bf16", "fp16") if keys.is_unread(name)]
    if computed:
        keys.assume(computed[0], "is computed; assumed: bf16")
    usual = "bf16" if autocasts and launch.libraries.trl_autocasts else ""
    mixed = "bf16" if computed else autocast(keys, launch, default=usual)
    weights = beside_quantised(keys, "from_pretrained.dtype", weights, quant, mixed)
    widens = keys.flag("get_peft_model.autocast_adapter_dtype", True)
    narrows = not (adapts and widens) or (is_trl and quant in BNB_QUANTS)
    return precision(keys, mixed, weights, narrows_adapters=narrows)


def _missing_dtype(keys: Keys, launch: Launch, quant: str) -> tuple[str, str]:
    """The dtype of weights that are loaded without one, and why."""
    loads, libraries = keys.word(LOADS), launch.libraries
    if not loads:
        return _WIDE, f"made in {_WIDE}"
    if loads.startswith(_OF_UNSLOTH):
        return "bfloat16", "a checkpoint in bfloat16"
    if keys.flag(f"{LOADS}.{MADE}") and not libraries.makes_wide:
        with contextlib.suppress(ConfigError):
            return (width := load_model(model_name(keys)).dtype), f"that of the config, {width}"
    is_wide = loads in model_wrappers() or "Classification" in loads
    return missing_dtype(
        trl.defaults(libraries) if is_trainer(loads) else plain_defaults(libraries),
        libraries,
        model_name(keys),
        usual="float32" if is_wide else "bfloat16",
        is_quantised=quant != "none",
    )


TOOL = Tool(
    name="python",
    summary="a Python script or notebook of transformers or TRL",
    models=MODELS,
    marks=MODELS | {"Trainer"},
    programs=frozenset(),
    read=_read,
    reads_commands=False,
    reads_code=True,
    without_effect=(*IDLE, *SAMPLING),
    unmodelled=UNMODELLED,
)
