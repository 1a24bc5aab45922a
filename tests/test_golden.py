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
EXPLAINED_PARTS = 16


@cache
def sample() -> list[golden.Row]:
    """Rows that are drawn before they are read: reading all takes 4 s in every worker."""
    texts, lines = golden.read_lines()
    drawn = random.Random(20261122).sample(lines, 160)
    return [texts.unpack(json.loads(line)) for line in drawn]


@pytest.mark.parametrize("part", range(PARTS))
def test_a_sample_is_predicted_as_it_was(part: int) -> None:
    """An explanation takes as long as forty predictions: most rows are predicted alone."""
    for row in sample()[part::PARTS]:
        before = {"refused": row["refused"]} if "refused" in row else row["explained"]
        now = golden.prediction_of(row["settings"], row["gpu"])
        assert list(golden.differences({name: before[name] for name in now}, now)) == [], row


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_a_sample_is_explained_as_it_was(part: int) -> None:
    rows = sample()[part::EXPLAINED_PARTS]
    now = golden.answers([golden.job_of(row) for row in rows], processes=1)
    assert golden.compare(rows, now) == []


@pytest.mark.slow
def test_there_are_3000_predictions_of_every_model_method_and_phase() -> None:
    explained = [row for row in golden.read_rows() if "explained" in row]
    assert len(explained) >= 3000
    runs = [row["explained"]["prediction"]["config"] for row in explained]
    assert {run["phase"] for run in runs} == {"finetune", "inference"}
    assert {run["method"] for run in runs} == set(golden.METHODS)
    assert len({run["model"] for run in runs}) > 200
    assert len({row["gpu"] for row in explained}) > 80


@pytest.mark.parametrize("factor", [1 + 1e-9, 1 - 1e-9])
def test_a_float_that_moves_in_its_ninth_digit_and_a_byte_more_are_seen(factor: float) -> None:
    now = next(row for row in sample() if "explained" in row)
    row = copy.deepcopy(now)
    prediction = row["explained"]["prediction"]
    prediction["time"]["time_per_token_s"] *= factor
    prediction["memory"]["peak_allocated_bytes"] += 1
    ((_, lines),) = golden.compare([row], [now])
    assert sorted(line.partition(":")[0] for line in lines) == [
        ".explained.prediction.memory.peak_allocated_bytes",
        ".explained.prediction.time.time_per_token_s",
    ]
