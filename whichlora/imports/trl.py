"""TRL's YAML and arguments: `SFTConfig`, `DPOConfig` or `KTOConfig`, and `ModelConfig`.

Defaults are those of TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.exports.recipe import BATCH
from whichlora.exports.trl import ADAPTER, FIXED, LENGTH, QUANTS, quantisation
from whichlora.imports.base import Keys, Launch, Tool, method_settings
from whichlora.imports.trainer import (
    KERNELS,
    UNMODELLED,
    WITHOUT_EFFECT,
    attention,
    autocast,
    dtype,
    precision,
    trainer_settings,
)
from whichlora.parallel import get_strategy
from whichlora.spec.run import ALL_LINEAR, BNB_QUANTS, FOUR_BIT_BNB
from whichlora.trainers import get_trainer

LENGTH_DEFAULT = 1024
_LOADS = {"load_in_4bit": False, "load_in_8bit": False}
_FOUR_BIT = {"bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False}
_STORAGE = "bnb_4bit_quant_storage"
_TRAINERS = ("sft", "dpo", "kto")
_OTHERS = ("grpo", "rloo", "reward", "orpo", "cpo", "gkd", "ppo")
PEFT_DEFAULT = ("q_proj", "v_proj")
FULL_ROWS = "every row is full of packed texts, and attends to all of it"


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    settings: dict[str, Any] = {"model": keys.word("model_name_or_path")}
    length = {"max_seq_length": "seq_len"} if "max_seq_length" in keys else LENGTH
    settings |= keys.of_run(length, seq_len=LENGTH_DEFAULT)
    settings |= trainer_settings(keys, launch, checkpoints=True)
    quant = _quant(keys)
    adapts = keys.flag("use_peft")
    settings |= _adapter(keys, quant, adapts=adapts)
    settings |= _precision(keys, launch, quant, adapts=adapts)
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
    targets = keys.names("lora_target_modules")
    if not targets:
        targets = PEFT_DEFAULT
        keys.assume("lora_target_modules", "is missing; assumed: q_proj, v_proj, as PEFT has it")
    if targets in ((ALL_LINEAR,), ("all_linear",)):
        targets = (ALL_LINEAR,)
    settings["use_rslora"] = keys.flag("use_rslora")
    settings["modules_to_save"] = keys.names("lora_modules_to_save")
    dora = keys.flag("use_dora")
    return settings | method_settings(quant, adapts=True, use_dora=dora, targets=targets)


def _precision(keys: Keys, launch: Launch, quant: str, *, adapts: bool) -> dict[str, Any]:
    weights = dtype(keys, "dtype", "torch_dtype", default="float32")
    mixed = autocast(keys, launch, default="bf16")
    if quant != "none" and mixed != "no" and weights == "float32":
        keys.assume("dtype", "is float32, in which a quantised base computes; assumed: 16 bit")
        weights = "bfloat16"
    # TRL narrows the adapters of a quantised base: `sft_trainer.py`, `_is_quantized_model`
    narrows = not adapts or quant in BNB_QUANTS
    return precision(keys, mixed, weights, narrows_adapters=narrows)


def _trainer(keys: Keys, launch: Launch) -> dict[str, Any]:
    """The trainer with its options; that of SFT is the Trainer with TRL's head."""
    name = launch.program.replace(".", " ").split(" ")[-1] or "sft"
    if name in _OTHERS:
        keys.refuse(
            "trainer", "the trainer", f"{name} is not predicted; {', '.join(_TRAINERS)} are"
        )
    settings: dict[str, Any] = dict(FIXED)
    if name in ("dpo", "kto"):
        settings = {"prepare_kbit": FIXED["prepare_kbit"], "trainer": name}
        settings["trainer_options"] = tuple(
            sorted(
                (option.name, _option(keys, option.name, option.default))
                for option in get_trainer(name).options
                if option.name in keys
            )
        )
    if keys.flag("use_liger_kernel"):
        keys.assume("use_liger_kernel", "of its kernels only the loss is predicted")
        if "trainer" not in settings:
            settings["loss_head"] = "liger"
    return settings


def _option(keys: Keys, name: str, default: Any) -> Any:
    if isinstance(default, bool):
        return keys.flag(name, default)
    return keys.number(name, default) if isinstance(default, float) else keys.word(name)


TOOL = Tool(
    name="trl",
    summary="trl sft, dpo, kto: --config, or the arguments of their scripts",
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
    without_effect=(
        *WITHOUT_EFFECT,
        *ADAPTER,  # without use_peft
        *("lora_*", "use_rslora", "use_dora", "bnb_4bit_*", "use_bnb_nested_quant"),
        *("chat_template_path", "eos_token", "pad_token", "completion_only_loss", "config"),
        *("assistant_only_loss", "truncation_mode", "shuffle_dataset", "packing_strategy"),
        *("eval_packing", "pad_to_multiple_of", "max_prompt_length", "max_completion_length"),
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
