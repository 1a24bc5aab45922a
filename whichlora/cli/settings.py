"""The options that describe a run, and the settings they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from whichlora.cli.options import (
    DATES,
    Count,
    Number,
    choices,
    counts,
    counts_or_max,
    fractions,
    image_size,
    list_option,
    named_values,
    tokens_if_any,
    versions,
    words,
)
from whichlora.errors import ConfigError
from whichlora.methods import BUILT_IN
from whichlora.spec import run as specs
from whichlora.spec.run import RunConfig
from whichlora.spec.words import MAX
from whichlora.tasks import BUILT_IN as TASKS
from whichlora.trainers import BUILT_IN as TRAINERS
from whichlora.trainers import other_name_note, own_name

if TYPE_CHECKING:
    from whichlora.workflow.whole_training import FromFiles


def _optimizers(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    """A click callback: optimizers by our names, or by those of `TrainingArguments`."""
    names = words("optimizer")(ctx, param, value)
    of_trainer = {"auto", *specs.OPTIMIZER_NAMES, *specs.OTHER_OPTIMIZERS}
    for name in names:
        if name not in of_trainer:
            words("optimizer", get_args(specs.Optimizer))(ctx, param, name)
    return names


_QUANTISED = [name for name, method in BUILT_IN.items() if method.base_quant != "none"]
_SERVED_AS_TRAINED = [name for name, method in BUILT_IN.items() if method.serve == "as-trained"]
_SETTINGS = (
    choices("phase", "finetune", "What runs", specs.Phase),
    list_option("method", "lora", f"{', '.join(BUILT_IN)}.", words("method")),
    list_option(
        "batch-size",
        "1",
        "Sequences per device per micro-step; max for the largest that fits. Under grpo, the least "
        "that writes whole groups of answers.",
        counts_or_max("batch-size"),
    ),
    list_option(
        "seq-len",
        "2048",
        "Tokens per sequence, padding included, such as 4096 or 4k; max for the most that fit.",
        counts_or_max("seq-len", of_tokens=True),
    ),
    click.option(
        "--target-len",
        callback=tokens_if_any("target-len"),
        help="Of an encoder-decoder, tokens that the decoder learns to write, where --seq-len are "
        "those that the encoder reads; default: as many.",
    ),
    click.option(
        "--method-option",
        "method_options",
        multiple=True,
        callback=named_values,
        help="A setting of the method's own, such as init_lora_weights=pissa; several times for "
        "several (whichlora methods).",
    ),
    list_option("r", "16", "Rank of the adapters.", counts("r")),
    list_option("lora-dropout", "0", "Dropout before the adapters.", fractions("lora-dropout")),
    click.option(
        "--target-modules",
        default=specs.ALL_LINEAR,
        show_default=True,
        help="Layers that get an adapter: names with commas, all-linear, attention, default, "
        "which are PEFT's own, or re: and a pattern of whole names.",
        callback=words("target-modules"),
    ),
    click.option(
        "--modules-to-save",
        help="Modules trained as a whole beside the adapters, such as embed_tokens,lm_head.",
    ),
    choices(
        "precision",
        "auto",
        "Base weights, adapters and autocast; auto: bf16, or fp16 where the GPU has no bf16",
        specs.Precision,
    ),
    choices(
        "base-dtype",
        "auto",
        "Dtype of the base weights; auto: what the precision says; float32: under autocast",
        specs.BaseDtype,
    ),
    choices(
        "adapter-dtype",
        "auto",
        "Dtype of the adapters; auto: float32, but for bf16-pure and fp16-pure",
        specs.AdapterDtype,
    ),
    choices(
        "compute-dtype",
        "auto",
        "Dtype of products with 4-bit weights; auto: what the precision says",
        specs.ComputeDtype,
    ),
    choices("bias", "none", "Biases of the base trained beside the adapters", specs.Bias),
    click.option("--use-rslora", is_flag=True, help="Scale adapters by the root of the rank."),
    click.option(
        "--loraplus-lr-ratio",
        type=float,
        default=1.0,
        show_default=True,
        help="LoRA+: learning rate of B over that of A.",
    ),
    list_option(
        "optimizer",
        "auto",
        f"Optimizer ({', '.join(get_args(specs.Optimizer))}), also by the other names of "
        "TrainingArguments; auto: theirs, adamw_torch_fused, adamw_torch before torch 2.8 or "
        "transformers 4.54.",
        _optimizers,
    ),
    click.option(
        "--gradient-checkpointing/--no-gradient-checkpointing",
        default=None,
        help="Recompute activations in the backward pass; default: where the model has that.",
    ),
    click.option(
        "--use-reentrant/--no-use-reentrant",
        default=None,
        help="Kind of checkpointing; default: what this version of transformers does.",
    ),
    list_option(
        "gradient-accumulation-steps",
        "1",
        "Micro-steps per optimizer step.",
        counts("gradient-accumulation-steps"),
    ),
    choices("attn", "sdpa", "Attention kernel", specs.AttentionKernel),
    choices("padding", "none", "Whether batches carry padding", specs.Padding),
    choices(
        "loss-head",
        "hf",
        "Who computes the loss; for raw a caller does, whose own tensors are not counted",
        specs.LossHead,
    ),
    list_option(
        "trainer", "transformers", f"Who runs the steps: {', '.join(TRAINERS)}.", words("trainer")
    ),
    click.option(
        "--task",
        default=None,
        help=f"What a model learns: {', '.join(TASKS)}; default: texts or masked words, by its "
        "type.",
    ),
    click.option(
        "--task-option",
        "task_options",
        multiple=True,
        callback=named_values,
        help="A setting of the task's own, such as num_labels=3; several times for several.",
    ),
    click.option(
        "--trainer-option",
        "trainer_options",
        multiple=True,
        callback=named_values,
        help="A setting of the trainer's own, such as beta=0.1; several times for several.",
    ),
    click.option(
        "--quant",
        default=None,
        help=f"Storage of the base weights ({', '.join(get_args(specs.Quant))}); "
        f"default: nf4-dq for {' and '.join(_QUANTISED)}, else none.",
    ),
    list_option(
        "quant-group-size",
        "128",
        "Weights that share a scale in a GPTQ or AWQ checkpoint.",
        counts("quant-group-size"),
    ),
    click.option(
        "--prepare-kbit/--no-prepare-kbit",
        default=None,
        help="Whether prepare_model_for_kbit_training runs; default: for a 4-bit or 8-bit base, "
        "except with the trl-fused loss.",
    ),
    list_option(
        "prompt-len", "512", "Prompt tokens (inference).", counts("prompt-len", of_tokens=True)
    ),
    list_option(
        "max-new-tokens",
        "128",
        "Generated tokens (inference).",
        counts("max-new-tokens", of_tokens=True),
    ),
    click.option(
        "--serve",
        default=None,
        help=f"How a method's model is served ({', '.join(get_args(specs.Serve))}; inference): "
        "its adapter beside the base that it was trained on, or merged into it; default: "
        f"as-trained for {' and '.join(_SERVED_AS_TRAINED)}, else merged. A quant such as fp8 "
        "means merged weights stored so, as --quant does.",
    ),
    choices("kv-cache", "dynamic", "Key-value cache (inference)", specs.KvCache),
    choices("cache-backend", "quanto", "Quantiser of kv-cache quantized", specs.CacheBackend),
    list_option("cache-nbits", "4", "Bits of a quantised cache: 4 or 2.", counts("cache-nbits")),
    list_option(
        "cache-group-size",
        "64",
        "Elements of a quantised cache that share a scale.",
        counts("cache-group-size"),
    ),
    list_option(
        "cache-residual-length",
        "128",
        "New tokens that a quantised cache gathers in full width.",
        counts("cache-residual-length"),
    ),
    click.option(
        "--llm-int8-threshold",
        type=float,
        default=specs.INT8_THRESHOLD,
        show_default=True,
        help="Inputs from where on int8 of bitsandbytes multiplies in 16 bit; 0 looks for none.",
    ),
    click.option(
        "--quantize-moe-experts",
        is_flag=True,
        help="Experts in one parameter are stored in 4 bit, too, as Axolotl does; bitsandbytes "
        "alone leaves them in 16 bit.",
    ),
    click.option(
        "--images",
        type=Count(0, specs.MOST_IMAGES),
        default=0,
        show_default=True,
        help="Images of each row or prompt; their tokens are among --seq-len and --prompt-len.",
    ),
    click.option(
        "--image-size",
        default="x".join(map(str, specs.DEFAULT_IMAGE_SIZE)),
        show_default=True,
        callback=image_size,
        help="Width and height of each image in pixels, before anything resizes it.",
    ),
    click.option(
        "--image-max-pixels",
        type=Count(1, specs.MOST_COUNT),
        help="A larger image is shrunk to so many pixels before its processor sees it.",
    ),
    click.option(
        "--audios",
        type=Count(0, specs.MOST_IMAGES),
        default=0,
        show_default=True,
        help="Clips of sound of each row or prompt; their tokens are among --seq-len and "
        "--prompt-len. Whisper has always one.",
    ),
    click.option(
        "--audio-seconds",
        type=Number(0, specs.MOST_SECONDS, min_open=True),
        default=specs.DEFAULT_AUDIO_SECONDS,
        show_default=True,
        help="How long each clip lasts.",
    ),
    click.option(
        "--freeze-vision-tower",
        is_flag=True,
        help="The vision tower gets no adapters and is not trained; without it PEFT's all-linear "
        "adapts its matrices, too.",
    ),
    click.option(
        "--expandable-segments",
        is_flag=True,
        help="PyTorch's allocator joins segments (PYTORCH_ALLOC_CONF=expandable_segments:True).",
    ),
    click.option(
        "--libraries",
        default="",
        callback=versions,
        help="Versions that are not the current ones, such as transformers=4.44.2,torch=2.1.1, or "
        "a month for the newest of its first day, such as 2024-05; older code keeps other "
        "tensors.",
    ),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: every option that describes a run."""
    for option in reversed(_SETTINGS):
        command = option(command)
    return command


