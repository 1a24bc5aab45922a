"""A plan for any card of so much memory: an answer by memory alone, and no time anywhere."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from plan_runs import Silent

from whichlora.errors import ConfigError
from whichlora.workflow import estimates
from whichlora.workflow.answer import Answer
from whichlora.workflow.run import run_plan

MODELS = ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B")
COUNTS = {"samples": 1000, "tokens": 200_000}


def plan_file(folder: Path, **keys: Any) -> Path:
    plan = {
        "gpu": "8GB",
        "profile": "none",
        "models": list(MODELS),
        "methods": ["lora"],
        "dataset": COUNTS,
        "sequence_length": 512,
        "output_dir": "out",
    }
    path = folder / "plan.yaml"
    path.write_text(json.dumps({k: v for k, v in (plan | keys).items() if v is not None}))
    return path


def answered(folder: Path, **keys: Any) -> Answer:
    return run_plan(plan_file(folder, **keys), progress=Silent())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """The answer to the plan as it is, which no test changes."""
    return answered(tmp_path_factory.mktemp("plain"))


def rows_in(folder: Path) -> dict[str, str]:
    rows = [{"prompt": "How?", "completion": "So, and " + "so. " * n} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": "./rows.jsonl"}


def test_the_largest_model_wins_with_the_largest_batch_that_surely_fits(plain: Answer) -> None:
    found = plain
    assert found.winner is not None
    assert found.winner.run.model == MODELS[1]
    own = [one for one in found.finetune if one.run.model == MODELS[1]]
    sure = [one.run.batch_size for one in own if one.chance_of_both_stages >= 0.95]
    assert found.winner.run.batch_size == max(sure) < max(one.run.batch_size for one in own)
    # the peaks are those that an estimate has
    run = found.winner.run
    (estimated,) = estimates.estimate([run], ["8GB"])
    assert found.winner.memory_bytes.value == pytest.approx(
        estimated.memory.device_used_bytes, rel=1e-6
    )


def test_no_time_is_written_anywhere(tmp_path: Path) -> None:
    found = answered(tmp_path, dataset=rows_in(tmp_path))
    assert all(one.total_s is None for one in found.finetune)
    assert all(math.isnan(one.time_per_token_s.value) for one in found.finetune)
    assert found.front == []
    assert found.basis.endswith("; memory only")
    with found.files["table"].open() as file:
        times = {row[name] for row in csv.DictReader(file) for name in row if name.endswith("_s")}
    assert times == {""}
    text = found.files["answer"].read_text()
    assert "NaN" not in text
    besides = json.loads(text)["besides_training"]
    assert besides["evaluations"] == 1
    assert besides["evaluation_s"] is None
    assert besides["evaluation_peak_bytes"] > 0
    stages = {stage["name"]: stage for stage in json.loads(text)["life"]["stages"]}
    assert stages["evaluating"]["device_used_bytes"] > stages["saving"]["device_used_bytes"]
    assert stages["saving"]["disk_bytes"] > 0
    assert "| merging" in found.files["summary"].read_text()
    page = found.files["report"].read_text()
    assert "From download to resumption" in page
    assert "Peak memory" in page
    assert "<dt>Time per token" not in page
    assert "id=plane-finetune" not in page
    assert found.files["job"].is_file()


def test_a_shortlist_of_many_candidates_has_the_same_winner(
    tmp_path: Path, plain: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whichlora.workflow.session.MANY", 0)
    short = answered(tmp_path)
    assert plain.winner is not None
    assert short.winner is not None
    assert short.winner.run == plain.winner.run


def test_of_several_amounts_the_first_on_which_the_most_fits_is_recommended(tmp_path: Path) -> None:
    found = answered(tmp_path, gpu=["8GB", "80GB"])
    assert found.choice is not None
    assert found.choice.best is not None
    assert found.choice.best.gpu == "80gb"
    assert found.choice.fastest is found.choice.cheapest is None


def test_who_prefers_memory_gets_the_smallest(tmp_path: Path) -> None:
    found = answered(tmp_path, prefer="memory")
    assert found.winner is not None
    assert found.winner.memory_bytes.value == min(one.memory_bytes.value for one in found.finetune)
    assert found.winner.run.batch_size == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"profile": None}, "it has profile: frontier: name a card"),
        ({"train": True}, "it has train: true: name a card"),
        (
            {"stage2_profile": {"total_time": "5h"}, "stage1_profile": {"time_per_token": "20ms"}},
            "it has stage1_profile.time_per_token, stage2_profile.total_time: leave that out",
        ),
        ({"prefer": "time"}, "it has prefer: time: leave that out"),
        ({"gpu": ["8GB", "rtx-4090-24gb"]}, "cards and amounts of memory can't be compared"),
    ],
    ids=str,
)
def test_what_needs_a_card_is_refused_in_one_line(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        answered(tmp_path, **{"dataset": rows_in(tmp_path)} | keys)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith(f"{tmp_path / 'plan.yaml'}: gpu: ")
    assert not (tmp_path / "out").exists()
