"""`axolotl train`: Axolotl 0.19."""

from __future__ import annotations

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
from whichlora.exports.launch import Spreading, launcher_options, spreading
from whichlora.exports.recipe import Export, Recipe
from whichlora.exports.simpler import TRAINED, file_names, made_of, rows_format
from whichlora.exports.trainer_keys import evaluating, padding_note, saving, written
from whichlora.exports.yaml import yaml_text
from whichlora.methods import get_method
from whichlora.spec.checkpoint import is_expanded
from whichlora.spec.data_format import (
    CHAT_LABELLED,
    CHAT_PREFERENCES,
    CHAT_ROWS,
    TEXT_LABELLED,
    TEXT_PAIRS,
    TEXT_PREFERENCES,
    TEXT_ROWS,
    DataFormat,
)
from whichlora.spec.options import OptionValue
from whichlora.spec.run import (
    BNB_QUANTS,
    FP32_PRECISIONS,
    USUAL_TRAINER,
    RunConfig,
    autocast_precision,
)
from whichlora.trainers import get_trainer

FILE = "axolotl.yaml"
LENGTH: Mapping[str, str] = {"sequence_len": "seq_len"}
BATCH: Mapping[str, str] = {
    "micro_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
ADAPTER: Mapping[str, str] = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
}
_UNKNOWN = (
    "bias",
    "adapter_dtype",
    "base_dtype",
    "expandable_segments",
    "compute_dtype",
    "llm_int8_threshold",
)
# Its only 4-bit storage is NF4 with double quantisation.
QUANTS = frozenset({"none", "int8", "nf4-dq"})
# What spreads a run over several GPUs. Source: Axolotl 0.19, `utils/schemas/fsdp.py`.
_FSDP = (
    "version",
    "auto_wrap_policy",
    "reshard_after_forward",
    "cpu_offload",
    "cpu_ram_efficient_loading",
)
_BACKEND = "ddp_backend"  # which accelerate sets where FSDP offloads (`setup_fsdp_envs`)
_SPREADS = frozenset(
    {"fsdp", *(f"fsdp_config.{key}" for key in _FSDP), "deepspeed", "device_map", _BACKEND}
)
_REFUSED_OPTIMIZERS = ("adamw_8bit", "adamw_bnb_8bit")
_STORED = {"bnb_4bit_quant_storage": "bfloat16"}  # `loaders/model.py`
# `monkeypatch/accelerate/fsdp2.py`
WIDENS_NOTHING = (
    "Axolotl prepares FSDP 2 itself: it widens no trained parameter to fp32, and each adapter "
    "matrix is gathered alone; neither is predicted",
)
WIDE_NORMS = "Axolotl keeps norms and embeddings in fp32 here, which is not predicted"
_PROMPT_AS_IT_IS = "{instruction}"
_ROWS: Mapping[DataFormat, Mapping[str, Any]] = {
    TEXT_ROWS: {"type": "completion", "field": "text"},
    TEXT_PAIRS: {
        "type": {
            "field_instruction": "prompt",
            "field_output": "completion",
            "format": _PROMPT_AS_IT_IS,
            "no_input_format": _PROMPT_AS_IT_IS,
        }
    },
    CHAT_ROWS: {
        "type": "chat_template",
        "chat_template": "tokenizer_default_fallback_alpaca",  # as in the train.py of WhichLoRA
        "field_messages": "messages",
        "message_property_mappings": {"role": "role", "content": "content"},
        "roles_to_train": ["assistant"],
        "train_on_eos": "turn",
    },
    # without a type TRL gets the rows as they are
    **{data: {} for data in (TEXT_PREFERENCES, CHAT_PREFERENCES, TEXT_LABELLED, CHAT_LABELLED)},
}
"""How a data set of each format is named. Source: Axolotl 0.19, `utils/schemas/datasets.py`."""


TRL = "1.9.0"  # that it needs, whose `DPOTrainer` and `KTOTrainer` read whole logits
BETA = "rl_beta"
# The class of TRL that it extends → `rl` (`core/builders/rl.py`), option → key, what it fixes
PREFERENCES: Mapping[str, tuple[str, Mapping[str, str], Mapping[str, OptionValue]]] = {
    "trl.DPOTrainer": (
        "dpo",
        {
            "beta": BETA,
            "loss_type": "dpo_loss_type",
            "label_smoothing": "dpo_label_smoothing",
            "precompute_ref_log_probs": "precompute_ref_log_probs",
        },
        {"disable_dropout": True},
    ),
    "trl.KTOTrainer": (
        "kto",
        {"beta": BETA},
        {"loss_type": "kto", "precompute_ref_log_probs": False, "disable_dropout": True},
    ),
    "trl.experimental.orpo.ORPOTrainer": ("orpo", {"beta": BETA}, {"disable_dropout": True}),
    "trl.experimental.cpo.CPOTrainer": (
        "simpo",
        {"beta": BETA, "cpo_alpha": "cpo_alpha"},
        {"loss_type": "simpo", "disable_dropout": True},
    ),
}
_LISTS = ("dpo_loss_type",)


