"""Do the tests notice a wrong formula? `mutants.py [--sample 300] [--only TEXT] [--write]`.

Draws small changes of the modules in `mutation_targets.toml` (an operator, a comparison, a
constant, a condition, a dropped call), runs the tests of the files named there that call the
changed function, in the order of the files and the fastest of a file first, and counts how many
changes make one fail. Prints the survivors; `--write` makes `docs/accuracy/mutants.md`. No file
changes: one process collects the tests, and each mutant is a fork of it in which the function has
the changed code. A change of what runs at import is loaded by an import hook in a process of its
own.

A script of our own rather than mutmut: each target names its tests, none of which needs torch, and
each mutant is given a bounded time, so that a sample ends in minutes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import datetime
import functools
import gc
import importlib
import importlib.abc
import importlib.util
import itertools
import json
import math
import os
import random
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np  # noqa: F401  imported before the forks
import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).parents[1]
TARGETS = Path(__file__).with_name("mutation_targets.toml")
PAGE = ROOT / "docs" / "accuracy" / "mutants.md"
GOAL = 0.9  # share of the mutants that should be killed
MOST_S = 40.0  # processor seconds of tests that each mutant is given, by their usual time
HANGS = 4.0  # times the usual time of its tests, after which a mutant counts as killed
START_S = 30.0  # that a process may need before its first test
WAITS = 20.0  # seconds by the clock, of one of a processor, after which it is taken to wait forever

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
        is_at_import: whether it changes what runs when the module is imported.
        text: source of the line it is in.
    """

    module: str
    function: str
    first_line: int
    is_at_import: bool
    line: int
    text: str
    before: str
    after: str
    path: _Path = field(repr=False)
    new: ast.AST = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return f"{self.module}:{self.function}: {self.before} -> {self.after} in: {self.text}"

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
    tree, lines = ast.parse(source), source.splitlines()
    for path, function, first_line in _places(tree):
        if target.functions and function.split(".")[-1] not in target.functions:
            continue
        old = _at(tree, path)
        for new in _changes(old):
            yield Mutant(
                module=target.module,
                function=function,
                first_line=first_line,
                is_at_import=_is_at_import(tree, path),
                line=old.lineno,
                text=lines[old.lineno - 1].strip(),
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
                        first = _first_line(child)
                step = (*path, (name, index))
                yield step, inside, first
                yield from walk(child, step, inside, first)

    yield from walk(tree, (), "", 0)


def _is_for_readers(node: ast.AST) -> bool:
    """Text, types, checks and refusals, whose wording is no behaviour that a formula has."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip, a check as assert is
        return True
    return isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom)


def _is_at_import(tree: ast.Module, path: _Path) -> bool:
    """Whether no function's body holds the place: the module, a class, or a default."""
    node: Any = tree
    for name, index in path:
        if isinstance(node, ast.Lambda) or (isinstance(node, ast.FunctionDef) and name == "body"):
            return isinstance(node, ast.Lambda)
        node = getattr(node, name) if index is None else getattr(node, name)[index]
    return True


def _at(tree: ast.AST, path: _Path) -> Any:
    node: Any = tree
    for name, index in path:
        node = getattr(node, name) if index is None else getattr(node, name)[index]
    return node


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPS:
        if isinstance(node, ast.BinOp) and any(map(_is_text, (node.left, node.right))):
            return
        if isinstance(node.op, ast.Mult) and ast.unparse(node.left) in ("0", "0.0"):
            return  # broadcasts, and zero divided is the same
        if isinstance(node.op, ast.Add) and ast.unparse(node.right).startswith(("0 * ", "0.0 * ")):
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


# --- processes


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


def _put(path: Path, tree: ast.Module) -> None:
    """Give the functions of `path` that are loaded the code of `tree`, whoever refers to them."""
    codes = dict(_codes(compile(tree, str(path), "exec")))
    for thing in gc.get_objects():
        if isinstance(thing, FunctionType) and thing.__code__.co_filename == str(path):
            changed = codes.get(_key(thing.__code__))
            if changed is not None and changed != thing.__code__:
                thing.__code__ = changed


def _note_calls(target: Target, called: set[str]) -> None:
    """Let every function of a module put its name into `called`."""
    tree = ast.parse(target.path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            place = f"{target.module}:{_first_line(node)}"
            node.body[:0] = ast.parse(f"_called.add({place!r})").body
    vars(sys.modules[target.module])["_called"] = called
    _put(target.path, ast.fix_missing_locations(tree))


def _first_line(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(item.lineno for item in function.decorator_list)])


def _codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            if not part.co_name.startswith("<"):  # a lambda is not alone in its line
                yield _key(part), part
            yield from _codes(part)


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _forget() -> None:
    """Empty every cache of ours, which another test may have filled."""
    for thing in gc.get_objects():
        if not isinstance(thing, functools._lru_cache_wrapper):
            continue
        if str(getattr(thing, "__module__", "")).startswith("whichlora"):
            thing.cache_clear()


def _in_child(work: Callable[[], int], limit_s: float, *, is_quiet: bool = True) -> int | None:
    """Exit status of `work` in a fork; negative or None where it ran out of time.

    Args:
        limit_s: of a processor, so that a busy machine makes no mutant look as if it hung.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s)))
        if is_quiet:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        status = 70
        try:
            status = int(work())
        finally:
            os._exit(status)
    end = time.monotonic() + WAITS * limit_s
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


# --- tests


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What the tests do when nothing is wrong: their time, and the functions they call."""

    seconds: dict[str, float]
    calls: dict[str, list[str]]

    def tests_of(self, mutant: Mutant, files: Sequence[str]) -> list[str]:
        """Tests of `files` that call the function, or all where none does, up to `MOST_S`.

        In the order of `files`, which names the sharpest first; the fastest of a file before.
        """
        place = f"{mutant.module}:{mutant.first_line}"
        rank = {file: number for number, file in enumerate(files)}
        inside = [test for test in self.seconds if test.split("::")[0] in rank]
        calling = [test for test in inside if place in self.calls[test]]
        ordered = sorted(
            calling or inside, key=lambda test: (rank[test.split("::")[0]], self.seconds[test])
        )
        spent = itertools.accumulate(self.seconds[test] for test in ordered)
        return [test for test, seconds in zip(ordered, spent, strict=True) if seconds < MOST_S]

    def limit_s(self, tests: Sequence[str]) -> float:
        return START_S + HANGS * sum(self.seconds[test] for test in tests)


class _Plugin:
    """Runs the collected tests by `work` in place of pytest's own loop, and collects failures."""

    def __init__(self, work: Callable[[_Plugin, pytest.Session], None] | None = None) -> None:
        self.work = work
        self.failed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        common = settings.get_profile("untimed")
        phases = (Phase.explicit, Phase.generate)  # failures need not be made small
        settings.register_profile("mutants", common, phases=phases, database=None)
        settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if self.work is None or session.testsfailed:
            return None
        self.work(self, session)
        return True

    def first_failure(self, session: pytest.Session, tests: Sequence[str]) -> bool:
        """Run these tests until one fails."""
        by_name = {item.nodeid: item for item in session.items}
        for test, following in itertools.pairwise([*tests, None]):
            after = None if following is None else by_name[following]
            session.config.hook.pytest_runtest_protocol(item=by_name[test], nextitem=after)
            if self.failed:
                return True
        return False


def _pytest(tests: Sequence[str], plugin: _Plugin) -> int:
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        os.environ["XDG_CACHE_HOME"] = folder
        arguments = [
            "-n0",
            "-x",
            "-q",
            "-s",
            "-p",
            "no:cacheprovider",
            f"--basetemp={folder}/tests",
        ]
        return int(pytest.main([*arguments, "--hypothesis-seed=0", *tests], plugins=[plugin]))


def _usual(
    plugin: _Plugin, items: Sequence[pytest.Item], targets: Sequence[Target]
) -> dict[str, Any]:
    """Run every test once and note the functions that it calls, its fixtures included."""
    called: set[str] = set()
    for target in targets:
        _note_calls(target, called)
    seconds, calls = {}, {}
    for item, following in itertools.pairwise([*items, None]):
        assert item is not None
        _forget()
        called.clear()
        start = time.process_time()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        seconds[item.nodeid] = time.process_time() - start
        calls[item.nodeid] = sorted(called)
    return {"seconds": seconds, "calls": calls, "failed": plugin.failed}


# --- runs


@dataclass(frozen=True, kw_only=True)
class Result:
    target: Target
    mutant: Mutant
    is_killed: bool


def run(
    targets: Sequence[Target],
    mutants: Sequence[tuple[Target, Mutant]],
    *,
    minutes: float,
    usual: Path | None = None,
) -> list[Result]:
    """The fate of each mutant, as far as the time goes.

    Args:
        usual: file of what the tests do when nothing is wrong; those it lacks are run and added.

    Raises:
        SystemExit: a test fails without any change.
    """
    files = sorted({test for target in targets for test in target.tests})
    end = time.monotonic() + 60 * minutes
    killed: dict[int, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        note, fates = usual or Path(folder) / "usual.json", Path(folder) / "fates.json"

        def as_they_are(plugin: _Plugin, session: pytest.Session) -> None:
            for target in targets:
                importlib.import_module(target.module)
            before = json.loads(note.read_text()) if note.exists() else {"seconds": {}, "calls": {}}
            unseen = [item for item in session.items if item.nodeid not in before["seconds"]]
            measured = _usual(plugin, unseen, targets)
            for name in ("seconds", "calls"):
                measured[name] = before[name] | measured[name]
            note.write_text(json.dumps(measured))

        def in_forks(plugin: _Plugin, session: pytest.Session) -> None:
            for target in targets:
                importlib.import_module(target.module)
            collected = {item.nodeid for item in session.items}
            for number, (target, mutant) in enumerate(mutants):
                if mutant.is_at_import or time.monotonic() > end:
                    continue
                tests = [test for test in as_is.tests_of(mutant, target.tests) if test in collected]

                def changed(
                    path: Path = target.path, mutant: Mutant = mutant, tests: Any = tests
                ) -> int:
                    _forget()
                    _put(path, mutant.changed(path.read_text()))
                    return int(plugin.first_failure(session, tests))

                status = _in_child(changed, as_is.limit_s(tests))
                killed[number] = _is_failure(status)
                if not killed[number]:
                    print(f"survived: {mutant.name} (line {mutant.line})", flush=True)
            fates.write_text(json.dumps(killed))

        _in_child(lambda: _pytest(files, _Plugin(as_they_are)), 3600)
        failed = json.loads(note.read_text())["failed"] if note.exists() else ["collection"]
        if failed:
            raise SystemExit(f"mutants.py: the tests fail as they are: {', '.join(failed)}")
        as_is = _read(note)
        seconds = sum(as_is.seconds.values())
        print(
            f"{len(as_is.seconds)} tests take {seconds:.0f} s of a processor as they are",
            flush=True,
        )
        # each of these needs a process of its own, so they come first and are never left out
        for number, (target, mutant) in enumerate(mutants):
            if mutant.is_at_import:
                killed[number] = _is_killed_at_import(mutant, as_is, target.tests)
                if not killed[number]:
                    print(f"survived: {mutant.name} (line {mutant.line})", flush=True)
        _in_child(lambda: _pytest(files, _Plugin(in_forks)), 24 * 3600, is_quiet=False)
        killed = {int(number): dead for number, dead in json.loads(fates.read_text()).items()}
    return [
        Result(target=target, mutant=mutant, is_killed=killed[number])
        for number, (target, mutant) in enumerate(mutants)
        if number in killed
    ]


def _is_failure(status: int | None) -> bool:
    """A test failed or could not be collected, ran too long, or brought its process down.

    4 is pytest's for a named test that is not there: its module can't be imported any more.
    """
    return status is None or status < 0 or status in (1, 2, 4)


def _read(note: Path) -> Usual:
    found = json.loads(note.read_text())
    return Usual(seconds=found["seconds"], calls=found["calls"])


def _is_killed_at_import(mutant: Mutant, as_is: Usual, files: Sequence[str]) -> bool:
    tests = as_is.tests_of(mutant, files)

    def work() -> int:
        sys.meta_path.insert(0, _Loader(mutant))
        return _pytest(tests, _Plugin())

    return _is_failure(_in_child(work, as_is.limit_s(tests)))


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


def page(
    results: Sequence[Result], reasons: dict[str, str], *, command: str, num_drawn: int
) -> str:
    counted = [result for result in results if result.mutant.name not in reasons]
    killed = sum(result.is_killed for result in counted)
    lines = [
        "# Mutants",
        "",
        f"Made by `{command}` on {datetime.date.today()}: {len(results)} small changes of the "
        f"formulas, the time model, the search and the store, drawn with a seed. "
        f"Of {num_drawn} drawn, those were run that the time allowed, "
        f"each with {MOST_S:g} processor seconds of tests at most; the goal is {GOAL:.0%}. "
        f"{len(results) - len(counted)} change nothing that can be seen. The tests that "
        f"`benchmarks/mutation_targets.toml` names kill {killed} of the other {len(counted)}, "
        f"{killed / max(1, len(counted)):.0%}.",
        "",
        "| module | sampled | killed | survived | equivalent |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for target in dict.fromkeys(result.target for result in results):
        sampled = [result for result in results if result.target == target]
        ended = [result.is_killed for result in counted if result.target == target]
        lines.append(
            f"| `{target.module}` | {len(sampled)} | {sum(ended)} | {len(ended) - sum(ended)} "
            f"| {len(sampled) - len(ended)} |"
        )
    lines += ["", "## Survivors", ""]
    lines += [f"- `{result.mutant.name}`" for result in counted if not result.is_killed]
    lines += ["", "## Equivalent", ""]
    named = [name for name in reasons if any(result.mutant.name == name for result in results)]
    lines += [f"- `{name}`: {reasons[name]}" for name in named]
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
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after these")
    parser.add_argument(
        "--usual", type=Path, help="keep the tests' times and calls in this file, and read them"
    )
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    every, reasons = read_targets()
    targets = [
        target for target in every if any(part in target.module for part in options.only.split(","))
    ]
    mutants = drawn(targets, options.sample, options.seed)
    results = run(targets, mutants, minutes=options.minutes, usual=options.usual)
    counted = [result for result in results if result.mutant.name not in reasons]
    num_killed = sum(result.is_killed for result in counted)
    share = num_killed / max(1, len(counted))
    num_equivalent = len(results) - len(counted)
    print(f"{num_killed} of {len(counted)} killed, {share:.1%}; {num_equivalent} equivalent")
    if options.write:
        command = (
            f"benchmarks/mutants.py --sample {options.sample} --seed {options.seed} "
            f"--minutes {options.minutes:g} --write"
        )
        PAGE.write_text(page(results, reasons, command=command, num_drawn=len(mutants)))
    if share < GOAL:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
