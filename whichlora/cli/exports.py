"""`whichlora export`: the winning fine-tuning in another tool's format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from whichlora.cli.options import Positive, calibration_option, gpu_option, json_option, print_json
from whichlora.cli.settings import plain_settings, run_options
from whichlora.cli.several_gpus import SpreadCommand
from whichlora.errors import ConfigError

_TOOLS = ("transformers", "trl", "axolotl", "llamafactory", "unsloth", "skypilot", "slurm")


@click.command(cls=SpreadCommand)
@click.argument("source", metavar="RUN_DIR|MODEL")
@click.option("--to", type=click.Choice(_TOOLS), required=True, help="The tool.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the files; default: RUN_DIR, or this one.",
)
@gpu_option("auto", "Accelerator of a MODEL.", single=True, counted=True)
@click.option(
    "--epochs",
    type=Positive(1000),
    default=1.0,
    show_default=True,
    help="Passes over the data of a MODEL.",
)
@click.option(
    "--learning-rate",
    type=Positive(1),
    help="Of a MODEL. Default: the usual one of its method and trainer, which the answer names.",
)
@run_options
@calibration_option
@json_option
@click.pass_context
def export(
    ctx: click.Context,
    /,
    source: str,
    to: str,
    output: Path | None,
    gpu: str,
    epochs: float,
    learning_rate: float | None,
    calibration_dir: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write the winner of a run, or a MODEL, for another trainer.

    RUN_DIR is the output folder of `whichlora run`. What changes under the tool (loss head,
    precision, preparation of a 4-bit base) is predicted again and printed.

    \b
    Example:
      whichlora export Qwen/Qwen2.5-7B --to trl --gpu rtx-4090-24gb --method qlora --output job
    """
    from whichlora import terminal
    from whichlora.workflow import combinations, export

    folder, data = Path(source), None
    notes: tuple[str, ...] = ()
    if source.startswith((".", "/", "~")) and not os.path.exists(folder):
        raise ConfigError(f"{source}: no such folder; give that of a whichlora run, or of a model")
    if os.path.isdir(folder) and not (folder / "config.json").is_file():
        _refuse_settings(ctx)
        folder = export.folder_of_winner(folder)
        recipe, data = export.read_recipe(folder), folder
    else:
        settings = plain_settings([source], options, command="export")
        settings, gpu = combinations.of_one_target(settings, gpu)
        runs = list(combinations.grid(settings))
        if len(runs) != 1:
            raise ConfigError(f"export writes one fine-tuning, these settings make {len(runs)}")
        if runs[0].phase != "finetune":
            raise ConfigError("--phase: export writes a fine-tuning, got inference; leave it out")
        try:
            recipe, notes = export.recipe_for(
                to,
                runs[0],
                gpu,
                calibration_dir=calibration_dir,
                epochs=epochs,
                learning_rate=learning_rate,
            )
        except ConfigError as error:
            is_unknown = str(error).startswith("model: ") and not os.path.exists(folder)
            also = f"; there is no folder {source} of a whichlora run, either"
            raise ConfigError(f"{error}{also if is_unknown else ''}") from None
        folder = Path()
    done = export.write_export(
        recipe, to, output or folder, data=data, calibration_dir=calibration_dir, notes=notes
    )
    if as_json:
        print_json(done.to_dict())
        return
    terminal.print_export(done)


def _refuse_settings(ctx: click.Context) -> None:
    """The settings of a run are those of its winner; a setting beside it would be ignored."""
    accepted = {"source", "to", "output", "calibration_dir", "as_json"}
    for name in ctx.params:
        on_command_line = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if on_command_line and name not in accepted:
            raise ConfigError(
                f"--{name.replace('_', '-')}: is for a MODEL; the winner of a run has its own"
            )
