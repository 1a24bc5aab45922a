"""Scores of models from a CSV file, and how they rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.plan import Objective
from whichlora.spec.quality import Score
from whichlora.store.quality import read_scores


def test_a_model_goes_by_the_names_that_people_write(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("model,score,benchmark,source\nqwen3 14b,61,MMLU-Pro,mine\nphi4:14b,70.5,,\n")
    with pytest.raises(DataFileError, match="can't be compared, keep one"):
        read_scores(path)
    path.write_text("model,score,benchmark,source\nqwen3 14b,61,MMLU-Pro,mine\n")
    (score,) = read_scores(path).values()
    assert score == Score(model="Qwen/Qwen3-14B", score=61.0, benchmark="MMLU-Pro", source="mine")
    assert score.in_words == "61 (MMLU-Pro, mine)"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model\nqwen3 14b\n", "has no column score"),
        ("model,score\nqwen3 14b,good\n", ":2: score is not a number, got 'good'"),
        ("model,score\nqwen3 14b,nan\n", ":2: score: must be a finite number"),
        ("model,score\nllama 8b,1\n", ":2: "),  # several models
        ("model,score\nqwen3 14b,1\nQwen/Qwen3-14B,2\n", ":3: Qwen/Qwen3-14B has a score already"),
        ("model,score\n", "has no row"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(text)
    with pytest.raises(DataFileError) as raised:
        read_scores(path)
    assert fault in str(raised.value)
    assert "\n" not in str(raised.value)


def test_scores_go_before_size_and_size_ranks_what_has_none() -> None:
    scores = {name: Score(model=name, score=score) for name, score in (("a", 1500.0), ("b", -2.0))}
    objective = Objective(prefer="quality", scores=scores)
    sizes = {"a": 10**9, "b": 10**11, "large": 7 * 10**10, "small": 3 * 10**8}
    ranked = sorted(sizes, key=lambda name: objective.place(name, sizes[name]))
    assert ranked == ["a", "b", "large", "small"]


def test_a_score_is_a_number() -> None:
    with pytest.raises(ConfigError, match="score: must be a finite number, got inf"):
        Score(model="a", score=float("inf"))
