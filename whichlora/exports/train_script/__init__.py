"""Recipe → a stand-alone `train.py` that performs exactly the fine-tuning that was predicted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import indent
from typing import Any

from whichlora.exports.python_source import Code, call, import_lines, literal
from whichlora.exports.recipe import Recipe
from whichlora.exports.train_script import templates
from whichlora.exports.train_script.checks import check, has_targets
from whichlora.exports.train_script.label_rows import COLLATORS, has_classes
from whichlora.exports.train_script.lines import (
    CLASS_NAMES_LINES,
    RANDOM_CHECKPOINT_LINES,
    adapter_lines,
    allocator_lines,
    argument_lines,
    attention_lines,
    chat_template,
    divides_while_loading,
    embedder_lines,
    has_optimizer,
    loss_lines,
    model_lines,
    optimizer_lines,
    predicted_versions,
    processor_lines,
    tokenizer_lines,
    trainer_name,
)
from whichlora.exports.train_script.rows import row_functions
from whichlora.families.multimodal import is_audio_class, is_image_class
from whichlora.methods import get_method, weight_dtype, with_defaults
from whichlora.predict.resolve import layout_of
from whichlora.spec.checkpoint import is_expanded
from whichlora.spec.data_format import TRANSCRIPTS, DataFormat
from whichlora.spec.plan import SAVED_SHARE, Collator, Keeping
from whichlora.spec.run import BNB_QUANTS, RunConfig
from whichlora.tasks import Task, task_of
from whichlora.trainers import Trainer, get_trainer

_IMPORTABLE: Mapping[str, Sequence[str]] = {
    "PIL": ("Image",),
    "accelerate": ("PartialState",),
    "datasets": ("Dataset",),
    "peft": ("get_peft_model", "prepare_model_for_kbit_training"),
    "peft.optimizers": ("create_loraplus_optimizer", "create_lorafa_optimizer"),
    "sentence_transformers.sentence_transformer.modules": ("Pooling", "Transformer"),
    "tokenizers": ("Tokenizer", "decoders", "models", "pre_tokenizers"),
    "transformers": (
        "AutoConfig",
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoModelForImageTextToText",
        "AutoModelForMaskedLM",
        "AutoModelForMultimodalLM",
        "AutoModelForQuestionAnswering",
        "AutoModelForSeq2SeqLM",
        "AutoModelForSequenceClassification",
        "AutoModelForSpeechSeq2Seq",
        "AutoModelForTokenClassification",
        "AutoProcessor",
        "AutoTokenizer",
        "BitsAndBytesConfig",
        "DataCollatorForLanguageModeling",
        "DataCollatorForSeq2Seq",
        "DataCollatorForTokenClassification",
        "DataCollatorWithPadding",
        "Mxfp4Config",
        "PreTrainedTokenizerFast",
        "TrainerCallback",
        "TrainingArguments",
        "set_seed",
    ),
    "transformers.image_utils": ("load_image",),
    "transformers.integrations": ("sdpa_attention",),
}


def train_script(recipe: Recipe) -> str:
    """The source of a script that fine-tunes the run of `recipe` on the `train.jsonl` beside it.

    It evaluates on `validation.jsonl` if there is one, and writes checkpoints, the adapter (or
    the model) and `result.json` to `output/`. Only the lines that the settings need are in it.
    With random weights no weights are downloaded and, unless a tokenizer is named, bytes are
    taken for tokens.

    Raises:
        ConfigError: a run that the script can't perform.
    """
    recipe = replace(recipe, run=with_defaults(recipe.run))
    run, data_format, model_config = recipe.run, recipe.data_format, recipe.model_config
    trainer, task = get_trainer(run.trainer), task_of(run)
    masked_lm = recipe.masked_lm and task is None
    check(recipe)
    keeping = _evaluated(trainer, recipe.keeping)
    random_config = model_config if recipe.weights == "random" else None
    takes_bytes = random_config is not None and recipe.tokenizer is None
    model_class = class_of(task, model_config or {}, data_format, masked_lm=masked_lm)
    hub = {"trust_remote_code": True} if recipe.trust_remote_code else {}
    chats = _renders_chats(data_format, masked_lm or has_targets(model_config))
    constants = {
        "MODEL": run.model if random_config is None else Code('HERE / "random-weights"'),
        "TOKENIZER": recipe.tokenizer,
        "OUTPUT": Code('HERE / "output"'),
        **_batch_constants(run, data_format, model_config),
        "EPOCHS": recipe.epochs,
        f"{recipe.rate_comment}LEARNING_RATE": recipe.learning_rate,
        **_keeping_constants(keeping, recipe.seed),
        "PREDICTED_WITH": predicted_versions(run),
        "CHAT_TEMPLATE": chat_template() if chats else None,
        "MODEL_CONFIG": _without_quantisation(random_config),
    }
    stored = {} if random_config is not None else model_config or {}
    model = _loading(run, model_class, hub, stored, data_format, takes_bytes=takes_bytes)
    model += [*adapter_lines(run, recipe.target_modules), *loss_lines(run)]
    main = [
        *templates.RESUME_LINES * keeping.saves,
        "compare_versions()",
        *allocator_lines(run),
        *_reader_lines(recipe.tokenizer, hub, data_format, takes_bytes=takes_bytes),
        *templates.CHAT_TEMPLATE_LINES * chats,
        *_row_lines(trainer, keeping, data_format),
        *RANDOM_CHECKPOINT_LINES * (random_config is not None),
        *_training_lines(model, run, keeping, recipe.reader, data_format),
    ]
    made = model_class if random_config else None
    functions = _helper_functions(run, keeping, made, takes_bytes=takes_bytes)
    kinds = {"masked_lm": masked_lm, "has_target": has_targets(model_config)}
    functions += row_functions(data_format, run, recipe.train_on, recipe.reader, **kinds)
    pads = _collator(recipe.reader, data_format, masked_lm=masked_lm)
    return _assembled(run, constants, functions, main, _tail(run, keeping, data_format, pads))


_BATCHES = {
    "images": "ImageBatches(processor)",
    "audios": "AudioBatches(processor)",
    "": "TranscriptBatches(processor)",
}


def _collator(reader: Collator, data: DataFormat, *, masked_lm: bool) -> str:
    """What makes batches of the rows."""
    if data.has_processor:
        return _BATCHES[data.media]
    fixed = {"pad_to_multiple_of": Code("SEQ_LEN")} if reader == "fixed" else {}
    pads = "DataCollatorForLanguageModeling" if masked_lm else "DataCollatorForSeq2Seq"
    return call(COLLATORS.get(data.kind, pads), Code("tokenizer"), **fixed)


def _loading(
    run: RunConfig,
    model_class: str,
    hub: Mapping[str, Any],
    stored: Mapping[str, Any],
    data: DataFormat,
    *,
    takes_bytes: bool,
) -> list[str]:
    """Lines that load the model, whose checkpoint has the config `stored`."""
    expanded = is_expanded(stored, run.quant or "none")
    if get_trainer(run.trainer).model_class:
        return embedder_lines(run, hub, loads_tokenizer=not takes_bytes, expanded=expanded)
    lines = model_lines(run, model_class, hub, expanded=expanded)
    return lines + CLASS_NAMES_LINES * has_classes(data.kind)


def _evaluated(trainer: Trainer, keeping: Keeping) -> Keeping:
    """`keeping`, without evaluations that would write answers."""
    return replace(keeping, eval_steps=0) if trainer.writes_answers else keeping


def _row_lines(trainer: Trainer, keeping: Keeping, data: DataFormat) -> list[str]:
    """The lines that read the rows, and what they are learnt by."""
    lines = templates.TRAIN_LINES + templates.VALIDATION_LINES * keeping.evaluates
    return [
        *templates.REWARD_LINES * trainer.writes_answers,
        *lines.format(reader=_reader_name(data)).splitlines(),
    ]


def _reader_lines(
    tokenizer: str | None, hub: Mapping[str, Any], data: DataFormat, *, takes_bytes: bool
) -> list[str]:
    """The lines that load what makes tokens of rows."""
    if data.has_processor:
        return processor_lines(tokenizer, hub, media=data.media)
    return tokenizer_lines(tokenizer, takes_bytes, hub)


def _reader_name(data: DataFormat) -> str:
    """The variable of what makes tokens of rows."""
    return "processor" if data.has_processor else "tokenizer"


def class_of(
    task: Task | None, model_config: Mapping[str, Any], data: DataFormat, *, masked_lm: bool = False
) -> str:
    """The class of transformers that loads the model for rows of `data`."""
    if task is not None:
        return task.auto_class.rpartition(".")[2]
    if data == TRANSCRIPTS:
        return "AutoModelForSpeechSeq2Seq"
    if has_targets(model_config):
        return "AutoModelForSeq2SeqLM"
    if is_audio_class(model_config):
        return "AutoModelForMultimodalLM"
    if is_image_class(model_config, images=data.images):
        return "AutoModelForImageTextToText"
    return "AutoModelForMaskedLM" if masked_lm else "AutoModelForCausalLM"


def _training_lines(
    model: Sequence[str],
    run: RunConfig,
    keeping: Keeping,
    reader: Collator,
    data: DataFormat,
) -> list[str]:
    """The lines that make the `model`, the Trainer's arguments and the optimizer."""
    grouped = reader == "grouped"
    arguments = argument_lines(run, keeping, grouped=grouped, processor=data.has_processor)
    in_order = [arguments, model] if divides_while_loading(run) else [model, arguments]
    made = optimizer_lines(run) * (not get_trainer(run.trainer).makes_adapters)
    return ["set_seed(SEED)", *attention_lines(run), *in_order[0], *in_order[1], *made]


