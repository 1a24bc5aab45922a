"""Every public formula says how far it can be trusted and where it comes from, and has a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import whichlora

PACKAGE = Path(whichlora.__file__).parent
TESTS = Path(__file__).parent
MEMORY = sorted((PACKAGE / "memory").glob("*.py"))
TIMING = [PACKAGE / "timing" / "model.py", *sorted((PACKAGE / "timing").glob("*work.py"))]
PARALLEL = sorted((PACKAGE / "parallel").glob("*.py"))
NUMBERS = re.compile(
    r"(Count|int|float|Real|Work|Conversion|TimeModel|LayerBytes|LayerPasses)"
    r"|dict\[str, (int|float|Count|Real)\]"
    r"|tuple\[((int|float|Real|dict\[str, (Real|float)\])(, )?)+\]"
)


def formulas(path: Path) -> Iterator[ast.FunctionDef]:
    """Public functions of a module that return numbers."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        if node.returns and NUMBERS.fullmatch(ast.unparse(node.returns)):
            yield node


@pytest.mark.parametrize(
    "path",
    [*MEMORY, *PARALLEL, *TIMING],
    ids=lambda path: path.name,
)
def test_every_formula_states_its_kind_and_its_source(path: Path) -> None:
    texts = {formula.name: ast.get_docstring(formula) or "" for formula in formulas(path)}
    kind = re.compile(r"Kind:\s+(exact|lower bound|upper bound|estimate|fitted)")
    assert [name for name, text in texts.items() if not kind.search(text)] == []
    assert [name for name, text in texts.items() if "Source:" not in text] == []


def test_every_formula_of_the_ledger_is_named_in_a_test() -> None:
    names = {formula.name for path in MEMORY + PARALLEL for formula in formulas(path)}
    assert len(names) > 40
    sources = (path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    words = {word for text in sources for word in re.findall(r"\w+", text)}
    assert names - words == set()
