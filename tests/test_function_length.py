"""No function is longer than a page; ruff's C901 holds them to as few branches."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import whichlora

PACKAGE = Path(whichlora.__file__).parent
MOST_LINES, MOST_LINES_OF_A_FORMULA = 80, 60


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def too_long(folder: Path, most: int) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}: {name} has {lines} lines"
        for path in sorted(folder.rglob("*.py"))
        for name, lines in functions(path)
        if lines > most
    ]


def test_no_function_has_more_than_80_lines() -> None:
    assert too_long(PACKAGE, MOST_LINES) == []


def test_no_function_of_the_ledger_has_more_than_60_lines() -> None:
    assert too_long(PACKAGE / "memory", MOST_LINES_OF_A_FORMULA) == []
