"""`whichlora guide`: the table of a parameter guide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from whichlora.cli.options import (
    Count,
    Positive,
    calibration_option,
    cost_options,
    gpu_option,
    json_option,
    names_if_any,
    print_json,
    rates_of,
    split_models,
)
from whichlora.cli.settings import plain_settings, run_options
from whichlora.cli.several_gpus import SpreadCommand
from whichlora.errors import ConfigError
from whichlora.text import visible


@click.command(cls=SpreadCommand)
@click.argument("models", nargs=-1, metavar="MODEL...", callback=split_models)
@click.option("--models", "listed", callback=names_if_any, help="More of them, with commas.")
@gpu_option("auto", "Accelerators: see `whichlora gpus`; cpu, auto.", counted=True)
@click.option(
    "--samples",
    type=Count(1, 10**9),
    default=10_000,
    show_default=True,
    help="Rows of the training data, each of --seq-len tokens.",
)
@click.option(
    "--epochs",
    type=Positive(1000),
    default=1.0,
    show_default=True,
    help="Passes over the data.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file instead: its end says the format (.md, .csv, .html).",
)
@run_options
@calibration_option
@cost_options
@json_option
def guide(
    models: list[str],
    listed: tuple[str, ...],
    gpu: list[str],
    samples: int,
    epochs: float,
    output: Path | None,
    calibration_dir: Path | None,
    prices: Path | None,
    country: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """A parameter guide: memory, time and cost for the data, throughput.

    With --phase inference --serving vllm the data are --samples requests.

    Every list with commas makes a grid, the number of GPUs too: --gpus 2,4,8 --parallel fsdp.

    \b
    Example:
      whichlora guide meta-llama/Llama-3.1-8B Qwen/Qwen2.5-14B \\
          --gpu a100-sxm-80gb,h100-sxm-80gb --batch-size 4,16 --seq-len 1024,4096
    """
    from whichlora import terminal
    from whichlora.workflow import combinations
    from whichlora.workflow.guide import make_guide

    if not models and not listed:
        raise ConfigError("guide needs a model: whichlora guide MODEL --gpu 4090")
    settings, types = combinations.of_one_number(
        plain_settings([*models, *listed], options, command="guide"), gpu
    )
    rows = make_guide(
        combinations.combinations(settings),
        types,
        num_samples=samples,
        epochs=epochs,
        calibration_dir=calibration_dir,
        rates=rates_of(prices, country),
    )
    if as_json:
        print_json(
            {
                "guide": terminal.flat_rows(rows),
                "refused": [combination.to_dict() for combination in rows.refused],
            }
        )
    elif output is not None:
        path = terminal.write_guide(output, rows, rows.refused)
        click.echo(visible(f"{path}: {len(rows)} rows"))
    else:
        terminal.print_guide(rows, rows.refused)