def run_settings(models: Sequence[str], options: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The values of every setting, as `combinations.grid` takes them, from `run_options`."""
    serve, quants = _forms(options)
    tasks = [""] if options["task"] is None else words("task")(None, None, options["task"])
    saved = []
    if options["modules_to_save"] is not None:
        saved = words("modules-to-save")(None, None, options["modules_to_save"])
    single = (
        "gradient_checkpointing",
        "use_reentrant",
        "prepare_kbit",
        "libraries",
        "method_options",
        "trainer_options",
        "task_options",
        "use_rslora",
        "loraplus_lr_ratio",
        "expandable_segments",
        "llm_int8_threshold",
        "quantize_moe_experts",
        "images",
        "image_size",
        "image_max_pixels",
        "audios",
        "audio_seconds",
        "freeze_vision_tower",
    )
    from whichlora.workflow.combinations import USUAL, with_concurrency

    context = click.get_current_context()
    beside_files = bool(context.params.get("from_files"))
    source_of = context.get_parameter_source
    stated = {name for name in options if source_of(name) is not click.core.ParameterSource.DEFAULT}
    open_settings = {} if "batch_size" in stated else {"batch_size": [USUAL]}
    return {
        **with_concurrency({**options, **open_settings}, stated=stated, beside_files=beside_files),
        **{name: [options[name]] for name in single},
        "trainer": list(map(own_name, options["trainer"])),
        "model": list(models),
        "quant": quants,
        "serve": serve,
        "task": tasks,
        "target_len": options["target_len"] or [None],
        "target_modules": [tuple(options["target_modules"])],
        "modules_to_save": [tuple(saved)],
    }


def _forms(options: Mapping[str, Any]) -> tuple[list[str | None], list[str | None]]:
    """--serve and --quant. A quant behind --serve, as `recommend` takes it, is of merged weights.

    Raises:
        ConfigError: a word that is neither, or a quant behind both.
    """
    from whichlora.store.quantised_names import gguf_type_named

    def listed(name: str, accepted: Sequence[str]) -> list[str | None]:
        given = options[name]
        return [None] if given is None else list(words(name, tuple(accepted))(None, None, given))

    stored = [
        word
        for name in ("quant", "serve")
        for word in (options[name] or "").split(",")
        if gguf_type_named(word.strip())
    ]
    quants = [*get_args(specs.Quant), *map(str.strip, stored)]
    behind_serve = {word.strip() for word in (options["serve"] or "").split(",")}
    if not behind_serve & {*quants}:
        return listed("serve", get_args(specs.Serve)), listed("quant", quants)
    if options["quant"] is not None:
        raise ConfigError(f"--serve: {options['serve']} is a --quant, which is given, too")
    return ["merged"], listed("serve", quants)


def plain_settings(
    models: Sequence[str], options: Mapping[str, Any], *, command: str
) -> dict[str, list[Any]]:
    """`run_settings` for a command that looks for no largest size.

    Raises:
        ConfigError: a size is max, or a value is not accepted.
    """
    from whichlora.workflow.combinations import SIZES

    settings: dict[str, Any] = run_settings(models, options)
    for name in SIZES:
        if settings[name] == [MAX]:
            raise ConfigError(
                f"{size_flag(name)}: {command} takes numbers; 'whichlora estimate' finds max"
            )
    return settings


def size_flag(name: str) -> str:
    """As it was given: --concurrency sets the batch size."""
    source = click.get_current_context().get_parameter_source("concurrency")
    is_concurrency = name == "batch_size" and source is click.core.ParameterSource.COMMANDLINE
    return _flag("concurrency" if is_concurrency else name)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def from_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: `--from`, files of other tools."""
    return click.option(
        "--from",
        "from_files",
        multiple=True,
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="A file of another tool: Axolotl's, LLaMA-Factory's or TRL's YAML, a script, or the "
        "command of a serving engine; several for accelerate's YAML and DeepSpeed's JSON beside "
        "it. Other options count more.",
    )(command)


def with_from_files(
    ctx: click.Context,
    settings: dict[str, list[Any]],
    files: Sequence[Path],
    targets: Sequence[str] = (),
) -> tuple[dict[str, list[Any]], FromFiles]:
    """`settings` over those of `files`, and what else these say; `targets` as of `with_files`.

    Raises:
        click.UsageError: neither files nor a model.
        ConfigError: a file that can't be read, or says what can't be predicted.
    """
    from whichlora.workflow.whole_training import NO_FILES

    if not files:
        if not settings["model"]:
            metavar = ctx.command.params[0].metavar
            raise click.UsageError(f"Missing argument '{metavar}'; or a file behind --from.", ctx)
        said = replace(NO_FILES, stated=frozenset(_stated(ctx, settings)))
        return settings, _with_other_names(ctx, settings, said)
    from whichlora.workflow.from_files import with_files

    stated = _stated(ctx, [*settings, "concurrency"])  # by now a batch size
    if settings["model"]:
        stated.add("model")
    if ctx.params.get("data"):
        stated.add("data")
    settings, imported = with_files(files, settings, stated, targets)
    return settings, _with_other_names(ctx, settings, imported)


def _stated(ctx: click.Context, names: Iterable[str]) -> set[str]:
    """Those of `names` that the command line gives."""
    on_command_line = click.core.ParameterSource.COMMANDLINE
    return {name for name in names if ctx.get_parameter_source(name) is on_command_line}


def _with_other_names(
    ctx: click.Context, settings: Mapping[str, list[Any]], said: FromFiles
) -> FromFiles:
    """`said`, and what a user must know who names what runs an engine, or a tool that trains."""
    from whichlora import serving

    phases = settings.get("phase", ())
    engines = settings.get("serving", ()) if "inference" in phases else ()
    trains = set(phases) != {"inference"}
    trainers = ctx.params.get("trainer") or () if trains else ()
    of_engines = map(serving.other_name_note, engines)
    of_trainers = map(other_name_note, trainers)
    notes = tuple(filter(None, (*ctx.meta.get(DATES, ()), *of_engines, *of_trainers)))
    return replace(said, notes=(*said.notes, *notes)) if notes else said


def only_run(settings: Mapping[str, list[Any]], *, command: str) -> RunConfig:
    """The run of `settings`, for a command that takes one.

    Raises:
        ConfigError: several values, or a value that is not accepted.
    """
    for name, values in settings.items():
        flag = name if name == "model" else _flag(name)
        if len(values) > 1:
            shown = ",".join(map(str, values))
            raise ConfigError(
                f"{flag}: {command} takes one value, got {shown}; 'whichlora estimate' takes lists"
            )
    from whichlora.workflow import combinations

    return next(combinations.grid(settings))
