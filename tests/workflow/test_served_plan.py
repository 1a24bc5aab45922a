"""A plan whose models an engine serves: stage 1 is what the engine answers when it starts."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_profiler import FakeProfiler, pretend_device
from plan_runs import Silent, write_config
from rich.console import Console

from whichlora.errors import ConfigError, DataFileError
from whichlora.html.figures import build_figures
from whichlora.html.source import read_source
from whichlora.search.feasibility import Candidate
from whichlora.serving import get_engine
from whichlora.spec.results import ServingPrediction
from whichlora.terminal.answer import explanation, print_answer
from whichlora.terminal.short import print_short
from whichlora.units import format_seconds
from whichlora.workflow import estimates, session
from whichlora.workflow.answer import Answer
from whichlora.workflow.run import run_plan

LLAMA, QWEN = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-14B"
SMALL, GEMMA = "Qwen/Qwen2.5-0.5B", "google/gemma-2-2b"


def answered(folder: Path, **keys: Any) -> Answer:
    plan = {
        "gpu": "rtx-3090-24gb",
        "profile": "none",
        "models": [LLAMA, QWEN],
        "methods": ["qlora"],
        "serving": "vllm",
        "stage1_profile": {"concurrency": 4, "context": 4096},
        "stage2_profile": {"batch_size": [1, 2]},
        "sequence_length": 512,
        "dataset": {"samples": 1000, "tokens": 200_000},
        "output_dir": "out",
    }
    path = folder / "plan.yaml"
    merged = {k: v for k, v in (plan | keys).items() if v is not None}
    path.write_text(json.dumps(merged))
    return run_plan(path, progress=Silent())


@pytest.mark.parametrize(
    ("flag", "fault"),
    [
        ("max_model_len", "is the setting context; accepted: stage1_profile.context"),
        ("quantization", "is the setting quant; accepted: quant"),
        ("cpu_offload_gb", "keeps weights on the host, which is not predicted; give more gpus or"),
    ],
)
def test_a_flag_that_is_no_option_says_why(flag: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"serving_options.{flag}: {fault}"):
        answered(tmp_path, serving_options={flag: 4})


def engine_of(answer: Answer) -> ServingPrediction:
    assert answer.serving is not None
    serving = answer.serving.prediction.serving
    assert serving is not None
    return serving


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    return answered(tmp_path_factory.mktemp("plain"))


def test_a_model_goes_on_only_if_the_engine_starts_with_it(plain: Answer) -> None:
    assert plain.kept == (LLAMA,)
    assert {each.run.model for each in plain.finetune} == {LLAMA}
    assert plain.winner is not None
    assert plain.winner.run.model == LLAMA
    assert any("vllm does not start: " in line and QWEN in line for line in explanation(plain))


def test_the_answer_is_what_an_estimate_of_the_same_engine_says(plain: Answer) -> None:
    assert plain.serving is not None
    (estimated,) = estimates.estimate([plain.serving.run], ["rtx-3090-24gb"])
    assert estimated.serving == engine_of(plain)
    assert engine_of(plain).max_running >= 4


def test_a_plan_leaves_out_what_the_engine_does_not_serve_in_the_dtype_of_the_card(
    tmp_path: Path,
) -> None:
    """vLLM refuses Gemma 2 in float16, and a T4 has no bf16."""
    models = {"models": [GEMMA, SMALL], "methods": ["lora"]}
    answer = answered(tmp_path, gpu="t4-16gb", **models)
    assert answer.kept == (SMALL,)
    assert any(GEMMA.partition("/")[2] in x and "in float16" in x for x in explanation(answer))


SEES = "Qwen/Qwen3.5-4B"


def test_what_trains_without_its_tower_is_judged_and_started_without_it(
    tmp_path: Path,
) -> None:
    """The causal class of Qwen3.5 is its text alone, and so are the merged weights."""
    keys = {"models": [SEES], "methods": ["lora"], "gpu": "a100-sxm-80gb"}
    answer = answered(tmp_path, **keys)
    assert "--language-model-only" in answer.files["serving"].read_text()
    assert answer.serving is not None
    alone, options = answer.serving.run, answer.serving.run.serving_options
    (with_tower,) = estimates.estimate([replace(alone, serving_options=())], ["a100-sxm-80gb"])
    assert options
    assert with_tower.serving is not None
    assert engine_of(answer).kv_pool_bytes > with_tower.serving.kv_pool_bytes


def test_a_base_under_its_adapter_keeps_its_tower(tmp_path: Path) -> None:
    keys = {"models": [SEES], "methods": ["lora"], "gpu": "a100-sxm-80gb", "serve": "as-trained"}
    answer = answered(tmp_path, **keys)
    assert answer.serving is not None
    assert "--language-model-only" not in engine_of(answer).command


def test_what_trains_on_images_keeps_its_tower(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")

    image.new("RGB", (448, 448)).save(tmp_path / "a.png")
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Black."}]
    row = json.dumps({"messages": turns, "images": ["a.png"]})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 20)
    data = {"path": "rows.jsonl", "images_column": "images"}
    keys = {"models": [SEES], "methods": ["lora"], "gpu": "a100-sxm-80gb", "dataset": data}
    text = answered(tmp_path, **keys).files["serving"].read_text()
    assert "base = AutoModelForImageTextToText" in text
    assert "AutoProcessor" in text
    assert "--language-model-only" not in text


LARGE = "meta-llama/Llama-3.1-70B"  # weights of 131 GiB


@pytest.mark.parametrize(
    ("engine", "option", "keys", "ranks"),
    [
        ("vllm", "tensor_parallel_size", {"gpus": 3}, 2),
        ("sglang", "tp_size", {"gpus": [2, 4]}, 4),
        ("vllm", "tensor_parallel_size", {"gpus": 4, "nodes": 2}, 2),
        ("vllm", "tensor_parallel_size", {"gpus": 4, "models": [SMALL]}, 2),  # it has 14 heads
        ("vllm", "tensor_parallel_size", {"gpus": 2, "models": [SMALL], "serve": "merged"}, 2),
        ("llama-cpp", "devices", {"gpus": 3, "models": [LLAMA]}, 3),
    ],
)
def test_an_engine_divides_a_model_over_the_gpus_of_one_machine(
    tmp_path: Path, engine: str, option: str, keys: dict[str, Any], ranks: int
) -> None:
    several = {"gpu": "h100", "serving": engine, "models": [LARGE], "parallel": "fsdp"}
    answer = answered(tmp_path, **several | keys)
    assert answer.serving is not None
    assert dict(answer.serving.run.serving_options) == {option: ranks}
    assert any(f"on {ranks} GPUs" in line for line in explanation(answer))
    (estimated,) = estimates.estimate([answer.serving.run], ["h100"])
    assert estimated.serving == engine_of(answer)


def test_a_plan_may_serve_on_fewer_gpus_than_it_trains_on(tmp_path: Path) -> None:
    alone = {"serving_options": {"tensor_parallel_size": 1}}
    answer = answered(tmp_path, gpu="h100", gpus=2, models=[LARGE], parallel="fsdp", **alone)
    assert answer.winner is None


def test_each_number_of_gpus_is_tried_and_the_one_that_meets_the_limits_serves(
    tmp_path: Path,
) -> None:
    """Over PCIe two L40S write faster than four, and one holds too few of the sequences."""
    asked = {"concurrency": 50, "context": 8192, "prefill_length": 7000, "tokens_to_generate": 500}
    keys = {"gpu": "l40s", "models": [LLAMA], "methods": ["lora"], "gpus": [1, 2, 4]}
    answer = answered(tmp_path, stage1_profile=asked | {"ttft": "2s", "tpot": "120ms"}, **keys)
    tried = [dict(each.run.serving_options) for each in answer.inference]
    assert tried == [{}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 4}]
    assert [each.chance > 0.9 for each in answer.inference] == [False, True, False]
    assert answer.winner is not None
    assert answer.serving is not None
    assert dict(answer.serving.run.serving_options) == {"tensor_parallel_size": 2}
    served = " ".join(explanation(answer))
    assert "tokens/s in all, with prompts of 7,000 and answers of 500 tokens" in served
    gpus = answer.winner.run.parallel.gpus
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert f"<code>python -m torch.distributed.run --nproc-per-node={gpus} " in report


def test_assumed_lengths_are_not_said_to_be_estimated_from_texts(plain: Answer) -> None:
    assert any(note.startswith("lengths are assumed, ") for note in plain.cautions)
    assert not any("UTF-8" in note for note in plain.cautions)


def test_the_files_and_the_terminal_name_engine_pool_concurrency_and_context(
    plain: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = engine_of(plain)
    said = f"by vllm {serving.version}: room for {serving.max_running} sequences of 4,096 tokens"
    print_answer(plain)
    shown = " ".join(capsys.readouterr().out.split())
    print_short(plain)
    assert f"serve it with: sh {plain.files['serving']}" in capsys.readouterr().out
    page = plain.files["report"].read_text()
    for text in (shown, plain.files["summary"].read_text(), page):
        assert said in text
        assert f"longest {serving.max_context:,}" in text
    row = json.loads(plain.files["answer"].read_text())["serving"]
    assert row["engine"]["kv_pool_bytes"] == serving.kv_pool_bytes
    assert row["max_running"] == serving.max_running


def test_a_narrow_terminal_breaks_no_name_of_stage_1(
    plain: Answer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminal() -> Console:
        return Console(width=80, force_terminal=True, color_system=None, highlight=False)

    monkeypatch.setattr("whichlora.terminal.answer.open_console", terminal)
    print_answer(plain)
    rows = capsys.readouterr().out.partition("stage 2")[0].splitlines()
    (row,) = [line.split() for line in rows if "Llama-3.1-8B" in line]
    assert row[-1] == "meets"


def test_the_script_starts_the_engine_exactly_as_it_was_judged(plain: Answer) -> None:
    text = plain.files["serving"].read_text()
    command = shlex.split(re.findall(r"^exec (.+)$", text, flags=re.MULTILINE)[0])
    judged = shlex.split(engine_of(plain).command)
    # the merged weights have a place of their own
    assert command == [*judged[:2], "./merged", *judged[3:], "$@"]
    assert 'PeftModel.from_pretrained(base, "output")' in text
    compile(re.findall(r"<<'END'\n(.+)END\n", text, flags=re.DOTALL)[0], "merge", "exec")


def test_weights_that_the_engine_does_not_load_are_judged_merged(plain: Answer) -> None:
    assert plain.winner is not None
    assert plain.winner.form is not None
    assert (plain.winner.form.serve, plain.winner.form.quant) == ("merged", "none")
    assert any(line.startswith("judged merged: vllm 0.33.0 reads no") for line in plain.cautions)


def test_a_form_that_is_asked_for_and_not_served_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^serving: vllm 0\.33\.0 reads no bitsandbytes"):
        answered(tmp_path, serve="as-trained")
    with pytest.raises(ConfigError, match="vllm cannot serve DoRA's magnitudes; use serve merged"):
        answered(tmp_path, serve="as-trained", methods=["dora"])


def test_a_refused_form_takes_no_part_beside_one_that_is_served(tmp_path: Path) -> None:
    answer = answered(tmp_path, serve="as-trained", methods=["lora", "dora"], models=[SMALL])
    assert {each.run.method for each in answer.finetune} == {"lora"}
    assert [(each.settings["phase"], each.settings["method"]) for each in answer.refused] == [
        ("inference", "dora")
    ]
    script = answer.files["serving"].read_text()
    assert "--enable-lora --max-lora-rank 16 --lora-modules adapter=./output" in script
    assert f"exec vllm serve {SMALL} " in script
    assert "merge" not in script.partition("\nset -e")[2]


@pytest.mark.parametrize(
    ("stage", "missed"),
    [
        ({"concurrency": 500, "context": 4096}, "concurrency"),
        ({"context": 60_000}, "context"),
    ],
)
def test_limits_on_sequences_reject_and_say_what_would_do(
    tmp_path: Path, stage: dict[str, int], missed: str
) -> None:
    answer = answered(tmp_path, models=[LLAMA], stage1_profile=stage)
    assert answer.winner is None
    (shape,) = answer.inference
    assert [check.limit for check in shape.checks if check.verdict == "misses"] == [missed]
    most = next(check.quantity.value for check in shape.checks if check.limit == missed)
    said = "\n".join(explanation(answer))
    assert f"Alone, {missed} {most:,.6g}" in said
    # just that much is met
    again = stage | {missed: int(most)}
    assert answered(tmp_path, models=[LLAMA], stage1_profile=again).winner is not None


def test_memory_is_the_engines_share_of_the_card(tmp_path: Path) -> None:
    limit = {"concurrency": 1, "context": 4096, "peak_memory": "20GiB"}
    assert answered(tmp_path, models=[LLAMA], stage1_profile=limit).winner is None
    answer = answered(
        tmp_path,
        models=[LLAMA],
        stage1_profile=limit,
        serving_options={"gpu_memory_utilization": 0.8},
    )
    assert answer.winner is not None
    assert answer.serving is not None
    assert 0.8 * 23.5 * 2**30 < answer.serving.memory_bytes.value < 20 * 2**30


@pytest.mark.parametrize("limit", ["time_per_token_ms", "ttft_ms", "tpot_ms", "requests_per_s"])
def test_limits_on_times_are_refused_of_an_engine_without_them(
    tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    untimed = replace(get_engine("vllm"), stepping=None)
    with monkeypatch.context() as patched:
        patched.setattr(session, "get_engine", lambda name: untimed)
        with pytest.raises(ConfigError, match="no times are predicted of serving vllm"):
            answered(tmp_path, stage1_profile={limit: 20})
    with pytest.raises(ConfigError, match="is an amount of memory, which has no time"):
        answered(tmp_path, gpu="24GB", stage1_profile={limit: 20})


def waits(folder: Path, **limits: float) -> Candidate:
    """Stage 1 of a Llama on an A100 under limits on its users' waits."""
    stage = {"concurrency": 8, "context": 4096, **limits}
    answer = answered(folder, gpu="a100-sxm-80gb", models=[LLAMA], stage1_profile=stage)
    (shape,) = answer.inference
    assert (answer.winner is None) == (shape.chance < 0.95)
    return shape


