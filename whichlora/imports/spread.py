"""Keys of accelerate, DeepSpeed and `TrainingArguments` → how a run is spread over its GPUs.

Each strategy reads its own options (`Strategy.read_accelerator`); here their files become what it
reads: the set-up of an accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports.base import Keys, Launch
from whichlora.imports.files import MissingFileError
from whichlora.imports.spread_keys import (
    unknown_of_accelerate,
    unknown_of_deepspeed,
    unknown_of_fsdp,
)
from whichlora.parallel import list_strategies
from whichlora.spec.options import OptionValue
from whichlora.spec.parallel import MOST_GPUS

_WRAPS = {"TRANSFORMER_BASED_WRAP": "transformer_auto_wrap_policy"}
# accelerate 1.15, `ShardingStrategy` of FSDP 1 by number
_SHARDS = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
OF_TOOL = "the file is not here; assumed: the one of this name in the tool"
# LLaMA-Factory's files until 2025-03-07 (0.9.2, pull request 7205) and ms-swift's until 2025-03-24
# (3.3.0, "compat transformers 4.50") had overlap_comm true.
_OVERLAPPED_BEFORE = "4.50"
ONCE_OVERLAPPED = "before 2025-03 it set overlap_comm: --libraries transformers=4.49"
_ON = ("true", "1", "yes")
_BATCH_OF_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def spread_settings(keys: Keys, launch: Launch, *, fsdp_version: int = 2) -> dict[str, Any]:
    """GPUs, nodes, strategy and its options, in the names of `combinations.grid`.

    Where a file says that a run is spread and not how many GPUs it has, the number is left out.

    Args:
        fsdp_version: where the tool's own keys do not say.
    """
    settings: dict[str, Any] = {}
    if launch.gpus is not None:
        settings["gpus"] = launch.gpus
    if launch.nodes > 1:
        settings["nodes"] = launch.nodes
    accelerator = _accelerator(keys, launch, fsdp_version)
    if accelerator is None:
        if (launch.gpus or 1) > 1:
            settings["parallel"] = "ddp"
        return settings
    strategy = _strategy(keys, accelerator)
    if launch.gpus != 1 or not strategy or runs_alone(strategy["parallel"]):
        return settings | strategy
    keys.assume(accelerator["key"], "divides nothing on one GPU; assumed: none of it")
    return settings


def launch_settings(keys: Keys, launch: Launch, zero: Mapping[str, Any]) -> dict[str, Any]:
    """What files of accelerate and DeepSpeed alone say of a run.

    Args:
        zero: DeepSpeed's file; of its keys, "auto" leaves a number to the script.
    """
    settings = spread_settings(keys, launch)
    if checkpoints_in_fsdp(keys, launch):
        settings |= {"gradient_checkpointing": True, "use_reentrant": False}
    for key, setting in _BATCH_OF_DEEPSPEED.items():
        if type(zero.get(key)) is int:
            settings[setting] = zero[key]
    half = zero.get("fp16")
    by_zero = isinstance(half, Mapping) and half.get("enabled") is True
    if by_zero or str(launch.accelerate.get("mixed_precision")).lower() == "fp16":
        settings["precision"] = "fp16"
    return settings


def runs_alone(name: str) -> bool:
    """Whether the strategy `name` of a file is that of a run on one GPU, too."""
    strategy = list_strategies().get(name)
    return strategy is not None and strategy.runs_alone


def _strategy(keys: Keys, accelerator: Mapping[str, Any]) -> dict[str, Any]:
    name = str(accelerator["key"])
    try:
        for strategy in list_strategies().values():
            options = strategy.read_accelerator(accelerator)
            if options is not None:
                return {"parallel": strategy.name, **_stated(options)}
    except (ConfigError, TypeError, ValueError, AttributeError, OverflowError) as error:
        fault = str(error) if isinstance(error, ConfigError) else "has a value of another type"
        keys.refuse("parallel", name, fault)
        return {}
    keys.refuse("parallel", name, f"{accelerator['what']} is not predicted")
    return {}


def _stated(options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """Options as the command line states them; an empty list is the default."""
    return {name: value for name, value in options.items() if value != ()}


def _accelerator(keys: Keys, launch: Launch, fsdp_version: int) -> dict[str, Any] | None:
    """The set-up of the accelerator, as strategies read it; None is that of plain processes."""
    accumulation = keys.mapping("accelerator_config").get("gradient_accumulation_kwargs")
    synced = (
        bool(accumulation.get("sync_each_batch")) if isinstance(accumulation, Mapping) else False
    )
    read: dict[str, Any] = {"sync_each_batch": synced}
    config = keys.file("deepspeed")
    if config is True:
        keys.refuse("parallel", "deepspeed", "is a switch, which names no file of DeepSpeed's")
        return None
    if config is not None:
        if isinstance(config, str):
            where = keys.where("deepspeed")
            try:
                config = _content(keys, launch, config)
            except ConfigError as error:
                keys.refuse("parallel", "deepspeed", str(error).removeprefix(f"{where}: "))
                return None
        return read | _deepspeed(keys, "deepspeed", config)
    fsdp = keys.raw("fsdp")
    if (fsdp not in (None, False, "", []) and str(fsdp).lower() != "false") or (
        "fsdp_version" in keys and "fsdp_config" in keys
    ):
        config = _fsdp_config(keys, launch)
        version = keys.raw("fsdp_version") or fsdp_version
        return read | _fsdp(keys, config, version=version, legacy=_words(fsdp))
    accelerate = launch.accelerate
    keys.note_unknown(unknown_of_accelerate(accelerate))
    kind = str(accelerate.get("distributed_type", "")).upper()
    if kind == "DEEPSPEED":
        config = accelerate.get("deepspeed_config")
        config = config if isinstance(config, Mapping) else {}
        file = config.get("deepspeed_config_file")
        if file is not None:
            content = launch.read_file("deepspeed_config_file", str(file))
        else:
            content = _of_plugin(config)
        return read | _deepspeed(keys, "deepspeed_config", content)
    if kind == "FSDP":
        config = accelerate.get("fsdp_config")
        config = config if isinstance(config, Mapping) else {}
        return read | _fsdp(keys, config, version=1, legacy=())  # accelerate's default
    keys.raw("fsdp_config")
    if kind not in ("", "NO") and not kind.startswith("MULTI_"):
        return read | {"distributed_type": kind, "key": "distributed_type", "what": kind}
    if accelerate.get("parallelism_config"):
        what = "parallelism_config"
        return read | {"distributed_type": what, "key": what, "what": what}
    return None


def _content(keys: Keys, launch: Launch, name: str) -> Mapping[str, Any]:
    """Of DeepSpeed's file `name`, or of the one that comes with the tool under its name.

    Raises:
        ConfigError: there is no such file, or it can't be read.
    """
    try:
        return launch.read_file(keys.where("deepspeed"), name)
    except MissingFileError:
        zero = launch.deepspeed_configs.get(PurePosixPath(name).stem)
        if zero is None:
            raise
    if zero.get("overlap_comm", True):
        keys.assume("deepspeed", OF_TOOL)
        return {"zero_optimization": zero}
    overlaps = launch.libraries.older("transformers", _OVERLAPPED_BEFORE)
    then = "of before 2025-03, with overlap_comm" if overlaps else ONCE_OVERLAPPED
    keys.assume("deepspeed", f"{OF_TOOL}; {then}")
    return {"zero_optimization": {**zero, "overlap_comm": overlaps}}


def _words(value: Any) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    return tuple(str(each).lower() for each in listed)


def _deepspeed(keys: Keys, key: str, config: Any) -> dict[str, Any]:
    stage = "?"
    if isinstance(config, Mapping):
        keys.note_unknown(unknown_of_deepspeed(config))
    if isinstance(config, Mapping) and isinstance(config.get("zero_optimization", {}), Mapping):
        stage = str(config.get("zero_optimization", {}).get("stage", 0))
    what = f"DeepSpeed with stage {stage}"
    return {"distributed_type": "DEEPSPEED", "deepspeed": config, "key": key, "what": what}


def _of_plugin(config: Mapping[str, Any]) -> dict[str, Any]:
    """What accelerate makes of its own keys. Source: accelerate 1.15 `DeepSpeedPlugin`."""
    zero: dict[str, Any] = {"stage": config.get("zero_stage", 2)}
    if isinstance(zero["stage"], str) and zero["stage"].isdecimal():
        zero["stage"] = int(zero["stage"])
    for offload in ("offload_optimizer", "offload_param"):
        zero[offload] = {"device": config.get(f"{offload}_device", "none")}
    return {"zero_optimization": zero}


def _fsdp(
    keys: Keys, config: Mapping[str, Any], *, version: Any, legacy: tuple[str, ...]
) -> dict[str, Any]:
    """The plugin of FSDP, from keys with or without "fsdp_" in front.

    Args:
        version: where `config` does not say.
        legacy: words of the older key `fsdp`.

    Source: transformers 5.23 `TrainingArguments._process_fsdp_args`, accelerate 1.15
    `FullyShardedDataParallelPlugin`.
    """
    keys.note_unknown(unknown_of_fsdp(config))
    plain = {str(name).removeprefix("fsdp_"): value for name, value in config.items()}
    key = "fsdp_config"
    version = plain.get("version") or version
    shards = plain.get("sharding_strategy", plain.get("reshard_after_forward"))
    if shards is None and "shard_grad_op" in legacy:
        shards = "SHARD_GRAD_OP"
    words = str(shards if shards is not None else True).upper()
    words = _SHARDS.get(words, words)
    reshards: bool | str = {"TRUE": True, "FALSE": False}.get(words, words)
    if plain.get("activation_checkpointing") in (True, "true", "True"):
        keys.assume(key, "activation_checkpointing; assumed: the model checkpoints its layers")
    offloads = any(_is_on(plain.get(name)) for name in ("offload_params", "cpu_offload"))
    policy = str(plain.get("auto_wrap_policy", "TRANSFORMER_BASED_WRAP"))
    return {
        "distributed_type": "FSDP",
        "key": key,
        "what": "this FSDP",
        "fsdp": {
            "fsdp_version": str(version),
            "shards": reshards,
            "cpu_offload": offloads or "offload" in legacy,
            "activation_checkpointing": False,
            "backward_prefetch": plain.get("backward_prefetch"),
            "cpu_ram_efficient_loading": _is_on(plain.get("cpu_ram_efficient_loading")),
            "wraps": _WRAPS.get(policy, policy),
        },
    }


def _is_on(value: Any) -> bool:
    return str(value).lower() in _ON


def _fsdp_config(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    """Of the keys, or the tool's own that the word of `fsdp` stands for."""
    return launch.fsdp_configs.get(str(keys.raw("fsdp"))) or keys.mapping("fsdp_config")


