"""The changes that `benchmarks/mutants.py` makes, and the list of what it makes them in."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

import mutants

in_checkout = pytest.mark.skipif(
    not (ROOT / "whichlora").is_dir(), reason="what is changed is the source of a checkout"
)
TARGET = mutants.Target(module="whichlora.spec.numeric", tests=())


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a + b", {"a - b"}),
        ("x = a < b", {"a <= b"}),
        ("x = a and b", {"a or b"}),
        ("x = not a", {"a"}),
        ("x = 4096", {"4097"}),
        ("x = True", {"False"}),
        ("save(a)", {"pass"}),
        ("x = b if a else c", {"b if not a else c"}),
        ('raise ValueError("at least 1")', set()),
        ('"""A text of 3 words."""', set()),
        ("x: Literal[1] = a", set()),
    ],
)
def test_a_change_is_one_operator_constant_condition_or_call(
    source: str, changed: set[str]
) -> None:
    assert {one.after for one in mutants.mutants_of(TARGET, source)} == changed


def test_a_mutant_names_its_function_and_leaves_the_others_alone() -> None:
    source = "def f(a):\n    return a + 1\n\ndef g(a):\n    return a * 2\n"
    target = mutants.Target(module="m", tests=(), functions=("g",))
    found = list(mutants.mutants_of(target, source))
    assert {one.name for one in found} == {
        "m:g: a * 2 -> a // 2 in: return a * 2",
        "m:g: 2 -> 3 in: return a * 2",
    }
    assert {one.first_line for one in found} == {4}


def test_defaults_tables_and_lambdas_are_changes_of_what_runs_at_import() -> None:
    source = "TABLE = {1: lambda a: a + 2}\ndef f(a=3):\n    return a + 4\n"
    found = mutants.mutants_of(mutants.Target(module="m", tests=()), source)
    at_import = {one.before: one.is_at_import for one in found}
    assert at_import == {
        "1": True,
        "a + 2": True,
        "2": True,
        "3": True,
        "a + 4": False,
        "4": False,
    }


@in_checkout
def test_a_sample_takes_from_every_target_and_is_the_same_again() -> None:
    targets, _ = mutants.read_targets()
    first = mutants.drawn(targets, len(targets), seed=1)
    assert {target for target, _ in first} == set(targets)
    assert [one.name for _, one in first] == [
        one.name for _, one in mutants.drawn(targets, len(targets), seed=1)
    ]


@in_checkout
def test_every_target_is_a_module_with_tests_and_every_equivalent_a_mutant_of_it() -> None:
    targets, reasons = mutants.read_targets()
    for target in targets:
        assert target.path.is_file(), target.module
        assert target.tests
        for test in target.tests:
            assert (ROOT / test).is_file(), test
    by_module = {target.module: target for target in targets}
    for name, why in reasons.items():
        target = by_module[name.split(":")[0]]
        names = {one.name for one in mutants.mutants_of(target, target.path.read_text())}
        assert name in names
        assert why
