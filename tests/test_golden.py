"""A seeded part of the golden predictions is predicted as it was: benchmarks/golden.py has all."""

from __future__ import annotations

import copy
import json
import random
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import golden

PARTS = 8  # for as many workers
EXPLAINED_PARTS = 4


@cache
def sample() -> list[golden.Row]:
    """Rows that are drawn before they are read: reading all takes 4 s in every worker."""
    texts, lines = golden.read_lines()
    drawn = random.Random(20261122).sample(lines, 160)
    return [texts.unpack(json.loads(line)) for line in drawn]


@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample_is_predicted_as_it_was(part: int) -> None:
    _as_it_was([row for row in sample() if not row["is_explained"]][part::PARTS])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(EXPLAINED_PARTS))
def test_a_sample_is_explained_as_it_was(part: int) -> None:
    _as_it_was([row for row in sample() if row["is_explained"]][part::EXPLAINED_PARTS])


def _as_it_was(rows: list[golden.Row]) -> None:
    assert rows
    now = golden.answers([golden.job_of(row) for row in rows], processes=1)
    assert golden.compare(rows, now) == []


@pytest.mark.slow
def test_there_are_3000_predictions_of_every_model_method_and_phase() -> None:
    rows = golden.read_rows()
    answered = [row for row in rows if "refused" not in row]
    assert len(answered) >= 3000
    assert len({row["settings"]["model"] for row in rows if row["is_explained"]}) > 100
    runs = [row.get("explained", row)["prediction"]["config"] for row in answered]
    assert {run["phase"] for run in runs} == {"finetune", "inference"}
    assert {run["method"] for run in runs} == set(golden.METHODS)
    assert len({run["model"] for run in runs}) > 200
    assert len({row["gpu"] for row in answered}) > 80


@pytest.mark.parametrize("factor", [1 + 1e-9, 1 - 1e-9])
def test_a_float_that_moves_in_its_ninth_digit_and_a_byte_more_are_seen(factor: float) -> None:
    now = next(row for row in sample() if "prediction" in row and "serving" not in row["settings"])
    row = copy.deepcopy(now)
    prediction = row["prediction"]
    prediction["time"]["time_per_token_s"] *= factor
    prediction["memory"]["peak_allocated_bytes"] += 1
    ((_, lines),) = golden.compare([row], [now])
    assert sorted(line.partition(":")[0] for line in lines) == [
        ".prediction.memory.peak_allocated_bytes",
        ".prediction.time.time_per_token_s",
    ]
