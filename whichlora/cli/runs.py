"""`whichlora run`, both stages of a config file, and `whichlora report` on what it left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal, get_args

import click

from whichlora.cli.faults import EXIT_NOTHING_FITS, goes_on_with
from whichlora.errors import MeasurementError
from whichlora.spec.plan import Prefer
from whichlora.text import visible

ImageFormat = Literal["png", "svg"]


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="Measure again what an earlier run measured.")
@click.option(
    "--prefer",
    type=click.Choice(get_args(Prefer)),
    help="What ranks the candidates that meet the limits, in place of what CONFIG says.",
)
@click.option("--all", "show_all", is_flag=True, help="Print every candidate and every reason.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def run(config: Path, fresh: bool, prefer: Prefer | None, show_all: bool, as_json: bool) -> None:
    """Find the largest model that meets the limits of CONFIG.

    And with it the LoRA variant and the batch size. It predicts every candidate, and profiles those
    that could change the answer, until the winner has the requested confidence or the budget is
    spent. It writes the table, the reasons, an HTML report and a ready train.py to the output
    directory. An interrupted run resumes with the same command.

    \b
    Example:
      whichlora run examples/quickstart.yaml
    """
    from whichlora import terminal
    from whichlora.workflow.run import run_plan

    again = ["run", str(config), *(["--prefer", prefer] if prefer else [])]
    with goes_on_with(*again), terminal.Progress(quiet=as_json) as progress:
        answer = run_plan(config, fresh=fresh, prefer=prefer, progress=progress)
    if as_json:
        click.echo(json.dumps(answer.to_dict(), indent=1))
    elif show_all:
        terminal.print_answer(answer)
    else:
        terminal.print_short(answer)
    if answer.training is not None and "error" in answer.training:
        raise MeasurementError(answer.training["error"])
    if answer.winner is None:
        sys.exit(EXIT_NOTHING_FITS)


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The HTML file; default: report.html in RUN_DIR.",
)
@click.option(
    "--static",
    "image_format",
    type=click.Choice(get_args(ImageFormat)),
    help="Each figure as a picture, too, in the folder figures of RUN_DIR (extra: images).",
)
def report(run_dir: Path, output: Path | None, image_format: ImageFormat | None) -> None:
    """Write the answer in RUN_DIR as one HTML file. It opens anywhere, offline.

    RUN_DIR is the output directory of a `whichlora run`, here or copied from elsewhere.

    \b
    Example:
      whichlora report runs/quickstart
    """
    from whichlora import html

    if image_format is not None:
        html.require_images()
    click.echo(visible(f"report: {html.write_report(run_dir, output)}"))
    if image_format is not None:
        for path in html.write_images(run_dir, image_format):
            click.echo(visible(f"figure: {path}"))
