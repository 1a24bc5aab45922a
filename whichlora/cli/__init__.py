"""Arguments in, one `api` call, text out; the only package that knows the CLI library."""

from __future__ import annotations

import io
import sys

import click

from whichlora import __version__
from whichlora.cli.assistants import mcp
from whichlora.cli.calibration import calibrate
from whichlora.cli.catalog import gpus, methods, models
from whichlora.cli.cluster import profile_task, slurm
from whichlora.cli.completion import add_completion, completion
from whichlora.cli.estimates import estimate, explain, where
from whichlora.cli.exports import export
from whichlora.cli.faults import Group
from whichlora.cli.guides import guide
from whichlora.cli.page import page
from whichlora.cli.recommend import recommend
from whichlora.cli.runs import report, run


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 nothing meets the limits, 2 bad request, 130 interrupted.",
)
@click.version_option(__version__, prog_name="whichlora")
def main() -> None:
    """The largest model, LoRA variant and batch size, before a GPU hour is spent."""
    for stream in (sys.stdout, sys.stderr):  # an old locale lacks µ and lines, not the answer
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_COMMANDS = (
    recommend,
    estimate,
    explain,
    where,
    guide,
    run,
    slurm,
    profile_task,
    report,
    page,
    export,
    gpus,
    models,
    methods,
    calibrate,
    mcp,
    completion,
)
for _command in _COMMANDS:
    main.add_command(_command)
add_completion(main)