def export(recipe: Recipe) -> Export:
    """SFT, without Axolotl's LoRA kernels, which are not modelled; or preferences (`rl`).

    Raises:
        ConfigError: a setting that Axolotl lacks.
    """
    require_plain(
        recipe,
        "axolotl",
        adapters=LORA_KEYS,
        quants=QUANTS,
        rows=_ROWS,
        data=rows_format(recipe),
        trainers=(SFT_CLASS, *PREFERENCES),
    )
    recipe, by_itself = by_own_sft(recipe, "Axolotl", USUAL_TRAINER)
    run, left_out = without(recipe.run, "Axolotl", *_UNKNOWN, *options_for_texts(recipe.run))
    run, notes = under_axolotl(run)
    spread = spreading(run, "axolotl", keys=_SPREADS, implied=_STORED, loads_on_gpu=True)
    notes += spread.notes + by_itself + left_out + WIDENS_NOTHING * ("fsdp" in spread.training)
    notes += padding_note(recipe)
    settings: dict[str, Any] = {"base_model": run.model, "attn_implementation": run.attn}
    if recipe.tokenizer is not None:
        settings["tokenizer_config"] = recipe.tokenizer
    if recipe.trust_remote_code:
        settings["trust_remote_code"] = True
    settings |= _expanded(recipe) | _adapter(recipe, run)
    settings |= {
        **_preferences(run),
        "datasets": [_dataset(recipe, file_names(recipe)[0])],
        **_evaluation(recipe),
        "val_set_size": 0.0,
        **_learned(recipe, run),
        "sample_packing": False,
        "pad_to_sequence_len": False,
        **written(run, BATCH),
        "gradient_checkpointing": run.gradient_checkpointing,
        **(
            {"gradient_checkpointing_kwargs": {"use_reentrant": bool(run.use_reentrant)}}
            if run.gradient_checkpointing
            else {}
        ),
        "num_epochs": recipe.epochs,
        "learning_rate": recipe.learning_rate,
        "optimizer": run.trainer_optim,
        "lr_scheduler": "linear",
        "bf16": run.precision == "bf16",
        "fp16": run.precision == "fp16",
        "tf32": run.precision == "tf32",
        "seed": recipe.seed,
        **saving(recipe),
        **_spread(run, spread),
        "output_dir": "./output-axolotl",
    }
    command = f"axolotl train {FILE}"
    if run.parallel.gpus > 1:
        command += _launcher(run, spread)
    head = f"Written by WhichLoRA for Axolotl 0.19. Start it here with: {command}"
    return Export(
        files={
            FILE: yaml_text(settings, head=head, rate_comment=recipe.rate_comment),
            **spread.files,
        },
        command=command,
        run=run,
        notes=notes,
        made_of=made_of(recipe),
        loads_on_gpu=spread.loads_on_gpu,
    )


def _preferences(run: RunConfig) -> dict[str, Any]:
    """The keys of a trainer of preferences; empty for another.

    Raises:
        ConfigError: a setting of the trainer that Axolotl has no key for.
    """
    trainer = get_trainer(run.trainer)
    if trainer.library_class not in PREFERENCES:
        return {}
    rl, names, fixed = PREFERENCES[trainer.library_class]
    for name, value in fixed.items():
        if run.trainer_option(name) not in (None, value):
            raise ConfigError(
                f"--to axolotl: its rl: {rl} has {name} {value}, not {run.trainer_option(name)}; "
                "use --to transformers"
            )
    stated = {names[name]: value for name, value in run.trainer_options if name in names}
    lists = {name: [stated[name]] for name in _LISTS if name in stated}
    return {"rl": rl, **stated, **lists}


def _learned(recipe: Recipe, run: RunConfig) -> dict[str, Any]:
    """Which tokens have a loss, and what becomes of long rows, where TRL does not decide it."""
    length = written(run, LENGTH)
    if get_trainer(run.trainer).rows != "texts":
        return {"skip_prepare_dataset": True, **length}
    return {
        "train_on_inputs": recipe.train_on == "all",
        **length,
        "excess_length_strategy": "truncate",
    }


