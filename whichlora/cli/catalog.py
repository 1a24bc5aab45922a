"""`whichlora gpus` and `whichlora models`: what is known."""

from __future__ import annotations

import click

from whichlora.cli.options import print_json
from whichlora.errors import WhichLoraError
from whichlora.spec.gpu import GpuSpec


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


@click.command()
@click.argument("pattern", default="")
@click.option("--json", "as_json", is_flag=True, help="Print every field.")
def models(pattern: str, as_json: bool) -> None:
    """List the models whose name or alias contains PATTERN, blanks and dashes aside.

    \b
    Example:
      whichlora models qwen
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


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter in "./")
