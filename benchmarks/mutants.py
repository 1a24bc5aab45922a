"""Do the tests notice a wrong formula? `mutants.py [--sample 300] [--only TEXT] [--write]`.

Draws small changes of the modules in `mutation_targets.toml` (an operator, a comparison, a
constant, a condition, a dropped call), runs the tests that are named there for each, and counts how
many fail. Prints the survivors; `--write` makes `docs/mutants.md`. Every mutant is a fork of one
process that has the libraries imported, and is loaded by an import hook: no file changes.

mutmut 3, judged by its documentation and not run: it needs the whole suite once for its statistics,
about 20 minutes of processor time here, and names no tests per module.
"""

from __future__ import annotations

import argparse
import ast
import copy
import datetime
import importlib.abc
import importlib.util
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np  # noqa: F401  imported before the forks
import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[1]
TARGETS = Path(__file__).with_name("mutation_targets.toml")
PAGE = ROOT / "docs" / "mutants.md"
GOAL = 0.9  # share of the mutants that should be killed
MOST_S = 20.0  # of tests that each mutant is given, by their usual time, the fastest first
HANGS = 10.0  # times that, after which a mutant counts as killed

_SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


_Path = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A module and the tests that should notice when it is wrong.

    Args:
        functions: the only ones to change; empty for all.
    """

    module: str
    tests: tuple[str, ...]
    functions: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return ROOT / (self.module.replace(".", "/") + ".py")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one module.

    Args:
        function: that it is in, with its class; "" at the top of the module.
        first_line: where that function starts, which is how a run of it is recognised.
    """

    module: str
    function: str
    first_line: int
    line: int
    before: str
    after: str
    path: _Path = field(repr=False)
    new: ast.AST = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.module}:{self.function}: {self.before} -> {self.after}"

    def changed(self, source: str) -> ast.Module:
        """The whole module with the change in it."""
        tree = ast.parse(source)
        parent, (name, index) = _at(tree, self.path[:-1]), self.path[-1]
        if index is None:
            setattr(parent, name, self.new)
        else:
            getattr(parent, name)[index] = self.new
        return ast.fix_missing_locations(tree)


def read_targets(path: Path = TARGETS) -> tuple[list[Target], dict[str, str]]:
    """The targets, and the mutants that change nothing, each with the reason."""
    content = tomllib.loads(path.read_text())
    targets = [
        Target(
            module=entry["module"],
            tests=tuple(entry["tests"]),
            functions=tuple(entry.get("functions", ())),
        )
        for entry in content["target"]
    ]
    return targets, {entry["mutant"]: entry["why"] for entry in content.get("equivalent", [])}


# --- changes


def mutants_of(target: Target, source: str) -> Iterator[Mutant]:
    """Every change of the module that the operators know, in the order of its lines."""
    tree = ast.parse(source)
    for path, function, first_line in _places(tree):
        if target.functions and function.split(".")[-1] not in target.functions:
            continue
        old = _at(tree, path)
        for new in _changes(old):
            yield Mutant(
                module=target.module,
                function=function,
                first_line=first_line,
                line=getattr(old, "lineno", 0),
                before=ast.unparse(old),
                after=ast.unparse(new),
                path=path,
                new=new,
            )


_UNTOUCHED = {"annotation", "returns", "decorator_list", "type_params"}


def _places(tree: ast.Module) -> Iterator[tuple[_Path, str, int]]:
    """Paths of every node that runs, with the function it is in."""

    def walk(node: ast.AST, path: _Path, function: str, line: int) -> Iterator[Any]:
        for name, value in ast.iter_fields(node):
            if name in _UNTOUCHED:
                continue
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(child, ast.AST) or _is_for_readers(child):
                    continue
                inside, first = function, line
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    inside = f"{function}.{child.name}".lstrip(".")
                    if isinstance(child, ast.FunctionDef):
                        first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                step = (*path, (name, index))
                yield step, inside, first
                yield from walk(child, step, inside, first)

    yield from walk(tree, (), "", 0)


def _is_for_readers(node: ast.AST) -> bool:
    """Text, types, and refusals, whose wording is no behaviour that a formula has."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom)


def _at(tree: ast.AST, path: _Path) -> Any:
    node: Any = tree
    for name, index in path:
        node = getattr(node, name) if index is None else getattr(node, name)[index]
    return node


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPS:
        if isinstance(node, ast.BinOp) and any(map(_is_text, (node.left, node.right))):
            return
        changed = copy.deepcopy(node)
        changed.op = _SWAPS[type(node.op)]()
        yield changed
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        changed = copy.deepcopy(node)
        changed.ops[0] = _SWAPS[type(node.ops[0])]()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(
            node.value + 1 if isinstance(node.value, int) else 1.5 * node.value + 0.1
        )
    elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


# --- runs


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a changed tree."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.path = str(Target(module=mutant.module, tests=()).path)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: Any) -> None:
        tree = self.mutant.changed(Path(self.path).read_text())
        exec(compile(tree, self.path, "exec"), module.__dict__)


class _Plugin:
    """Finds failures without making them small; and notes who calls what, where asked."""

    def __init__(self, modules: dict[str, str] | None = None) -> None:
        self.modules = modules or {}
        self.calls: dict[str, set[str]] = {}
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        usual = settings.get_profile("untimed")
        settings.register_profile("mutants", usual, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        called: set[str] = set()
        seen: set[CodeType] = set()

        def note(frame: Any, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code not in seen:
                seen.add(code)
                module = self.modules.get(code.co_filename)
                if module is not None:
                    called.add(f"{module}:{code.co_firstlineno}")

        if self.modules:
            sys.setprofile(note)
        start = time.perf_counter()
        yield
        sys.setprofile(None)
        self.seconds[item.nodeid] = time.perf_counter() - start
        self.calls[item.nodeid] = called


def _in_child(work: Any, limit_s: float) -> int | None:
    """Exit status of `work` in a fork; None where it ran out of time."""
    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        status = 70
        try:
            status = int(work())
        finally:
            os._exit(status)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _pytest(tests: Sequence[str], plugin: _Plugin, folder: str) -> int:
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
    os.environ["XDG_CACHE_HOME"] = folder
    os.chdir(ROOT)
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests]
    return int(pytest.main(arguments, plugins=[plugin]))


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What the tests do when nothing is wrong: their time, and the functions they call."""

    seconds: dict[str, float]
    calls: dict[str, list[str]]

    def tests_of(self, mutant: Mutant, files: Sequence[str]) -> list[str]:
        """Tests of `files`, those that call the function first, and the faster ones before."""
        place = f"{mutant.module}:{mutant.first_line}"
        inside = [test for test in self.seconds if test.split("::")[0] in files]
        inside.sort(key=lambda test: (place not in self.calls[test], self.seconds[test]))
        spent = itertools.accumulate(self.seconds[test] for test in inside)
        return [test for test, seconds in zip(inside, spent, strict=True) if seconds < MOST_S]