def test_limits_on_waits_are_judged_by_the_engines_times(tmp_path: Path) -> None:
    serving = waits(tmp_path).prediction.serving
    assert serving is not None
    time = serving.time
    assert time is not None
    for key, name, value, (low, high) in (
        ("ttft_ms", "ttft limit", time.ttft_s, time.interval_ttft_s),
        ("tpot_ms", "tpot limit", time.tpot_s, time.interval_tpot_s),
    ):
        for bound, chance in ((1.02 * high, 0.95), (0.98 * low, 0.05), (value, 0.5)):
            shape = waits(tmp_path, **{key: 1e3 * bound})
            (check,) = (each for each in shape.checks if each.limit == name)
            assert check.quantity.value == value
            if bound == value:
                assert check.chance == pytest.approx(chance, abs=0.01)
            else:
                assert (check.chance > chance) == (bound > value)


def test_the_old_limit_on_time_is_of_all_tokens_of_the_engine(tmp_path: Path) -> None:
    serving = waits(tmp_path).prediction.serving
    assert serving is not None
    assert serving.time is not None
    per_token_ms = 1e3 / serving.time.output_tokens_per_s
    assert waits(tmp_path, time_per_token_ms=1.5 * per_token_ms).chance > 0.95
    assert waits(tmp_path, time_per_token_ms=per_token_ms / 1.5).chance < 0.05


