"""`llamafactory-cli train`: LLaMA-Factory 0.9.5."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.exports.checks import (
    LORA_KEYS,
    SFT_CLASS,
    by_own_sft,
    options_for_texts,
    require_plain,
    without,
    without_pinned_kernel,
)
from whichlora.exports.launch import ACCELERATE_FILE, Spreading, launch_files, spreading
from whichlora.exports.recipe import Export, Recipe
from whichlora.exports.simpler import file_names, made_of, rows_format
from whichlora.exports.trainer_keys import (
    BATCH,
    evaluating,
    optimising,
    padding_note,
    saving,
    written,
)
from whichlora.exports.yaml import yaml_text
from whichlora.methods import get_method
from whichlora.spec.data_format import (
    CHAT_ROWS,
    TEXT_LABELLED,
    TEXT_PAIRS,
    TEXT_PREFERENCES,
    TEXT_ROWS,
    DataFormat,
)
from whichlora.spec.dtypes import has_master_weights
from whichlora.spec.options import OptionValue
from whichlora.spec.run import (
    FOUR_BIT_BNB,
    FP32_PRECISIONS,
    USUAL_TRAINER,
    RunConfig,
    autocast_precision,
)
from whichlora.trainers import Trainer, get_trainer, llamafactory_dpo, llamafactory_kto

FILE = "llamafactory.yaml"
LENGTH: Mapping[str, str] = {"cutoff_len": "seq_len"}
ADAPTER: Mapping[str, str] = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
}
_UNKNOWN: tuple[str, ...] = (
    "bias",
    "adapter_dtype",
    "expandable_segments",
    "compute_dtype",
    "llm_int8_threshold",
    "quantize_moe_experts",
)
FIXED: Mapping[str, Any] = {"loss_head": "hf", "prepare_kbit": False}
QUANTS = frozenset({"none", "int8"}) | FOUR_BIT_BNB
# What spreads a run over several GPUs: FSDP through accelerate, whose file has all of its keys.
_BACKEND = "ddp_backend"  # which accelerate sets where its file offloads
_FSDP = (
    *("version", "auto_wrap_policy", "reshard_after_forward", "backward_prefetch", "cpu_offload"),
    "cpu_ram_efficient_loading",
)
_DIVIDE = frozenset({"fsdp", "deepspeed"})
_SPREADS = frozenset(
    {"fsdp", *(f"fsdp_config.{key}" for key in _FSDP), "deepspeed", "accelerator_config"}
    | {_BACKEND}
)
_STORED = {"bnb_4bit_quant_storage": "bfloat16"}  # the dtype that it computes in
ATTENTION = {"sdpa": "sdpa", "eager": "disabled", "flash_attention_2": "fa2"}
_ROWS: Mapping[DataFormat, Mapping[str, Any]] = {
    TEXT_ROWS: {"columns": {"prompt": "text"}},
    TEXT_PAIRS: {"columns": {"prompt": "prompt", "response": "completion"}},
    TEXT_PREFERENCES: {
        "ranking": True,
        "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    },
    TEXT_LABELLED: {
        "columns": {"prompt": "prompt", "response": "completion", "kto_tag": "label"},
    },
    CHAT_ROWS: {
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "system",
        },
    },
}
"""How a data set of each format is named. Source: LLaMA-Factory 0.9.5, `data/parser.py`."""
_TURNS = (
    "LLaMA-Factory reads the chat template of the tokenizer, or puts the turns together without "
    "any: name the model's own as template:, such as qwen or llama3",
    "LLaMA-Factory drops a conversation in which user and assistant do not take turns",
)
_PROMPTS = "LLaMA-Factory takes rows that have a prompt each"
_END = "LLaMA-Factory's template without words, fewshot, puts two line breaks before the end"


BETA, LOSS = llamafactory_dpo.BETA.name, llamafactory_dpo.LOSS.name
STAGES: Mapping[str, Trainer] = {
    "dpo": llamafactory_dpo.TRAINER,
    "kto": llamafactory_kto.TRAINER,
}
# The class of a recipe → the stage that learns the same, and its loss where the class has one alone
_LEARNS: Mapping[str, tuple[str, str]] = {
    **{trainer.library_class: (stage, "") for stage, trainer in STAGES.items()},
    "trl.DPOTrainer": ("dpo", ""),
    "trl.experimental.orpo.ORPOTrainer": ("dpo", "orpo"),
    "trl.experimental.cpo.CPOTrainer": ("dpo", "simpo"),
    "trl.KTOTrainer": ("kto", "kto"),
}


def export(recipe: Recipe) -> Export:
    """Stage `pt` for plain texts, without its default packing; `dpo`, `kto` or `sft` for others.

    Raises:
        ConfigError: a setting that LLaMA-Factory lacks.
    """
    require_plain(
        recipe,
        "llamafactory",
        adapters=LORA_KEYS,
        quants=QUANTS,
        rows=_ROWS,
        data=rows_format(recipe),
        trainers=(SFT_CLASS, *_LEARNS),
    )
    recipe, by_itself = by_own_sft(recipe, "LLaMA-Factory", USUAL_TRAINER)
    unknown = _UNKNOWN + options_for_texts(recipe.run)
    if not get_method(recipe.run.method).trains_base:
        unknown += ("base_dtype",)
    run, left_out = without(recipe.run, "LLaMA-Factory", *unknown)
    spread = spreading(run, "llamafactory", keys=_SPREADS, implied=_STORED, loads_on_gpu=True)
    run, notes = under_llamafactory(run, divided=bool(spread.training.keys() & _DIVIDE))
    notes += spread.notes + by_itself + left_out
    notes += padding_note(recipe)
    settings: dict[str, Any] = {
        "model_name_or_path": run.model,
        "flash_attn": ATTENTION[run.attn],
        "disable_gradient_checkpointing": not run.gradient_checkpointing,
        "use_reentrant_gc": bool(run.use_reentrant),
    }
    if recipe.trust_remote_code:
        settings["trust_remote_code"] = True
    rows, rows_notes = _rows(recipe)
    notes += rows_notes
    settings |= (
        quantisation(run.quant or "none") | rows | {"do_train": True} | _adapter(recipe, run)
    )
    evaluation = evaluating(recipe)
    settings |= {
        "dataset": "train",
        **({"eval_dataset": "validation"} if evaluation else {}),
        "dataset_dir": ".",
        **written(run, LENGTH),
        "packing": False,
        **written(run, BATCH),
        **({"per_device_eval_batch_size": run.batch_size} | evaluation if evaluation else {}),
        **optimising(recipe, run),
        "pure_bf16": run.precision == "bf16-pure",
        "seed": recipe.seed,
        "output_dir": "output-llamafactory",
        **saving(recipe),
        **{
            name: value
            for name, value in spread.training_keys.items()
            if not name.startswith("fsdp") and name != _BACKEND
        },
        "report_to": "none",
    }
    if recipe.tokenizer is not None:
        notes = (*notes, f"LLaMA-Factory takes the model's own tokenizer, not {recipe.tokenizer}")
    splits = ("train", "validation")[: 1 + bool(evaluation)]
    data = {
        split: {"file_name": file, **_ROWS[rows_format(recipe)]}
        for split, file in zip(splits, file_names(recipe), strict=False)
    }
    command = _command(run, spread)
    head = f"Written by WhichLoRA for LLaMA-Factory 0.9.5. Start it here with: {command}"
    return Export(
        files={
            FILE: yaml_text(settings, head=head, rate_comment=recipe.rate_comment),
            "dataset_info.json": json.dumps(data, indent=2) + "\n",
            **(launch_files(run) if "fsdp" in spread.training else spread.files),
        },
        command=command,
        run=run,
        notes=notes,
        made_of=made_of(recipe),
        loads_on_gpu=spread.loads_on_gpu,
    )


def _command(run: RunConfig, spread: Spreading) -> str:
    """FSDP is set up by accelerate's launcher, everything else started by LLaMA-Factory's own.

    Source: LLaMA-Factory 0.9.5, `launcher.py`, `model/model_utils/quantization.py`.
    """
    train = f"llamafactory-cli train {FILE}"
    config = run.parallel
    if config.gpus == 1:
        return train
    if "fsdp" in spread.training:
        nodes = ""
        if config.nodes > 1:
            nodes = "--machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR "
            nodes += "--main_process_port 29500 "
        start = f"accelerate launch --config_file {ACCELERATE_FILE} {nodes}"
        return f"{start}-m llamafactory.launcher {FILE}"
    # OPTIM_TORCH would turn on expandable segments
    variables = ["FORCE_TORCHRUN=1", "OPTIM_TORCH=0", f"NPROC_PER_NODE={config.gpus_per_node}"]
    if config.nodes > 1:
        variables += [f"NNODES={config.nodes}", "RDZV_ID=whichlora", "MASTER_PORT=29500"]
    return " ".join([*variables, train])


def _rows(recipe: Recipe) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The stage, which tokens of a row have a loss, and notes.

    Raises:
        ConfigError: loss on prompts of plain text, where it appends no end token.
    """
    everything = recipe.train_on == "all"
    data = rows_format(recipe)
    if get_trainer(recipe.run.trainer).rows != "texts":
        stage, keys = _preferences(recipe.run)
        return {"stage": stage, "template": "fewshot", **keys}, (_END, _PROMPTS)
    if data == TEXT_ROWS:
        return {"stage": "pt"}, ()
    if data == CHAT_ROWS:
        last_alone = recipe.data_format != CHAT_ROWS and not everything
        return {"stage": "sft", "train_on_prompt": everything, "mask_history": last_alone}, _TURNS
    if everything:
        raise ConfigError(
            "--to llamafactory: it can't learn prompts of plain text and the end of a text "
            "(train_on: all); give the rows as one text with dataset.template, or use --to "
            "transformers"
        )
    return {"stage": "sft", "template": "fewshot", "train_on_prompt": False}, (_END,)