def usual(targets: Sequence[Target]) -> Usual:
    """Run every named test once.

    Raises:
        SystemExit: one fails without any change.
    """
    files = sorted({test for target in targets for test in target.tests})
    plugin = _Plugin({str(target.path): target.module for target in targets})
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "usual.json"

        def work() -> int:
            status = _pytest(files, plugin, folder)
            calls = {test: sorted(called) for test, called in plugin.calls.items()}
            found = {"seconds": plugin.seconds, "calls": calls, "failed": plugin.failed}
            note.write_text(json.dumps(found))
            return status

        status = _in_child(work, 3600)
        found = json.loads(note.read_text()) if note.exists() else {"failed": []}
        if status != 0:
            what = ", ".join(found["failed"]) or f"pytest ended with {status}"
            raise SystemExit(f"mutants.py: the tests fail as they are: {what}")
        return Usual(seconds=found["seconds"], calls=found["calls"])


def is_killed(mutant: Mutant, tests: Sequence[str], limit_s: float) -> bool:
    with tempfile.TemporaryDirectory() as folder:

        def work() -> int:
            sys.meta_path.insert(0, _Loader(mutant))
            return _pytest(tests, _Plugin(), folder)

        return _in_child(work, limit_s) != 0


def drawn(targets: Sequence[Target], number: int, seed: int) -> list[tuple[Target, Mutant]]:
    """A sample that takes from every target in turn, so that no large module has it all."""
    generator = random.Random(seed)
    queues = []
    for target in targets:
        queue = list(mutants_of(target, target.path.read_text()))
        generator.shuffle(queue)
        queues.append((target, queue))
    found: list[tuple[Target, Mutant]] = []
    while len(found) < number and any(queue for _, queue in queues):
        found += [(target, queue.pop()) for target, queue in queues if queue]
    return found[:number]


# --- the page


def page(results: Sequence[tuple[Target, Mutant, bool]], reasons: dict[str, str]) -> str:
    counted = [one for one in results if one[1].name not in reasons]
    killed = sum(one[2] for one in counted)
    lines = [
        "# Mutants",
        "",
        f"Made by `benchmarks/mutants.py --write` on {datetime.date.today()}: {len(results)} small "
        f"changes of the formulas, the time model, the search and the store, drawn with a seed. "
        f"{len(results) - len(counted)} change nothing. The tests of "
        f"`benchmarks/mutation_targets.toml` kill {killed} of {len(counted)}, "
        f"{killed / max(1, len(counted)):.0%}.",
        "",
        "| module | mutants | killed |",
        "| --- | ---: | ---: |",
    ]
    for target in dict.fromkeys(target for target, _, _ in counted):
        ended = [is_dead for of, _, is_dead in counted if of == target]
        lines.append(f"| `{target.module}` | {len(ended)} | {sum(ended)} |")
    lines += ["", "## Survivors", ""]
    lines += [f"- `{mutant.name}` (line {mutant.line})" for _, mutant, dead in counted if not dead]
    lines += ["", "## Changes of nothing", ""]
    lines += [
        f"- `{mutant.name}`: {reasons[mutant.name]}"
        for _, mutant, _ in results
        if mutant.name in reasons
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="targets whose module contains one of these, with commas"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="stop drawing after these")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    every, reasons = read_targets()
    targets = [one for one in every if any(part in one.module for part in options.only.split(","))]
    as_is = usual(targets)
    print(
        f"{len(as_is.seconds)} tests take {sum(as_is.seconds.values()):.0f} s as they are",
        flush=True,
    )
    end = time.monotonic() + 60 * options.minutes
    results: list[tuple[Target, Mutant, bool]] = []
    for target, mutant in drawn(targets, options.sample, options.seed):
        if time.monotonic() > end:
            break
        tests = as_is.tests_of(mutant, target.tests)
        dead = is_killed(mutant, tests, HANGS * MOST_S)
        results.append((target, mutant, dead))
        if not dead:
            print(f"survived: {mutant.name} (line {mutant.line})", flush=True)
    counted = [dead for _, mutant, dead in results if mutant.name not in reasons]
    share = sum(counted) / max(1, len(counted))
    print(f"{sum(counted)} of {len(counted)} killed, {share:.1%}")
    if options.write:
        PAGE.write_text(page(results, reasons))
    if share < GOAL:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