def test_a_rate_of_requests_is_the_load_and_the_limit(tmp_path: Path) -> None:
    idle = waits(tmp_path, requests_per_s=0.2)
    serving = idle.prediction.serving
    assert serving is not None
    assert serving.time is not None
    assert idle.run.request_rate == 0.2
    assert idle.chance == pytest.approx(0.95)
    assert not serving.time.queue_grows
    flooded = waits(tmp_path, requests_per_s=500)
    (check,) = (each for each in flooded.checks if each.limit == "requests limit")
    assert check.chance == 0.0
    assert 1 < check.quantity.value < 100
    assert check.excess == pytest.approx(500 / check.quantity.value)


def test_the_answer_says_what_users_wait(tmp_path: Path) -> None:
    answer = answered(tmp_path, gpu="a100-sxm-80gb", models=[LLAMA])
    time = engine_of(answer).time
    assert time is not None
    line = next(line for line in explanation(answer) if "served as" in line)
    assert f"first token after {format_seconds(time.ttft_s)}" in line
    row = json.loads(answer.files["answer"].read_text())["serving"]
    assert row["tpot_s"] == row["engine"]["tpot_s"] == time.tpot_s


def test_an_older_release_serves_quantised_weights_as_they_were_trained(tmp_path: Path) -> None:
    answer = answered(tmp_path, serving_version="0.27.1", models=[QWEN])
    assert answer.winner is not None
    assert answer.winner.form is not None
    assert answer.winner.form.serve == "as-trained"
    assert engine_of(answer).version == "0.27.1"


