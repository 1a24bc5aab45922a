"""A script for Unsloth 2026.10; it takes no configuration file."""

from __future__ import annotations

from dataclasses import replace

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
from whichlora.exports.launch import launch_line, spreading
from whichlora.exports.python_source import Code, call, literal
from whichlora.exports.recipe import DATA_FILE, VALIDATION_FILE, Export, Recipe
from whichlora.exports.train_script import templates
from whichlora.exports.train_script.lines import chat_template
from whichlora.exports.train_script.rows import row_functions
from whichlora.exports.trainer_keys import evaluating, optimising, padding_note, saving
from whichlora.methods import get_method, weight_dtype
from whichlora.spec.data_format import (
    CHAT_PAIRS,
    CHAT_PREFERENCES,
    CHAT_ROWS,
    TEXT_PAIRS,
    TEXT_PREFERENCES,
    TEXT_ROWS,
)
from whichlora.spec.run import FP32_PRECISIONS, RunConfig, autocast_precision
from whichlora.trainers import get_trainer, unsloth

FILE = "train_unsloth.py"
_CLASS = unsloth.TRAINER.library_class
_OUTPUT = "output-unsloth"
_UNKNOWN = (
    "bias",
    "adapter_dtype",
    "base_dtype",
    "loraplus_lr_ratio",
    "expandable_segments",
    "compute_dtype",
    "llm_int8_threshold",
    "quantize_moe_experts",
)
_QUANTS = frozenset({"none", "int8", "nf4-dq"})
_ROWS = (TEXT_ROWS, TEXT_PAIRS, CHAT_PAIRS, CHAT_ROWS, TEXT_PREFERENCES, CHAT_PREFERENCES)
_PACKED = ("packed", "packed-bfd")
_HEAD = '''\
"""Fine-tune a model on the train.jsonl beside this file under Unsloth.

Written by WhichLoRA; edit it as you like.
"""

from unsloth import FastLanguageModel  # first: it patches what is imported after it

{standard}

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

HERE = Path(__file__).resolve().parent
{constants}


'''


def export(recipe: Recipe) -> Export:
    """A script with PyTorch's checkpointing; Unsloth's would move activations to the host.

    Token ids and labels are those of `train.py`. Unsloth takes rows with labels unchanged and pads
    them to the longest (unsloth_zoo 2026.10, `dataset_utils.py`, `sft_prepare_dataset`).

    Raises:
        ConfigError: a setting that Unsloth lacks.
    """
    require_plain(
        recipe,
        "unsloth",
        adapters=LORA_KEYS,
        quants=_QUANTS,
        rows=_ROWS,
        trainers=(SFT_CLASS, _CLASS),
    )
    recipe, by_itself = by_own_sft(recipe, "Unsloth", unsloth.TRAINER.name)
    is_own = get_trainer(recipe.run.trainer).library_class == _CLASS
    options = () if is_own else options_for_texts(recipe.run)
    run, left_out = without(recipe.run, "Unsloth", *_UNKNOWN, *options)
    run, notes = under_unsloth(run)
    spreading(run, "unsloth", keys=())  # it runs under torchrun, where DDP needs no key
    notes += by_itself + left_out
    notes += padding_note(recipe, *_PACKED)
    constants = {
        "SEQ_LEN": literal(run.seq_len),
        f"{recipe.rate_comment}LEARNING_RATE": literal(recipe.learning_rate),
    }
    chats = recipe.data_format.conversational
    if chats:
        constants["CHAT_TEMPLATE"] = chat_template()
    functions = templates.SAY + row_functions(
        recipe.data_format,
        run,
        recipe.train_on,
        recipe.batching if recipe.batching in _PACKED else "longest",
        masked_lm=False,
    )
    lines = [
        f"model, tokenizer = {_load(run)}",
        *templates.CHAT_TEMPLATE_LINES * chats,
        *_adapter_lines(recipe, run),
        f"trainer = {_trainer(recipe, run)}",
        "trainer.train()",
        f"model.save_pretrained({literal(_OUTPUT)})",
        f"tokenizer.save_pretrained({literal(_OUTPUT)})",
    ]
    head = _HEAD.format(
        standard=templates.standard_imports(f"Path(__file__)\n{functions}"),  # no text of a user
        constants="\n".join(f"{name} = {value}" for name, value in constants.items()),
    )
    script = head + functions + "\n".join(lines) + "\n"
    return Export(files={FILE: script}, command=launch_line(run, FILE), run=run, notes=notes)