def checkpoints_in_fsdp(keys: Keys, launch: Launch) -> bool:
    """Whether FSDP checkpoints the layers, in place of the Trainer."""
    accelerate = launch.accelerate.get("fsdp_config")
    for config in (_fsdp_config(keys, launch), accelerate):
        if isinstance(config, Mapping):
            for name in ("activation_checkpointing", "fsdp_activation_checkpointing"):
                if str(config.get(name)).lower() in _ON:
                    return True
    return False


def is_divided(keys: Keys, launch: Launch) -> bool:
    """Whether accelerate or DeepSpeed divides the model."""
    kind = str(launch.accelerate.get("distributed_type", "")).upper()
    return "deepspeed" in keys or "fsdp" in keys or kind in ("FSDP", "DEEPSPEED")


def number_of_gpus(where: str, *counts: Any) -> int | None:
    """The product of `counts`; None where one is not said, or is of a variable of the shell.

    Raises:
        ConfigError: one is no number of GPUs.
    """
    product = 1
    for count in counts:
        text = str(count)
        if count is None or text in ("gpu", "auto") or "$" in text:
            return None
        if not text.isdecimal() or len(text) > 6 or not 1 <= int(text) <= MOST_GPUS:
            raise ConfigError(f"{where}: {text[:40]!r} is not a number of GPUs or machines")
        product *= int(text)
    return product
