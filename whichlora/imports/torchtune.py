"""torchtune's recipes for supervised fine-tuning: `tune run`, and YAML. Keys are those of 0.6.

Trainer `torchtune` in the dtype of the file, without autocast: `recipes/*_finetune_*.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports.base import Keys, Launch, Tool, method_settings
from whichlora.imports.spread import spread_settings
from whichlora.imports.torchtune_configs import content_of
from whichlora.imports.trl import FULL_ROWS
from whichlora.store.models import find_model
from whichlora.trainers import torchtune

# Packages of torchtune/models → the model whose shapes their builders have, but for the size.
_SERIES: Mapping[str, str] = {
    "llama2": "meta-llama/Llama-2-{}-hf",
    "llama3": "meta-llama/Meta-Llama-3-{}",
    "llama3_1": "meta-llama/Llama-3.1-{}",
    "llama3_2": "meta-llama/Llama-3.2-{}",
    "llama3_3": "meta-llama/Llama-3.3-{}-Instruct",
    "mistral": "mistralai/Mistral-{}-v0.1",
    "gemma": "google/gemma-{}",
    "gemma2": "google/gemma-2-{}",
    "phi4": "microsoft/phi-4",
    "qwen2": "Qwen/Qwen2-{}",
    "qwen2_5": "Qwen/Qwen2.5-{}",
    "qwen3": "Qwen/Qwen3-{}",
}
_MODEL, _COMPONENT = "model._component_", "_component_"
OPTIMIZERS = {
    "torch.optim.AdamW": "adamw_torch",
    "torch.optim.SGD": "sgd",
    "bitsandbytes.optim.PagedAdamW": "paged_adamw_32bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
}
_PARTS = {"output_proj": "o_proj"}
_MLP = ("gate_proj", "up_proj", "down_proj")
_PRECISIONS = {"bf16": "bf16-pure", "fp32": "fp32"}
# Keys of recipes whose steps are others.
_OTHER_STEPS: Mapping[str, str] = {
    "teacher_model": "distillation",
    "ref_policy_checkpointer": "PPO",
    "reward_and_value_model": "PPO",
    "grpo_samples": "GRPO",
    "quantizer": "quantisation-aware training",
}
# `tune run [options of torchrun] RECIPE --config NAME key=value ...`
_RECIPES = tuple(
    f"{kind}_finetune_{where}"
    for kind in ("full", "lora")
    for where in ("single_device", "distributed")
)
_LAUNCHER = ("nproc_per_node", "nnodes", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "master_port")


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    launch = replace(launch, gpus=_gpus(keys, launch))
    package, builder = _builder(keys)
    settings: dict[str, Any] = {"model": _model(keys, package, builder)}
    _refuse_steps(keys)
    settings |= keys.of_run(
        {"batch_size": "batch_size", "gradient_accumulation_steps": "gradient_accumulation_steps"}
    )
    if "tokenizer.max_seq_len" in keys:
        settings["seq_len"] = keys.count("tokenizer.max_seq_len", 0)
    if keys.flag("dataset.packed"):
        keys.assume("dataset.packed", FULL_ROWS)
    settings |= _adapter(keys, builder)
    settings["gradient_checkpointing"] = keys.flag("enable_activation_checkpointing")
    settings["use_reentrant"] = False  # `set_activation_checkpointing`
    dtype = keys.word("dtype", "bf16")
    if dtype not in _PRECISIONS:
        keys.refuse("precision", "dtype", f"{dtype[:40]!r} is not bf16 or fp32")
    settings |= {"precision": _PRECISIONS.get(dtype, "bf16-pure"), "attn": "sdpa"}
    settings |= {"trainer": torchtune.TRAINER.name, "prepare_kbit": False}
    settings |= {"optimizer": _optimizer(keys)} | _loss(keys)
    settings |= _spread(keys, launch)
    return settings


def _gpus(keys: Keys, launch: Launch) -> int | None:
    """Those of the command. A recipe behind options is the last value of one of them."""
    words = [keys.raw(name) for name in (*_LAUNCHER, "recipe") if name in keys]
    last = [each[-1] if isinstance(each, list) else each for each in words]
    recipes = [each for each in last if isinstance(each, str) and not each.isdecimal()]
    if recipes and recipes[-1] not in _RECIPES:
        text = f"{recipes[-1][:60]!r} is not predicted; {', '.join(_RECIPES)} are"
        keys.refuse("trainer", "recipe", text)
    if recipes and recipes[-1].endswith("single_device"):
        return 1
    if launch.gpus is not None or "nproc_per_node" not in keys:
        return launch.gpus
    counts = []
    for name in ("nproc_per_node", "nnodes"):
        value = keys.raw(name) or "1"
        counts.append(str(value[0] if isinstance(value, list) else value))
    each, nodes = counts
    if each.isdecimal() and nodes.isdecimal():
        return int(each) * int(nodes)
    keys.assume("nproc_per_node", f"{each} on {nodes}; assumed: one GPU, say --gpus")
    return None


def _builder(keys: Keys) -> tuple[str, str]:
    """The package and the function that make the model."""
    parts = keys.word(_MODEL).split(".")
    return (parts[-2], parts[-1]) if len(parts) > 1 else ("", parts[0])


def _model(keys: Keys, package: str, builder: str) -> str:
    """The model by its builder, since the folder of the checkpoint may have any name."""
    if keys.asked_model:
        return keys.model()
    plain = builder.removeprefix("qlora_").removeprefix("lora_")
    size = plain.removeprefix(f"{package}_")
    for suffix in ("_base", "_instruct"):
        size = size.removesuffix(suffix)
    name = _SERIES.get(package, "").format(size.replace("_", "."))
    with contextlib.suppress(ConfigError):
        spec = find_model(name) if name else None
        if spec is not None:
            return spec.name
    keys.refuse("model", _MODEL, f"{builder[:60]!r} is of no model that is read")
    return ""


def _refuse_steps(keys: Keys) -> None:
    """Refuse recipes other than supervised fine-tuning on text."""
    recipe = next((recipe for key, recipe in _OTHER_STEPS.items() if key in keys), "")
    if "rlhf" in keys.word("loss._component_"):
        recipe = recipe or "learning preferences"
    if recipe:
        instead = "fine-tuning on answers is read; --trainer dpo and grpo are TRL's"
        keys.refuse("trainer", _MODEL, f"torchtune's {recipe} is not predicted; {instead}")


def _adapter(keys: Keys, builder: str) -> dict[str, Any]:
    four_bit = builder.startswith("qlora_") or keys.flag("model.quantize_base")
    quant = "nf4-dq" if four_bit else "none"  # torchao `to_nf4`: scales of scales, too
    if "lora_" not in builder:
        return method_settings(quant, adapts=False, use_dora=False, targets=())
    table = {f"model.{name}": name for name in ("lora_alpha", "lora_dropout")}
    settings = keys.of_run({"model.lora_rank": "r", **table}, r=8, lora_alpha=16, lora_dropout=0.0)
    names = [_PARTS.get(name, name) for name in keys.names("model.lora_attn_modules")]
    names += _MLP if keys.flag("model.apply_lora_to_mlp") else ()
    if keys.flag("model.apply_lora_to_output"):
        keys.refuse("target_modules", "model.apply_lora_to_output", "is not predicted")
    dora = keys.flag("model.use_dora")
    return settings | method_settings(quant, adapts=True, use_dora=dora, targets=tuple(names))


def _optimizer(keys: Keys) -> str:
    name = keys.word("optimizer._component_", "torch.optim.AdamW")
    fused = keys.flag("optimizer.fused") and name == "torch.optim.AdamW"
    if name not in OPTIMIZERS:
        text = f"{name[:60]} is not predicted; {', '.join(OPTIMIZERS)} are"
        keys.refuse("optimizer", "optimizer._component_", text)
    return "adamw_torch_fused" if fused else OPTIMIZERS.get(name, "adamw_torch")


def _loss(keys: Keys) -> dict[str, Any]:
    """The loss, and the trainer's other options."""
    switches = (torchtune.IN_BACKWARD, torchtune.OFFLOADS, torchtune.COMPILES)
    options: dict[str, Any] = {each.name: True for each in switches if keys.flag(each.name)}
    name = keys.word("loss._component_").rpartition(".")[2]
    if name in torchtune.LOSSES:
        options[torchtune.LOSS.name] = name
    if torchtune.COMPILES.name in options:
        keys.assume("compile", "is predicted of the loss; assumed: eager kernels in the layers")
    return {"loss_head": "hf", "trainer_options": tuple(sorted(options.items()))}


