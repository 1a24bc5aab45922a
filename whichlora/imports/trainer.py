"""Keys of transformers' `TrainingArguments`, which TRL and LLaMA-Factory extend."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from whichlora.errors import ConfigError
from whichlora.exports.trainer_keys import BATCH
from whichlora.exports.trl import ADAPTER
from whichlora.imports.base import Keys, Launch, Tool, full_method, optimizer
from whichlora.imports.spread import checkpoints_in_fsdp, spread_settings
from whichlora.spec.run import FP32_PRECISIONS, ComputeDtype, precision_of_weights
from whichlora.spec.versions import Libraries
from whichlora.store.hub import load_model
from whichlora.trainers import liger
from whichlora.trainers.base import Defaults, plain_defaults

EVALUATES = ("eval_strategy", "evaluation_strategy")
BATCH_SIZE = 8  # `per_device_train_batch_size` where it is missing
EXPANDABLE = "expandable_segments:true"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
UNMODELLED: Mapping[str, str] = {
    "torch_compile": "eager kernels",
    "torch_compile_backend": "eager kernels",
    "torch_compile_mode": "eager kernels",
    "activation_offloading": "activations on the GPU",
    "auto_find_batch_size": "the batch size of the file",
    "label_smoothing_factor": "no label smoothing",
    "neftune_noise_alpha": "no noise",
    "optim_target_modules": "an optimizer without projection",
    "torch_empty_cache_steps": "the allocator keeps its cache",
    "ddp_bucket_cap_mb": "buckets of 25 MiB",
    "parallelism_config": "none of it",
    "padding_free": "rows of full length",
    "use_cache": "no cache",
}
WITHOUT_EFFECT = (
    *("output_dir", "overwrite_output_dir", "learning_rate"),
    *("lr_scheduler*", "warmup_*", "weight_decay", "adam_*", "optim_args", "max_grad_norm"),
    *("logging_*", "log_*", "report_to", "run_name", "project", "trackio_*", "disable_tqdm"),
    *("eval_*", "evaluation_strategy", "per_device_eval_batch_size", "prediction_loss_only"),
    *("include_*", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "save_*"),
    *("hub_*", "push_to_hub*", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    *("resume_from_checkpoint", "full_determinism", "seed", "data_seed", "dataloader_*"),
    *("remove_unused_columns", "label_names", "train_sampling_strategy", "group_by_length"),
    *("length_column_name", "ddp_*", "debug", "skip_memory_metrics", "do_*", "local_rank"),
    "fsdp_transformer_layer_cls_to_wrap",  # of transformers 4
    *("enable_jit_checkpoint", "average_tokens_across_devices", "trust_remote_code", "env"),
    *("dataset_*", "datasets", "streaming", "model_revision", "cache_dir", "tokenizer_*"),
    *("preprocessing_num_workers", "overwrite_cache", "max_train_samples", "max_eval_samples"),
    *("source_lang", "target_lang", "source_prefix", "text_column", "summary_column"),
    *("predict_with_generate", "generation_*", "num_beams", "val_max_target_length"),
    *("train_file", "validation_*", "wandb_*", "use_fast_tokenizer", "hf_hub_token", "token"),
)


def eval_rows(keys: Keys) -> int:
    """Rows that an evaluation reads at once; 0 without one, as `TrainingArguments` have it."""
    readable = [name for name in EVALUATES if not keys.is_unread(name)]
    strategies = [str(keys.raw(name) or "no").lower() for name in readable]
    is_off = all(when in ("no", "intervalstrategy.no") for when in strategies)
    if is_off or keys.is_unread("per_device_eval_batch_size"):
        return 0
    return keys.count("per_device_eval_batch_size", BATCH_SIZE)


def trainer_settings(
    keys: Keys,
    launch: Launch,
    *,
    checkpoints: bool | None = False,
    batch_size: int = BATCH_SIZE,
    evaluated: Callable[[Keys], int] = eval_rows,
) -> dict[str, Any]:
    """Batch, optimizer, checkpointing, GPUs and allocator.

    Args:
        checkpoints: whether it checkpoints where the keys do not say; None: its release says.
        batch_size: where they do not say.
        evaluated: rows that an evaluation reads at once.
    """
    settings = keys.of_run(BATCH, batch_size=batch_size)
    if "per_device_train_batch_size" not in keys:
        keys.assume("per_device_train_batch_size", f"is missing; assumed: {batch_size}")
    keys.eval_batch_size = evaluated(keys)
    settings["optimizer"] = optimizer(keys, "optim", launch.libraries)
    keys.says("optimizer", "optim")
    settings |= checkpointing(keys, launch, default=checkpoints)
    return settings | spread_settings(keys, launch) | allocator(launch)


def checkpointing(keys: Keys, launch: Launch, *, default: bool | None) -> dict[str, Any]:
    """Whether layers are checkpointed, and how; transformers 5 has two names for both keys."""
    options: Mapping[str, Any] = {}
    is_on = default
    for prefix in ("gradient", "activation"):
        name = f"{prefix}_checkpointing"
        is_on = keys.flag(name) if name in keys else is_on
        if name in keys or "gradient_checkpointing" not in keys.saying:
            keys.says("gradient_checkpointing", name)
        keys.raw(name)
        options = keys.mapping(f"{prefix}_checkpointing_kwargs") or options
    if checkpoints_in_fsdp(keys, launch):
        return {"gradient_checkpointing": True, "use_reentrant": False}
    settings: dict[str, Any] = {"gradient_checkpointing": is_on}
    if isinstance(options.get("use_reentrant"), bool):
        settings["use_reentrant"] = options["use_reentrant"]
    return settings


def liger_options(keys: Keys) -> dict[str, Any]:
    """Liger's kernels of `TrainingArguments`, as options of the Trainer."""
    config = keys.mapping(liger.CONFIG.name)
    of_old_trl = keys.flag("use_liger")  # its name in SFTConfig to 0.17
    keys.says("loss_head", liger.USE.name, liger.AS_SWITCH)
    if not keys.flag(liger.USE.name) and not of_old_trl:
        return {}
    written = ((liger.CONFIG.name, json.dumps(dict(config))),) if config else ()
    return {"trainer_options": (*written, (liger.USE.name, True))}


