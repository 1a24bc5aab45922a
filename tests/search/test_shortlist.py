"""A large plan is decided on a few of its candidates, and answers as if on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_profiler import FakeProfiler, pretend_device
from plan_runs import Silent, write_config

from whichlora.config import load_plan
from whichlora.errors import ConfigError
from whichlora.predict.counted import CountedRun, count_block, count_run
from whichlora.predict.predict import predict
from whichlora.predict.quantities import moment_parts
from whichlora.predict.resolve import ResolvedRun
from whichlora.search import shortlist
from whichlora.search.counted_training import TrainingGroup
from whichlora.spec.results import MemoryPrediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.workflow.answer import Answer
from whichlora.workflow.run import run_plan, search
from whichlora.workflow.session import Session


@pytest.fixture(autouse=True)
def fake_device(monkeypatch: pytest.MonkeyPatch) -> type[FakeProfiler]:
    pretend_device(monkeypatch)
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


@pytest.mark.slow
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


def test_what_a_list_has_counted_is_not_counted_when_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whichlora.workflow.session.MANY", 0)
    again, fresh = (session(plan_file(tmp_path / name)) for name in ("again", "fresh"))
    counted: dict[str, list[object]] = {"moment_parts": [], "count_block": []}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(job: ResolvedRun, *axes: Any, **sizes: Any) -> Any:
            counted[name].append(job.run)
            return function(job, *axes, **sizes)

        return noted

    with monkeypatch.context() as counting:
        parts, block = noting("moment_parts", moment_parts), noting("count_block", count_block)
        counting.setattr("whichlora.search.counted_training.moment_parts", parts)
        counting.setattr("whichlora.search.shortlist.count_block", block)
        first = again.runs()
        step = again.calibration.time["finetune"]
        mean = {
            name: value * (50 if name == "elementwise" else 1) for name, value in step.mean.items()
        }
        slow = replace(
            again.calibration,
            time={**again.calibration.time, "finetune": replace(step, mean=mean)},
        )
        again.calibration = slow
        second = again.runs()
    fresh.calibration = slow
    assert second == fresh.runs() != first
    for runs in counted.values():
        assert len(runs) == len(set(runs)) > 0


def test_models_of_later_tiers_are_left_alone_once_three_meet_the_limits(tmp_path: Path) -> None:
    plan = {
        "models": ["Qwen/Qwen3-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"],
        "gpu": "a100-sxm-80gb",
        "methods": ["lora", "qlora", "dora"],
        "ranks": [4, 8, 16, 32, 64],
        "stage2_profile": {"batch_size": [1, 2, 3, 4, 6, 8]},
        "dataset": {"samples": 500, "tokens": 100_000},
        "profile": "none",
        "weights": "random",
        "output_dir": "out",
    }
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(plan))
    answer = run_plan(path, progress=Silent())
    assert answer.winner is not None
    assert answer.winner.run.model == plan["models"][0]
    assert {candidate.run.model for candidate in answer.finetune} == set(plan["models"][:3])


def test_of_a_large_plan_only_what_is_near_a_limit_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whichlora.workflow.session.MANY", 0)
    plan = {
        "models": ["Qwen/Qwen2.5-0.5B"],
        "gpu": "rtx-4090-24gb",
        "methods": ["lora"],
        "stage2_profile": {"batch_size": [1, 4, 8, 12, 16, 32, 64]},
        "dataset": {"samples": 500, "mean_tokens": 512, "max_tokens": 512, "p95_tokens": 512},
        "sequence_length": 512,
        "profile": "none",
        "weights": "random",
        "output_dir": str(tmp_path / "out"),
    }
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(plan))
    here = Session(load_plan(path), find_gpu("rtx-4090-24gb"), Silent(), fresh=True)
    gpu, calibration = here.gpu, here.calibration

    def alone(run: RunConfig) -> MemoryPrediction:
        return predict(here.models[run.model], run, gpu, calibration).memory

    runs = here.space.finetune_runs()
    limit = alone(runs[3]).device_used_bytes
    here.limits = replace(here.limits, finetune_bytes=limit)
    near, far = [], []
    for candidate in here.candidates(here.search_loop(runs)):
        memory = alone(candidate.run)
        (near if candidate.prediction.memory == memory else far).append(memory)
    assert near
    assert far
    assert all(
        memory.interval_bytes[1] <= limit or memory.peak_allocated_bytes > 0.95 * limit
        for memory in far
    )
    assert limit in {memory.device_used_bytes for memory in near}
    answer = run_plan(path, progress=Silent())
    assert answer.winner is not None
    assert answer.winner.prediction.memory == alone(answer.winner.run)


def test_what_waits_too_long_is_left_out_before_its_memory_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "models: [Qwen/Qwen3-0.6B, meta-llama/Llama-3.1-8B]\n"
        "dataset: {samples: 2000, mean_tokens: 300, p95_tokens: 800}\n"
        "gpu: a100-sxm-80gb\ngpus: [1, 2, 4, 8]\nparallel: auto\nsequence_length: 1024\n"
        f"weights: random\nprofile: none\noutput_dir: {tmp_path / 'out'}\n"
    )
    counted: list[TrainingGroup] = []
    whole_counted = shortlist._PosteriorSamples.num_bytes

    def noting(samples: Any, group: TrainingGroup) -> Any:
        counted.append(group)
        return whole_counted(samples, group)

    def listed() -> tuple[list[RunConfig], Answer]:
        session = Session(load_plan(plan), find_gpu("a100-sxm-80gb"), Silent(), fresh=True)
        return session.runs(), search(session)

    monkeypatch.setattr(shortlist._PosteriorSamples, "num_bytes", noting)
    runs, answer = listed()
    num_counted = len(counted)
    counted.clear()
    monkeypatch.setattr(shortlist._Shortlist, "_cost_in_time", lambda *_: np.array([[-np.inf]]))
    every_run, every = listed()
    assert num_counted < 0.7 * len(counted)
    assert answer.winner is not None
    assert every.winner is not None
    assert answer.winner.run == every.winner.run
    offloaded = [run for run in every_run if dict(run.parallel.options).get("offload")]
    assert {*every_run} - {*runs} <= {*offloaded}, "only the smallest of a model may differ"
