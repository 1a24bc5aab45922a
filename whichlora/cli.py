"""Arguments in, one `api` call, text out; the only file that knows the CLI library."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, get_args

import click

from whichlora import __version__, specs
from whichlora.errors import ConfigError, InfeasibleError, WhichLoraError
from whichlora.results import SCHEMA_VERSION

EXIT_NOTHING_FITS = 1
EXIT_BAD_REQUEST = 2
_MAX_COUNT = 10**9  # no batch, no length: a slipped key


class _OneLine(click.ClickException):
    """An error that is told in one line on stderr, without the usage that click adds."""

    exit_code = EXIT_BAD_REQUEST

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, err=True)


class _NothingFits(_OneLine):
    exit_code = EXIT_NOTHING_FITS


class _Group(click.Group):
    """Turns our errors and click's into one line; any other exception keeps its traceback."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _one_line():  # our own options
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():  # those of the command, and its work
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except InfeasibleError as error:
        raise _NothingFits(f"nothing fits: {error}") from None
    except WhichLoraError as error:
        raise _OneLine(str(error)) from None
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "whichlora"
        fault = error.format_message().rstrip(".")
        raise _OneLine(f"{command}: {fault}; see '{command} --help'") from None


def _words(setting: str, accepted: tuple[str, ...] | None = None) -> Callable[..., list[str]]:
    """A click callback: comma list of words, each one of `accepted`."""

    def split(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
        words = [word.strip() for word in value.split(",")]
        for word in words:
            if not word:
                raise ConfigError(f"--{setting}: has an empty name in {value!r}")
            if accepted is not None and word not in accepted:
                raise ConfigError(
                    f"--{setting}: {word!r} is not known; accepted are {', '.join(accepted)}"
                )
        return words

    return split


def _counts(setting: str) -> Callable[..., list[int]]:
    """A click callback: comma list of whole numbers from 1 to a billion."""

    def split(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
        counts = []
        for word in value.split(","):
            try:
                count = int(word)
            except ValueError:
                count = 0
            if not 1 <= count <= _MAX_COUNT:
                raise ConfigError(
                    f"--{setting}: {word.strip()[:40]!r} is not a whole number from 1 to "
                    f"{_MAX_COUNT}; give one, or several with commas"
                )
            counts.append(count)
        return counts

    return split


def _fractions(setting: str) -> Callable[..., list[float]]:
    """A click callback: comma list of numbers from 0 to below 1."""

    def split(ctx: click.Context, param: click.Parameter, value: str) -> list[float]:
        fractions = []
        for word in value.split(","):
            try:
                fraction = float(word)
            except ValueError:
                fraction = -1.0
            if not 0.0 <= fraction < 1.0:
                raise ConfigError(
                    f"--{setting}: {word.strip()[:40]!r} is not a number from 0 to below 1; "
                    "give one, or several with commas"
                )
            fractions.append(fraction)
        return fractions

    return split


def _versions(ctx: click.Context, param: click.Parameter, value: str) -> tuple[Any, ...]:
    """A click callback: comma list of library=version."""
    pairs = [word.partition("=") for word in value.split(",") if word.strip()]
    return tuple(sorted((library.strip(), version.strip()) for library, _, version in pairs))


def _list_option(
    flag: str, default: str, help_text: str, callback: Callable[..., Any]
) -> Callable[[Any], Any]:
    return click.option(
        f"--{flag}", default=default, show_default=True, help=help_text, callback=callback
    )


def _choices(flag: str, default: str, help_text: str, choice: Any) -> Callable[[Any], Any]:
    accepted = tuple(get_args(choice))
    return _list_option(
        flag, default, f"{help_text} ({', '.join(accepted)}).", _words(flag, accepted)
    )


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="whichlora")
def main() -> None:
    """The largest model, LoRA variant and batch size that fit, before a GPU hour is spent."""


@main.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@_choices("phase", "finetune", "What runs", specs.Phase)
@_list_option("method", "lora", "full, lora, qlora, dora, qdora.", _words("method"))
@_list_option("batch-size", "1", "Sequences per device per micro-step.", _counts("batch-size"))
@_list_option("seq-len", "2048", "Tokens per sequence, padding included.", _counts("seq-len"))
@_list_option("r", "16", "Rank of the adapters.", _counts("r"))
@_list_option("lora-dropout", "0", "Dropout before the adapters.", _fractions("lora-dropout"))
@click.option(
    "--target-modules",
    default=specs.ALL_LINEAR,
    show_default=True,
    help="Layers that get an adapter: names with commas, all-linear, or attention.",
    callback=_words("target-modules"),
)
@_choices("precision", "bf16", "Base weights, adapters and autocast", specs.Precision)
@_choices("optimizer", "adamw_torch_fused", "Optimizer", specs.Optimizer)
@click.option(
    "--gradient-checkpointing/--no-gradient-checkpointing",
    default=True,
    show_default=True,
    help="Recompute activations in the backward pass.",
)
@_list_option(
    "gradient-accumulation-steps",
    "1",
    "Micro-steps per optimizer step.",
    _counts("gradient-accumulation-steps"),
)
@_choices("attn", "sdpa", "Attention kernel", specs.AttentionKernel)
@_choices("padding", "none", "Whether batches carry padding", specs.Padding)
@_choices("loss-head", "hf", "Who computes the loss", specs.LossHead)
@click.option(
    "--quant",
    default=None,
    help=f"Storage of the base weights ({', '.join(get_args(specs.Quant))}); "
    "default: nf4-dq for qlora and qdora, else none.",
)
@click.option(
    "--prepare-kbit/--no-prepare-kbit",
    default=None,
    help="Whether prepare_model_for_kbit_training runs; default: for a 4-bit or 8-bit base, "
    "except with the trl-fused loss.",
)
@_list_option("prompt-len", "512", "Prompt tokens (inference).", _counts("prompt-len"))
@_list_option("max-new-tokens", "128", "Generated tokens (inference).", _counts("max-new-tokens"))
@_choices("kv-cache", "dynamic", "Key-value cache (inference)", specs.KvCache)
@click.option(
    "--libraries",
    default="",
    callback=_versions,
    help="Versions that are not the current ones, such as transformers=4.44.2,torch=2.1.1; older "
    "code keeps other tensors.",
)
@_list_option("gpu", "auto", "Accelerators: see `whichlora gpus`; cpu, auto.", _words("gpu"))
@click.option(
    "--calibration-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Your calibrations.",
)
@click.option(
    "--engine",
    type=click.Choice(get_args(specs.Engine)),
    default="ledger",
    show_default=True,
    help="Where memory comes from: formulas, or a trace of the real code (needs torch).",
)
@click.option(
    "--trace-layers",
    type=click.Choice(["2,4", "all"]),
    default="2,4",
    show_default=True,
    help="Trace four layers and stretch them to all, checked by two; or trace all.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every part.")
def estimate(
    models: tuple[str, ...],
    gpu: list[str],
    quant: str | None,
    target_modules: list[str],
    gradient_checkpointing: bool,
    prepare_kbit: bool | None,
    libraries: tuple[tuple[str, str], ...],
    calibration_dir: Path | None,
    engine: specs.Engine,
    trace_layers: str,
    as_json: bool,
    **lists: list[Any],
) -> None:
    """Peak memory and time, without a GPU and without running anything.

    Every list with commas makes a grid.

    \b
    Example:
      whichlora estimate meta-llama/Llama-3.1-8B --gpu h100-sxm-80gb \\
          --method lora,qlora --batch-size 1,4,16 --seq-len 2048
    """
    from whichlora import api

    quants: list[str | None] = [None]
    if quant is not None:
        quants = list(_words("quant", tuple(get_args(specs.Quant)))(None, None, quant))
    settings: dict[str, list[Any]] = {
        **lists,
        "model": list(models),
        "quant": quants,
        "target_modules": [tuple(target_modules)],
        "gradient_checkpointing": [gradient_checkpointing],
        "prepare_kbit": [prepare_kbit],
        "libraries": [libraries],
    }
    predictions = api.estimate(
        api.grid(settings),
        gpu,
        calibration_dir=calibration_dir,
        engine=engine,
        trace_layers=trace_layers,
    )
    if as_json:
        answer = {
            "schema_version": SCHEMA_VERSION,
            "predictions": [prediction.to_dict() for prediction in predictions],
        }
        click.echo(json.dumps(answer, indent=1))
        return
    from whichlora import report

    report.print_predictions(predictions)


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="Measure again what an earlier run measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def run(config: Path, fresh: bool, as_json: bool) -> None:
    """Find the largest model, variant and batch size that meet the limits of CONFIG.

    Predicts every candidate, profiles those that could change the answer, and writes the table,
    the reasons and a ready train.py to the output directory. An interrupted run resumes.

    \b
    Example:
      whichlora run examples/quickstart.yaml
    """
    from whichlora import report, workflow

    with report.Progress(quiet=as_json) as progress:
        answer = workflow.run(config, fresh=fresh, progress=progress)
    if as_json:
        click.echo(json.dumps(answer.to_dict(), indent=1))
    else:
        report.print_answer(answer)
    if answer.winner is None:
        sys.exit(EXIT_NOTHING_FITS)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print every field.")
def gpus(as_json: bool) -> None:
    """List the accelerators of the catalog, and what this machine has.

    \b
    Example:
      whichlora gpus
    """
    from whichlora import api, report

    found = api.list_gpus()
    if as_json:
        import dataclasses

        rows = [dataclasses.asdict(gpu) for gpu in found]
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "gpus": rows}, indent=1))
        return
    report.print_gpus(found, here=api.find_gpu("auto"))