def _hosts_table(run: RunConfig) -> bool:
    return run.trainer_option(unsloth.OFFLOADED_EMBEDDING.name) == "true"


def _load(run: RunConfig) -> Code:
    quant = run.quant or "none"
    return call(
        "FastLanguageModel.from_pretrained",
        model_name=run.model,
        max_seq_length=run.seq_len,
        dtype=Code(f"torch.{weight_dtype(run)}"),
        load_in_4bit=quant == "nf4-dq",
        load_in_8bit=quant == "int8",
        full_finetuning=get_method(run.method).trains_base,
        **({"offload_embedding": True} if _hosts_table(run) else {}),
    )


def _adapter_lines(recipe: Recipe, run: RunConfig) -> list[str]:
    method = get_method(run.method)
    if not method.peft_class:
        return []
    settings = method.peft_config(run)
    adapted = call(
        "FastLanguageModel.get_peft_model",
        Code("model"),
        r=run.r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=recipe.target_modules,
        use_dora=bool(settings.get("use_dora")),
        **({"use_rslora": True} if run.use_rslora else {}),
        modules_to_save=list(run.modules_to_save) or None,
        bias="none",
        use_gradient_checkpointing=_checkpointing(run),
        random_state=recipe.seed,
    )
    return [f"model = {adapted}"]


def _checkpointing(run: RunConfig) -> bool | str:
    """True is PyTorch's; the other one keeps inputs of layers on the host."""
    if run.gradient_checkpointing and get_trainer(run.trainer).offloads(run):
        return "unsloth"
    return bool(run.gradient_checkpointing)


def _trainer(recipe: Recipe, run: RunConfig) -> Code:
    evaluation = evaluating(recipe)
    arguments = call(
        "SFTConfig",
        output_dir=_OUTPUT,
        max_length=Code("SEQ_LEN"),
        packing=False,
        per_device_train_batch_size=run.batch_size,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        **optimising(recipe, run) | {"learning_rate": Code("LEARNING_RATE")},
        seed=recipe.seed,
        **saving(recipe),
        **({"per_device_eval_batch_size": run.batch_size} | evaluation if evaluation else {}),
        report_to="none",
    )
    return call(
        "SFTTrainer",
        model=Code("model"),
        processing_class=Code("tokenizer"),
        train_dataset=_dataset(DATA_FILE),
        **({"eval_dataset": _dataset(VALIDATION_FILE)} if evaluation else {}),
        args=arguments,
    )


def _dataset(file: str) -> Code:
    return call("Dataset.from_list", Code(f"read_rows(HERE / {literal(file)}, tokenizer)"))


def under_unsloth(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` with Unsloth's loss; it never casts a 4-bit base.

    Raises:
        ConfigError: fp32 weights, which its kernels don't take.
    """
    for option in (unsloth.WHOLE_LOGITS, unsloth.EMBEDDING_RATE):
        if run.trainer_option(option.name):
            raise ConfigError(f"--to unsloth: {option.name} is not written; leave it out")
    if run.precision in FP32_PRECISIONS:
        raise ConfigError("--to unsloth: its kernels are 16-bit; set precision bf16 or fp16")
    run, pinned = without_pinned_kernel(run, "Unsloth")
    if get_trainer(run.trainer).library_class == _CLASS:
        return run, pinned
    notes = [*pinned, "of Unsloth's kernels only the loss is modelled: --trainer unsloth has all"]
    precision = autocast_precision(run.precision)
    if precision != run.precision:
        notes.append(f"Unsloth has no {run.precision}: it runs under {precision} autocast")
    changed = replace(run, loss_head="unsloth", prepare_kbit=False, precision=precision)
    return changed, tuple(notes)
