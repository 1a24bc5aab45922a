"""The size and the shape of the code: modules, functions, names and words of documentation.

    python benchmarks/house.py            # this checkout
    python benchmarks/house.py PATH ...   # other checkouts, beside each other

Vague names are local names that say nothing of what they hold. Complexity is McCabe's, as ruff's
C901 counts it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

VAGUE = {"one", "found", "known", "own", "what", "given", "other", "left", "kept", "rest"} | {
    "such",
    "thing",
    "said",
    "asked",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((root / "whichlora").rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def num_lines(function: Function) -> int:
    """Lines of a function without its docstring and its decorators."""
    assert function.end_lineno is not None
    total = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        total -= first.end_lineno - first.lineno + 1
    return total


def local_names(tree: ast.AST) -> list[str]:
    """Names that functions assign: variables, loop and comprehension targets."""
    inner = {
        node
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return [node.id for node in inner]


def highest_complexity(root: Path) -> int:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901"]
    command += ["--config", "lint.mccabe.max-complexity=1", "--output-format", "concise"]
    output = subprocess.run([*command, str(root / "whichlora")], capture_output=True, text=True)
    return max(int(number) for number in re.findall(r"\((\d+) > 1\)", output.stdout))


def num_words(root: Path) -> int:
    """Words of prose: documentation without generated pages, tables and blocks of code."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    text = "\n".join(
        page.read_text(encoding="utf-8")
        for page in pages
        if page.name != "cli.md"  # the help of every command, generated
    )
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE).split())


def figures(root: Path) -> dict[str, str]:
    """Each figure of the checkout at `root`, by its name."""
    package = root / "whichlora"
    parsed = list(trees(root))
    longest = max(
        (
            (num_lines(function), path, function.name)
            for path, tree in parsed
            for function in functions(tree)
        ),
        key=lambda item: item[0],
    )
    names = [name for _, tree in parsed for name in local_names(tree)]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path, _ in parsed)
    return {
        "modules at the top": str(
            len([p for p in package.glob("*.py") if not p.stem.startswith("__")])
        ),
        "packages at the top": str(len(list(package.glob("*/__init__.py")))),
        "rows of the import contract": str(len(rows)),
        "longest function, lines": f"{longest[0]} ({longest[1].stem}.{longest[2]})",
        "highest complexity": str(highest_complexity(root)),
        "lines of the package": f"{lines:,}",
        "words of documentation": f"{num_words(root):,}",
        "words of the changelog": f"{len((root / 'CHANGELOG.md').read_text().split()):,}",
        "vague local names": f"{sum(name in VAGUE for name in names) / len(names):.1%}",
    }


def main() -> None:
    roots = [Path(argument) for argument in sys.argv[1:]] or [Path(__file__).parents[1]]
    columns = [figures(root) for root in roots]
    for name in columns[0]:
        print("| " + " | ".join([name, *(column[name] for column in columns)]) + " |")


if __name__ == "__main__":
    main()
