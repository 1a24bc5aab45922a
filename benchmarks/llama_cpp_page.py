"""The command line of the scripts that measure llama.cpp and write a page of what they found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markdown_tables import write_page


def run(
    description: str | None,
    *,
    page: str,
    title: str,
    measure: Callable[[Path], None],
    probe: Callable[[dict[str, Any]], None],
    text: Callable[[], str],
) -> None:
    """Print `text`, after a new measurement where one is asked for; `--write` writes its page.

    Args:
        measure: with a build of llama.cpp.
        probe: one measurement, in a process of its own.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measure", type=Path, metavar="BUILD")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.probe:
        probe(json.loads(asked.probe))
    if asked.measure:
        measure(asked.measure)
    found = text()
    print(found)
    if asked.write:
        write_page(page, title, found)
