"""A plan over several numbers of GPUs answers as predicting each of its candidates does."""

from __future__ import annotations

import csv
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_profiler import FakeProfiler, pretend_device
from plan_runs import Silent

from whichlora.config import load_plan
from whichlora.errors import ConfigError
from whichlora.predict.parallel_choice import every
from whichlora.predict.predict import predict
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.terminal import explanation, print_answer, print_short
from whichlora.workflow.answer import Answer
from whichlora.workflow.profiling import has_ranks_of
from whichlora.workflow.run import run_plan
from whichlora.workflow.session import Session

MODEL = "Qwen/Qwen2.5-0.5B"
GPU = "a100-sxm-80gb"
LENGTH = 512
ROWS = 960


def plan_file(folder: Path, **keys: Any) -> Path:
    rows = [{"text": "a" * 600} for _ in range(ROWS)]  # all are cut to one length
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = {
        "gpu": GPU,
        "gpus": [1, 2, 4],
        "models": [MODEL],
        "methods": ["lora", "full"],
        "stage2_profile": {"batch_size": [1, 4]},
        "global_batch_size": 16,
        "dataset": {"path": "./rows.jsonl", "validation_fraction": 0},
        "sequence_length": LENGTH,
        "profile": "none",
        "weights": "random",
        "output_dir": "out",
    }
    path = folder / "plan.yaml"
    path.write_text(json.dumps({k: v for k, v in (plan | keys).items() if v is not None}))
    return path


def answered(folder: Path, **keys: Any) -> Answer:
    folder.mkdir(exist_ok=True)
    return run_plan(plan_file(folder, **keys), progress=Silent())


def exhaustive(path: Path) -> list[tuple[float, Prediction]]:
    """Seconds of the whole training and the prediction of every candidate, one by one."""
    plan = load_plan(path)
    gpu, model = find_gpu(GPU), load_model(MODEL)
    calibration = Session(plan, gpu, Silent(), fresh=True).calibration
    found = []
    for config, method, size in itertools.product(
        plan.spreads, plan.methods, plan.finetune_batch_sizes
    ):
        for spread in every(config) if config.strategy == "auto" else (config,):
            run = replace(
                plan.finetune,
                model=MODEL,
                method=method,
                batch_size=size,
                seq_len=LENGTH,
                precision="bf16",
                parallel=spread,
            )
            try:
                prediction = predict(model, run, gpu, calibration)
            except ConfigError:
                continue
            several = prediction.several_gpus
            at_once = 16 if several is None else several.global_batch_size
            assert at_once == 16
            found.append((ROWS / 16 * (prediction.time.step_s or 0.0), prediction))
    return found


@pytest.mark.parametrize("strategies", [["ddp", "fsdp", "zero1", "zero3"], ["fsdp"], ["pp"]])
@pytest.mark.parametrize("many", [10**9, 0])
def test_the_winner_and_each_number_of_gpus_are_those_of_an_exhaustive_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategies: list[str], many: int
) -> None:
    monkeypatch.setattr("whichlora.workflow.session.MANY", many)
    keys: dict[str, Any] = {"gpus": [2, 4], "parallel": strategies}
    answer = answered(tmp_path, **keys)
    best: dict[int, tuple[float, Prediction]] = {}
    for total_s, prediction in exhaustive(tmp_path / "plan.yaml"):
        gpus = prediction.run.parallel.gpus
        if gpus not in best or total_s < best[gpus][0]:
            best[gpus] = total_s, prediction
    total_s, fastest = min(best.values(), key=lambda found: found[0])
    assert answer.winner is not None
    assert answer.winner.run.parallel == fastest.run.parallel
    assert (answer.winner.run.method, answer.winner.run.batch_size) == (
        fastest.run.method,
        fastest.run.batch_size,
    )
    assert answer.winner.total_s is not None
    assert answer.winner.total_s.value == pytest.approx(total_s, rel=1e-6)
    assert answer.counts is not None
    for candidate in answer.counts.candidates:
        seconds, prediction = best[candidate.run.parallel.gpus]
        assert candidate.run.parallel == prediction.run.parallel
        assert candidate.total_s is not None
        assert candidate.total_s.value == pytest.approx(seconds, rel=1e-6)
        assert candidate.prediction.memory == prediction.memory


def test_auto_takes_what_a_job_can_be_written_for_and_the_job_states_it(tmp_path: Path) -> None:
    answer = answered(tmp_path, gpus=[4])
    assert answer.winner is not None
    config = answer.winner.run.parallel
    tried = {candidate.run.parallel.strategy for candidate in answer.finetune}
    assert {"ddp", "fsdp", "zero1"} <= tried
    assert not any({"pp", "tp"} & set(strategy.split("+")) for strategy in tried)
    assert config.gpus == 4
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert recipe["run"]["parallel"]["strategy"] == config.strategy
    assert "num_processes: 4" in (tmp_path / "out" / "accelerate.yaml").read_text()


