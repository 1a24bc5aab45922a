"""Run → a stand-alone `train.py` that performs exactly the fine-tuning that was predicted."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any, Literal

from whichlora.errors import ConfigError
from whichlora.exports.python_source import Code, call, import_lines, literal
from whichlora.exports.train_script import templates
from whichlora.exports.train_script.label_rows import COLLATORS, has_classes
from whichlora.exports.train_script.lines import (
    CLASS_NAMES_LINES,
    RANDOM_CHECKPOINT_LINES,
    adapter_lines,
    allocator_lines,
    argument_lines,
    attention_lines,
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
from whichlora.families import writes_transcripts
from whichlora.families.multimodal import is_audio_class, is_image_class
from whichlora.methods import get_method, usual_learning_rate, weight_dtype, with_defaults
from whichlora.parallel.host_update import OMP_NUM_THREADS
from whichlora.predict.resolve import layout_of
from whichlora.spec.checkpoint import is_expanded
from whichlora.spec.data_format import (
    ALPACA_CHAT_TEMPLATE,
    TEXT_ROWS,
    TRANSCRIPTS,
    DataFormat,
)
from whichlora.spec.plan import SAVED_SHARE, Collator, Keeping, TrainOn
from whichlora.spec.run import BNB_QUANTS, RunConfig
from whichlora.tasks import Task, rows_of, task_of
from whichlora.trainers import Trainer, get_trainer, list_trainers

TRAINER_CLASS = "transformers.Trainer"  # whose steps the script's are
Weights = Literal["pretrained", "random"]

KEEPING = Keeping()

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


def train_command(path: Path, run: RunConfig, *, python: str = sys.executable) -> list[str]:
    """The command that performs `run` with the script at `path`, on this machine's GPUs.

    Raises:
        ConfigError: a run over several nodes, whose processes a batch script starts.
    """
    layout = layout_of(run)
    if layout is None or layout.launcher == "python":
        return [python, str(path)]
    if layout.config.nodes > 1:
        raise ConfigError(
            f"nodes: {layout.config.nodes} can't be started from one of them; submit the batch "
            "script of 'whichlora export --to slurm'"
        )
    return [*torchrun(python, run), str(path)]


def thread_setting(run: RunConfig) -> list[str]:
    """What the environment of its processes says of threads, where that is not torchrun's 1."""
    threads = dict(run.parallel.options).get(OMP_NUM_THREADS.name, 1)
    return [] if threads == 1 else [f"OMP_NUM_THREADS={threads}"]


def torchrun(python: str, run: RunConfig) -> list[str]:
    """The command that starts a script in a process for each GPU of this node."""
    processes = run.parallel.gpus_per_node
    threads = thread_setting(run)
    return [
        *(["env"] if threads else []),
        *threads,
        python,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
    ]


