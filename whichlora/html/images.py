"""Each figure of the report as an image file, for papers and slides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError, DataFileError
from whichlora.extras import require
from whichlora.html.figures import build_figures
from whichlora.html.source import read_source

WIDTH, HEIGHT = 960, 600  # CSS pixels
SCALE = 2  # of PNG: sharp in print


def require_images() -> None:
    """Refuse pictures where a library that draws them is not installed.

    Raises:
        ConfigError: kaleido or plotly is missing.
    """
    require("--static", "kaleido", "plotly", extra="images")


def write_images(place: Path, image_format: str) -> list[Path]:
    """Every figure of the run in `place` as one file, in its `figures` folder.

    Raises:
        ConfigError: kaleido or a Chromium for it is not installed.
        DataFileError: no readable answer there, or the folder can't be written.
    """
    require_images()
    from plotly import io
    from plotly.graph_objects import Figure

    source = read_source(place)
    folder = (place if place.is_dir() else place.parent) / "figures"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataFileError(f"{folder}: can't be made ({error.strerror}); check the path") from None
    figures = build_figures(source)
    paths = [folder / f"{figure['id']}.{image_format}" for figure in figures]
    drawn = [Figure({"data": figure["data"], "layout": _still(figure)}) for figure in figures]
    try:
        io.write_images(drawn, paths, format=image_format, width=WIDTH, height=HEIGHT, scale=SCALE)
    except RuntimeError as error:
        fault = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--static: kaleido could not draw ({fault}); it needs a Chrome or Chromium, which "
            "plotly_get_chrome installs"
        ) from None
    return paths


def _still(figure: dict[str, Any]) -> dict[str, Any]:
    """The layout with its title, since an image has no page around it."""
    layout = dict(figure["layout"])
    return layout | {
        "title": {"text": figure["title"], "x": 0.02, "xanchor": "left"},
        "template": "plotly_white",
        "margin": layout["margin"] | {"t": 56},
    }