def _helper_functions(
    run: RunConfig, keeping: Keeping, random_class: str | None, *, takes_bytes: bool
) -> str:
    """The functions of the script beside those of the rows.

    Args:
        random_class: class of a model with random weights, which the script writes.
    """
    random_model, after_update = "", get_method(run.method).after_update
    if random_class is not None:
        dtype = weight_dtype(run)
        task = task_of(run)
        written = {} if task is None else task.config(run)
        settings = "".join(f", {name}={literal(value)}" for name, value in written.items())
        random_model = templates.RANDOM_MODEL.format(
            model_class=random_class, dtype=dtype, settings=settings
        )
    return "".join(
        [
            templates.SAY,
            templates.VERSIONS,
            templates.LAST_CHECKPOINT * keeping.saves,
            templates.AFTER_UPDATE.format(name=after_update) * bool(after_update),
            templates.NARROW_TRAINER.format(trainer=trainer_name(run)) * _is_narrow(run, keeping),
            random_model,
            templates.BYTE_TOKENIZER * takes_bytes,
        ]
    )


def _assembled(
    run: RunConfig,
    constants: Mapping[str, Any],
    functions: str,
    main: Sequence[str],
    tail: str,
) -> str:
    """The script: its head, `functions`, and `main()`, which runs the lines `main` and `tail`."""
    lines = indent("\n".join(main) + "\n", "    ")
    body = f"{functions}def main():\n{lines}{tail}"
    trainer = get_trainer(run.trainer)
    loss = trainer.loss(run)
    classes = (
        get_method(run.method).peft_class,
        trainer.library_class,
        trainer.config_class,
        trainer.model_class,
        "" if loss is None else f"{loss.module}.{loss.name}",
    )
    return _head(body, constants, classes) + body