def _preferences(run: RunConfig) -> tuple[str, dict[str, OptionValue]]:
    """The stage that learns what the trainer of `run` does, and its keys.

    Raises:
        ConfigError: a loss or a setting that it lacks.
    """
    stage, fixed = _LEARNS[get_trainer(run.trainer).library_class]
    asked = dict(run.trainer_options)
    keys: dict[str, OptionValue] = {BETA: asked.get(BETA, asked.get("beta", 0.1))}
    loss = str(asked.get(LOSS, asked.get("loss_type", fixed)))
    accepted = (fixed,) if fixed else llamafactory_dpo.LOSS.choices
    if loss not in accepted:
        raise ConfigError(
            f"--to llamafactory: its stage {stage} has no loss {loss}; it has "
            f"{', '.join(accepted)}; use --to transformers"
        )
    if asked.get(llamafactory_dpo.NO_DROPOUT.name) is False:
        raise ConfigError(
            f"--to llamafactory: its stage {stage} turns dropout off; use --to transformers, or "
            "disable_dropout true"
        )
    if stage == "dpo":
        keys[LOSS] = loss
    further = {"label_smoothing": "dpo_label_smoothing", "cpo_alpha": "pref_ftx"}
    return stage, keys | {key: asked[name] for name, key in further.items() if asked.get(name)}


