"""What the page answers: the words of the command line, without any library."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from whichlora import recommend
from whichlora.cli import main
from whichlora.page.build import bundle
from whichlora.page.form import Question, command, fields, stated
from whichlora.page.questions import answer

LLAMA = "meta-llama/Llama-3.1-8B"
QUESTIONS: tuple[Question, ...] = (
    {"gpu": "4090", "model": "llama 3.1 8b", "method": "qlora"},
    {"gpu": "24GB", "model": LLAMA, "seq_len": "512", "r": "64", "gradient_checkpointing": "no"},
    {"gpu": "a100-sxm-80gb", "model": LLAMA, "batch_size": "4", "optimizer": "adamw_8bit"},
    {"gpu": "3090+2x4090", "model": "Qwen/Qwen3-8B", "parallel": "fsdp"},
    {"gpu": "l4", "gpus": "4", "model": "Qwen/Qwen3-14B", "method": "qlora", "seq_len": "4096"},
    {"gpu": "h100", "gpus": "16", "nodes": "2", "parallel": "zero3", "model": LLAMA},
    {"gpu": "t4", "model": "Qwen/Qwen3-0.6B", "trainer": "dpo", "gradient_checkpointing": "yes"},
    {"gpu": "l40s", "phase": "inference", "model": LLAMA, "quant": "nf4", "prompt_len": "2000"},
    {"gpu": "h100", "phase": "inference", "model": LLAMA, "serving": "vllm", "concurrency": "16"},
    {"gpu": "4090", "phase": "inference", "model": LLAMA, "serving": "llama-cpp"},
)


def parts(question: Question) -> list[dict[str, Any]]:
    return [json.loads(part) for part in answer(json.dumps(question))]


def printed(command_line: str) -> str:
    program, *arguments = shlex.split(command_line)
    assert program == "whichlora"
    return CliRunner().invoke(main, [*arguments, "--json"]).stdout


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: "-".join(question.values()))
def test_the_command_of_an_answer_prints_the_same_bytes(question: Question) -> None:
    run = next(json.loads(part) for part in answer(json.dumps(question)))
    assert run["part"] == "run", run
    assert printed(run["commands"][0]) == run["document"] + "\n"
    (prediction,) = json.loads(run["document"])["predictions"]
    used = prediction["memory"]["device_used_bytes"]
    assert sum(piece["num_bytes"] for piece in run["bytes"]) == used
    assert run["verdict"] == prediction["verdict"]


def test_after_the_run_come_the_largest_batch_and_every_card_as_where_has_them() -> None:
    run, largest, *tables = parts({"gpu": "4090", "model": LLAMA, "method": "qlora"})
    maximum = json.loads(printed(f"{run['commands'][0]} --batch-size max"))["predictions"][0]
    assert largest["value"] == str(maximum["config"]["batch_size"])
    assert largest["note"] in maximum["notes"][0]
    placements = json.loads(printed(run["commands"][1]))["placements"]
    judged = [placement["gpu"] for placement in placements if placement["prediction"]]
    assert [row["gpu"] for row in tables[-1]["rows"]] == judged
    assert tables[-1]["done"] == tables[-1]["of"] == len(placements)
    assert tables[-1]["rows"][0]["question"] == {
        "gpu": judged[0], "model": LLAMA, "method": "qlora"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "seq_len"), [("4090", 4096), ("8GB", 2048), ("a100-sxm-80gb", 512), ("l4", 2048)]
)
def test_without_a_model_the_largest_that_fits_is_what_recommend_takes(
    gpu: str, seq_len: int
) -> None:
    *_, models = parts({"gpu": gpu, "seq_len": str(seq_len)})
    fitting = [row for row in models["rows"] if row["verdict"] == "fits"]
    assert models["rows"][: len(fitting)] == fitting
    winner = recommend(gpu=gpu, seq_len=seq_len).winner
    assert winner is not None
    assert fitting[0]["model"] == winner.run.model
    assert models["title"].startswith(winner.run.model.rpartition("/")[2])


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"model": LLAMA}, "gpu: name a card, such as 4090, or memory such as 24GB"),
        ({"gpu": "auto", "model": LLAMA}, "or memory such as 24GB, got 'auto'"),
        ({"gpu": "l4,t4", "model": LLAMA}, "one card at a time"),
        ({"gpu": "4091", "model": LLAMA}, "unknown GPU '4091'"),
        ({"gpu": "l4", "model": LLAMA, "seq_len": "two"}, "seq_len: 'two' is not a whole number"),
        ({"gpu": "l4", "gpus": "0", "model": LLAMA}, "gpus: must be 1 to"),
        ({"gpu": "l4", "model": "llama 8b"}, "llama 8b"),
        ({"gpu": "l4", "model": LLAMA, "colour": "red"}, "colour: is not a setting"),
    ],
)
def test_a_fault_is_the_line_of_the_library(question: Question, message: str) -> None:
    (refusal,) = parts(question)
    assert refusal["part"] == "refusal"
    assert message in refusal["text"]
    assert "\n" not in refusal["text"]


def test_the_command_line_takes_every_choice_of_every_field() -> None:
    estimate = main.commands["estimate"]
    for field in fields():
        others = [value for value, _ in field.choices if value not in ("", field.default)]
        for value in others or ["3" if field.kind == "count" else "4090"]:
            phase = value if field.name == "phase" else field.phase or "finetune"
            asked = {"gpu": "h100", "model": LLAMA, "phase": phase, "gpus": "2", field.name: value}
            _, name, *words = shlex.split(command(asked))
            context = estimate.make_context(name, words)
            taken = context.params["models" if field.name == "model" else field.name]
            one = taken[0] if isinstance(taken, list) else taken
            assert one == field.value(value), (field.name, value)


def test_a_question_leaves_out_defaults_and_what_its_phase_does_not_read() -> None:
    question = {"gpu": "l4", "model": "a/b", "r": "16", "phase": "inference", "seq_len": "512"}
    assert {field.name: text for field, text in stated(question).items()} == {
        "gpu": "l4", "model": "a/b", "phase": "inference"
    }  # fmt: skip
    hostile = command({"gpu": "l4", "model": "$(rm -rf ~); 'x"})
    assert shlex.split(hostile)[2] == "$(rm -rf ~); 'x"


def test_the_bundle_answers_with_the_standard_library_alone(tmp_path: Path) -> None:
    with zipfile.ZipFile(BytesIO(bundle())) as archive:
        archive.extractall(tmp_path)
    code = f"""
import json, sys
sys.path.insert(0, {str(tmp_path)!r})
from whichlora.page.questions import answer
for question in {QUESTIONS!r}:
    print(json.loads(next(answer(json.dumps(question))))["document"])
print(json.loads(list(answer(json.dumps({{"gpu": "l4"}})))[-1])["title"])
print(json.loads(list(answer(json.dumps({{"gpu": "l4", "model": "some/other"}})))[-1])["text"])
beside = {{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)
assert beside <= {{"whichlora", "__main__"}}, beside
"""
    isolated = [sys.executable, "-I", "-S", "-c", code]  # no site-packages
    done = subprocess.run(isolated, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    *documents, title, refusal = done.stdout.splitlines()
    here = [json.loads(next(answer(json.dumps(question))))["document"] for question in QUESTIONS]
    assert "\n".join(documents) == "\n".join(here)
    assert title.startswith("phi-4 qlora")
    assert "not in the database and the hub can't be asked" in refusal