def _spread(keys: Keys, launch: Launch) -> dict[str, Any]:
    """FSDP 2 over several GPUs, as the distributed recipes have it."""
    offload = keys.flag("fsdp_cpu_offload")
    if launch.gpus in (None, 1) and not offload:
        return {} if launch.gpus is None else {"gpus": 1}
    config = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": offload}
    accelerate = {"distributed_type": "FSDP", "fsdp_config": config}
    if keys.count("tensor_parallel_dim", 1) > 1:
        keys.refuse("parallel", "tensor_parallel_dim", "is not predicted")
    return spread_settings(keys, replace(launch, accelerate=accelerate))


TOOL = Tool(
    name="torchtune",
    summary="tune run, and a recipe's YAML of torchtune",
    models=frozenset({"checkpointer"}),
    marks=frozenset({"checkpointer", "model", "tokenizer", "metric_logger", "profiler", "loss"}),
    programs=frozenset({"tune run"}),
    read=_read,
    reads_commands=False,
    component="_component_",
    positional="recipe",
    configs=content_of,
    configs_release="0.6.1",
    epochs=("epochs", 1.0),
    steps="max_steps_per_epoch",
    sections=frozenset(
        {"model", "tokenizer", "dataset", "optimizer", "loss", "checkpointer", "lr_scheduler"}
        | {"metric_logger", "profiler", "dataset_val"}
    ),
    without_effect=(
        *("checkpointer.*", "lr_scheduler.*", "metric_logger.*", "profiler.*", "dataset_val.*"),
        *("tokenizer.*", "dataset.*", "optimizer.*", "loss.*", "model.lora_*"),
        *("output_dir", "resume_from_checkpoint", "save_adapter_weights_only", "seed", "shuffle"),
        *("clip_grad_norm", "log_*", "device", "low_cpu_ram", "run_val_every_n_steps"),
        *("batch_size_val", "keep_last_n_checkpoints", "custom_sharded_layers", "collate_fn"),
        *("data_parallel_*", "tensor_parallel_*", "use_distributed_state_dict"),
    ),
    unmodelled={
        "compile": "eager kernels",
        "use_flex": "SDPA",
    },
)
