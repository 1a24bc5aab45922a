"""`whichlora estimate`: one candidate or a grid, predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import click

from whichlora import specs
from whichlora.cli.options import list_option, words
from whichlora.cli.settings import run_options, run_settings
from whichlora.results import SCHEMA_VERSION


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@run_options
@list_option("gpu", "auto", "Accelerators: see `whichlora gpus`; cpu, auto.", words("gpu"))
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
    calibration_dir: Path | None,
    engine: specs.Engine,
    trace_layers: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Peak memory and time, without a GPU and without running anything.

    Every list with commas makes a grid.

    \b
    Example:
      whichlora estimate meta-llama/Llama-3.1-8B --gpu h100-sxm-80gb \\
          --method lora,qlora --batch-size 1,4,16 --seq-len 2048
    """
    from whichlora import api

    predictions = api.estimate(
        api.grid(run_settings(models, given)),
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
