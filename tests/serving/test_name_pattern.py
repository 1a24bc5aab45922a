"""Patterns of names: what C++ finds, in a time that is bounded."""

from __future__ import annotations

import random
import re

import pytest

from whichlora.serving.name_pattern import search

NAMES = [
    f"blk.{layer}.{name}.weight"
    for layer in (0, 9, 12, 25)
    for name in ("ffn_up_exps", "attn_q", "ffn_gate_inp", "ffn_down_exps")
] + ["output.weight", ""]
BITS = (
    *("blk", r"\.", "[0-9]", "(1|2)", "(?:[0-9]|1[0-5])", ".*", ".+", "ffn_", "exps", "(a*)*"),
    *("(up|down|gate)", "^", "$", "x?", "|", r"\d+", "e+", "(ffn_.*)?", "[^b]", "_"),
)


def test_what_is_found_is_what_python_finds() -> None:
    chosen = random.Random(0)
    for _ in range(1500):
        pattern = "".join(chosen.choices(BITS, k=chosen.randint(1, 7)))
        found = search(pattern)
        for name in NAMES:
            assert found(name) == bool(re.search(pattern, name)), (pattern, name)


def test_a_pattern_that_python_takes_minutes_for_takes_none() -> None:
    ways = "(" + "|".join("." * 60) + ")"
    assert not search(ways * 3 + ".*.*.*(a*)*~")("blk.12.ffn_gate_inp_shexp.weight" * 2)


@pytest.mark.parametrize(
    "pattern", ["(", ")", "a{2}", r"\b", "(?=a)", "[9-0]", "**", "[", "(" * 400, "a" * 501]
)
def test_what_is_not_understood_is_said(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"not understood|no end|more than|bad character"):
        search(pattern)