def _renders_chats(data: DataFormat, has_own_rows: bool) -> bool:
    """Whether the tokenizer's chat template makes texts of the rows."""
    return data.conversational and not (has_own_rows or data.has_processor)


def _batch_constants(
    run: RunConfig, data: DataFormat, model_config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Sizes of a batch, and the classes of its labels, where rows name them."""
    target_len = (run.target_len or run.seq_len) if has_targets(model_config) else None
    sizes: dict[str, Any] = {
        "SEQ_LEN": run.seq_len,
        "TARGET_LEN": target_len,
        "BATCH_SIZE": run.batch_size,
        "GRADIENT_ACCUMULATION_STEPS": run.gradient_accumulation_steps,
        "IMAGE_MAX_PIXELS": run.image_max_pixels if data.images else None,
        "LANGUAGE": "" if data == TRANSCRIPTS else None,
    }
    task = task_of(run)
    if task is not None and has_classes(data.kind):
        sizes |= {"NUM_LABELS": task.config(run)["num_labels"], "CLASSES": []}
    columns = get_trainer(run.trainer).columns(run)
    if columns is not None:
        sizes["NUM_NEGATIVES"] = columns.texts - 2
    return sizes


def _keeping_constants(keeping: Keeping, seed: int) -> dict[str, int | float | None]:
    """When checkpoints are written and rows evaluated, None where they are not; and the seed."""
    return {
        "SAVE_STEPS": _save_steps(keeping) if keeping.saves else None,
        "SAVE_TOTAL_LIMIT": keeping.save_total_limit if keeping.saves else None,
        "EVAL_STEPS": keeping.eval_steps or None,
        "SEED": seed,
    }


def _is_narrow(run: RunConfig, keeping: Keeping) -> bool:
    """Whether adapters that a checkpoint brings back must be narrowed again."""
    by_trainer = get_trainer(run.trainer).narrows_adapters(run) and run.quant in BNB_QUANTS
    narrow = run.narrows_adapters or by_trainer
    return keeping.saves and narrow and not get_method(run.method).trains_base


def _tail(run: RunConfig, keeping: Keeping, data: DataFormat, pads: str) -> str:
    """The training and the files that it writes.

    Args:
        pads: the expression of what makes batches.
    """
    trainer = get_trainer(run.trainer)
    collator = f"        data_collator={pads},\n"
    last = templates.LAST_EVALUATION if keeping.eval_steps else ""
    layout = layout_of(run)
    has_group = layout is not None and layout.launcher == "torchrun"
    rows = ("{}", "{} or None")
    # those of TRL and of sentence-transformers take a `Dataset` alone
    if trainer.makes_adapters or trainer.model_class:
        rows = ("Dataset.from_list({})", "Dataset.from_list({0}) if {0} else None")
    has_config = trainer.makes_adapters and not get_method(run.method).trains_base
    validation = rows[1].format("validation_rows")
    return templates.TAIL.format(
        reader=_reader_name(data),
        trainer="NarrowTrainer" if _is_narrow(run, keeping) else trainer_name(run),
        train=rows[0].format("train_rows"),
        evaluation=f"        eval_dataset={validation},\n" * keeping.evaluates,
        collator=collator * (trainer.rows == "texts"),
        adapter="        peft_config=peft_config,\n" * has_config
        + "        reward_funcs=reward_funcs,\n" * trainer.writes_answers
        + "        loss=loss,\n" * (trainer.loss(run) is not None),
        optimizer="        optimizers=(optimizer, None),\n"
        * (has_optimizer(run) and not has_config),
        after="".join(indent(line, "    ") for line in _after(run, keeping)),
        callbacks=_callback_line(run, keeping),
        resume="resume_from_checkpoint=checkpoint" * keeping.saves,
        stopped=templates.STOPPED if keeping.saves else templates.STOPPED_WITHOUT,
        validation=(last + templates.VALIDATION_LOSS) * keeping.evaluates,
        leaving=templates.LEAVING * has_group,
    )


def _callback_line(run: RunConfig, keeping: Keeping) -> str:
    after_update = bool(get_method(run.method).after_update)
    made = ["LogAtCheckpoints()"] * keeping.saves + ["AfterUpdate()"] * after_update
    return f"        callbacks=[{', '.join(made)}],\n" if made else ""


def _after(run: RunConfig, keeping: Keeping) -> list[str]:
    """The lines that follow the trainer: of the adapters that it made, and of rows it left out."""
    trainer = get_trainer(run.trainer)
    lines = []
    if trainer.makes_adapters and has_optimizer(run):
        lines += ["model = trainer.model\n", *(f"{line}\n" for line in optimizer_lines(run))]
        lines.append("trainer.optimizer = optimizer\n")
    if trainer.rows != "texts" and not trainer.model_class:
        if trainer.keeps_unlearned:
            lines.append(templates.FILTER_ROWS)
            lines.append(templates.FILTER_VALIDATION_ROWS * keeping.evaluates)
        lines.append(templates.ROWS_LEFT_OUT)
    return lines


def _save_steps(keeping: Keeping) -> int | float:
    """As `TrainingArguments` take it: below 1 it is a share of the run."""
    return SAVED_SHARE if keeping.save_steps is None else keeping.save_steps


def _head(body: str, constants: Mapping[str, Any], classes: Sequence[str]) -> str:
    """The docstring, the imports that `body` needs, and the constants that are set.

    Args:
        classes: dotted names of the run's PEFT config, trainer and arguments.
    """
    named: dict[str, set[str]] = {}
    for module, _, name in (dotted.rpartition(".") for dotted in classes if dotted):
        named.setdefault(module, set()).add(name)
    importable = {
        module: tuple(sorted({*_IMPORTABLE.get(module, ()), *named.get(module, ())}))
        for module in sorted({*_IMPORTABLE, *named})
    }
    return templates.HEAD.format(
        standard=templates.standard_imports(f"Path(__file__)\n{body}"),
        arrays="import numpy as np\n" if re.search(r"\bnp\.", body) else "",
        imports=import_lines(body, importable),
        constants="\n".join(
            f"{name} = {literal(value)}" for name, value in constants.items() if value is not None
        ),
    )


def _without_quantisation(model_config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The config without the quantisation of the published checkpoint."""
    if model_config is None:
        return None
    return {name: value for name, value in model_config.items() if name != "quantization_config"}
