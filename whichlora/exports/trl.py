"""`trl sft --config`, and the commands of its other trainers: TRL 1.16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.exports import transformers
from whichlora.exports.checks import (
    LORA_KEYS,
    require_plain,
    require_trainer,
    without,
    without_pinned_kernel,
)
from whichlora.exports.launch import Spreading, launch_line, spreading
from whichlora.exports.recipe import DATA_FILE, Export, Recipe
from whichlora.exports.trainer_keys import BATCH, optimising, padding_note, saving, written
from whichlora.exports.yaml import yaml_text
from whichlora.methods import get_method, weight_dtype
from whichlora.parallel.base import ON_HOST
from whichlora.spec.checkpoint import is_expanded
from whichlora.spec.data_format import (
    CHAT_LABELLED,
    CHAT_PAIRS,
    CHAT_PREFERENCES,
    CHAT_ROWS,
    TEXT_LABELLED,
    TEXT_PAIRS,
    TEXT_PREFERENCES,
    TEXT_ROWS,
    DataFormat,
    Rows,
)
from whichlora.spec.run import BNB_QUANTS, FOUR_BIT_BNB, RunConfig
from whichlora.tasks import task_of
from whichlora.trainers import get_trainer, sft

FILE = "trl.yaml"
LENGTH: Mapping[str, str] = {"max_length": "seq_len"}
ADAPTER: Mapping[str, str] = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
}
_UNKNOWN = (
    "bias",
    "adapter_dtype",
    "loraplus_lr_ratio",
    "expandable_segments",
    "compute_dtype",
    "llm_int8_threshold",
    "quantize_moe_experts",
)
_COMMANDS: Mapping[str, str] = {  # of `trl`, by the class that trains
    sft.TRAINER.library_class: "sft",
    "trl.DPOTrainer": "dpo",
    "trl.KTOTrainer": "kto",
    "trl.RewardTrainer": "reward",
}
_ROWS: Mapping[Rows, Sequence[DataFormat]] = {
    "texts": (TEXT_ROWS, TEXT_PAIRS, CHAT_PAIRS, CHAT_ROWS),
    "pairs": (TEXT_PREFERENCES, CHAT_PREFERENCES),
    "labelled": (TEXT_LABELLED, CHAT_LABELLED),
}
_TEMPLATE = "TRL needs a chat template in the tokenizer; without one, add chat_template_path"
_MARKS = "TRL tells the assistant's turns by the marks {% generation %} of the chat template"
_PACKED = (
    "TRL's command line has no key for Mxfp4Config(dequantize=True): where the kernels package is "
    "installed, name a 16-bit copy of the model"
)
FIXED: Mapping[str, Any] = {"loss_head": "trl-fused", "prepare_kbit": False}
QUANTS = frozenset({"none", "int8"}) | FOUR_BIT_BNB
# What spreads a run over several GPUs: those of TrainingArguments, which SFTConfig extends.
_FSDP = (
    *("version", "auto_wrap_policy", "reshard_after_forward", "backward_prefetch", "cpu_offload"),
    "cpu_ram_efficient_loading",
)
_SPREADS = frozenset(
    {"fsdp", *(f"fsdp_config.{key}" for key in _FSDP), "deepspeed", "accelerator_config"}
    | {"bnb_4bit_quant_storage", "device_map", "ddp_backend"}
)


def export(recipe: Recipe) -> Export:
    """SFT with TRL's fused loss head, which can't be turned off, or the run's trainer of TRL.

    Raises:
        ConfigError: a setting that TRL lacks.
    """
    if recipe.run.images or recipe.data_format.images:
        return _with_images(recipe)
    trainer = get_trainer(recipe.run.trainer)
    name = _COMMANDS.get(trainer.library_class, "sft")
    require_plain(
        recipe,
        "trl",
        adapters=LORA_KEYS,
        quants=QUANTS,
        rows=_ROWS.get(trainer.rows, ()),
        trainers=tuple(_COMMANDS),
    )
    run, left_out = without(recipe.run, "TRL", *_UNKNOWN)
    run, notes = under_trl(run)
    spread = spreading(run, "trl", keys=_SPREADS)
    notes += left_out
    notes += padding_note(recipe, "packed", "grouped")
    if is_expanded(recipe.model_config or {}, run.quant or "none"):
        notes = (*notes, _PACKED)
    settings: dict[str, Any] = {
        "model_name_or_path": run.model,
        "dtype": weight_dtype(run),
        "attn_implementation": run.attn,
        **_model_keys(spread),
    }
    settings |= quantisation(run.quant or "none") | _adapter(recipe, run)
    settings |= {
        "datasets": [{"path": "json", "data_files": DATA_FILE}],
        **_rows(recipe),
        **written(run, LENGTH),
        **_batching(recipe),
        **written(run, BATCH),
        "gradient_checkpointing": run.gradient_checkpointing,
        **(
            {"gradient_checkpointing_kwargs": {"use_reentrant": bool(run.use_reentrant)}}
            if run.gradient_checkpointing
            and run.use_reentrant != run.versions.checkpoints_reentrant
            else {}
        ),
        **optimising(recipe, run),
        "seed": recipe.seed,
        "output_dir": "output-trl",
        **saving(recipe),
        **spread.training_keys,
        "report_to": "none",
    }
    if recipe.data_format.conversational:
        notes = (*notes, _TEMPLATE)
    if recipe.data_format.kind == "messages" and recipe.train_on == "completions":
        notes = (*notes, _MARKS)
    if recipe.trust_remote_code:
        settings["trust_remote_code"] = True
    if recipe.tokenizer is not None:
        notes = (*notes, f"TRL takes the model's own tokenizer, not {recipe.tokenizer}")
    command = f"trl {name} --config {FILE}"
    if run.parallel.gpus > 1:  # without accelerate's own file of this machine
        command = launch_line(run, f"trl.scripts.{name} --config {FILE}", module=True)
    head = f"Written by WhichLoRA for TRL 1.16. Start it here with: {command}"
    return Export(
        files={
            FILE: yaml_text(settings, head=head, rate_comment=recipe.rate_comment),
            **spread.files,
        },
        command=command,
        run=run,
        notes=notes,
    )


def _with_images(recipe: Recipe) -> Export:
    """`train.py` with TRL's `SFTTrainer`, since its command shrinks no image and freezes no tower.

    The script makes the batches: TRL's own collator cuts the tokens of an image at `max_length`,
    and has a loss on them. Source: TRL 1.16 `DataCollatorForVisionLanguageModeling`.

    Raises:
        ConfigError: another trainer of TRL, or a setting that the script lacks.
    """
    require_trainer(recipe.run, "--to trl", sft.TRAINER.library_class)
    run, notes = under_trl(recipe.run)
    made = transformers.export(replace(recipe, run=replace(run, trainer=sft.TRAINER.name)))
    return replace(made, notes=notes)


def _model_keys(spread: Spreading) -> dict[str, Any]:
    """TRL has a key for the storage of codes; other options go to `from_pretrained` as they are.

    Under FSDP its own device map, "auto", would cut the model over all GPUs in each process.
    Source: TRL 1.16 `create_model_from_path`, and `SFTTrainer.__init__`, which resets it for DDP
    and DeepSpeed alone.
    """
    options = {**({"device_map": ON_HOST} if "fsdp" in spread.training else {}), **spread.model}
    stored = {name: options[name] for name in options if name.startswith("bnb_4bit_")}
    rest = {name: options[name] for name in options if name not in stored}
    return {**stored, **({"model_init_kwargs": rest} if rest else {})}


def _rows(recipe: Recipe) -> dict[str, Any]:
    """The columns of a row, and which tokens have a loss; or the options of another trainer."""
    trainer = get_trainer(recipe.run.trainer)
    options = dict(trainer.arguments(replace(recipe.run, **FIXED)))
    if trainer.rows != "texts":
        return options
    learned = recipe.train_on == "completions"
    match recipe.data_format.kind:
        case "prompt-completion":
            return {"completion_only_loss": learned, **options}
        case "messages":
            return {"assistant_only_loss": learned, **options}
    return {"dataset_text_field": "text", **options}


def _batching(recipe: Recipe) -> dict[str, Any]:
    """How batches are made, where the trainer has a choice."""
    if get_trainer(recipe.run.trainer).rows != "texts":
        return {}
    return {
        "packing": recipe.batching == "packed",
        **({"packing_strategy": "wrapped"} if recipe.batching == "packed" else {}),
        **({"train_sampling_strategy": "group_by_length"} if recipe.batching == "grouped" else {}),
    }


def quantisation(quant: str) -> dict[str, Any]:
    """The keys of a storage of the base weights."""
    if quant in FOUR_BIT_BNB:
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quant.removesuffix("-dq"),
            "use_bnb_nested_quant": quant.endswith("-dq"),
        }
    return {"load_in_8bit": True} if quant == "int8" else {}


def _adapter(recipe: Recipe, run: RunConfig) -> dict[str, Any]:
    """Adapter settings; empty for full fine-tuning."""
    method = get_method(run.method)
    if not method.peft_class:
        return {}
    adapter, task = method.peft_config(run), task_of(run)
    targets = recipe.target_modules
    return {
        "use_peft": True,
        **({"lora_task_type": task.peft_task} if task is not None else {}),
        **written(run, ADAPTER),
        "lora_target_modules": targets if isinstance(targets, str) else list(targets),
        **({"use_rslora": True} if run.use_rslora else {}),
        "use_dora": bool(adapter.get("use_dora")),
        **({"lora_modules_to_save": list(run.modules_to_save)} if run.modules_to_save else {}),
    }


def under_trl(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` as TRL runs it: with TRL's loss head, and a 4-bit base that is not prepared.

    Raises:
        ConfigError: a precision that TRL lacks.
    """
    run, pinned = without_pinned_kernel(run, "TRL")
    notes = [*pinned]
    precision = run.precision
    adapters = not get_method(run.method).trains_base
    if precision.endswith("-pure") and adapters and (run.quant or "none") == "none":
        precision = "fp16-no-autocast" if precision == "fp16-pure" else "bf16-no-autocast"
        notes.append(f"TRL keeps adapters of a 16-bit base in fp32, so {run.precision} isn't")
    if precision == "bf16-no-autocast" and adapters and run.quant in BNB_QUANTS:
        precision = "bf16-pure"  # `sft_trainer.py`, `_is_quantized_model`
        notes.append("TRL narrows the adapters of a quantised base to bf16")
    if precision == "fp16" and not adapters:
        raise ConfigError("--to trl: full fine-tuning in fp16 needs fp32 weights; use bf16")
    fixed = FIXED if get_trainer(run.trainer).rows == "texts" else {}
    return replace(run, **fixed, precision=precision), tuple(notes)