def train_script(
    run: RunConfig,
    *,
    target_modules: Sequence[str] | str,
    epochs: float = 1.0,
    learning_rate: float | None = None,
    rate_source: str = "",
    seed: int = 0,
    tokenizer: str | None = None,
    weights: Weights = "pretrained",
    model_config: Mapping[str, Any] | None = None,
    batching: Collator | None = None,
    masked_lm: bool = False,
    max_steps: int | None = None,
    trust_remote_code: bool = False,
    data_format: DataFormat = TEXT_ROWS,
    train_on: TrainOn = "completions",
    keeping: Keeping = KEEPING,
) -> str:
    """The source of a script that fine-tunes `run` on the `train.jsonl` beside it.

    It evaluates on `validation.jsonl` if there is one, and writes checkpoints, the adapter (or
    the model) and `result.json` to `output/`. Only the lines that the settings need are in it.

    Args:
        target_modules: leaf names that get an adapter, or "all-linear".
        learning_rate, rate_source: as in a `Recipe`.
        tokenizer: hub id or path; None takes the model's own.
        weights: "random" needs `model_config`, downloads no weights and, unless `tokenizer` is
            given, takes bytes for tokens.
        batching: as `Plan.collator`; None: packed without `run.padding`, longest with it.
        masked_lm: an encoder, trained to fill in masked tokens.
        max_steps: stop after so many optimizer steps instead of `epochs`.
        data_format: what a row of `train.jsonl` looks like.
        train_on: with "completions", prompts and the turns of others have no loss.

    Raises:
        ConfigError: a run that the script can't perform.
    """
    run = with_defaults(run)
    trainer, task = get_trainer(run.trainer), task_of(run)
    masked_lm = masked_lm and task is None
    reader: Collator = batching or ("packed" if run.padding == "none" else "longest")
    _check(run, weights, model_config, data_format, reader)
    keeping = _evaluated(trainer, keeping)
    random_config = model_config if weights == "random" else None
    takes_bytes = random_config is not None and tokenizer is None
    model_class = class_of(task, model_config or {}, data_format, masked_lm=masked_lm)
    hub = {"trust_remote_code": True} if trust_remote_code else {}
    chats = _renders_chats(data_format, masked_lm or has_targets(model_config))
    constants = {
        "MODEL": run.model if random_config is None else Code('HERE / "random-weights"'),
        "TOKENIZER": tokenizer,
        "OUTPUT": Code('HERE / "output"'),
        **_batch_constants(run, data_format, model_config),
        **_schedule(epochs, max_steps, *_rate(run, learning_rate, rate_source)),
        **_keeping_constants(keeping, seed),
        "PREDICTED_WITH": predicted_versions(run),
        "CHAT_TEMPLATE": chat_template() if chats else None,
        "MODEL_CONFIG": _without_quantisation(random_config),
    }
    stored = {} if random_config is not None else model_config or {}
    model = _loading(run, model_class, hub, stored, data_format, takes_bytes=takes_bytes)
    model += [*adapter_lines(run, target_modules), *loss_lines(run)]
    main = [
        *templates.RESUME_LINES * keeping.saves,
        "compare_versions()",
        *allocator_lines(run),
        *_reader_lines(tokenizer, hub, data_format, takes_bytes=takes_bytes),
        *templates.CHAT_TEMPLATE_LINES * chats,
        *_row_lines(trainer, keeping, data_format),
        *RANDOM_CHECKPOINT_LINES * (random_config is not None),
        *_training_lines(model, run, keeping, reader, data_format, limited=max_steps is not None),
    ]
    made = model_class if random_config else None
    functions = _helper_functions(run, keeping, made, takes_bytes=takes_bytes)
    kinds = {"masked_lm": masked_lm, "has_target": has_targets(model_config)}
    functions += row_functions(data_format, run, train_on, reader, **kinds)
    tail = _tail(run, keeping, data_format, _collator(reader, data_format, masked_lm=masked_lm))
    return _assembled(run, constants, functions, main, tail)


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
    *,
    limited: bool,
) -> list[str]:
    """The lines that make the `model`, the Trainer's arguments and the optimizer.

    Args:
        limited: by steps, not epochs.
    """
    grouped = reader == "grouped"
    arguments = argument_lines(
        run, keeping, limited=limited, grouped=grouped, processor=data.has_processor
    )
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


def _rate(run: RunConfig, rate: float | None, source: str) -> tuple[float, str]:
    """The learning rate, and whose it is where nobody stated it."""
    return usual_learning_rate(run) if rate is None else (rate, source)


def _schedule(
    epochs: float, max_steps: int | None, rate: float, source: str
) -> dict[str, float | None]:
    """How long is trained, and how fast: below a comment with whose rate that is."""
    return {
        "EPOCHS": epochs if max_steps is None else None,
        "MAX_STEPS": max_steps,
        f"# usual: {source}\nLEARNING_RATE" if source else "LEARNING_RATE": rate,
    }


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


def chat_template() -> Code:
    """The template for a tokenizer without one, a line of source for each of its parts."""
    parts = re.split(r"(?<=[%}]\})|(?<=\. )", ALPACA_CHAT_TEMPLATE)
    lines = indent("\n".join(literal(part) for part in parts if part), "    ")
    return Code(f"(\n{lines}\n)")


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


def require_library(run: RunConfig, place: str) -> None:
    """Refuse a run whose steps no library has.

    Args:
        place: how the message begins.

    Raises:
        ConfigError: its steps are written out by a script.
    """
    trainer = get_trainer(run.trainer)
    if not trainer.config_class:
        whose = trainer.library_class or "a script's own"
        raise ConfigError(
            f"{place}: it can't be written for trainer {run.trainer}, whose steps are {whose}; use "
            "trainer transformers, or 'whichlora export' to its tool"
        )


def require_texts(run: RunConfig, place: str) -> None:
    """Refuse rows with images or sound, which `train.py` alone reads.

    Args:
        place: how the message begins.

    Raises:
        ConfigError: there are images, or a tower that is left alone.
    """
    for setting in ("images", "audios", "freeze_vision_tower"):
        if getattr(run, setting):
            raise ConfigError(
                f"{place}: {setting} can't be written, its training would leave them out; "
                f"use --to transformers, or leave {setting} out"
            )


def _check_media(
    run: RunConfig, weights: Weights, data_format: DataFormat, reader: Collator
) -> None:
    """Refuse images or sound that the job can't read.

    Raises:
        ConfigError: there are images without rows that name them, or settings that exclude them.
    """
    for setting in ("images", "audios"):
        if getattr(run, setting) and data_format.media != setting and data_format != TRANSCRIPTS:
            raise ConfigError(
                f"train.py: {setting} are predicted, and no row names one; give rows with a column "
                f"{setting}, or leave {setting} out"
            )
    if not data_format.has_processor:
        return
    media, trainer = data_format.media or "audio", get_trainer(run.trainer)
    reads = runs_in_trainer(run) or (data_format.images and trainer.takes_images)
    for is_wrong, fault in (
        (weights == "random", "weights: random has no processor for them; set weights: pretrained"),
        (not reads, f"trainer {run.trainer} does not read them; use transformers"),
        (reader not in ("longest",), f"collator {reader} can't batch them; use longest"),
    ):
        if is_wrong:
            raise ConfigError(f"train.py: rows have {media}: {fault}")


