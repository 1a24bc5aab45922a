"""`whichlora slurm` and `profile-task`: profiling on the GPUs of a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whichlora.cli.faults import EXIT_NOTHING_FITS, goes_on_with
from whichlora.extras import require
from whichlora.text import visible

if TYPE_CHECKING:
    from collections.abc import Callable

    from whichlora.cluster.merge import Recommendation
    from whichlora.terminal import SweepProgress

_RUN_DIR = click.argument("run_dir", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the recommendation as JSON.")


class _PlanByDefault(click.Group):
    """`whichlora slurm CONFIG.yaml` is `whichlora slurm plan CONFIG.yaml`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["plan", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_PlanByDefault)
def slurm() -> None:
    """Profile on every GPU type of a Slurm cluster. Alone with CONFIG.yaml: plan.

    \b
    Example:
      whichlora slurm examples/slurm.yaml --submit
    """


@slurm.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--submit", is_flag=True, help="Submit the scripts, and follow them to the answer.")
@click.option(
    "--engine",
    type=click.Choice(["slurm", "local", "skypilot"]),
    default="slurm",
    show_default=True,
    help="Who runs the tasks: the cluster, this machine with one child per GPU, or a cloud, for "
    "which a task file is written.",
)
@click.option("--fresh", is_flag=True, help="Start over, and measure again.")
@_JSON
def plan(config: Path, submit: bool, engine: str, fresh: bool, as_json: bool) -> None:
    """Find the GPU types and write scripts for what is worth it.

    Predicts for each type, and lists the candidates whose runs could change the answer.

    \b
    Example:
      whichlora slurm plan examples/slurm.yaml --submit
    """
    from whichlora import terminal
    from whichlora.cluster import rounds, watch
    from whichlora.cluster.engines import ENGINES

    if submit:
        require("--submit", "sklearn", extra="profile")
    with terminal.SweepProgress(quiet=as_json) as progress:
        runner = ENGINES[engine]()
        sweep = rounds.plan_sweep(config, runner, name=engine, progress=progress, fresh=fresh)
        if not as_json:
            terminal.print_sweep(sweep)
        recommendation = None
        if submit:
            with goes_on_with("slurm", "resume", str(sweep.run_dir)):
                recommendation = watch.follow(sweep, runner, progress)
        elif not sweep.arrays:
            recommendation = watch.join(sweep.run_dir, progress)
    if recommendation is not None:
        _show(recommendation, as_json=as_json)


@slurm.command()
@_RUN_DIR
def status(run_dir: Path) -> None:
    """How every task of the sweep in RUN_DIR stands.

    \b
    Example:
      whichlora slurm status runs/slurm
    """
    from whichlora import terminal
    from whichlora.cluster import watch

    terminal.print_status(watch.status(run_dir))


@slurm.command()
@_RUN_DIR
@_JSON
def resume(run_dir: Path, as_json: bool) -> None:
    """Go on with the sweep in RUN_DIR. Submits what is open, and follows it to the answer.

    \b
    Example:
      whichlora slurm resume runs/slurm
    """
    from whichlora.cluster import watch

    _conclude(watch.resume, run_dir, as_json=as_json)


@slurm.command()
@_RUN_DIR
@_JSON
def merge(run_dir: Path, as_json: bool) -> None:
    """Join what is recorded by now. The merge job of the cluster runs this.

    \b
    Example:
      whichlora slurm merge runs/slurm
    """
    from whichlora.cluster import watch

    _conclude(watch.join, run_dir, as_json=as_json)


def _conclude(
    act: Callable[[Path, SweepProgress], Recommendation], run_dir: Path, *, as_json: bool
) -> None:
    from whichlora import terminal

    require("a sweep's answer", "sklearn", extra="profile")
    with (
        goes_on_with("slurm", "resume", str(run_dir)),
        terminal.SweepProgress(quiet=as_json) as progress,
    ):
        recommendation = act(run_dir, progress)
    _show(recommendation, as_json=as_json)


def _show(recommendation: Recommendation, *, as_json: bool) -> None:
    from whichlora import terminal
    from whichlora.cluster import watch

    if as_json:
        click.echo(json.dumps(recommendation.to_dict(), indent=1))
    else:
        terminal.print_recommendation(recommendation, watch.dry_run(recommendation))
    if recommendation.best is None:
        sys.exit(EXIT_NOTHING_FITS)


@click.command("profile-task", hidden=True)
@click.argument("tasks", metavar="TASKS.json", type=click.Path(path_type=Path))
@click.argument("indices", metavar="INDEX...", type=int, nargs=-1, required=True)
@click.option(
    "--calibration-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the records go; default: the folder that the list names.",
)
def profile_task(tasks: Path, indices: tuple[int, ...], calibration_dir: Path | None) -> None:
    """Profile candidates of a list on the GPU of this machine; what every array task runs.

    \b
    Example:
      whichlora profile-task runs/slurm/h100/tasks-1.json 0
    """
    from whichlora.cluster.tasks import profile_task as profile
    from whichlora.predict.words import describe

    for measurement in profile(tasks, indices, calibration_dir=calibration_dir):
        run, outcome = describe(measurement.run), measurement.outcome
        click.echo(visible(f"{run}: {outcome} on {measurement.gpu}"))
