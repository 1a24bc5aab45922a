"""LitGPT's `finetune_lora` and `finetune_full`: commands and YAML. Defaults are those of 0.5.13.

Source: litgpt 0.5.13 `finetune/lora.py`, `finetune/full.py` (`setup`), `args.py`, `__main__.py`;
config_hub/finetune of its repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whichlora.imports.base import Keys, Launch, Tool, method_settings
from whichlora.imports.spread import spread_settings
from whichlora.imports.torchtune import OPTIMIZERS
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.trainers import litgpt

_MODEL = "checkpoint_dir"
_METHODS: Mapping[str, str] = {
    **dict.fromkeys(("litgpt finetune", "litgpt finetune_lora", "lora"), "lora"),
    **dict.fromkeys(("litgpt finetune_full", "full"), "full"),
    **{f"{before}adapter{v2}": "" for before in ("litgpt finetune_", "") for v2 in ("", "_v2")},
}
_SCRIPTS = ("lora", "full")  # of lit-gpt, which hold their settings themselves
_SCRIPT = "lit-gpt's script holds them; assumed: its own of 2023, 4 of 128 rows"
# `--precision` → ours, and the dtype of the weights under autocast. `__main__` allows TF32.
_PRECISIONS: Mapping[str, tuple[str, str]] = {
    "bf16-true": ("bf16-pure", ""),
    "16-true": ("fp16-pure", ""),
    "bf16-mixed": ("bf16", "float32"),
    "16-mixed": ("fp16", "float32"),
    **dict.fromkeys(("32-true", "32"), ("tf32", "")),
}
_LORA = {"query": True, "key": False, "value": True}
_LORA |= dict.fromkeys(("projection", "mlp", "head"), False)
_ADAMW = "torch.optim.AdamW"


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    settings: dict[str, Any] = {"model": keys.model(_MODEL), "trainer": litgpt.TRAINER.name}
    quant = _quant(keys)
    settings |= _method(keys, launch, quant)
    settings |= _precision(keys, quant)
    settings |= _batch(keys, launch)
    settings["optimizer"] = _optimizer(keys, quant)
    settings["attn"] = "sdpa"
    return settings


def _quant(keys: Keys) -> str:
    if keys.raw("quantize") is None:
        return "none"
    asked = keys.word("quantize").removeprefix("bnb.")
    if asked not in FOUR_BIT_BNB:
        known = ", ".join(f"bnb.{each}" for each in sorted(FOUR_BIT_BNB))
        keys.refuse("quant", "quantize", f"{asked[:40]!r} is not predicted; {known} are")
        return "none"
    return asked


def _method(keys: Keys, launch: Launch, quant: str) -> dict[str, Any]:
    has_lora = any(f"lora_{part}" in keys for part in ("r", *_LORA))
    name = _METHODS.get(launch.program, "lora" if has_lora else "full")
    if not name:
        keys.refuse("method", _MODEL, f"{launch.program} is not predicted; finetune_lora is")
    if name == "full":
        return method_settings(quant, adapts=False, use_dora=False, targets=())
    table = {"lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
    settings = keys.of_run(table, r=8, lora_alpha=16, lora_dropout=0.05)
    on = tuple(part for part, default in _LORA.items() if keys.flag(f"lora_{part}", default))
    if not on:
        keys.refuse("target_modules", "lora_query", "nothing is adapted")
    return settings | method_settings(quant, adapts=True, use_dora=False, targets=on)


def _precision(keys: Keys, quant: str) -> dict[str, Any]:
    """Source: `get_default_supported_precision(training=True)`; `setup`: mixed is refused."""
    asked = keys.word("precision", "bf16-mixed")
    if asked not in _PRECISIONS:
        known = ", ".join(_PRECISIONS)
        keys.refuse("precision", "precision", f"{asked[:40]!r} is not predicted; {known} are")
        return {}
    if "precision" not in keys and quant == "none":
        keys.assume("precision", "is missing; LitGPT takes bf16-mixed, whose weights are fp32")
    precision, weights = _PRECISIONS[asked]
    if weights and quant != "none":
        keys.refuse("precision", "quantize", "LitGPT refuses it without --precision bf16-true")
        return {}
    return {"precision": precision, **({"base_dtype": weights} if weights else {})}


def _batch(keys: Keys, launch: Launch) -> dict[str, Any]:
    """Batch, length, GPUs, and checkpointing, which comes with several GPUs alone."""
    is_script = launch.program in _SCRIPTS
    usual, whole = (4, 128) if is_script else (1, 16)
    if is_script:
        keys.assume("micro_batch_size, global_batch_size", _SCRIPT)
    size = keys.count("train.micro_batch_size", usual)
    gpus = _gpus(keys, launch)
    steps = keys.count("train.global_batch_size", whole) // (gpus or 1) // max(1, size)
    settings: dict[str, Any] = {
        "batch_size": size,
        "gradient_accumulation_steps": max(1, steps),
        "gradient_checkpointing": (gpus or 1) > 1,
        "use_reentrant": False,  # `checkpoint_wrapper`, `apply_activation_checkpointing`
    }
    if "train.max_seq_length" in keys:
        settings["seq_len"] = keys.count("train.max_seq_length", 0)
    keys.eval_batch_size = size
    if gpus is None:
        return settings
    if gpus == 1:
        return settings | {"gpus": 1}
    config = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
    accelerate = {"distributed_type": "FSDP", "fsdp_config": config}
    return settings | spread_settings(keys, replace(launch, gpus=gpus, accelerate=accelerate))


def _gpus(keys: Keys, launch: Launch) -> int | None:
    """None where it takes all that there are."""
    if launch.gpus is not None:
        keys.read_elsewhere("devices")
        keys.read_elsewhere("num_nodes")
        return launch.gpus
    if str(keys.raw("devices")) in ("auto", "-1"):
        keys.assume("devices", "auto; assumed: one GPU, say --gpus")
        return None
    return keys.count("devices", 1) * keys.count("num_nodes", 1)


def _optimizer(keys: Keys, quant: str) -> str:
    """Source: `instantiate_torch_optimizer`; `instantiate_bnb_optimizer`: `PagedAdamW`."""
    named = "optimizer.class_path"
    name = keys.word(named, _ADAMW)
    name = name if "." in name else f"torch.optim.{name}"
    if quant != "none":
        if "AdamW" not in name:
            keys.refuse("optimizer", named, f"{name[:60]} is refused beside --quantize")
        return "paged_adamw_32bit"
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        keys.refuse("optimizer", named, f"{name[:60]} is not predicted; {known} are")
    return OPTIMIZERS.get(name, "adamw_torch")


TOOL = Tool(
    name="litgpt",
    summary="litgpt finetune_lora and finetune_full, and their YAML",
    models=frozenset({_MODEL}),
    marks=frozenset({_MODEL, "lora_query", "lora_head", "quantize", "train.micro_batch_size"})
    | frozenset({"train", "eval", "logger_name", "devices", "num_nodes"}),
    programs=frozenset(name for name in _METHODS if " " in name),
    read=_read,
    commands_have=frozenset({"precision", "quantize", "data_dir", "out_dir"}),
    epochs=("train.epochs", 5.0),
    steps="train.max_steps",
    sections=frozenset({"train", "eval", "data", "optimizer", "log"}),
    component="class_path",
    positional=_MODEL,
    without_effect=(
        *("out_dir", "data", "data.*", "data_dir", "eval.*", "log.*", "logger_name", "seed"),
        *("access_token", "optimizer.*", "resume", "train.save_interval", "train.log_interval"),
        *("train.lr_warmup_*", "train.epochs", "train.max_steps", "train.max_time"),
        *("train.min_lr", "train.max_norm", "train.max_tokens", "train.tie_embeddings"),
        *("train.learning_rate", "train.weight_decay", "train.beta*"),
    ),
)
