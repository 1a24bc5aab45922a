"""`whichlora page`: a site that answers in the browser."""

from __future__ import annotations

from pathlib import Path

import click

from whichlora.text import visible
from whichlora.units import format_bytes


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--pyodide",
    type=click.Path(path_type=Path, exists=True),
    help="The npm package pyodide, packed or as a folder; default: downloaded once and kept.",
)
def page(folder: Path, pyodide: Path | None) -> None:
    """Write a web page that predicts in the browser, to FOLDER.

    The formulas run there as they do here, in Python. Any host of plain files serves the folder;
    no server computes, and what a reader types stays in the browser.

    \b
    Example:
      whichlora page site && python -m http.server --directory site
    """
    from whichlora.page.build import build

    site = build(folder, pyodide)
    click.echo(visible(f"page: {site.folder / 'index.html'} ({format_bytes(site.num_bytes)})"))
    if not site.has_snapshot:
        click.echo("it starts in half the time if Node.js is on the path when it is written")
    click.echo(visible(f"look at it with: python -m http.server --directory {site.folder}"))