@main.command()
@click.argument("pattern", default="")
@click.option("--json", "as_json", is_flag=True, help="Print every field.")
def models(pattern: str, as_json: bool) -> None:
    """List the models of the database whose name contains PATTERN.

    \b
    Example:
      whichlora models qwen
    """
    from whichlora import api, report

    found = [one for one in api.list_models() if pattern.lower() in one.hub_id.lower()]
    if as_json:
        import dataclasses

        rows = [dataclasses.asdict(one) for one in found]
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "models": rows}, indent=1))
        return
    report.print_models(found)


# --- calibrate ----------------------------------------------------------------------------

_gpu_option = click.option("--gpu", help="One accelerator; default: every one with records.")
_folder_option = click.option(
    "--calibration-dir", type=click.Path(path_type=Path, file_okay=False), help="Your calibrations."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print every field as JSON.")


@main.group(invoke_without_command=True)
@_gpu_option
@_folder_option
@click.pass_context
def calibrate(ctx: click.Context, gpu: str | None, calibration_dir: Path | None) -> None:
    r"""Fit the predictors to the recorded runs; share and merge records. Alone: fit.

    \b
    Example:
      whichlora calibrate --gpu a100-sxm-80gb
    """
    given = {"gpu": gpu, "calibration_dir": calibration_dir}
    ctx.default_map = dict.fromkeys(calibrate.commands, given)
    if ctx.invoked_subcommand is None:
        ctx.invoke(fit, **given, as_json=False)


@calibrate.command()
@_gpu_option
@_folder_option
@_json_option
def fit(gpu: str | None, calibration_dir: Path | None, as_json: bool) -> None:
    """Refit to every record there is, and say what improved."""
    from whichlora import databases, report

    refits = databases.calibrate_all(gpu, calibration_dir)
    if as_json:
        click.echo(_json("fits", [one.to_dict() for one in refits]))
        return
    for one in refits:
        report.print_refit(one)


@calibrate.command()
@_gpu_option
@_folder_option
@_json_option
def show(gpu: str | None, calibration_dir: Path | None, as_json: bool) -> None:
    """What is known about a device, from whom, how well, and what is distrusted."""
    from whichlora import databases, report

    found = databases.calibration_reports(gpu, calibration_dir)
    if as_json:
        click.echo(_json("calibrations", [one.to_dict() for one in found]))
        return
    for one in found:
        report.print_calibration(one)


@calibrate.command("import")
@click.argument("table", metavar="FILE.csv", type=click.Path(path_type=Path))
@click.option("--skip-bad", is_flag=True, help="Leave out rows that can't be true.")
@_folder_option
def import_(table: Path, skip_bad: bool, calibration_dir: Path | None) -> None:
    """Add the runs of anybody's table; docs/calibration.md has the columns."""
    from whichlora import databases, report

    merged, refused = databases.import_table(
        table, skip_bad=skip_bad, calibration_dir=calibration_dir
    )
    report.print_merged(merged, refused)


@calibrate.command()
@click.argument("path", metavar="FILE.csv|FILE.jsonl", type=click.Path(path_type=Path))
@_gpu_option
@_folder_option
def export(path: Path, gpu: str | None, calibration_dir: Path | None) -> None:
    """Write all records, or those of one accelerator, to a table or to JSON lines."""
    from whichlora import databases

    count = databases.export_records(path, gpu, calibration_dir=calibration_dir)
    click.echo(f"{path}: {count} records")


@calibrate.command()
@click.argument("place", metavar="FOLDER|FILE", type=click.Path(path_type=Path))
@_folder_option
def merge(place: Path, calibration_dir: Path | None) -> None:
    """Add the records of another database, or of one .jsonl file; all of them or none."""
    from whichlora import databases, report

    report.print_merged(databases.merge_records(place, calibration_dir=calibration_dir))


@calibrate.command()
@click.argument("url")
@_folder_option
def pull(url: str, calibration_dir: Path | None) -> None:
    """Add the records of a database elsewhere: a directory, s3://, hf://datasets/…."""
    from whichlora import databases, report

    report.print_merged(databases.pull_records(url, calibration_dir=calibration_dir))


@calibrate.command()
@click.argument("url")
@_folder_option
def push(url: str, calibration_dir: Path | None) -> None:
    """Add your records to a database elsewhere; nothing there is changed."""
    from whichlora import databases

    count = databases.push_records(url, calibration_dir=calibration_dir)
    click.echo(f"{url}: {count} new records")


def _json(name: str, rows: list[dict[str, Any]]) -> str:
    return json.dumps({"schema_version": SCHEMA_VERSION, name: rows}, indent=1)