def allocator(launch: Launch) -> dict[str, Any]:
    """The setting of PyTorch's allocator, where the command sets its variable."""
    texts = [launch.environment.get(name, "").lower() for name in ALLOCATOR]
    return {"expandable_segments": True} if any(EXPANDABLE in text for text in texts) else {}


def autocast(keys: Keys, launch: Launch, *, default: str = "") -> str:
    """Autocast of the arguments, else `default`, else of the launcher: "bf16", "fp16" or "no"."""
    fp16, bf16 = keys.flag("fp16"), keys.flag("bf16")
    if fp16 or bf16:
        return "fp16" if fp16 else "bf16"
    if default and "bf16" not in keys:
        return default
    launched = str(launch.accelerate.get("mixed_precision", "no")).lower()
    return launched if launched in ("bf16", "fp16") else "no"


def precision(keys: Keys, mixed: str, weights: str, *, narrows_adapters: bool) -> dict[str, Any]:
    """`precision_of_weights`, with the key for tf32."""
    tf32 = keys.flag("tf32")
    return precision_of_weights(mixed, weights, narrows_adapters=narrows_adapters, tf32=tf32)


def dtype(keys: Keys, *names: str, default: str, model: str = "") -> str:
    """The dtype in which weights are loaded; "auto" is that of the checkpoint.

    Args:
        model: whose weights they are; of one that is not known, 16 bit are assumed.
    """
    for name in names:
        if name in keys:
            word = keys.word(name).removeprefix("torch.")
            if word.lower() in ("auto", "none"):
                if stored := checkpoint_dtype(model):
                    return stored
                keys.assume(name, "auto; assumed: a checkpoint in bfloat16")
                return "bfloat16"
            if word not in ("float32", "float16", "bfloat16"):
                raise keys.fault(name, "is not float32, float16, bfloat16 or auto")
            return word
    return default


def checkpoint_dtype(model: str) -> str:
    """The dtype in which a known model is stored; empty of one that is not known."""
    if not model:
        return ""
    with contextlib.suppress(ConfigError):
        return load_model(model).dtype
    return ""


def missing_dtype(
    loader: Defaults, libraries: Libraries, model: str, *, usual: str, is_quantised: bool = False
) -> tuple[str, str]:
    """The dtype in which weights are loaded where nobody states one, and why.

    Args:
        loader: defaults of who loads them.
        usual: dtype of a checkpoint that is not known.
        is_quantised: the run asks for it; a checkpoint that is stored so says it itself.
    """
    spec = None
    with contextlib.suppress(ConfigError):
        spec = load_model(model)
    width = loader.loaded_dtype(
        libraries,
        usual if spec is None else spec.dtype,
        is_quantised=is_quantised or (spec is not None and "quantization_config" in spec.config),
    )
    if loader.told_dtype in ("float32", "bfloat16"):
        return width, f"loaded in {width}, as its trainer does"
    if libraries.loads_wide:
        return width, f"loaded in {width}, as transformers {libraries.transformers} does"
    if spec is None:
        return width, f"a checkpoint in {width}"
    return width, f"that of the checkpoint, {width}, as transformers 5 does"


