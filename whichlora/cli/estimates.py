"""`whichlora estimate`, `explain` and `where`: predictions, taken apart and by accelerator."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from whichlora.cli.faults import EXIT_NOTHING_FITS
from whichlora.cli.options import (
    calibration_option,
    check_form,
    cost_options,
    data_options,
    gpu_option,
    markdown_option,
    print_json,
    rates_of,
    split_models,
)
from whichlora.cli.settings import (
    from_option,
    only_run,
    plain_settings,
    run_options,
    run_settings,
    size_flag,
    with_from_files,
)
from whichlora.cli.several_gpus import SpreadCommand
from whichlora.errors import ConfigError
from whichlora.spec import run as specs
from whichlora.spec.life import LifeConfig, MergeOn
from whichlora.spec.plan import Keeping
from whichlora.text import visible

if TYPE_CHECKING:
    from whichlora.predict.life import Life


_NONE_SERVED = (
    "no widely used model is served so; give fewer sequences, a shorter context, more GPUs, or "
    "name models"
)


@click.command(cls=SpreadCommand)
@click.argument("models", nargs=-1, metavar="MODEL...", callback=split_models)
@from_option
@run_options
@gpu_option(
    "auto",
    "Accelerators: see `whichlora gpus`; cpu, auto; 24GB: memory alone; cpu-64gb: any "
    "processor; 2x3090: two in one run; 3090+2x4090: unequal ones; 3090@280W: limited to that "
    "power; g5.12xlarge: the GPUs of it.",
    counted=True,
)
@click.option(
    "--calibration-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Your calibrations.",
)
@click.option(
    "--engine",
    type=click.Choice(get_args(specs.Engine)),
    default="auto",
    show_default=True,
    help="Where memory comes from: formulas (ledger), or a trace of the real code (needs torch); "
    "auto traces models that the formulas do not know.",
)
@click.option(
    "--trace-layers",
    type=click.Choice(["2,4", "all"]),
    default="2,4",
    show_default=True,
    help="Trace four layers and stretch them to all, checked by two; or trace all.",
)
@data_options
@cost_options
@click.option(
    "--check",
    is_flag=True,
    help="Exit with 1 where a run does not fit, or can't run, and say which; one that may fit "
    "passes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every part.")
@markdown_option
@click.pass_context
def estimate(
    ctx: click.Context,
    /,
    models: list[str],
    from_files: tuple[Path, ...],
    gpu: list[str],
    calibration_dir: Path | None,
    engine: specs.Engine,
    trace_layers: str,
    data: str | None,
    samples: int | None,
    epochs: float | None,
    prices: Path | None,
    country: str | None,
    check: bool,
    as_json: bool,
    as_markdown: bool,
    **options: Any,
) -> None:
    """Predict peak memory, time and cost; nothing is run.

    Every list with commas makes a grid. With an engine and no MODEL: the largest that it serves.

    \b
    Example:
      whichlora estimate meta-llama/Llama-3.1-8B --gpu h100-sxm-80gb \\
          --method lora,qlora --batch-size 1,4,16 --seq-len 2048
      whichlora estimate llama-3.1-8b --gpu l4 --method qlora --data train.jsonl --epochs 3
      whichlora estimate --from axolotl.yaml --gpu h100-sxm-80gb
      whichlora estimate --from axolotl.yaml --gpu l4 --check --markdown
      whichlora estimate --serving vllm --gpu 4090 --context 32768
    """
    from whichlora.workflow import estimates, served_models
    from whichlora.workflow.combinations import maximised
    from whichlora.workflow.whole_training import NO_FILES, Data

    check_form(as_json, as_markdown)
    settings = run_settings(models, options)
    files = NO_FILES
    asks_for_models = not from_files and served_models.asks_for_models(settings)
    if not asks_for_models:
        settings, files = with_from_files(ctx, settings, from_files, gpu)
    maximise = maximised(settings, size_flag)
    answered = served_models.largest_served if asks_for_models else estimates.estimate_grid
    predictions = answered(
        settings,
        gpu,
        calibration_dir=calibration_dir,
        engine=engine,
        trace_layers=trace_layers,
        maximise=maximise,
        files=files,
        rates=rates_of(prices, country),
        data=Data.asked(data, samples, epochs, files),
        stated=files.stated,
    )
    if asks_for_models and not predictions:
        click.echo(_NONE_SERVED, err=True)
        sys.exit(EXIT_NOTHING_FITS)
    if as_json:
        print_json(estimates.document(predictions))
    elif as_markdown:
        from whichlora import terminal

        document = terminal.predictions_document(predictions, predictions.refused)
        click.echo(terminal.as_markdown(document), nl=False)
    else:
        from whichlora import terminal

        terminal.print_predictions(predictions, predictions.refused)
    if maximise and all(prediction.verdict != "fits" for prediction in predictions):
        sys.exit(EXIT_NOTHING_FITS)
    if check and (faults := estimates.faults(predictions)):
        for fault in faults:
            click.echo(visible(fault), err=True)
        sys.exit(EXIT_NOTHING_FITS)


@click.command(cls=SpreadCommand)
@click.argument("models", metavar="MODEL", nargs=-1)
@from_option
@run_options
@gpu_option("auto", "Accelerator: see `whichlora gpus`.", single=True, counted=True)
@calibration_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every line.")
@markdown_option
@click.option(
    "--advice",
    "with_advice",
    is_flag=True,
    help="Rules for rank, targets and learning rate, with their papers.",
)
@click.option(
    "--life",
    "whole_life",
    is_flag=True,
    help="Peaks of loading, training, evaluating, saving, merging and resuming.",
)
@click.option(
    "--eval-rows",
    type=int,
    default=0,
    show_default=True,
    help="With --life: rows whose logits compute_metrics gets; 0: the loss alone.",
)
@click.option(
    "--eval-accumulation-steps",
    type=int,
    help="With --life: batches after which these logits move to the host.",
)
@click.option(
    "--save-total-limit",
    type=int,
    default=2,
    show_default=True,
    help="With --life: checkpoints that are kept.",
)
@click.option(
    "--merge-on",
    type=click.Choice(get_args(MergeOn)),
    default="gpu",
    show_default=True,
    help="With --life: where the adapter is merged into the base.",
)
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    models: tuple[str, ...],
    from_files: tuple[Path, ...],
    gpu: str,
    calibration_dir: Path | None,
    as_json: bool,
    as_markdown: bool,
    with_advice: bool,
    whole_life: bool,
    eval_rows: int,
    eval_accumulation_steps: int | None,
    save_total_limit: int,
    merge_on: MergeOn,
    **options: Any,
) -> None:
    """Where the bytes of one run go, and what would change them.

    \b
    Example:
      whichlora explain meta-llama/Llama-3.1-8B --gpu rtx-4090-24gb --method qlora
    """
    from whichlora.predict.advice import advice
    from whichlora.workflow import combinations, estimates

    check_form(as_json, as_markdown)
    settings = plain_settings(models, options, command="explain")
    settings, files = with_from_files(ctx, settings, from_files, [gpu])
    settings, gpu = combinations.of_one_target(settings, gpu)
    run = only_run(settings, command="explain")
    life = LifeConfig(
        eval_rows=eval_rows,
        eval_accumulation_steps=eval_accumulation_steps,
        merge_on=merge_on,
        keeping=Keeping(save_total_limit=save_total_limit),
    )
    if life != LifeConfig() and not whole_life:
        raise ConfigError(
            "--eval-rows, --eval-accumulation-steps, --save-total-limit, --merge-on: need --life"
        )
    notes = files.notes_of_step(run)
    if whole_life:
        lived = estimates.life(run, gpu, life, calibration_dir=calibration_dir, notes=notes)
        _print_life(lived, as_json=as_json, as_markdown=as_markdown)
        return
    explanation = estimates.explain(
        run, gpu, calibration_dir=calibration_dir, notes=notes, stated=files.stated
    )
    rules = advice(explanation.prediction.run, explanation.prediction.num_trainable_params)
    if as_json:
        advised = {"advice": [asdict(rule) for rule in rules]} if with_advice else {}
        print_json({"explanation": explanation.to_dict()} | advised)
        return
    from whichlora import terminal

    if as_markdown:
        click.echo(terminal.as_markdown(terminal.explanation_document(explanation)), nl=False)
    else:
        terminal.print_explanation(explanation)
    for rule in rules if with_advice else ():
        click.echo(f"advice: {rule.in_words}")


def _print_life(life: Life, *, as_json: bool, as_markdown: bool) -> None:
    from whichlora import terminal

    if as_json:
        print_json({"life": life.to_dict()})
    elif as_markdown:
        click.echo(terminal.as_markdown(terminal.life_document(life)), nl=False)
    else:
        terminal.print_life(life)


@click.command(cls=SpreadCommand)
@click.argument("models", metavar="MODEL", nargs=-1)
@from_option
@run_options
@gpu_option("all", "Accelerators to compare; all: those of the catalog.", counted=True)
@calibration_option
@cost_options
@click.option("--all", "whole", is_flag=True, help="Print every card and note.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every part.")
@markdown_option
@click.pass_context
def where(
    ctx: click.Context,
    /,
    models: tuple[str, ...],
    from_files: tuple[Path, ...],
    gpu: list[str],
    calibration_dir: Path | None,
    prices: Path | None,
    country: str | None,
    whole: bool,
    as_json: bool,
    as_markdown: bool,
    **options: Any,
) -> None:
    """Which accelerators one run fits on, the smallest first, and which is cheapest.

    \b
    Example:
      whichlora where meta-llama/Llama-3.1-8B --method qlora --batch-size 4
      whichlora where --from axolotl.yaml
    """
    from whichlora.workflow import combinations, estimates

    check_form(as_json, as_markdown)
    settings = plain_settings(models, options, command="where")
    settings, files = with_from_files(ctx, settings, from_files, gpu)
    settings, gpu = combinations.of_one_number(settings, gpu)
    run = only_run(settings, command="where")
    rates = rates_of(prices, country)
    placements = estimates.where(
        run,
        gpu,
        calibration_dir=calibration_dir,
        notes=files.notes_of_step(run),
        rates=rates,
        stated=files.stated,
    )
    if as_json:
        print_json({"placements": [placement.to_dict() for placement in placements]})
    elif as_markdown:
        from whichlora import terminal

        document = terminal.placements_document(placements)
        click.echo(terminal.as_markdown(document), nl=False)
    else:
        from whichlora import terminal

        terminal.print_placements(placements, whole=whole)
    if not any(
        placement.prediction and placement.prediction.verdict == "fits" for placement in placements
    ):
        sys.exit(EXIT_NOTHING_FITS)
