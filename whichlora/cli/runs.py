"""`whichlora run`: both stages of a config file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from whichlora.cli.faults import EXIT_NOTHING_FITS


@click.command()
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
