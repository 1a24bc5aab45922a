"""A large plan is decided on a few of its candidates, and answers as if on all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_profiler import FakeProfiler
from plan_runs import Silent, write_config

from whichlora.config import load_plan
from whichlora.errors import ConfigError
from whichlora.predict.predict import CountedRun, count_run, predict
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.workflow.answer import Answer
from whichlora.workflow.run import run_plan
from whichlora.workflow.session import Session


@pytest.fixture(autouse=True)
def fake_device(monkeypatch: pytest.MonkeyPatch) -> type[FakeProfiler]:
    monkeypatch.setattr("whichlora.profiler.profile.Profiler", FakeProfiler)
    monkeypatch.setattr(FakeProfiler, "calls", [])
    return FakeProfiler


def plan_file(folder: Path, **changes: str) -> Path:
    """The plan of the workflow's tests, with more of everything."""
    folder.mkdir(exist_ok=True)
    path = write_config(folder, methods="[lora, qlora, dora]")
    text = path.read_text().replace("ranks: 8", "ranks: [4, 8, 16]")
    path.write_text(text + "".join(f"{key}: {value}\n" for key, value in changes.items()))
    return path


def session(path: Path) -> Session:
    return Session(load_plan(path), find_gpu("cpu"), Silent(), fresh=True)


def answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, str]
) -> tuple[Answer, Answer]:
    """Without and with a shortlist."""
    found = []
    for many in (10**9, 0):
        monkeypatch.setattr("whichlora.workflow.session.MANY", many)
        part = folder / str(many)
        path = plan_file(part)
        text = path.read_text()
        for key, value in limits.items():
            text = text.replace(f"{key}: {'10h' if key == 'total_time' else '64GiB'}", value)
        path.write_text(text)
        found.append(run_plan(path, progress=Silent()))
    return found[0], found[1]


@pytest.mark.parametrize(
    "limits",
    [{}, {"total_time": "total_time: 5min"}, {"total_time": "total_time: 2min"}],
    ids=str,
)
def test_a_shortlist_gives_the_answer_of_the_whole_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, str]
) -> None:
    whole, short = answers(tmp_path, monkeypatch, limits)
    assert len(short.finetune) < len(whole.finetune)
    assert (short.winner and short.winner.run) == (whole.winner and whole.winner.run)


def test_where_nothing_fits_the_smallest_and_the_fastest_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, short = answers(tmp_path, monkeypatch, {"total_time": "total_time: 1ms"})
    assert whole.winner is None
    assert short.winner is None
    assert short.finetune


def test_every_combination_of_the_lists_is_a_candidate(tmp_path: Path) -> None:
    lists = {
        "attn": "[sdpa, eager]",
        "optimizer": "[adamw_torch, sgd]",
        "gradient_checkpointing": "[true, false]",
    }
    one, all_of_them = (
        session(plan_file(tmp_path / str(i), **more)).space for i, more in enumerate(({}, lists))
    )
    serving, training = one.number()
    assert all_of_them.number() == (2 * serving, 8 * training)
    runs = all_of_them.finetune_runs()
    assert len(set(runs)) == len(runs) == 8 * training
    settings = {(run.attn, run.optimizer, run.gradient_checkpointing) for run in runs}
    assert len(settings) == 8


def test_of_a_list_what_the_device_does_not_run_is_left_out(tmp_path: Path) -> None:
    both = session(plan_file(tmp_path / "both", attn="[sdpa, flash_attention_2]")).space
    assert {run.attn for run in both.finetune_runs()} == {"sdpa"}
    alone = session(plan_file(tmp_path / "alone", attn="flash_attention_2")).space
    with pytest.raises(ConfigError, match="flash_attention_2 does not run on cpu"):
        alone.finetune_runs()


def test_rows_name_the_settings_that_the_plan_has_several_of(tmp_path: Path) -> None:
    path = plan_file(tmp_path, gradient_checkpointing="[true, false]")
    run_plan(path, progress=Silent())
    written = json.loads((tmp_path / "out" / "answer.json").read_text())
    variants = {row["variant"] for row in written["finetune"]}
    assert {"lora r=8", "lora r=8, no checkpointing"} <= variants


def test_a_candidate_is_counted_once_in_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[RunConfig] = []

    def noted(job: ResolvedRun) -> CountedRun:
        counted.append(job.run)
        return count_run(job)

    monkeypatch.setattr("whichlora.workflow.session.count_run", noted)
    here = session(plan_file(tmp_path))
    runs = here.runs()[::7]
    for _ in range(2):
        found = here.candidates(here.search_loop(runs))
    assert sorted(map(repr, counted)) == sorted(map(repr, runs))
    for candidate in found:
        run = candidate.run
        expected = predict(here.models[run.model], run, here.gpu, here.calibration)
        assert candidate.prediction == expected


def test_a_list_is_made_again_without_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whichlora.workflow.session.MANY", 0)
    again, fresh = (session(plan_file(tmp_path / name)) for name in ("again", "fresh"))
    first = again.runs()
    step = again.calibration.time["finetune"]
    mean = {name: value * (50 if name == "elementwise" else 1) for name, value in step.mean.items()}
    slow = replace(
        again.calibration,
        time={**again.calibration.time, "finetune": replace(step, mean=mean)},
    )
    again.calibration = fresh.calibration = slow
    expected = fresh.runs()
    with monkeypatch.context() as counting:
        for name in ("moment_parts", "count_block", "step_features"):
            counting.delattr(f"whichlora.search.shortlist.{name}")
        assert again.runs() == expected != first