def beside_quantised(keys: Keys, name: str, weights: str, quant: str, mixed: str) -> str:
    """`weights`, the dtype that `name` gives, or 16 bit under autocast of a quantised base."""
    if quant == "none" or mixed == "no" or weights != "float32":
        return weights
    keys.assume(name, "is float32, in which a quantised base computes; assumed: 16 bit")
    return "bfloat16"


_NARROW = {"bf16": "bfloat16", "fp16": "float16"}


def compute_dtype(keys: Keys, name: str, precision: str, *, default: str) -> dict[str, Any]:
    """The dtype of products with 4-bit weights, where it is not that of the precision.

    Args:
        default: where `name` is missing.

    Source: transformers 5.23 `BitsAndBytesConfig`, bitsandbytes 0.50.2 `Linear4bit.forward`.
    """
    if keys.is_unread(name):
        keys.assume(name, "is computed; assumed: that of the precision")
        return {}
    word = keys.word(name, default).removeprefix("torch.")
    word = default if word == "None" else word
    if word not in get_args(ComputeDtype):
        raise keys.fault(name, "is not float32, float16 or bfloat16")
    if precision in FP32_PRECISIONS:
        if word != "float32":
            text = f"is {word} in a run of fp32, which is not predicted; assumed: float32"
            keys.assume(name, text)
        return {}
    if word == _NARROW[precision[:4]]:
        return {}
    if name not in keys:
        keys.assume(name, f"is missing, which is {word}")
    return {"compute_dtype": word}


def note_adapters(keys: Keys, *, read: bool) -> None:
    """Note that keys name adapters although all weights are trained.

    Args:
        read: the tool has such keys and needs its switch beside them; else a script of its own
            makes the adapters, and whether and how can't be read.
    """
    asking = keys.switched_on(("lora", "qlora", "peft"))
    if asking and read:
        keys.assume("use_peft", f"is off, and {asking} without effect; assumed: no adapters")
    elif asking:
        keys.refuse("method", asking, "adapters that a script of its own makes are not read")


# PyTorch's memory-efficient kernel was xformers', and runs where flash attention does not
_NEAREST = {"xformers": "sdpa-efficient", "sage": "flash_attention_2"}


def attention(keys: Keys, name: str, kernels: Mapping[str, str], *, default: str) -> str:
    """The attention kernel, by the tool's own words; a boolean of older versions means flash."""
    switch = keys.raw(name)
    if isinstance(switch, bool):
        return "flash_attention_2" if switch else kernels[default]
    return known_kernel(keys, name, keys.word(name, default), kernels)


def known_kernel(keys: Keys, name: str, kernel: str, kernels: Mapping[str, str]) -> str:
    """The kernel that `name` asks for, or with a note the nearest one."""
    if kernel in kernels:
        return kernels[kernel]
    nearest = _NEAREST.get(kernel) or ("flash_attention_2" if "fl" in kernel else "sdpa")
    keys.assume(name, f"{kernel[:60]!r} is not predicted; assumed: {nearest}")
    return nearest


def _read(keys: Keys, launch: Launch) -> Mapping[str, Any]:
    """Full fine-tuning of a script such as transformers' `run_clm.py`."""
    settings = trainer_settings(keys, launch)
    mixed = autocast(keys, launch)
    example, libraries = _EXAMPLES.get(launch.program, _Example()), launch.libraries
    model = keys.model("model_name_or_path", "model_name")
    loader = plain_defaults(libraries)
    width, why = missing_dtype(loader, libraries, model, usual=example.dtype)
    weights = dtype(keys, "dtype", "torch_dtype", default=width, model=model)
    if "dtype" not in keys and "torch_dtype" not in keys:
        keys.assume("dtype", f"is missing; assumed: {why}")
    settings |= precision(keys, mixed, weights, narrows_adapters=True)
    settings["model"] = model
    settings["method"] = full_method()
    note_adapters(keys, read=False)
    _refuse_own_ways(keys)
    if example.task:
        settings["task"] = example.task
    if example.length:
        settings["seq_len"] = example.length
    settings |= keys.of_run({key: setting for key, setting in ADAPTER.items() if key in keys})
    settings |= _length(keys, launch)
    settings |= _two_lengths(keys, launch)
    settings["attn"] = attention(
        keys, "attn_implementation", {name: name for name in KERNELS}, default="sdpa"
    )
    settings |= liger_options(keys)
    keys.assume(
        launch.program or "the script",
        "transformers' Trainer is assumed, and full fine-tuning unless --method is given",
    )
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    """A script of transformers' examples/pytorch.

    Args:
        task: of `whichlora.tasks`, where it trains a head for labels.
        length: of a row, where it names none; 0 is not said.
        dtype: that the checkpoints have which it is made for: from_pretrained keeps it.
    """

    task: str = ""
    length: int = 0
    dtype: str = "bfloat16"