def test_every_output_names_the_strategies_and_numbers_of_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    answer = answered(tmp_path, gpu_prices={GPU: 2})
    assert answer.winner is not None
    print_short(answer)
    print_answer(answer)
    shown = capsys.readouterr().out
    strategy = answer.winner.run.parallel.strategy
    assert f"{strategy} on 4 GPUs" in shown
    assert "by the number of GPUs" in shown
    assert "fewest: 1 (" in shown
    with (tmp_path / "out" / "candidates.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "finetune"]
    assert {row["gpus"] for row in rows} == {"1", "2", "4"}
    assert {strategy, "none"} <= {row["parallel"] for row in rows}
    content = json.loads((tmp_path / "out" / "answer.json").read_text())
    counts = content["gpu_counts"]
    assert [row["gpus"] for row in counts] == [1, 2, 4]
    for row in counts:
        assert row["cost"] == pytest.approx(2 * row["gpus"] * row["total_time_s"] / 3600)
    report = (tmp_path / "out" / "report.html").read_text()
    assert f"{strategy} on 4 GPUs" in report


def test_a_price_is_paid_for_each_gpu(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"gpus": [1, 4], "gpu_prices": {GPU: 2}, "prefer": "price"}
    answer = answered(tmp_path, **keys)
    assert answer.winner is not None
    assert answer.winner.run.parallel.gpus == 1  # 4 GPUs are never 4 times as fast


@pytest.mark.parametrize(("prices", "money"), [({}, r"\S+ USD"), ({GPU: 1000}, r"[\d.,]+$")])
def test_money_has_its_currency(tmp_path: Path, prices: dict[str, int], money: str) -> None:
    keys = {"gpu_prices": prices} if prices else {}
    lines = explanation(answered(tmp_path, **keys))
    (cheapest,) = [line for line in lines if line.startswith("  cheapest: ")]
    assert re.search(rf"GPU-hours, {money}", cheapest)


def test_a_model_that_one_gpu_cannot_hold_is_trained_by_several(tmp_path: Path) -> None:
    large: dict[str, Any] = {"models": ["meta-llama/Llama-3.1-70B"], "methods": ["lora"]}
    alone = answered(tmp_path / "alone", gpus=[1], **large)
    assert alone.winner is None
    answer = answered(tmp_path / "eight", gpus=[1, 8], **large)
    assert answer.winner is not None
    assert answer.winner.run.parallel.gpus == 8
    assert answer.counts is not None
    assert answer.counts.lacking == [1]
    assert any("more than one GPU has" in caution for caution in answer.cautions)


def test_without_a_global_batch_the_answer_says_that_steps_differ(tmp_path: Path) -> None:
    answer = answered(tmp_path, global_batch_size=None)
    assert any("set global_batch_size" in caution for caution in answer.cautions)
    assert not any("set global_batch_size" in caution for caution in answered(tmp_path).cautions)


def test_a_refused_strategy_is_named_with_its_reason(tmp_path: Path) -> None:
    answer = answered(tmp_path, parallel=["ddp", "pp"], global_batch_size=8, gpus=[4])
    reasons = [refusal.reason for refusal in answer.refused]
    assert len(reasons) == 2  # both methods
    assert all("global_batch_size" in reason or "micro-batches" in reason for reason in reasons)


def test_what_the_host_cannot_hold_is_no_candidate(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"parallel": "zero2", "offload": ["optimizer"], "gpus": [2]}
    answer = answered(tmp_path / "roomy", methods=["lora"], host_memory="64GiB", **keys)
    assert answer.winner is not None
    with pytest.raises(ConfigError, match=r"host memory: .* do not fit in the 1.00 MiB stated"):
        answered(tmp_path / "tight", methods=["lora"], host_memory="1MiB", **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"profile": "frontier"}, "is not in this machine"),
        ({"parallel": "ddp", "interconnect": "warp"}, "interconnect: 'warp' is not known"),
    ],
)
def test_what_is_not_possible_is_refused_in_one_line(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        answered(tmp_path, **({"gpus": [2]} | keys))


def test_profiles_on_one_gpu_correct_what_several_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_device(monkeypatch)
    keys: dict[str, Any] = {
        "gpu": "cpu",
        "gpus": [2],
        "parallel": "zero2",  # whose ranks a CPU can't stand in for
        "interconnect": "10GB/s",
        "methods": ["lora"],
        "calibration_dir": "calibration",
    }
    dry = answered(tmp_path / "dry", **keys)
    answer = answered(tmp_path / "profiled", profile="frontier", **keys)
    assert FakeProfiler.calls
    assert all(run.parallel == ONE_GPU for run in FakeProfiler.calls)
    assert answer.winner is not None
    assert dry.winner is not None
    assert answer.winner.run.parallel.gpus == 2
    assert FakeProfiler.calls[-1].batch_size in {
        candidate.run.batch_size for candidate in answer.finetune
    }
    assert answer.search.runs == len(FakeProfiler.calls) == len(answer.compared)
    width = {
        name: each.winner.total_s.high / each.winner.total_s.low
        for name, each in (("dry", dry), ("profiled", answer))
        if each.winner and each.winner.total_s
    }
    assert width["profiled"] < 0.95 * width["dry"]
    assert any("profiled on one GPU" in caution for caution in answer.cautions)


def test_candidates_are_profiled_with_their_ranks_where_the_gpus_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_device(monkeypatch)
    keys: dict[str, Any] = {
        "gpu": "cpu",
        "gpus": [2],
        "parallel": "ddp",
        "interconnect": "10GB/s",
        "methods": ["lora"],
        "calibration_dir": "calibration",
    }
    dry = answered(tmp_path / "dry", **keys)
    answer = answered(tmp_path / "profiled", profile="frontier", **keys)
    assert FakeProfiler.calls
    assert {run.parallel.gpus for run in FakeProfiler.calls} == {2}
    assert answer.winner is not None
    assert dry.winner is not None
    assert answer.winner.measured
    assert answer.winner.run in FakeProfiler.calls
    assert answer.winner.total_s is not None
    assert dry.winner.total_s is not None
    same = next(each for each in dry.finetune if each.run == answer.winner.run)
    assert same.total_s is not None
    factor = answer.winner.total_s.value / same.total_s.value
    assert factor == pytest.approx(FakeProfiler.TIME_FACTOR, rel=0.02)
    assert any("profiled with all ranks" in caution for caution in answer.cautions)
    assert not any("profiled on one GPU" in caution for caution in answer.cautions)


def test_a_candidate_whose_ranks_fail_is_not_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_device(monkeypatch)
    monkeypatch.setattr(FakeProfiler, "OUTCOMES", {"lora": "crashed"})
    keys: dict[str, Any] = {
        "gpu": "cpu",
        "gpus": [2],
        "parallel": "ddp",
        "interconnect": "10GB/s",
        "methods": ["lora", "full"],
        "stage2_profile": {"batch_size": [1]},
        "calibration_dir": "calibration",
        "prefer": "memory",
    }
    answer = answered(tmp_path, profile="frontier", **keys)
    assert [run.method for run in FakeProfiler.calls] == ["lora", "full"]
    assert answer.winner is not None
    assert answer.winner.run.method == "full"


@pytest.mark.parametrize(
    ("here", "strategy", "gpus", "expected"),
    [
        (["t4-16gb"] * 4, "ddp", 4, True),
        (["t4-16gb"] * 4, "fsdp", 2, True),
        (["t4-16gb"] * 2, "ddp", 4, False),
        (["t4-16gb", "l4-24gb"], "ddp", 2, False),
        (["l4-24gb"] * 2, "ddp", 2, False),
        (["t4-16gb"] * 4, "zero3", 4, True),
        (["t4-16gb"] * 4, "tp", 4, False),
    ],
)
def test_ranks_are_here_where_all_gpus_are_equal_and_enough(
    monkeypatch: pytest.MonkeyPatch, here: list[str], strategy: str, gpus: int, expected: bool
) -> None:
    found = [(None, find_gpu(key)) for key in here]
    monkeypatch.setattr("whichlora.workflow.profiling.detected_gpus", lambda: found)
    monkeypatch.setattr("whichlora.profiler.spread.find_spec", lambda name: name)
    run = RunConfig(model=MODEL, parallel=ParallelConfig(strategy=strategy, gpus=gpus))
    assert has_ranks_of(run, find_gpu("t4-16gb")) is expected
    assert not has_ranks_of(replace(run, parallel=ONE_GPU), find_gpu("t4-16gb"))
    monkeypatch.setattr("whichlora.profiler.spread.find_spec", lambda _: None)
    assert has_ranks_of(run, find_gpu("t4-16gb")) is (expected and "zero" not in strategy)


def test_auto_says_what_it_left_out_where_the_data_alone_is_not_divided(tmp_path: Path) -> None:
    keys = {"gpu": "h100-sxm-80gb", "gpus": 8, "methods": ["full"], "parallel": "auto"}
    size = {"stage2_profile": {"batch_size": 1}, "global_batch_size": None, "weights": None}
    answer = answered(tmp_path / "large", models=["meta-llama/Llama-3.1-70B"], **keys, **size)
    assert any("tp" in line and "not among it" in line for line in answer.cautions)
    small = answered(tmp_path / "small", **keys, **size)
    assert not any("not among it" in line for line in small.cautions)
