"""Patterns of names: what Python and C++ find, in a time that is bounded."""

from __future__ import annotations

import random
import re

import pytest

from whichlora.spec.name_pattern import search, whole

NAMES = [
    f"blk.{layer}.{name}.weight"
    for layer in (0, 9, 12, 25)
    for name in ("ffn_up_exps", "attn_q", "ffn_gate_inp", "ffn_down_exps")
] + ["output.weight", ""]
BITS = (
    *("blk", r"\.", "[0-9]", "(1|2)", "(?:[0-9]|1[0-5])", ".*", ".+", "ffn_", "exps", "(a*)*"),
    *("(up|down|gate)", "^", "$", "x?", "|", r"\d+", "e+", "(ffn_.*)?", "[^b]", "_"),
    *(".*?", ".{2,4}?", "[a-z]{3}", "(.{2}){2,}", r"\b", r"[\d\.]+", r"\w+?", "(up|n)??"),
    *("(?!.*exps)", "(?=.*q)", "(?=ffn|attn(?!_k))", r"(?<=\.)", "(?<!attn_)", "(f{0,2}n?){3}"),
)


def test_what_is_found_is_what_python_finds() -> None:
    chosen = random.Random(0)
    for _ in range(1500):
        pattern = "".join(chosen.choices(BITS, k=chosen.randint(1, 7)))
        found = search(pattern)
        is_match = whole(pattern)
        for name in NAMES:
            assert found(name) == bool(re.search(pattern, name)), (pattern, name)
            assert is_match(name) == bool(re.fullmatch(pattern, name)), (pattern, name)


@pytest.mark.parametrize(
    "pattern",
    [
        ("(" + "|".join("." * 60) + ")") * 3 + ".*.*.*(a*)*~",
        ".*" * 25 + "~",
        "(" * 15 + ".?" + "){999}" * 15 + "~",
        "(?=.*" * 15 + "~" + ")" * 15,
    ],
)
def test_a_pattern_that_python_takes_minutes_for_takes_none(pattern: str) -> None:
    assert not search(pattern)("blk.12.ffn_gate_inp_shexp.weight" * 2)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a{4,2}",
        "a{,2}",
        "a*+",
        r"(a)\1",
        "(?i)a",
        "[9-0]",
        "**",
        "[",
        "(" * 400,
        "a" * 2001,
    ],
)
def test_what_is_not_understood_is_said(pattern: str) -> None:
    with pytest.raises(
        ValueError, match=r"not understood|no end|more than|bad character|at least 4"
    ):
        search(pattern)


def test_a_group_may_have_a_name() -> None:
    assert whole(r"(?P<layer>\d+)\.(?P<name>up|down)")("12.down")
