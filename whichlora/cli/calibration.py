"""`whichlora calibrate`: fit, show, share and merge records."""

from __future__ import annotations

from pathlib import Path

import click

from whichlora.cli.faults import goes_on_with
from whichlora.cli.options import calibration_option, gpu_option, json_option, print_json
from whichlora.text import visible

_gpu_option = gpu_option(None, "Accelerators; default: every one with records.")


@click.group(invoke_without_command=True)
@_gpu_option
@calibration_option
@click.option(
    "--measure",
    "config",
    metavar="CONFIG.yaml",
    type=click.Path(path_type=Path),
    help="First measure, on this machine, the runs that tell most about CONFIG's candidates.",
)
@click.option("--budget", default="10min", show_default=True, help="Device time for --measure.")
@click.option(
    "--launch-us",
    type=float,
    help="Microseconds that this host takes to launch a kernel; kept for --gpu.",
)
@click.option(
    "--links",
    is_flag=True,
    help="Measure the links between this machine's GPUs, and keep them for predictions.",
)
@click.option(
    "--from-log",
    "log",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Record what a serving engine's log or /metrics states of its run on --gpu.",
)
@click.option("--model", help="Of --from-log, where the log names a folder.")
@click.pass_context
def calibrate(
    ctx: click.Context,
    gpu: list[str],
    calibration_dir: Path | None,
    config: Path | None,
    budget: str,
    launch_us: float | None,
    links: bool,
    log: Path | None,
    model: str | None,
) -> None:
    """Fit predictors to recorded runs; share and merge records. Alone: fit.

    \b
    Examples:
      whichlora calibrate --gpu a100-sxm-80gb
      whichlora calibrate --measure plan.yaml --budget 10min
      whichlora calibrate --gpu t4 --launch-us 28
      whichlora calibrate --links --gpu rtx-3090-24gb
      whichlora calibrate --gpu l40s --from-log vllm.log
    """
    options = {"gpu": list(gpu), "calibration_dir": calibration_dir}
    ctx.default_map = dict.fromkeys(calibrate.commands, options)
    if launch_us is not None:
        if len(gpu) != 1:
            raise click.UsageError("--launch-us needs one --gpu: beside which accelerator?")
        from whichlora.calibration.database import state_launch

        click.echo(f"kept in {state_launch(gpu[0], launch_us, calibration_dir)}")
    elif links:
        from whichlora import terminal
        from whichlora.workflow.own_links import measure_own_links

        terminal.print_own_links(measure_own_links(gpu, calibration_dir))
    elif log is not None:
        if len(gpu) != 1:
            raise click.UsageError("--from-log needs one --gpu: which accelerator did it run on?")
        from whichlora.terminal.engine_log import print_log_record
        from whichlora.workflow.engine_log import record_log

        print_log_record(record_log(log, gpu[0], model=model, calibration_dir=calibration_dir))
    elif config is not None:
        from whichlora import terminal
        from whichlora.config import parse_duration
        from whichlora.workflow.collect import measure

        again = ("calibrate", "--measure", str(config), "--budget", budget)
        with goes_on_with(*again), terminal.Progress(quiet=False) as progress:
            fitted = measure(config, budget_s=parse_duration(budget), progress=progress)
        terminal.print_refit(fitted)
    elif ctx.invoked_subcommand is None:
        ctx.invoke(fit, gpu=gpu, calibration_dir=calibration_dir, as_json=False)


@calibrate.command()
@_gpu_option
@calibration_option
@json_option
def fit(gpu: list[str], calibration_dir: Path | None, as_json: bool) -> None:
    """Refit to every record there is, and say what improved.

    \b
    Example:
      whichlora calibrate fit --gpu a100-sxm-80gb
    """
    from whichlora import terminal
    from whichlora.calibration import database

    refits = database.calibrate_all(gpu, calibration_dir)
    if as_json:
        print_json({"fits": [refit.to_dict() for refit in refits]})
        return
    for refit in refits:
        terminal.print_refit(refit)


