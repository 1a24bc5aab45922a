"""`whichlora gpus` and `whichlora models`: what is known."""

from __future__ import annotations

from pathlib import Path

import click

from whichlora.cli.options import print_json
from whichlora.errors import WhichLoraError
from whichlora.spec.gpu import GpuSpec
from whichlora.text import visible


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print every field.")
def gpus(as_json: bool) -> None:
    """List the accelerators of the catalog, and what is here.

    \b
    Example:
      whichlora gpus
    """
    from whichlora import terminal
    from whichlora.store.gpus import find_gpu, list_gpus

    catalog = list_gpus()
    if as_json:
        import dataclasses

        print_json({"gpus": [dataclasses.asdict(gpu) for gpu in catalog]})
        return
    try:
        here: GpuSpec | str = find_gpu("auto")
    except WhichLoraError as error:  # one that no file describes: the list is what helps
        here = str(error)
    terminal.print_gpus(catalog, here=here)


class _ListsByDefault(click.Group):
    """A group whose first argument is a pattern where it is no command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ListsByDefault)
def models() -> None:
    """List the models whose name or alias contains PATTERN; add one.

    \b
    Examples:
      whichlora models qwen
      whichlora models add Qwen/Qwen3-8B-Instruct
    """


@models.command()
@click.argument("name", metavar="ORGANISATION/NAME")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, exists=True),
    help="Its config.json, or the folder with it; default: the hub's.",
)
def add(name: str, config_path: Path | None) -> None:
    """Add a model to your database: its config alone, no weights.

    The parameters that the formulas count are compared with those of the real module, where
    torch and transformers are installed. Your database is $WHICHLORA_MODELS, or
    ~/.local/share/whichlora/models_db.

    \b
    Example:
      whichlora models add my-org/my-model --config ./my-model
    """
    from whichlora.units import format_count
    from whichlora.workflow.add_model import add as add_model

    added = add_model(name, config_path)
    checked = (
        "as the module of transformers has"
        if added.is_checked
        else "not compared with the module: pip install 'whichlora[profile]' does that"
    )
    click.echo(
        visible(
            f"{added.name}: {added.model_type}, {format_count(added.num_params)} parameters, "
            f"{checked}; kept in {added.path}"
        )
    )


@models.command("list")
@click.argument("pattern", default="")
@click.option("--json", "as_json", is_flag=True, help="Print every field.")
def list_(pattern: str, as_json: bool) -> None:
    """List the models whose name or alias contains PATTERN, blanks and dashes aside.

    \b
    Example:
      whichlora models list qwen
    """
    from whichlora import terminal
    from whichlora.store.models import list_models

    wanted = _letters(pattern)
    matching = [
        model
        for model in list_models()
        if any(wanted in _letters(name) for name in (model.hub_id, *model.aliases))
    ]
    if as_json:
        import dataclasses

        print_json({"models": [dataclasses.asdict(model) for model in matching]})
        return
    if matching:
        terminal.print_models(matching)
    else:
        click.echo(f"no model has {pattern!r} in its name; 'whichlora models' lists all")


@click.command()
@click.argument("model", default="")
@click.option("--gpu", default="", help="Accelerator of the times; default: an A100 with 80 GB.")
@click.option("--json", "as_json", is_flag=True, help="Print every field.")
def methods(model: str, gpu: str, as_json: bool) -> None:
    """List the fine-tuning methods, and what each takes of MODEL against LoRA.

    The default is Llama 3.1 8B. Settings are those of `whichlora estimate`.

    \b
    Example:
      whichlora methods Qwen/Qwen3-8B --gpu 4090
    """
    from whichlora import api, terminal

    asked = {name: value for name, value in (("model", model), ("gpu", gpu)) if value}
    rows = api.compare_methods(**asked)
    if as_json:
        import dataclasses

        print_json({"methods": [dataclasses.asdict(row) for row in rows]})
        return
    terminal.print_methods(rows)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter in "./")