def runs_in_trainer(run: RunConfig, *others: str) -> bool:
    """Whether the steps of `run` are those of `TRAINER_CLASS`, or of one of `others`."""
    return get_trainer(run.trainer).library_class in (TRAINER_CLASS, *others)


def require_trainer(run: RunConfig, place: str, *others: str) -> None:
    """Refuse a run whose steps are not those of the Trainer of transformers, or a subclass of it.

    Args:
        place: how the message begins.
        others: further classes whose steps are accepted.

    Raises:
        ConfigError: another trainer.
    """
    if not runs_in_trainer(run, *others):
        is_written = get_trainer(run.trainer).config_class
        names = [
            trainer.name
            for trainer in list_trainers().values()
            if trainer.library_class in (TRAINER_CLASS, *others)
        ]
        raise ConfigError(
            f"{place}: trainer {run.trainer} can't be written, it runs {', '.join(names)}; use "
            f"{'--to transformers' if is_written else 'trainer transformers'}"
        )


def _check(
    run: RunConfig,
    weights: Weights,
    model_config: Mapping[str, Any] | None,
    data_format: DataFormat,
    reader: Collator,
) -> None:
    if run.phase != "finetune":
        raise ConfigError(f"phase: {run.phase} has nothing to train; a job needs finetune")
    trainer = get_trainer(run.trainer)
    require_library(run, "train.py")
    if runs_in_trainer(run) and run.loss_head not in ("hf", "liger"):
        raise ConfigError(
            f"loss_head: {run.loss_head} can't be trained by the job; accepted are hf and liger"
        )
    if run.quantize_moe_experts:
        raise ConfigError(
            "quantize_moe_experts: train.py leaves experts in 16 bit; use --to axolotl, or leave "
            "it out"
        )
    _check_media(run, weights, data_format, reader)
    data_format.require(rows_of(run))
    adapted = trainer.makes_adapters and not get_method(run.method).trains_base
    keeps_base = trainer.keeps_base(run)
    if adapted and run.quant in BNB_QUANTS and run.prepare_kbit == keeps_base:
        does = "does not prepare" if keeps_base else "prepares"
        raise ConfigError(
            f"prepare_kbit: {run.prepare_kbit}, but trainer {run.trainer} {does} a quantised base; "
            "leave it out"
        )
    if adapted and run.quant == "none" and run.narrows_adapters:
        raise ConfigError(
            f"train.py: trainer {run.trainer} makes adapters in fp32, not those of precision "
            f"{run.precision} and adapter_dtype {run.adapter_dtype}; use precision bf16 or "
            "bf16-no-autocast, and leave adapter_dtype out"
        )
    if weights == "random" and model_config is None:
        raise ConfigError("weights: random needs the config of the model")
    transcribes = writes_transcripts(model_config or {})
    if transcribes != (data_format == TRANSCRIPTS):
        takes = "clips with transcripts: audio, text" if transcribes else "messages or texts"
        raise ConfigError(
            f"train.py: rows have {data_format.describe()}, and {run.model} learns from {takes}; "
            "give such rows, or another model"
        )
    if has_targets(model_config) and not run.task:
        _check_targets(run, data_format, reader)


def has_targets(model_config: Mapping[str, Any] | None) -> bool:
    """Whether an encoder reads one text of each row, and its decoder learns to write the other."""
    config = model_config or {}
    return bool(config.get("is_encoder_decoder")) and not writes_transcripts(config)


def _check_targets(run: RunConfig, data: DataFormat, reader: Collator) -> None:
    """Refuse rows that are no pairs of texts, or settings that can't batch them."""
    model = f"model: {run.model} is an encoder-decoder"
    for is_wrong, fault in (
        (
            data.kind not in ("prompt-completion", "messages") or data.media,
            f"which needs pairs of texts, and rows have {data.describe()}; give prompt and "
            "completion, or messages",
        ),
        (
            reader not in ("longest", "grouped"),
            f"whose two texts collator {reader} can't batch; use longest",
        ),
        (
            not runs_in_trainer(run),
            f"which trainer {run.trainer} does not train; use transformers",
        ),
    ):
        if is_wrong:
            raise ConfigError(f"{model}, {fault}")


def _without_quantisation(model_config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The config without the quantisation of the published checkpoint."""
    if model_config is None:
        return None
    return {name: value for name, value in model_config.items() if name != "quantization_config"}