@calibrate.command()
@_gpu_option
@calibration_option
@json_option
def show(gpu: list[str], calibration_dir: Path | None, as_json: bool) -> None:
    """What is known about a device, how well, and from whom.

    \b
    Example:
      whichlora calibrate show --gpu a100-sxm-80gb
    """
    from whichlora import terminal
    from whichlora.calibration import database

    reports = database.calibration_reports(gpu, calibration_dir)
    if as_json:
        print_json({"calibrations": [device_report.to_dict() for device_report in reports]})
        return
    for device_report in reports:
        terminal.print_calibration(device_report)


@calibrate.command()
@_gpu_option
@calibration_option
@json_option
def report(gpu: list[str], calibration_dir: Path | None, as_json: bool) -> None:
    """Print the accuracy page of a database, in Markdown.

    Each record beside a prediction by a fit that did not see it: errors by accelerator and
    software, how many values the intervals hold, and the worst rows by name.

    \b
    Example:
      whichlora calibrate report --gpu a100-sxm-80gb > accuracy.md
    """
    from whichlora import terminal
    from whichlora.workflow.accuracy import accuracies

    of_gpus = accuracies(gpu, calibration_dir)
    if as_json:
        print_json({"accuracies": [each.to_dict() for each in of_gpus]})
        return
    click.echo(terminal.as_markdown(terminal.accuracy_document(of_gpus)), nl=False)


@calibrate.command("import")
@click.argument("table", metavar="FILE.csv", type=click.Path(path_type=Path))
@click.option("--skip-bad", is_flag=True, help="Leave out rows that can't be true.")
@calibration_option
def import_(table: Path, skip_bad: bool, calibration_dir: Path | None) -> None:
    """Add the runs of anybody's table.

    docs/calibration.md has the columns.

    \b
    Example:
      whichlora calibrate import runs.csv --skip-bad
    """
    from whichlora import terminal
    from whichlora.calibration import database

    merged, refused = database.import_table(
        table, skip_bad=skip_bad, calibration_dir=calibration_dir
    )
    terminal.print_merged(merged, refused)


@calibrate.command()
@click.argument("path", metavar="FILE.csv|FILE.jsonl", type=click.Path(path_type=Path))
@_gpu_option
@calibration_option
def export(path: Path, gpu: list[str], calibration_dir: Path | None) -> None:
    """Write records to a table or to JSON lines.

    \b
    Example:
      whichlora calibrate export records.csv --gpu a100-sxm-80gb
    """
    from whichlora.calibration import database

    count = database.export_records(path, gpu, calibration_dir=calibration_dir)
    click.echo(visible(f"{path}: {count} records"))


@calibrate.command()
@click.argument("place", metavar="FOLDER|FILE", type=click.Path(path_type=Path))
@calibration_option
def merge(place: Path, calibration_dir: Path | None) -> None:
    """Add another database, or one .jsonl file: all or nothing.

    \b
    Example:
      whichlora calibrate merge ../colleague/calibration
    """
    from whichlora import terminal
    from whichlora.calibration import database

    terminal.print_merged(database.merge_records(place, calibration_dir=calibration_dir))


@calibrate.command()
@click.argument("url")
@calibration_option
def pull(url: str, calibration_dir: Path | None) -> None:
    """Add the records of a directory, s3:// or hf://datasets/….

    \b
    Example:
      whichlora calibrate pull hf://datasets/org/calibration
    """
    from whichlora import terminal
    from whichlora.calibration import database

    terminal.print_merged(database.pull_records(url, calibration_dir=calibration_dir))


@calibrate.command()
@click.argument("url")
@calibration_option
def push(url: str, calibration_dir: Path | None) -> None:
    """Add your records to a database elsewhere. Nothing there is changed.

    \b
    Example:
      whichlora calibrate push s3://bucket/calibration
    """
    from whichlora.calibration import database

    count = database.push_records(url, calibration_dir=calibration_dir)
    click.echo(visible(f"{url}: {count} new records"))


@calibrate.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@_gpu_option
@calibration_option
def contribute(folder: Path, gpu: list[str], calibration_dir: Path | None) -> None:
    """Write your records to FOLDER without what tells of you, with a report for reviewers.

    Nothing is sent. Commands, paths, hosts and names of your own are left out;
    docs/calibration.md lists what stays.

    \b
    Example:
      whichlora calibrate contribute shared --gpu rtx-4090-24gb
    """
    from whichlora import terminal
    from whichlora.workflow.contribute import contribute as written

    terminal.print_contribution(written(folder, gpu, calibration_dir))