def test_a_quantised_copy_is_trained_and_served_as_it_is_stored(tmp_path: Path) -> None:
    copy = "Qwen/Qwen2.5-7B-Instruct-AWQ"
    answer = answered(tmp_path, models=[copy, SMALL], methods=["full", "lora"])
    assert answer.winner is not None
    assert (answer.winner.run.model, answer.winner.run.method) == (copy, "lora")
    assert answer.winner.run.quant == "awq-int4"
    assert answer.winner.form is not None
    assert (answer.winner.form.serve, answer.winner.form.quant) == ("as-trained", "awq-int4")
    script, command = (tmp_path / "out" / name for name in ("train.py", "serve.sh"))
    assert f"vllm serve {copy} " in command.read_text()
    assert "quantization_config" not in script.read_text()  # the checkpoint has its own


def test_a_shortlisted_plan_drops_the_same_models(tmp_path: Path) -> None:
    answer = answered(
        tmp_path,
        methods=["lora", "qlora"],
        ranks=[4, 8, 16, 32, 64],
        optimizer=["adamw_torch_fused", "paged_adamw_8bit"],
        attn=["sdpa", "eager"],
        stage2_profile={"batch_size": [1, 2, 4, 8]},
    )
    assert answer.kept == (LLAMA,)
    assert answer.winner is not None
    assert {each.run.model for each in answer.finetune} == {LLAMA}


