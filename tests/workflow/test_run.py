"""Both stages end to end, on a device that answers from the formulas."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from clips import write_clip
from fake_profiler import FakeProfiler, pretend_device
from plan_runs import MODELS, Silent, write_config
from rich.console import Console

import whichlora
from whichlora import terminal
from whichlora.cli import main
from whichlora.config import DEFAULT_MODELS, load_plan
from whichlora.errors import ConfigError, DataFileError
from whichlora.predict.words import describe
from whichlora.profiler.installed import installed_versions
from whichlora.search.feasibility import Candidate
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.store.locks import hold_folder
from whichlora.store.written import OF_A_RUN, RECORD
from whichlora.terminal.answer import gpu_rows
from whichlora.workflow import estimates
from whichlora.workflow.answer import Answer
from whichlora.workflow.export import read_recipe, write_export
from whichlora.workflow.job import files_of
from whichlora.workflow.profiling import require_profiler
from whichlora.workflow.run import run_plan

pytestmark = pytest.mark.usefixtures("fake_device")


@dataclass(frozen=True)
class Finished:
    """A run that is done: its answer, the folder of its plan, what it profiled."""

    answer: Answer
    folder: Path
    calls: list[RunConfig]


def finished(folder: Path, **changes: str) -> Finished:
    with pytest.MonkeyPatch.context() as patch:
        pretend_device(patch)
        answer = run_plan(write_config(folder, **changes), progress=Silent())
        return Finished(answer, folder, FakeProfiler.calls)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The plan as it is; a test leaves the answer and its files as they are."""
    return finished(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same with every candidate profiled."""
    return finished(tmp_path_factory.mktemp("everything"), profile="all")


def test_the_largest_model_wins_when_nothing_limits_it(plain: Finished) -> None:
    answer = plain.answer
    assert answer.winner is not None
    assert answer.winner.run.model == "Qwen/Qwen2.5-0.5B"
    assert answer.winner.measured
    assert answer.kept == ("Qwen/Qwen2.5-0.5B", "EleutherAI/pythia-160m", MODELS[0])


def test_the_winners_serving_was_measured_too(plain: Finished) -> None:
    answer = plain.answer
    assert answer.winner is not None
    serving = [one for one in answer.inference if one.run.model == answer.winner.run.model]
    assert any(one.measured and one.verdict == "meets" for one in serving)


@pytest.mark.slow
def test_the_frontier_finds_what_profiling_everything_finds_in_fewer_runs(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    limits = {"finetune_memory": "1.3GiB", "total_time": "20min"}
    (tmp_path / "all").mkdir()
    (tmp_path / "frontier").mkdir()
    everything = run_plan(
        write_config(tmp_path / "all", profile="all", **limits), progress=Silent()
    )
    runs_of_all = len(fake_device.calls)
    frontier = run_plan(write_config(tmp_path / "frontier", **limits), progress=Silent())
    assert everything.winner is not None
    assert frontier.winner is not None
    assert frontier.winner.run == everything.winner.run
    assert runs_of_all == len(everything.inference) + len(everything.finetune)
    assert len(fake_device.calls) - runs_of_all < runs_of_all / 2


def test_a_model_that_cannot_be_served_is_never_fine_tuned(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    path = write_config(tmp_path, inference_memory="1GiB", methods="lora")
    answer = run_plan(path, progress=Silent())
    assert "Qwen/Qwen2.5-0.5B" not in answer.kept
    trained = {run.model for run in fake_device.calls if run.phase == "finetune"}
    assert "Qwen/Qwen2.5-0.5B" not in trained
    assert answer.winner is not None
    assert answer.winner.run.model == "EleutherAI/pythia-160m"


def test_a_method_falls_only_with_the_form_in_which_its_model_is_served(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    answer = run_plan(write_config(tmp_path, inference_memory="1GiB"), progress=Silent())
    trained = {(run.model, run.method) for run in fake_device.calls if run.phase == "finetune"}
    assert ("Qwen/Qwen2.5-0.5B", "lora") not in trained  # 16 bit and merged it takes 2 GiB in fp32
    assert answer.winner is not None
    assert (answer.winner.run.model, answer.winner.run.method) == ("Qwen/Qwen2.5-0.5B", "qlora")
    served = [one.run for one in answer.inference if one.form == answer.winner.form]
    assert all((run.serve, run.quant, run.r) == ("as-trained", "nf4-dq", 8) for run in served)
    assert any(run in fake_device.calls for run in served)


def test_what_is_clearly_slower_is_not_timed_to_the_end_and_the_winner_is(plain: Finished) -> None:
    answer = plain.answer
    assert answer.winner is not None
    assert answer.winner.total_s is not None
    assert answer.winner.measurement is not None
    assert len(answer.winner.measurement.step_s) == 4 < answer.plan.num_batches  # known to 2 %
    beaten = [
        one.measurement
        for one in answer.finetune
        if one.measurement is not None
        and one.total_s is not None
        and one.total_s.value > 1.1 * answer.winner.total_s.value
    ]
    assert 2 in {len(one.step_s) for one in beaten}
    serving = [one.measurement for one in answer.inference if one.measurement is not None]
    assert {len(one.generate_s) for one in serving} == {1}  # no limit of inference time


def test_profiling_everything_makes_every_batch(everything: Finished) -> None:
    answer = everything.answer
    records = [one.measurement for one in answer.finetune if one.measurement is not None]
    assert {len(one.step_s) for one in records} == {answer.plan.num_batches}


def test_the_answer_says_how_sure_it_is_and_what_it_cost(plain: Finished) -> None:
    answer = plain.answer
    search = answer.search
    assert search.stopped_by == "certain"
    assert search.confidence >= 0.95
    assert search.runs == len(plain.calls) == search.device_s
    written = json.loads((plain.folder / "out" / "answer.json").read_text())
    assert written["search"]["confidence"] == search.confidence
    assert written["objective"]["prefer"] == "size"


def test_a_budget_of_one_run_ends_the_search_and_says_so(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    path = write_config(tmp_path)
    path.write_text(path.read_text() + "max_profile_runs: 1\n")
    answer = run_plan(path, progress=Silent())
    assert len(fake_device.calls) == 1
    assert answer.search.stopped_by == "runs"
    assert answer.search.confidence < 0.95


@pytest.mark.parametrize("prefer", ["time", "memory"])
def test_a_preferred_quantity_beats_size(tmp_path: Path, prefer: Any) -> None:
    answer = run_plan(write_config(tmp_path), progress=Silent(), prefer=prefer)
    assert answer.winner is not None
    assert answer.winner.run.model != "Qwen/Qwen2.5-0.5B"
    meeting = [one for one in answer.finetune if one.verdict == "meets"]
    values = {
        "time": [one.total_s.value for one in meeting if one.total_s],
        "memory": [one.memory_bytes.value for one in meeting],
    }[prefer]
    best = answer.winner
    own = best.memory_bytes.value if prefer == "memory" else best.total_s and best.total_s.value
    assert own is not None
    assert own <= min(values) / 0.9


def test_an_own_order_of_models_beats_size(tmp_path: Path) -> None:
    path = write_config(tmp_path, models=", ".join(reversed(MODELS[:2])))
    answer = run_plan(path, progress=Silent(), prefer="order")
    assert answer.winner is not None
    assert answer.winner.run.model == MODELS[1]


def test_a_price_is_needed_where_it_is_preferred(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefer: price needs the price of an hour on cpu-"):
        run_plan(write_config(tmp_path), progress=Silent(), prefer="price")


def test_limits_of_this_gpu_take_the_place_of_the_general_ones(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    path.write_text(path.read_text() + "gpu_limits: {cpu: {finetune_memory: 1MiB}}\n")
    assert run_plan(path, progress=Silent()).winner is None


def test_a_dry_run_measures_nothing_and_still_answers(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    answer = run_plan(write_config(tmp_path, profile="none"), progress=Silent())
    assert fake_device.calls == []
    assert answer.winner is not None
    assert not answer.winner.measured


GPU_LIST = "gpu: [l4, 4090, t4]\ngpu_prices: {l4: 0.5, 4090: 0.4}\n"


def test_the_page_has_the_currency_of_each_cost(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    path.write_text(path.read_text().replace("gpu: cpu\n", "gpu: [l4, 4090]\n"))
    run_plan(path, progress=Silent())
    page = (tmp_path / "out" / "report.html").read_text()
    rows = page.split("On each GPU</h2>")[1].split("</table>")[0]
    assert len(re.findall(r"<td>0\.0*[1-9]\d* USD</td>", rows)) == 2


def test_each_gpu_of_a_list_is_answered_for_and_the_best_recommended(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    path.write_text(path.read_text().replace("gpu: cpu\n", GPU_LIST))
    answer = run_plan(path, progress=Silent())
    choice = answer.choice
    assert choice is not None
    assert choice.best is not None
    assert answer.gpu.key == choice.best.gpu == "rtx-4090-24gb"
    assert [on.gpu for on in choice.gpus] == ["l4-24gb", "rtx-4090-24gb", "t4-16gb"]
    seconds = {on.gpu: on.least_s(choice.model) for on in choice.gpus}
    assert choice.fastest is not None
    assert seconds[choice.fastest.gpu] == min(seconds.values())
    assert choice.cheapest is not None
    costs = {
        on.gpu: answer.plan.objective.money(on.gpu, 1, seconds[on.gpu]) for on in choice.gpus[:2]
    }
    assert choice.cost_of_model(choice.cheapest) == pytest.approx(min(costs.values()))
    written = json.loads((tmp_path / "out" / "answer.json").read_text())
    assert written["gpu"] == "rtx-4090-24gb"
    assert [row["recommended"] for row in written["gpus"]] == [False, True, False]
    assert written["gpus"][2]["cost"] is None
    assert (tmp_path / "out" / "t4-16gb" / "answer.json").is_file()
    assert "On each GPU" in (tmp_path / "out" / "report.html").read_text()
    assert any(line.startswith("GPU: rtx-4090-24gb is recomm") for line in written["explanation"])


@pytest.mark.slow
def test_of_a_list_only_the_device_of_this_machine_is_profiled(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    path = write_config(tmp_path, profile="all")
    path.write_text(path.read_text().replace("gpu: cpu\n", "gpu: [4090, cpu]\n"))
    answer = run_plan(path, progress=Silent())
    assert fake_device.calls
    assert answer.choice is not None
    assert [on.measured for on in answer.choice.gpus] == [False, True]


def test_where_no_gpu_of_a_list_is_sure_the_likeliest_one_is_shown(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none", total_time="3s")
    gpus = "gpu: [p4, h100-sxm-80gb, t4]\nconfidence: 0.999\n"
    path.write_text(path.read_text().replace("gpu: cpu\n", gpus))
    answer = run_plan(path, progress=Silent())
    assert answer.choice is not None
    assert answer.winner is None
    assert answer.gpu.key == max(answer.choice.gpus, key=lambda on: on.best_chance).gpu
    assert answer.gpu.key != answer.choice.gpus[0].gpu
    assert f"GPU: all of this is of {answer.gpu.key}, the likeliest of 3." in terminal.explanation(
        answer
    )
    cells = {row[0]: row[1] for row in gpu_rows(answer.choice)}
    chance = max(on.best_chance for on in answer.choice.gpus)
    likeliest = max(answer.finetune, key=lambda each: each.chance_of_both_stages)
    words = "nothing meets every limit"
    if chance >= 0.5:
        words = f"{likeliest.run.model} may fit, {chance:.0%}"
    assert cells[answer.gpu.key] == words
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"<th scope=row>{answer.gpu.key}</th><td>{words}</td>" in page


def test_a_gpu_that_runs_nothing_of_the_plan_leaves_the_others(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    text = path.read_text().replace("gpu: cpu\n", "gpu: [2080ti, 4090]\n")
    text = text.replace("precision: fp32", "precision: bf16")
    path.write_text(text + "attn: flash_attention_2\n")
    answer = run_plan(path, progress=Silent())
    assert answer.choice is not None
    assert "does not run on rtx-2080-ti-11gb" in answer.choice.gpus[0].refusal
    assert answer.gpu.key == "rtx-4090-24gb"


def test_one_gpu_has_the_answer_it_always_had(tmp_path: Path) -> None:
    run_plan(write_config(tmp_path, profile="none"), progress=Silent())
    assert "gpus" not in json.loads((tmp_path / "out" / "answer.json").read_text())


def test_training_needs_one_gpu(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    path.write_text(path.read_text().replace("gpu: cpu\n", GPU_LIST) + "train: true\n")
    with pytest.raises(ConfigError, match="train: true needs one gpu, got 3"):
        run_plan(path, progress=Silent())


def test_where_no_job_can_be_written_the_answer_says_so_instead_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, profile="none")
    text = path.read_text().replace(", ".join(MODELS), "google-t5/t5-small")
    path.write_text(text + "train: true\n")
    monkeypatch.chdir(tmp_path)
    progress = Silent()
    training = run_plan(path, progress=progress).training
    assert training is not None
    assert "has no train.py" in training["error"]
    assert any("is an encoder-decoder" in line for line in progress.said)


def test_an_encoder_decoder_learns_pairs_at_the_lengths_of_the_data(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    rows = [{"prompt": "x" * n, "completion": "y" * (n // 4)} for n in range(8, 60, 4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = path.read_text().replace(", ".join(MODELS), "google-t5/t5-small")
    path.write_text(text.replace(", text_column: text", ""))
    winner = run_plan(path, progress=Silent()).winner
    assert winner is not None
    assert (winner.run.seq_len, winner.run.target_len) == (56, 14)
    script = (tmp_path / "out" / "train.py").read_text()
    assert "SEQ_LEN = 56\nTARGET_LEN = 14\n" in script
    path.write_text(path.read_text() + "target_length: 6\n")
    shorter = run_plan(path, progress=Silent()).winner
    assert shorter is not None
    assert shorter.run.target_len == 6
    assert shorter.prediction.memory.peak_allocated_bytes <= (
        winner.prediction.memory.peak_allocated_bytes
    )


def test_whisper_is_chosen_though_its_rows_are_shorter_than_the_plans(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    text = path.read_text().replace(", ".join(MODELS), "openai/whisper-tiny")
    path.write_text(text.replace("sequence_length: 64\n", ""))
    winner = run_plan(path, progress=Silent()).winner
    assert winner is not None
    assert winner.run.seq_len <= 448


def test_a_job_of_whisper_needs_clips(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    text = path.read_text().replace(", ".join(MODELS), "openai/whisper-tiny")
    path.write_text(text.replace("sequence_length: 64\n", ""))
    progress = Silent()
    assert "job" not in run_plan(path, progress=progress).files
    assert any("learns from clips with transcripts" in line for line in progress.said)
    write_clip(tmp_path / "a.wav", 1.0)
    row = json.dumps({"audio": "a.wav", "text": "what was said"})
    (data,) = tmp_path.glob("*.jsonl")
    data.write_text(f"{row}\n" * 8)
    text = path.read_text().replace("weights: random", "weights: pretrained")
    path.write_text(text.replace("text_column: ", "audio_column: audio, text_column: "))
    job = run_plan(path, progress=progress).files["job"]
    assert "AutoModelForSpeechSeq2Seq" in job.read_text()
    (line, *_) = job.with_name("train.jsonl").read_text().splitlines()
    assert json.loads(line) == {"audio": str(tmp_path / "a.wav"), "text": "what was said"}


def test_a_model_that_a_setting_refuses_leaves_the_others_in_the_plan(tmp_path: Path) -> None:
    models = f"{MODELS[0]}, albert/albert-base-v2"
    path = write_config(tmp_path, profile="none", models=models)
    path.write_text(path.read_text() + "gradient_checkpointing: true\n")
    answer = run_plan(path, progress=Silent())
    assert answer.winner is not None
    assert {one.run.model for one in answer.finetune} == {MODELS[0]}
    assert {one.model for one in answer.refused} == {"albert/albert-base-v2"}
    written = json.loads((tmp_path / "out" / "answer.json").read_text())
    assert "the albert of transformers has none" in written["refused"][0]["reason"]
    (line,) = (line for line in written["explanation"] if line.startswith("left out: "))
    assert line.startswith("left out: albert-base-v2 lora, albert-base-v2 qlora: gradient_ch")


def test_a_plan_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none", models="albert/albert-base-v2")
    path.write_text(path.read_text() + "gradient_checkpointing: true\n")
    with pytest.raises(ConfigError, match="the albert of transformers has none"):
        run_plan(path, progress=Silent())


def dry_run_with_a_tight_limit(folder: Path, more: str = "") -> tuple[Answer, Candidate]:
    """The answer where the best candidate needs just what the limit allows, and that candidate."""
    (folder / "free").mkdir()
    free = run_plan(write_config(folder / "free", profile="none"), progress=Silent()).winner
    assert free is not None
    limit = f"{round(free.memory_bytes.value) + 1} B"
    path = write_config(folder, profile="none", finetune_memory=limit)
    path.write_text(path.read_text() + more)
    return run_plan(path, progress=Silent()), free


def test_a_dry_run_crowns_no_coin_flip_and_says_what_may_fit(tmp_path: Path) -> None:
    answer, bold = dry_run_with_a_tight_limit(tmp_path)
    assert answer.winner is not None
    assert answer.winner.chance_of_both_stages >= 0.95
    assert bold.run in [one.run for one in answer.may_fit]
    text = (tmp_path / "out" / "answer.md").read_text()
    line = next(line for line in text.splitlines() if describe(bold.run) in line)
    assert line.startswith("may fit, 50% chance: ")
    rows = json.loads((tmp_path / "out" / "answer.json").read_text())["may_fit"]
    assert [row["name"] for row in rows] == [describe(one.run) for one in answer.may_fit]
    assert rows[0]["chance_of_both_stages"] < 0.95
    assert "may fit, 50% chance" in (tmp_path / "out" / "report.html").read_text()
    assert all(one.chance_of_both_stages >= 0.95 for one in answer.front)


def test_a_dry_run_is_as_bold_as_it_was_asked_to_be(tmp_path: Path) -> None:
    answer, bold = dry_run_with_a_tight_limit(tmp_path, "confidence: 0.5\n")
    assert answer.winner is not None
    assert answer.winner.run == bold.run


def test_a_dry_run_that_is_sure_of_nothing_has_no_winner_and_no_job(tmp_path: Path) -> None:
    (tmp_path / "free").mkdir()
    path = write_config(tmp_path / "free", profile="none")
    candidates = run_plan(path, progress=Silent()).finetune
    least = min(one.memory_bytes.value for one in candidates)
    path = write_config(tmp_path, profile="none", finetune_memory=f"{round(least)} B")
    answer = run_plan(path, progress=Silent())
    assert answer.winner is None
    assert answer.may_fit
    assert "job" not in answer.files
    lines = terminal.explanation(answer)
    assert lines[0].startswith("Nothing meets every limit with the requested confidence of 95%")
    assert "`profile: frontier` measures what may fit" in lines[1]
    assert any(line.startswith("may fit, ") for line in lines)
    assert CliRunner().invoke(main, ["run", str(path)]).exit_code == 1


def test_a_dry_run_answers_for_an_accelerator_that_is_not_here(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    path.write_text(path.read_text().replace("gpu: cpu", "gpu: a100-sxm-80gb"))
    answer = run_plan(path, progress=Silent())
    assert answer.gpu.key == "a100-sxm-80gb"
    assert answer.winner is not None


def test_profiling_an_accelerator_that_is_not_here_is_refused_at_once(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace("gpu: cpu", "gpu: a100-sxm-80gb"))
    with pytest.raises(ConfigError, match=r"gpu: a100-sxm-80gb is not in this machine .* none"):
        run_plan(path, progress=Silent())


@pytest.mark.parametrize("outcome", ["oom", "crashed", "killed", "timeout", "error"])
def test_a_failed_profile_is_a_result_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    monkeypatch.setattr(FakeProfiler, "OUTCOMES", {"lora": outcome})
    answer = run_plan(write_config(tmp_path), progress=Silent())
    assert answer.winner is not None
    assert answer.winner.run.method == "qlora"
    failed = [one for one in answer.finetune if one.measured and one.run.method == "lora"]
    assert failed
    assert all(outcome in one.failure for one in failed)


def test_a_time_out_leaves_the_answer_open_and_counts_until_more_time_is_given(
    tmp_path: Path, fake_device: type[FakeProfiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_device, "OUTCOMES", {"lora": "timeout", "qlora": "timeout"})
    path = write_config(tmp_path, models=MODELS[0])
    first = run_plan(path, progress=Silent())
    tried = [one for one in first.finetune if one.measured]
    assert first.winner is None
    assert {one.verdict for one in tried} == {"undecided"}
    rows = {row["source"] for row in first.to_dict()["finetune"] if row["outcome"] == "timeout"}
    assert rows == {"predicted"}
    assert len(tried) == len(first.finetune)  # a time-out says nothing about larger batches
    assert first.search.confidence < 0.5
    measured = len(fake_device.calls)
    monkeypatch.setattr(fake_device, "OUTCOMES", {})
    assert run_plan(path, progress=Silent()).winner is None
    assert len(fake_device.calls) == measured
    path.write_text(path.read_text() + "profile_timeout: 20min\n")
    progress = Silent()
    assert run_plan(path, progress=progress).winner is not None
    assert any("measured before with a profile_timeout that was too" in x for x in progress.said)


def test_a_busy_device_is_told_once_and_marked_in_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "whichlora.workflow.session.busy", lambda _: "other programs use 95% of 2 cores"
    )
    progress = Silent()
    answer = run_plan(write_config(tmp_path), progress=progress)
    told = [line for line in progress.said if line.startswith("other programs")]
    assert told == [
        "other programs use 95% of 2 cores: times measured now may be too long; records say so"
    ]
    marks = {one.measurement.provenance["busy"] for one in answer.compared}
    assert marks == {"other programs use 95% of 2 cores"}


def test_a_plan_without_gpu_asks_for_one_where_there_is_none(
    tmp_path: Path, fake_device: type[FakeProfiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whichlora.store.gpus.detect_gpus", tuple)
    path = write_config(tmp_path)
    path.write_text(path.read_text().replace("gpu: cpu\n", ""))
    result = CliRunner().invoke(main, ["run", str(path)])
    assert result.exit_code == 2
    assert "gpu: is not set, and this machine has no GPU" in result.stderr
    assert "or set gpu: cpu" in result.stderr
    assert not fake_device.calls


def test_running_out_of_memory_rules_out_larger_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_device: type[FakeProfiler]
) -> None:
    monkeypatch.setattr(FakeProfiler, "OUT_OF_MEMORY_BYTES", 1 << 20)
    answer = run_plan(write_config(tmp_path, profile="all"), progress=Silent())
    assert answer.winner is None
    per_variant = [(run.model, run.method) for run in fake_device.calls if run.method]
    finetunes = [run for run in fake_device.calls if run.phase == "finetune"]
    assert len(finetunes) == len({(run.model, run.method) for run in finetunes})
    assert per_variant


def test_nothing_fits_names_the_closest_and_what_it_lacks(tmp_path: Path) -> None:
    from whichlora.terminal import explanation

    answer = run_plan(write_config(tmp_path, finetune_memory="1MiB"), progress=Silent())
    assert answer.winner is None
    text = "\n".join(explanation(answer))
    assert "Nothing meets every limit." in text
    assert "it would need peak memory limit of at least" in text


def test_the_answer_lies_in_files_that_add_up(plain: Finished) -> None:
    answer = plain.answer
    written = json.loads((plain.folder / "out" / "answer.json").read_text())
    assert answer.winner is not None
    assert written["winner"]["model"] == answer.winner.run.model
    with (plain.folder / "out" / "candidates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(answer.inference) + len(answer.finetune)
    compile((plain.folder / "out" / "train.py").read_text(), "train.py", "exec")
    with (plain.folder / "out" / "predicted_vs_measured.csv").open() as file:
        compared = list(csv.DictReader(file))
    assert {row["quantity"] for row in compared} >= {"peak_allocated", "step", "prefill", "decode"}


@pytest.mark.parametrize("width", [80, 100])
def test_the_answer_fits_a_terminal_with_numbers_and_words_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    answer = run_plan(write_config(tmp_path, total_time="1min"), progress=Silent())
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr("whichlora.terminal.answer.open_console", lambda: console)
    terminal.print_answer(answer)
    lines = text.getvalue().splitlines()
    assert [one for one in lines if len(one) > width and str(tmp_path) not in one] == []
    verdicts = re.findall(r" (WINNER|meets|misses|undecided) *$", text.getvalue(), re.MULTILINE)
    assert len(verdicts) == len(answer.inference) + len(answer.finetune)


TWENTY = ", ".join(DEFAULT_MODELS)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("gpu", ["rtx-4090-24gb", "a100-sxm-80gb"])
def test_with_twenty_models_the_winner_stands_on_one_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    path = write_config(tmp_path, profile="none", models=TWENTY)
    text = path.read_text().replace("gpu: cpu", f"gpu: {gpu}").replace("fp32", "bf16")
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    answer = run_plan(Path("config.yaml"), progress=Silent())
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("whichlora.terminal.short.open_console", lambda: console)
    terminal.print_short(answer)
    lines = out.getvalue().splitlines()
    assert len(lines) <= 24, out.getvalue()
    assert answer.winner is not None
    assert sum(line.startswith(f"Winner: {answer.winner.run.model}") for line in lines) == 1
    assert sum(line.rstrip().endswith("WINNER") for line in lines) == 1
    assert any("--all" in line for line in lines)


def test_the_short_answer_keeps_what_must_be_known_before_the_winner_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "Why? ", "chosen": "Because. " * 40, "rejected": "No."}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    keys = {
        "gpu": "t4-16gb",
        "models": "Qwen/Qwen3-0.6B",
        "methods": "lora",
        "dataset": "pairs.jsonl",
        "sequence_length": 16,
        "profile": "none",
        "precision": "bf16",
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(keys))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    answer = run_plan(Path("plan.yaml"), progress=Silent())
    terminal.print_short(answer)
    printed = capsys.readouterr().out
    for caution in (
        "lengths are estimated",
        "rows are cut to 16 tokens",
        "rejected answers are kept, and not trained on",
        "t4-16gb has no bf16 matrix units",
    ):
        assert caution in printed
        assert any(caution in noted for noted in answer.to_dict()["cautions"])
    assert "not verified" not in printed


@pytest.mark.parametrize("estimated", [False, True])
def test_the_job_cuts_rows_where_the_plan_says_if_their_lengths_are_estimated(
    tmp_path: Path, estimated: bool
) -> None:
    config = write_config(tmp_path, profile="none")
    text = config.read_text()
    (longest,) = {int(n) for n in re.findall(r"sequence_length: (\d+)", text)}
    text = text.replace("weights: random\n", "") if estimated else text
    config.write_text(text)
    answer = run_plan(config, progress=Silent())
    assert answer.winner is not None
    job = (tmp_path / "out" / "train.py").read_text()
    assert ("estimated" in answer.tokens) is estimated
    cut = longest if estimated else answer.winner.run.seq_len
    assert f"SEQ_LEN = {cut}\n" in job
    recipe = read_recipe(tmp_path / "out")
    done = write_export(recipe, "transformers", tmp_path / "out")
    peak = answer.winner.prediction.memory.device_used_bytes
    assert done.before.memory.device_used_bytes == done.after.memory.device_used_bytes == peak
    assert (tmp_path / "out" / "train.py").read_text() == job


def test_a_later_answer_without_a_winner_says_that_the_job_is_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    path = write_config(tmp_path, profile="none")
    assert run_plan(path, progress=Silent()).winner is not None
    path = write_config(tmp_path, profile="none", total_time="1ms")
    progress = Silent()
    assert run_plan(path, progress=progress).winner is None
    job = tmp_path / "out" / "train.py"
    assert f"{job}: is of an earlier answer, not of this one" in progress.said
    with pytest.raises(ConfigError, match="nothing to export"):
        read_recipe(tmp_path / "out")


def test_an_edited_script_stops_the_next_run_before_its_search(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    job = run_plan(write_config(tmp_path, profile="none"), progress=Silent()).files["job"]
    edited = job.read_text() + "# mine\n"
    job.write_text(edited)
    with pytest.raises(DataFileError, match=r"train\.py: was edited.*set another output_dir"):
        run_plan(write_config(tmp_path), progress=Silent())
    assert job.read_text() == edited
    assert fake_device.calls == []


def test_a_folder_from_before_there_were_records_is_run_again(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    run_plan(path, progress=Silent())
    out = tmp_path / "out"
    (out / RECORD).unlink()
    path.write_text(path.read_text().replace("gpu: cpu", "gpu: l4"))
    answer = run_plan(path, progress=Silent())
    assert json.loads((out / "answer.json").read_text())["gpu"] == answer.gpu.key == "l4-24gb"
    assert set(json.loads((out / RECORD).read_text())["files"]) <= OF_A_RUN


def test_every_file_that_an_answer_may_replace_is_asked_for_before_the_search(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    path = write_config(tmp_path)
    run_plan(path, progress=Silent())
    out = tmp_path / "out"
    asked = {file.name for file in files_of(load_plan(path))}
    assert asked >= set(json.loads((out / RECORD).read_text())["files"])
    assert asked <= OF_A_RUN
    calls = len(fake_device.calls)
    for name in ("recipe.json", "predicted_vs_measured.csv"):
        (out / name).write_text("mine")
    with pytest.raises(DataFileError) as caught:
        run_plan(path, progress=Silent(), fresh=True)
    files = f"{out / 'recipe.json'}, {out / 'predicted_vs_measured.csv'}"
    assert str(caught.value).startswith(f"{files}: were edited since WhichLoRA wrote them; set")
    assert len(fake_device.calls) == calls


def test_of_a_list_of_gpus_every_folder_is_asked_before_the_first_search(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    path.write_text(path.read_text().replace("gpu: cpu\n", "gpu: [l4, 4090]\n"))
    mine = tmp_path / "out" / "rtx-4090-24gb" / "train.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(DataFileError, match=r"rtx-4090-24gb/train\.py: exists"):
        run_plan(path, progress=Silent())
    assert not (tmp_path / "out" / "l4-24gb").exists()


def test_a_rerun_keeps_nothing_of_an_earlier_answer_that_it_does_not_have(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    assert run_plan(path, progress=Silent()).files["data_train"].is_file()
    out = tmp_path / "out"
    counts = "dataset: {samples: 200, mean_tokens: 40}"
    path.write_text(re.sub("dataset: .*", counts, path.read_text()))
    progress = Silent()
    assert run_plan(path, progress=progress).winner is not None
    assert not (out / "train.jsonl").exists()
    assert f"{out / 'train.jsonl'}: was of an earlier answer and is removed" in progress.said
    (out / "train.jsonl").write_text("mine")  # as the script asks for
    run_plan(path, progress=Silent())
    assert (out / "train.jsonl").read_text() == "mine"


@pytest.mark.parametrize("weights", ["random", "pretrained"])
def test_rows_are_cut_to_the_positions_that_a_model_can_look_up(
    tmp_path: Path, weights: str
) -> None:
    data = tmp_path / "long.jsonl"
    data.write_text((json.dumps({"text": "a word or two " * 1000}) + "\n") * 40)
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "models: [gpt2, EleutherAI/pythia-160m]\nmethods: lora\ngpu: a100-sxm-80gb\n"
        f"dataset: {data}\nprofile: none\nweights: {weights}\noutput_dir: {tmp_path / 'out'}\n"
        "prefer: order\nstage2_profile: {batch_size: [1, 2]}\n"
    )
    progress = Silent()
    answer = run_plan(plan, progress=progress)
    lengths = {one.run.model: one.run.seq_len for one in answer.finetune}
    assert lengths == {"gpt2": 1024, "EleutherAI/pythia-160m": 2048}
    assert "gpt2: rows are cut to 1024 tokens, all its positions" in progress.said
    assert answer.winner is not None
    assert answer.winner.run.model == "gpt2"
    assert "rows are cut to 1024 tokens" in answer.tokens
    assert "SEQ_LEN = 1024\n" in (tmp_path / "out" / "train.py").read_text()


def test_a_training_that_was_stopped_goes_on_and_one_that_ended_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = (
        "import pathlib, sys, time; out = pathlib.Path(sys.argv[1]) / 'output'; "
        "(out / 'checkpoint-5').mkdir(parents=True, exist_ok=True); time.sleep(0.02); "
        "(out / 'checkpoint-5/trainer_state.json').write_text('{}'); "
        "(out / 'starts').open('a').write(f'{sys.argv[2:]}'); "
        "'--resume' in sys.argv or sys.exit(1); "
        "(out / 'result.json').write_text('{\"train_s\": 3.0}')"
    )
    command = [sys.executable, "-c", job, str(tmp_path / "out")]
    monkeypatch.setattr("whichlora.exports.launch.train_command", lambda *_: command)
    config = write_config(tmp_path, profile="none")
    config.write_text(config.read_text() + "train: true\n")
    for expected, starts in ((2, "[]"), (0, "[]['--resume']"), (0, "[]['--resume']")):
        result = CliRunner().invoke(main, ["run", str(config)])
        assert result.exit_code == expected
        assert (tmp_path / "out/output/starts").read_text() == starts
    assert "trained before: " in result.stderr
    config.write_text(config.read_text() + "learning_rate: 0.001\n")  # another job
    assert CliRunner().invoke(main, ["run", str(config)]).exit_code == 2
    assert (tmp_path / "out/output/starts").read_text() == "[]['--resume'][]"


def test_a_training_that_fails_costs_nobody_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [sys.executable, "-c", "raise OSError('no weights here')"]
    monkeypatch.setattr("whichlora.exports.launch.train_command", lambda *_: failing)
    config = write_config(tmp_path, profile="none")
    config.write_text(config.read_text() + "train: true\n")
    result = CliRunner().invoke(main, ["run", str(config)])
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert "train.py: ended with exit code 1: OSError: no weights here" in last
    assert "Winner: Qwen/Qwen2.5-0.5B" in result.stdout
    assert "start the fine-tuning with: " in result.stdout
    assert (tmp_path / "out" / "report.html").is_file()
    assert (
        "no weights"
        in json.loads((tmp_path / "out" / "answer.json").read_text())["training"]["error"]
    )


def test_a_plan_of_a_plain_loop_has_an_answer_and_no_train_py(tmp_path: Path) -> None:
    config = write_config(tmp_path, profile="none")
    config.write_text(config.read_text() + "trainer: loop\n")
    result = CliRunner().invoke(main, ["run", str(config)])
    assert result.exit_code == 0
    assert "no train.py: it can't be written for trainer loop, whose steps" in result.stderr
    assert "start the fine-tuning with" not in result.stdout
    assert not (tmp_path / "out" / "train.py").exists()
    with pytest.raises(ConfigError, match=r"train\.py: it can't be written for trainer loop"):
        write_export(read_recipe(tmp_path / "out"), "transformers", tmp_path / "out")
    config.write_text(config.read_text() + "train: true\n")
    refused = CliRunner().invoke(main, ["run", str(config)])
    assert refused.exit_code == 2
    assert "train: true needs train.py: it can't be written for trainer loop" in refused.stderr


def test_labelled_answers_lead_to_a_job_of_batches_that_the_trainer_takes(tmp_path: Path) -> None:
    lines = "".join(f"q{number},{'a ' * number},{number % 3 == 0}\n" for number in range(1, 30))
    (tmp_path / "rows.csv").write_text(f"prompt,completion,label\n{lines}")
    (tmp_path / "plan.yaml").write_text(
        f"models: {MODELS[0]}\nmethods: lora\ndataset: rows.csv\ntrainer: kto\ngpu: l4-24gb\n"
        "profile: none\nweights: random\nsequence_length: 64\noutput_dir: out\n"
        "stage2_profile: {batch_size: [1, 2]}\n"
    )
    answer = run_plan(tmp_path / "plan.yaml", progress=Silent())
    # TRL exchanges the answers of a batch for its KL term, which one row has none to
    assert {candidate.run.batch_size for candidate in answer.finetune} == {2}
    first = json.loads((tmp_path / "out" / "train.jsonl").read_text().splitlines()[0])
    assert first == {"prompt": "q1", "completion": "a ", "label": False}
    assert "KTOTrainer(" in (tmp_path / "out" / "train.py").read_text()


def test_a_trainer_whose_library_is_missing_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "trl" else there(name)
    )
    with pytest.raises(ConfigError, match=r"needs trl, which is not installed: pip install trl=="):
        require_profiler(RunConfig(model="tiny", trainer="dpo"))
    require_profiler(RunConfig(model="tiny"))


def test_a_record_that_could_not_be_kept_is_not_measured(
    tmp_path: Path, fake_device: type[FakeProfiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        DataFileError, match=r"Permission denied\); set calibration_dir, or \$WHICH"
    ):
        run_plan(write_config(tmp_path), progress=Silent())
    assert fake_device.calls == []


def test_a_run_ends_with_a_report_that_is_made_from_its_files_alone(tmp_path: Path) -> None:
    from whichlora.html import write_report

    answer = run_plan(write_config(tmp_path), progress=Silent())
    report = tmp_path / "out" / "report.html"
    assert answer.files["report"] == report
    moved = tmp_path / "moved"
    (tmp_path / "out").rename(moved)
    written = (moved / "report.html").read_bytes()
    assert write_report(moved).read_bytes() == written


def test_bytes_by_part_in_the_answer_add_up_to_the_predicted_peak(plain: Finished) -> None:
    written = json.loads((plain.folder / "out" / "answer.json").read_text())
    for row in written["finetune"] + written["inference"] + written["side_by_side"]:
        assert sum(row["breakdown"].values()) == row["predicted_peak_bytes"]


def test_the_winner_is_set_beside_every_method_and_rank(plain: Finished) -> None:
    answer = plain.answer
    assert answer.winner is not None
    shape = (answer.winner.run.model, answer.winner.run.batch_size, answer.winner.run.seq_len)
    found = {(one.run.method, one.run.r) for one in answer.side_by_side}
    assert found >= {(method, r) for method in ("lora", "qlora", "dora") for r in (4, 64)}
    assert {one.run.method for one in answer.side_by_side} >= {"full", "qdora"}
    assert {(o.run.model, o.run.batch_size, o.run.seq_len) for o in answer.side_by_side} == {shape}
    assert answer.winner.run in [one.run for one in answer.side_by_side]


def test_what_was_measured_stands_beside_its_predictions_with_bounds(plain: Finished) -> None:
    written = json.loads((plain.folder / "out" / "answer.json").read_text())
    assert {row["quantity"] for row in written["comparison"]} == {
        "memory_bytes", "time_per_token_s",
    }  # fmt: skip
    for row in written["comparison"]:
        for stage in ("cold", "before", "after"):
            assert row[stage]["low"] <= row[stage]["value"] <= row[stage]["high"]
    steps = [
        row["measured"] / row["cold"]["value"]
        for row in written["comparison"]
        if row["quantity"] == "time_per_token_s"
    ]
    assert steps == pytest.approx([FakeProfiler.TIME_FACTOR] * len(steps), rel=0.01)


def test_the_refit_brings_predictions_closer_and_names_itself(everything: Finished) -> None:
    from whichlora.terminal import comparison_rows

    answer = everything.answer
    rows = [row for row in comparison_rows(answer.compared) if row["quantity"] == "step"]
    cold = max(abs(row["cold_error"]) for row in rows)
    after = max(abs(row["after_error"]) for row in rows)
    assert cold == pytest.approx(1 - 1 / FakeProfiler.TIME_FACTOR, rel=0.01)
    assert after < cold / 3
    [prediction] = estimates.estimate(
        [answer.finetune[0].run], ["cpu"], calibration_dir=everything.folder / "calibration"
    )
    assert " runs on cpu-" in prediction.basis


def test_total_time_follows_the_tokens_of_the_data(plain: Finished) -> None:
    answer = plain.answer
    best = answer.winner
    assert best is not None
    assert best.total_s is not None
    measurement = best.measurement
    assert measurement is not None
    per_token = sum(measurement.step_s) / (sum(measurement.batch_seq_len) * best.run.batch_size)
    padded = sum(
        (min(64, max(lengths)) * len(lengths) for lengths in _batches(plain.folder, best.run)), 0
    )
    assert best.total_s.value == pytest.approx(per_token * padded, rel=0.15)


def _batches(folder: Path, run: RunConfig) -> list[list[int]]:
    """Text lengths of some shuffle into batches; the widths' distribution is what counts."""
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    lengths = [len(row["text"]) for row in rows][: round(len(rows) * 0.95)]
    random.Random(1).shuffle(lengths)
    size = run.batch_size
    return [lengths[i : i + size] for i in range(0, len(lengths), size)]


def test_a_finished_run_resumes_without_measuring_again(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    path = write_config(tmp_path)
    first = run_plan(path, progress=Silent())
    measured = len(fake_device.calls)
    again = run_plan(path, progress=Silent())
    assert len(fake_device.calls) == measured
    assert first.winner is not None
    assert again.winner is not None
    assert again.winner.run == first.winner.run


def write_local_model(folder: Path, num_layers: int) -> None:
    config = dict(load_model(MODELS[0]).config) | {"num_hidden_layers": num_layers}
    (folder / "my-model").mkdir(exist_ok=True)
    (folder / "my-model" / "config.json").write_text(json.dumps(config))


def test_a_folder_whose_config_has_changed_is_measured_again(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    path = write_config(tmp_path, models="./my-model")
    write_local_model(tmp_path, num_layers=4)
    small = run_plan(path, progress=Silent())
    measured = len(fake_device.calls)
    write_local_model(tmp_path, num_layers=24)
    progress = Silent()
    large = run_plan(path, progress=progress)
    assert len(fake_device.calls) > measured
    assert not any(line.startswith("resumed") for line in progress.said)
    assert any(
        line.endswith("on another config.json of this model: measured again as needed")
        for line in progress.said
    )
    assert small.winner is not None
    assert large.winner is not None
    assert small.winner.total_s is not None
    assert large.winner.total_s is not None
    assert large.winner.total_s.value > 2 * small.winner.total_s.value


def test_what_other_library_versions_measured_is_measured_again(
    tmp_path: Path, fake_device: type[FakeProfiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path)
    older = installed_versions() | {"transformers": "5.22.0"}
    monkeypatch.setattr("fake_profiler.installed_versions", lambda: older)
    run_plan(path, progress=Silent())
    measured = len(fake_device.calls)
    monkeypatch.setattr("fake_profiler.installed_versions", installed_versions)
    progress = Silent()
    run_plan(path, progress=progress)
    assert len(fake_device.calls) > measured
    said = [line for line in progress.said if "measured before" in line]
    assert said == [
        f"{measured} runs were measured before with transformers 5.22.0: measured again as needed"
    ]


def test_another_number_of_batches_is_measured_again(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    path = write_config(tmp_path)
    run_plan(path, progress=Silent())
    measured = len(fake_device.calls)
    path.write_text(path.read_text() + "num_batches: 7\n")
    progress = Silent()
    run_plan(path, progress=progress)
    assert len(fake_device.calls) > measured
    assert any("measured before with 5 batches" in line for line in progress.said)


def test_fresh_measures_again(tmp_path: Path, fake_device: type[FakeProfiler]) -> None:
    path = write_config(tmp_path)
    run_plan(path, progress=Silent())
    measured = len(fake_device.calls)
    run_plan(path, progress=Silent(), fresh=True)
    assert len(fake_device.calls) > measured


def test_a_second_start_in_the_same_folder_is_refused_before_it_measures(
    tmp_path: Path, fake_device: type[FakeProfiler]
) -> None:
    config = write_config(tmp_path)
    with hold_folder(tmp_path / "out"):
        done = CliRunner().invoke(main, ["run", str(config)])
    assert done.exit_code == 2
    assert f"(process {os.getpid()} on" in done.stderr
    assert not fake_device.calls


@pytest.mark.slow
def test_killing_the_run_again_and_again_loses_no_finished_measurement(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="all", models=MODELS[0])
    calls = tmp_path / "calls"
    environment = os.environ | {
        "WHICHLORA_TEST_CALLS": str(calls),
        "PYTHONPATH": str(Path(whichlora.__file__).parents[1]),
    }
    script = Path(__file__).parents[1] / "run_with_fake_profiler.py"
    command = [sys.executable, str(script), "0.05", "run", str(path)]

    def records() -> int:
        files = (tmp_path / "calibration").rglob("*.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    kills = 0
    while records() < 7:
        wanted = 1 + max(records(), 3 * kills)
        killed = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 60
        while records() < wanted and time.monotonic() < deadline and killed.poll() is None:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        kills += 1
        assert records() >= wanted
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "resumed:" in done.stderr
    # at most the one measurement that was under way when a process died ran twice
    assert calls.read_text().count("\n") <= records() + kills
    assert records() == 2 * 2 + 6  # two forms in which the model is served


def test_a_time_per_token_times_the_tokens_it_is_of_is_the_total_beside_it(
    everything: Finished,
) -> None:
    answer = everything.answer
    with (everything.folder / "out" / "candidates.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "finetune"]
    alone = [row for row in rows if row["batch_size"] == "1" and row["outcome"] in ("", "ok")]
    assert {row["source"] for row in alone} == {"measured"}
    tokens = answer.dataset["tokens_per_epoch"] * answer.dataset["epochs"]
    for row in alone:  # a batch of one carries no padding
        of_total = float(row["total_time_s"]) / float(row["time_per_token_s"])
        assert of_total == pytest.approx(tokens, rel=1e-6)


def test_a_plan_without_a_precision_is_in_fp16_on_a_card_without_bf16(tmp_path: Path) -> None:
    path = write_config(tmp_path, profile="none")
    text = re.sub("(?m)^gpu: .*", "gpu: t4-16gb", path.read_text(encoding="utf-8"))
    path.write_text(re.sub("(?m)^precision: .*\n", "", text), encoding="utf-8")
    answer = run_plan(path, progress=Silent())
    assert answer.plan.finetune.precision == answer.plan.inference.precision == "fp16"
    script = (answer.plan.output_dir / "train.py").read_text(encoding="utf-8")
    assert "fp16=True" in script
    assert "bf16" not in script