def quantisation(quant: str) -> dict[str, Any]:
    """The keys of a storage of the base weights."""
    if quant == "none":
        return {}
    if quant == "int8":
        return {"quantization_method": "bnb", "quantization_bit": 8}
    return {
        "quantization_method": "bnb",
        "quantization_bit": 4,
        "quantization_type": quant.removesuffix("-dq"),
        "double_quantization": quant.endswith("-dq"),
    }


def _adapter(recipe: Recipe, run: RunConfig) -> dict[str, Any]:
    """The type of fine-tuning, and adapter settings."""
    method = get_method(run.method)
    if not method.peft_class:
        return {"finetuning_type": "full"}
    adapter = method.peft_config(run)
    targets = recipe.target_modules
    return {
        "finetuning_type": "lora",
        **written(run, ADAPTER),
        "lora_target": "all" if isinstance(targets, str) else ",".join(targets),
        "use_dora": bool(adapter.get("use_dora")),
        **({"use_rslora": True} if run.use_rslora else {}),
        **({"loraplus_lr_ratio": run.loraplus_lr_ratio} if run.loraplus_lr_ratio != 1 else {}),
        **({"additional_target": ",".join(run.modules_to_save)} if run.modules_to_save else {}),
    }


def under_llamafactory(
    run: RunConfig, *, divided: bool = False
) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` as LLaMA-Factory runs it: a 4-bit base is not prepared, adapters are fp32.

    Args:
        divided: accelerate or DeepSpeed decides which parameters are fp32, and divides those.

    Raises:
        ConfigError: full fine-tuning in fp16, adapters in fp32.
    """
    run, pinned = without_pinned_kernel(run, "LLaMA-Factory")
    notes = [*pinned]
    precision = run.precision
    if get_method(run.method).trains_base:
        if precision.startswith("fp16"):
            raise ConfigError(
                "--to llamafactory: full fine-tuning in fp16 is not modelled there; use bf16"
            )
        widened = has_master_weights(run, trains_base=True)
        if precision == "bf16-no-autocast":
            precision = "bf16-pure"  # the same, where all weights are trained
        if precision not in (*FP32_PRECISIONS, "bf16-pure") and not widened and not divided:
            precision = "bf16-pure"  # else it widens all weights to fp32
            notes.append(f"{run.precision} becomes pure_bf16, or it would widen all weights")
    elif precision in FP32_PRECISIONS:
        raise ConfigError(
            f"--to llamafactory: it loads a frozen base in 16 bit (infer_optim_dtype), never for "
            f"{precision}; use bf16, or --to transformers"
        )
    elif precision.startswith("fp16") or precision.endswith("-no-autocast"):
        precision = autocast_precision(precision)
        if precision != run.precision:
            width = run.precision[:4]
            notes.append(
                f"LLaMA-Factory has no {width} without autocast: it runs under {width} autocast"
            )
    if get_trainer(run.trainer).rows != "texts":
        run, how = _by_its_trainer(run)
        notes.append(how)
    elif run.loss_head != "hf":
        notes.append(f"the loss head {run.loss_head} is left out")
    return replace(run, **FIXED, precision=precision), tuple(notes)


def _by_its_trainer(run: RunConfig) -> tuple[RunConfig, str]:
    """`run` with LLaMA-Factory's own trainer of preferences, and what to say of it."""
    stage, keys = _preferences(run)
    trainer = STAGES[stage]
    names = [option.name for option in trainer.options]
    options = tuple(sorted((name, value) for name, value in keys.items() if name in names))
    note = (
        f"LLaMA-Factory's {trainer.class_name} makes a log-softmax of whole "
        "logits in fp32, also of the reference, as which it is predicted"
    )
    return replace(run, trainer=trainer.name, trainer_options=options), note