def test_a_profiled_plan_measures_no_inference(tmp_path: Path) -> None:
    from whichlora.config import load_plan
    from whichlora.store.gpus import find_gpu
    from whichlora.workflow.session import Session

    answered(tmp_path, models=[LLAMA])
    plan = load_plan(tmp_path / "plan.yaml")
    session = Session(plan, find_gpu("rtx-3090-24gb"), Silent(), fresh=True)
    loop = session.search_loop(session.runs())
    assert {run.phase for run in loop.runs} == {"finetune"}
    decision = loop.decide()
    assert decision.next_run is not None
    assert loop.problem.answered == {0: True}


@pytest.mark.parametrize("profile", ["frontier", "all"])
def test_a_whole_search_measures_no_inference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    """llama.cpp runs on a CPU, which the fake profiler has."""
    pretend_device(monkeypatch)
    path = write_config(tmp_path, profile=profile, models="HuggingFaceTB/SmolLM2-135M")
    text = path.read_text().replace("  batch_size: [1, 2]\n  prefill", "  prefill", 1)
    text = text.replace("precision: fp32\n", "")  # its weights are a file's
    path.write_text(f"{text}serving: llama-cpp\n")
    progress = Silent()
    answer = run_plan(path, progress=progress)
    assert answer.winner is not None
    assert answer.winner.measured
    assert {run.phase for run in FakeProfiler.calls} == {"finetune"}
    assert any("no inference is profiled" in line for line in progress.said)
    # qlora's weights are no GGUF file: merged, and so served in one form
    assert {each.form for each in answer.finetune} == {answer.winner.form}
    assert "serving" not in answer.files  # random weights are nothing to serve


def test_the_page_draws_what_more_users_wait(tmp_path: Path) -> None:
    answer = answered(
        tmp_path, models=[LLAMA], gpu="a100-sxm-80gb", stage1_profile={"context": 4096}
    )
    place = tmp_path / "out" / "answer.json"
    values = json.loads(place.read_text())
    users = [row["concurrency"] for row in values["waits"]]
    assert answer.serving is not None
    assert answer.serving.prediction.serving is not None
    assert users[:3] == [1, 2, 4]
    assert users[-1] == answer.serving.prediction.serving.max_running
    (figure,) = (each for each in build_figures(read_source(place)) if each["id"] == "waits")
    (trace,) = figure["data"]
    assert trace["x"] == [row["output_tokens_per_s"] for row in values["waits"]]
    assert trace["y"] == sorted(row["tpot_s"] for row in values["waits"])
    values["waits"][0]["tpot_s"] = "<script>"
    place.write_text(json.dumps(values))
    with pytest.raises(DataFileError, match="is not an answer of whichlora run"):
        read_source(place)