def _spread(run: RunConfig, spread: Spreading) -> dict[str, Any]:
    """What spreads `run` over its GPUs, in Axolotl's keys.

    Raises:
        ConfigError: an optimizer that it refuses beside FSDP 2.
    """
    implied = ("fsdp", _BACKEND)
    keys = {name: value for name, value in spread.training_keys.items() if name not in implied}
    config = dict(keys.pop("fsdp_config", {}))
    if "cpu_offload" in config:
        config["offload_params"] = config.pop("cpu_offload")
    if not config:
        return keys | dict(spread.model)
    if run.trainer_optim in _REFUSED_OPTIMIZERS:
        raise ConfigError(
            f"--to axolotl: it refuses optimizer {run.optimizer} beside FSDP 2; use adamw_torch, "
            "or --to transformers"
        )
    return {"fsdp_version": config.pop("version"), "fsdp_config": config, **keys}


def _launcher(run: RunConfig, spread: Spreading) -> str:
    if "device_map" in spread.model:
        return " --launcher python"
    return f" --launcher torchrun -- {' '.join(launcher_options(run))}"


def _dataset(recipe: Recipe, file: str) -> dict[str, Any]:
    rows = _ROWS[rows_format(recipe)]
    marked = rows is _ROWS[CHAT_ROWS] and recipe.data_format != CHAT_ROWS
    marks = {"message_field_training": TRAINED} if recipe.train_on == "completions" else {}
    return {"path": file, "ds_type": "json", **rows, **(marks if marked else {})}


def _evaluation(recipe: Recipe) -> dict[str, Any]:
    """The validation rows, and when they are evaluated; empty without them."""
    when = evaluating(recipe)
    if not when:
        return {}
    validation = _dataset(recipe, file_names(recipe)[1]) | {"split": "train"}  # its name in a file
    size = recipe.run.batch_size
    return {"test_datasets": [validation], "eval_batch_size": size, **when}


def _adapter(recipe: Recipe, run: RunConfig) -> dict[str, Any]:
    """Adapter settings; empty for full fine-tuning."""
    method = get_method(run.method)
    if not method.peft_class:
        return {}
    adapter = method.peft_config(run)
    targets, quant = recipe.target_modules, run.quant or "none"
    return {
        "adapter": "qlora" if quant == "nf4-dq" else "lora",
        **quantisation(quant),
        **({"quantize_moe_experts": True} if run.quantize_moe_experts else {}),
        **written(run, ADAPTER),
        **(
            {"lora_target_linear": True}
            if isinstance(targets, str)
            else {"lora_target_modules": list(targets)}
        ),
        **({"peft_use_rslora": True} if run.use_rslora else {}),
        **({"loraplus_lr_ratio": run.loraplus_lr_ratio} if run.loraplus_lr_ratio != 1 else {}),
        "peft_use_dora": bool(adapter.get("use_dora")),
        **({"lora_modules_to_save": list(run.modules_to_save)} if run.modules_to_save else {}),
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
    }


def _expanded(recipe: Recipe) -> dict[str, Any]:
    """The keys that expand the experts of an mxfp4 checkpoint.

    Source: Axolotl 0.19 `loaders/model.py`, `_set_quantization_config`.
    """
    if not is_expanded(recipe.model_config or {}, recipe.run.quant or "none"):
        return {}
    return {
        "model_quantization_config": "Mxfp4Config",
        "model_quantization_config_kwargs": {"dequantize": True},
    }


def quantisation(quant: str) -> dict[str, Any]:
    """The keys of a storage of the base weights."""
    return {"load_in_4bit": quant == "nf4-dq", "load_in_8bit": quant == "int8"}


def under_axolotl(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` as Axolotl runs it.

    It prepares a 4-bit base, then narrows the norms and embeddings again: in effect, the base is
    not prepared (`loaders/model.py`, `_configure_embedding_dtypes`).
    """
    run, pinned = without_pinned_kernel(run, "Axolotl")
    notes = [*pinned]
    precision = autocast_precision(run.precision)
    if precision != run.precision:
        notes.append(f"Axolotl has no {run.precision}: it runs under {precision} autocast")
        run = replace(run, precision=precision)
    if get_trainer(run.trainer).rows != "texts":
        run = replace(run, libraries=tuple(sorted({**dict(run.libraries), "trl": TRL}.items())))
        notes.append(f"Axolotl 0.19 needs TRL {TRL}, as which it is predicted")
    elif run.loss_head != "hf":
        notes.append(f"the loss head {run.loss_head} is left out: it is a plugin of Axolotl")
    if get_method(run.method).trains_base and run.precision not in FP32_PRECISIONS:
        notes.append(WIDE_NORMS)
    prepared = False if run.quant in BNB_QUANTS else run.prepare_kbit
    return replace(run, loss_head="hf", prepare_kbit=prepared), tuple(notes)