# Source: transformers 5.23 examples/pytorch, `DataTrainingArguments` of each.
_WIDE = _Example(dtype="float32")
_EXAMPLES: Mapping[str, _Example] = {
    **dict.fromkeys(("run_clm", "run_clm_no_trainer", "run_fim"), _Example()),
    **dict.fromkeys(("run_mlm", "run_plm", "run_speech_recognition_seq2seq"), _WIDE),
    **dict.fromkeys(("run_summarization", "run_translation"), _WIDE),
    **dict.fromkeys(
        ("run_glue", "run_xnli", "run_classification"),
        _Example(task="sequence-classification", length=128, dtype="float32"),
    ),
    "run_ner": _Example(task="token-classification", dtype="float32"),
    "run_qa": _Example(task="question-answering", length=384, dtype="float32"),
}
# Keys of `TrainingArguments` among those with these words in their names.
_SPREADS = frozenset(
    {"fsdp", "fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"}
    | {"deepspeed", "fsdp_version"}
)


def _refuse_own_ways(keys: Keys) -> None:
    """Refuse options of a script that names FSDP or DeepSpeed in its own words."""
    asking = keys.switched_on(("fsdp", "deepspeed", "zero"), without=_SPREADS)
    if asking:
        text = "how a script of its own spreads a run is not read"
        keys.refuse("parallel", asking, text)


_LENGTHS = ("block_size", "max_seq_length", "max_length", "model_max_length")
_LIKE_ALPACA = ("train", "train_mem")
_LENGTH_OF_ALPACA = 512


def _length(keys: Keys, launch: Launch) -> dict[str, int]:
    """Tokens of a row, where the keys or a script of a known kind say it.

    Source: `TrainingArguments.model_max_length` of tatsu-lab/stanford_alpaca train.py, which
    FastChat's fastchat/train/train.py keeps at 047b6e4.
    """
    for name in reversed(_LENGTHS):
        if name in keys:
            return {"seq_len": keys.count(name, 0)}
    if "data_path" in keys and launch.program.rpartition(".")[2] in _LIKE_ALPACA:
        text = f"{launch.program} is taken as Stanford Alpaca's, which cuts rows at"
        keys.assume("model_max_length", f"{text} {_LENGTH_OF_ALPACA} tokens (--seq-len)")
        return {"seq_len": _LENGTH_OF_ALPACA}
    return {}


_SOURCE_LENGTH, _TARGET_LENGTH = 1024, 128  # where a script for pairs of texts names none
_OF_PAIRS = frozenset({"run_summarization", "run_translation"})


def _two_lengths(keys: Keys, launch: Launch) -> dict[str, int]:
    """Lengths of source and target, for a script that trains on pairs of texts.

    Source: transformers 5.23 examples/pytorch/summarization/run_summarization.py and
    translation/run_translation.py, `DataTrainingArguments`.
    """
    named = {"seq_len": "max_source_length", "target_len": "max_target_length"}
    if launch.program not in _OF_PAIRS and not any(name in keys for name in named.values()):
        return {}
    defaults = (_SOURCE_LENGTH, _TARGET_LENGTH)
    pairs = zip(named.items(), defaults, strict=True)
    return {setting: keys.count(name, default) for (setting, name), default in pairs}


KERNELS = ("sdpa", "eager", "flash_attention_2")
TOOL = Tool(
    name="transformers",
    summary="a script with the arguments of TrainingArguments",
    models=frozenset({"model_name_or_path", "model_name"}),
    marks=frozenset({"model_name_or_path", "model_max_length", "block_size", *BATCH, *ADAPTER}),
    programs=frozenset(_EXAMPLES),
    read=_read,
    without_effect=(
        *WITHOUT_EFFECT,
        "data_path",
        "lazy_preprocess",
        "task_name",
        "doc_stride",
        "max_duration_in_seconds",
    ),
    unmodelled={**UNMODELLED, "freeze_encoder": "the encoder is trained, too"},
    reads_files=False,
)
