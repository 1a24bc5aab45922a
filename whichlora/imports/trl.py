"""TRL's YAML and arguments: those of its trainers' configs, and of `ModelConfig`.

Defaults are those of TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.exports.trainer_keys import BATCH
from whichlora.exports.trl import ADAPTER, LENGTH, QUANTS, quantisation
from whichlora.imports.base import Keys, Launch, Tool, method_settings, targets
from whichlora.imports.trainer import (
    KERNELS,
    UNMODELLED,
    WITHOUT_EFFECT,
    attention,
    autocast,
    beside_quantised,
    dtype,
    liger_options,
    note_adapters,
    precision,
    trainer_settings,
)
from whichlora.parallel import get_strategy
from whichlora.spec.run import BNB_QUANTS, DEFAULT_TARGETS, FOUR_BIT_BNB
from whichlora.trainers import BUILT_IN, get_trainer
from whichlora.trainers.trl import LIBRARY, defaults

LENGTH_DEFAULT = 1024
_LOADS = {"load_in_4bit": False, "load_in_8bit": False}
_FOUR_BIT = {"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False}
_STORAGE = "bnb_4bit_quant_storage"
_TRAINERS = tuple(  # with the dtypes that are read below
    name
    for name, trainer in BUILT_IN.items()
    if trainer.library == LIBRARY and "experimental" not in trainer.library_class
)
# Trainers whose files are not read → the nearest that is predicted, and what it is beside them.
_WITH_PROMPTS = ("grpo", "which writes answers and holds a reference, too")
_OTHERS: Mapping[str, tuple[str, str]] = {
    "ppo": (
        "grpo",
        "of batches of 8 answers: PPO holds a reward model and trains a value model on top of it",
    ),
    "rloo": _WITH_PROMPTS,
    "online_dpo": _WITH_PROMPTS,
    "xpo": _WITH_PROMPTS,
    "nash_md": _WITH_PROMPTS,
    "orpo": ("orpo", "whose options --trainer-option takes"),
    "cpo": ("cpo", "whose options --trainer-option takes"),
    "bco": ("kto", "which scores single answers against a reference, too"),
    "prm": ("reward", "which trains a head on pairs of answers"),
    "gkd": ("dpo", "which holds a second model without gradients, of the same size"),
}
_SFT = "sft"
COMPLETION, PROMPT = "max_completion_length", "max_prompt_length"
_OF_OTHERS = dict.fromkeys(  # keys of other trainers, which a file without its command may have
    [
        *(option.name for name in _TRAINERS for option in get_trainer(name).options),
        PROMPT,
    ]
).keys() - {"loss_type", *(option.name for option in get_trainer(_SFT).options)}
_PROMPT_TOKENS = 512
PEFT_DEFAULT = (DEFAULT_TARGETS,)
FULL_ROWS = "every row is full of packed texts, and attends to all of it"


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    settings: dict[str, Any] = {"model": keys.model("model_name_or_path")}
    length = {"max_seq_length": "seq_len"} if "max_seq_length" in keys else LENGTH
    if "max_seq_length" in keys or not is_uncut(keys, launch):
        settings |= keys.of_run(length, seq_len=LENGTH_DEFAULT)
    settings |= trainer_settings(keys, launch, checkpoints=None)
    quant = _quant(keys)
    adapts = keys.flag("use_peft")
    if not adapts:
        note_adapters(keys, read=not launch.program or launch.program in TOOL.programs)
    settings |= _adapter(keys, quant, adapts=adapts)
    settings |= _precision(keys, launch, settings["model"], quant, adapts=adapts)
    settings["attn"] = attention(
        keys, "attn_implementation", {name: name for name in KERNELS}, default="sdpa"
    )
    options = get_strategy(settings["parallel"]).options if "parallel" in settings else ()
    if quant in FOUR_BIT_BNB and any(option.name == _STORAGE for option in options):
        settings[_STORAGE] = keys.word(_STORAGE, "uint8").removeprefix("torch.")
    if keys.flag("packing"):
        keys.raw("packing_strategy")
        keys.assume("packing", FULL_ROWS)
    return settings | _trainer(keys, launch)


def is_uncut(keys: Keys, launch: Launch) -> bool:
    """Whether the keys state None for the tokens of a row, which switches cutting off.

    Source: TRL `SFTConfig.max_length`. Its older name did so in 0.15 alone: None was 1024 tokens to
    0.14, and left `max_length` as it is from 0.16 to 0.19.
    """
    old, release = "max_seq_length", launch.libraries
    says_old = keys.states_none(old)
    was_off = not release.older("trl", "0.15") and release.older("trl", "0.16")
    if says_old and not was_off and not keys.states_none("max_length"):
        keys.assume(old, f"is None, which stands for {LENGTH_DEFAULT} tokens but in TRL 0.15")
    for name in filter(keys.states_none, ("max_length", old)):
        keys.read_elsewhere(name)
    return keys.states_none("max_length") or (says_old and was_off)


def _quant(keys: Keys) -> str:
    defaults = _LOADS | (_FOUR_BIT if keys.flag("load_in_4bit") else {})
    quant = keys.like({name: quantisation(name) for name in sorted(QUANTS)}, defaults)
    if quant is None:
        keys.refuse("quant", "load_in_4bit", "this storage of the base is not predicted")
    return quant or "none"


def _adapter(keys: Keys, quant: str, *, adapts: bool) -> dict[str, Any]:
    if not adapts:
        return method_settings(quant, adapts=False, use_dora=False, targets=())
    settings = keys.of_run(ADAPTER, lora_dropout=0.05)
    names = targets(keys, "lora_target_modules", default=PEFT_DEFAULT)
    settings["use_rslora"] = keys.flag("use_rslora")
    settings["modules_to_save"] = keys.names("lora_modules_to_save")
    dora = keys.flag("use_dora")
    return settings | method_settings(quant, adapts=True, use_dora=dora, targets=names)


def _precision(
    keys: Keys, launch: Launch, model: str, quant: str, *, adapts: bool
) -> dict[str, Any]:
    libraries = launch.libraries
    usual = defaults(libraries).loaded_dtype(libraries, "bfloat16")
    weights = dtype(keys, "dtype", "torch_dtype", default=usual, model=model)
    mixed = autocast(keys, launch, default="bf16" if libraries.trl_autocasts else "")
    weights = beside_quantised(keys, "dtype", weights, quant, mixed)
    # TRL narrows the adapters of a quantised base: `sft_trainer.py`, `_is_quantized_model`
    narrows = not adapts or quant in BNB_QUANTS
    return precision(keys, mixed, weights, narrows_adapters=narrows)


def _trainer(keys: Keys, launch: Launch) -> dict[str, Any]:
    """The trainer with its options."""
    name = launch.trainer or _of_program(launch.program)
    if name in _OTHERS:
        refuse_other(keys, "the trainer", name)
    elif launch.program not in TOOL.programs and launch.program and not launch.trainer:
        keys.assume(launch.program, f"taken as TRL's {name or _SFT} unless --trainer is given")
    liger = liger_options(keys)
    if name not in _TRAINERS or name == _SFT:
        named = launch.program or launch.trainer
        for key in sorted(each for each in _OF_OTHERS if each in keys and not named)[:1]:
            keys.assume(key, "is no key of trl sft, which is assumed unless --trainer is given")
        return {"trainer": _SFT, **liger}
    if liger:
        keys.assume("use_liger_kernel", "of its kernels none is predicted in this trainer")
    options = {option.name: option for option in get_trainer(name).options}
    stated = [
        (option.name, keys.option(option)) for option in options.values() if option.name in keys
    ]
    settings: dict[str, Any] = {"trainer": name, "trainer_options": tuple(sorted(stated))}
    if COMPLETION in options:
        settings["seq_len"] = completed(keys, int(str(options[COMPLETION].default)))
    return settings


def refuse_other(keys: Keys, key: str, name: str) -> None:
    """Refuse one of `_OTHERS`, with what comes nearest to it."""
    near, how = _OTHERS[name]
    keys.refuse("trainer", key, f"TRL's {name} is not read; nearest is --trainer {near}, {how}")


def other_trainer(called: str) -> str:
    """The name of the class of TRL's whose steps are not read; empty of any other."""
    names = {f"{name.replace('_', '')}trainer": name for name in _OTHERS}
    return names.get(called.lower(), "")


def _of_program(program: str) -> str:
    """The trainer that the name of a program has as a word: "reward_modeling" has reward."""
    name = program.replace(".", " ").split(" ")[-1].replace("-", "_")
    named = [each for each in (*_OTHERS, *_TRAINERS) if f"_{each}_" in f"_{name}_"]
    return max(named, key=len, default="")


def completed(keys: Keys, default: int) -> int:
    """Tokens of a prompt with its completion, where the trainer writes that itself."""
    if PROMPT not in keys:
        keys.assume(PROMPT, f"is missing; assumed: {_PROMPT_TOKENS}")
    return keys.count(PROMPT, _PROMPT_TOKENS) + keys.count(COMPLETION, default)


# `trl/accelerate_configs`
_EIGHT: Mapping[str, Any] = {"mixed_precision": "bf16", "num_machines": 1, "num_processes": 8}
_FSDP: Mapping[str, Mapping[str, Any]] = {
    "fsdp1": {
        "fsdp_version": 1,
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_reshard_after_forward": "FULL_SHARD",
    },
    "fsdp2": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
}
_LAUNCH_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {**_EIGHT, "distributed_type": "NO"},
    "multi_gpu": {**_EIGHT, "distributed_type": "MULTI_GPU"},
    **{
        name: {**_EIGHT, "distributed_type": "FSDP", "fsdp_config": config}
        for name, config in _FSDP.items()
    },
    **{
        f"zero{stage}": {
            **_EIGHT,
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": stage},
        }
        for stage in (1, 2, 3)
    },
}
TOOL = Tool(
    name="trl",
    parses_whole=frozenset({"use_peft"}),
    summary="trl sft and others: --config, or the arguments of their scripts",
    models=frozenset({"model_name_or_path"}),
    marks=frozenset(
        {"use_peft", "dataset_name", "datasets", "packing", "dtype", "load_in_4bit"}
        | {"load_in_8bit", "lora_target_modules", "use_bnb_nested_quant", "bnb_4bit_quant_type"}
        | {"dataset_text_field", "completion_only_loss", "assistant_only_loss", "beta"}
        | {"model_name_or_path", *BATCH, *LENGTH, *ADAPTER}
    ),
    programs=frozenset(
        f"{prefix}{name}"
        for name in (*_TRAINERS, *_OTHERS)
        for prefix in ("", "trl ", "trl.scripts.")
    ),
    read=_read,
    launch_configs=_LAUNCH_CONFIGS,
    without_effect=(
        *WITHOUT_EFFECT,
        *ADAPTER,  # without use_peft
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
        *(
            "lora_modules_to_save",
            "lora_task_type",
            "use_rslora",
            "use_dora",
            "bnb_4bit_*",
            "use_bnb_nested_quant",
        ),
        *("chat_template_path", "eos_token", "pad_token", "completion_only_loss", "config"),
        *("assistant_only_loss", "truncation_mode", "shuffle_dataset", "packing_strategy"),
        *("eval_packing", "pad_to_multiple_of", "max_prompt_length", "max_completion_length"),
        *("max_length", "max_seq_length"),  # of a trainer with prompts and completions
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "reward_*", "epsilon*"),
        *("log_completions", "num_completions_to_print", "scale_rewards", "vllm_*"),
        *("gradient_checkpointing_kwargs", "tf32", "desirable_weight", "undesirable_weight"),
        *("label_pad_token_id", "padding_value", "sync_ref_model", "use_weighting"),
    ),
    unmodelled={
        **UNMODELLED,
        "model_init_kwargs": "none of them",
        "lora_target_parameters": "adapters on target_modules alone",
        "loss_type": "TRL's own loss",
        "router_aux_loss_coef": "no auxiliary loss",
    },
)
