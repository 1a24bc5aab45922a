"""What the page answers: the words of the command line, without any library."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import zipfile
from io import BytesIO
from itertools import takewhile
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


AXOLOTL = f"""base_model: {LLAMA}
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_target_linear: true
sequence_len: 1024
micro_batch_size: 2
val_set_size: 0
"""


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that a reader chose, as the page has it."""
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL, encoding="utf-8")
    (tmp_path / "serve.sh").write_text("vllm serve Qwen/Qwen3-8B --max-model-len 16384\n")
    rows = [{"prompt": "why? " * (i % 7 + 1), "completion": "so. " * (i % 50)} for i in range(200)]
    lines = (json.dumps(row) + "\n" for row in rows)
    (tmp_path / "train data.jsonl").write_text("".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # no tokenizer, as in a browser
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path


def parts(question: Question) -> list[dict[str, Any]]:
    return [json.loads(part) for part in answer(json.dumps(question))]


def settled(question: Question) -> dict[str, Any]:
    """What is said of the runs once the allocator's whole replay is known."""
    every = map(json.loads, answer(json.dumps(question)))
    *_, last = takewhile(lambda part: part["part"] in ("run", "compare"), every)
    return last


def printed(command_line: str) -> str:
    program, *arguments = shlex.split(command_line)
    assert program == "whichlora"
    return CliRunner().invoke(main, [*arguments, "--json"]).stdout


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: "-".join(question.values()))
def test_the_command_of_an_answer_prints_the_same_bytes(question: Question) -> None:
    run = settled(question)
    assert run["part"] == "run", run
    assert printed(run["commands"][0]) == run["document"] + "\n"
    (prediction,) = json.loads(run["document"])["predictions"]
    used = prediction["memory"]["device_used_bytes"]
    assert sum(piece["num_bytes"] for piece in run["bytes"]) == used
    assert run["verdict"] == prediction["verdict"]


def test_after_the_run_come_the_largest_batch_and_every_card_as_where_has_them() -> None:
    question = {"gpu": "4090", "model": LLAMA, "method": "qlora"}
    run = settled(question)
    largest, *tables = (part for part in parts(question) if part["part"] != "run")
    maximum = json.loads(printed(f"{run['commands'][0]} --batch-size max"))["predictions"][0]
    assert largest["value"] == str(maximum["config"]["batch_size"])
    assert largest["note"] in maximum["notes"][0]
    placements = json.loads(printed(run["commands"][1]))["placements"]
    judged = [placement["gpu"] for placement in placements if placement["prediction"]]
    assert [row["name"] for row in tables[-1]["rows"]] == judged
    assert tables[-1]["done"] == tables[-1]["of"] == len(placements)
    assert tables[-1]["rows"][0]["question"] == {
        "gpu": judged[0], "model": LLAMA, "method": "qlora"
    }  # fmt: skip


DATA = {"data": "train data.jsonl", "epochs": "3"}


@pytest.mark.parametrize(
    "question",
    [
        {"gpu": "4090", "from": "axolotl.yaml"},
        {"gpu": "l4", "from": "axolotl.yaml", "r": "8", "gpus": "2"},
        {"gpu": "4090", "from": "serve.sh", "concurrency": "4", "context": "8192"},
        {"gpu": "l4", "model": LLAMA, "method": "qlora", **DATA},
        {"gpu": "l4", "model": LLAMA, "method": "qlora", "batch_size": "4", **DATA},
        {"gpu": "l4", "from": "axolotl.yaml", **DATA},
        {"gpu": "l4", "model": LLAMA, "method": "qlora", "samples": "1000", "epochs": "0.5"},
        {"gpu": "2x3090", "model": LLAMA, "method": "qlora"},
        {"gpu": "2x3090, a6000", "model": LLAMA, "method": "qlora"},
        {"gpu": "l4,2x3090", "model": LLAMA, "method": "qlora", **DATA},
    ],
    ids=lambda question: "-".join(question.values()),
)
def test_files_data_and_several_cards_are_answered_as_the_command_line_does(
    question: Question, chosen: Path
) -> None:
    said = settled(question)
    ours, printed_ones = json.loads(said["document"]), json.loads(printed(said["commands"][0]))
    for prediction in [*ours["predictions"], *printed_ones["predictions"]]:
        prediction["notes"] = [
            note for note in prediction["notes"] if not note.startswith("lengths are estimated")
        ]  # why there is no tokenizer differs
    assert ours == printed_ones


def test_with_data_the_page_says_what_the_training_takes_and_costs(chosen: Path) -> None:
    question = {"gpu": "l4", "model": LLAMA, "method": "qlora", **DATA}
    first, run, largest, *tables = parts(question)
    assert first["need"] != run["need"]  # the whole replay reserves more than its beginning
    facts = {name: (value, more) for name, value, more in run["facts"]}
    training = json.loads(run["document"])["predictions"][0]["training"]
    assert facts["Data"][0] == "196 rows"
    assert "4 rows without text are left out" in run["notes"]
    assert f"{training['num_steps']:,} steps" in facts["The whole training"][1]
    assert facts["The training costs"][0].endswith("USD")
    assert "an hour (" in facts["The training costs"][1]
    assert any("lengths are estimated" in note for note in run["notes"])
    maximum = json.loads(printed(f"{run['commands'][0]} --batch-size max"))["predictions"][0]
    assert maximum["config"]["padding"] == "padded"  # rows of a batch differ
    assert largest["value"] == str(maximum["config"]["batch_size"])
    longest = f"--seq-len {training['longest']}"
    assert longest in run["commands"][1]
    links = [row["question"] for row in tables[-1]["rows"]]
    assert all("data" not in link for link in links)  # no address carries a file


def test_models_and_cards_have_costs_and_the_cheapest_is_that_of_the_command_line(
    chosen: Path,
) -> None:
    *_, models = parts({"gpu": "l4", "samples": "100", "model": ""})
    assert models["columns"][-2:] == ["The training takes", "It costs"]
    assert models["rows"][0]["cells"][-1].endswith("USD")
    assert models["commands"] == ["whichlora recommend --gpu l4 --samples 100"]
    *_, cards = parts({"model": "llama 3.1 70b", "method": "qlora"})
    assert cards["is_answer"]
    text = CliRunner().invoke(main, shlex.split(cards["commands"][0])[1:]).stdout
    card, price = cards["cheapest"]
    assert f"cheapest, 1M tokens on {card}: {price.partition(': ')[2]}" in text
    assert cards["cheapest_hour"] in text
    assert cards["cheapest_first"][0] == card
    fitting = [row["name"] for row in cards["rows"] if row["verdict"] == "fits"]
    assert card in fitting
    assert sorted(cards["cheapest_first"]) == sorted(row["name"] for row in cards["rows"])


def test_cards_beside_each_other_have_prices_and_the_largest_batches(chosen: Path) -> None:
    first, *_, last = parts({"gpu": "2x3090,a6000", "model": LLAMA, "method": "qlora"})
    assert [row["name"] for row in last["rows"]] == ["2 x rtx-3090-24gb", "rtx-a6000-48gb"]
    column = first["columns"].index("Largest batch") - 1
    assert {row["cells"][column] for row in first["rows"]} == {"…"}
    assert all(int(row["cells"][column]) >= 1 for row in last["rows"])
    assert last["headline"].startswith("2 of 2 fit, fastest: ")
    assert last["rows"][0]["question"] == {
        "gpu": "rtx-3090-24gb", "gpus": "2", "model": LLAMA, "method": "qlora"
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
    assert fitting[0]["name"] == winner.run.model
    assert fitting[0]["question"]["trainer"] == winner.run.trainer
    assert models["title"].startswith(winner.run.model.rpartition("/")[2])


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"seq_len": "512"}, "gpu: name a card, such as 4090, or memory such as 24GB; or name a"),
        ({"gpu": "l4,t4"}, "model: name one, to compare it on l4, t4"),
        ({"gpu": "2xl4", "gpus": "3", "model": LLAMA}, "2xl4 states how many; leave gpus out"),
        ({"gpu": "l4", "model": LLAMA, "samples": "x"}, "samples: 'x' is not a number"),
        ({"gpu": "l4", "model": LLAMA, "data": "no.jsonl"}, "no.jsonl: can't be read"),
        ({"gpu": "l4", "from": "no.yaml"}, "no.yaml: can't be read"),
        ({"gpu": "auto", "model": LLAMA}, "or memory such as 24GB, got 'auto'"),
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


def test_the_command_line_takes_every_choice_of_every_field(chosen: Path) -> None:
    estimate = main.commands["estimate"]
    for field in fields():
        if field.kind == "file":
            continue
        others = [value for value, _ in field.choices if value not in ("", field.default)]
        for value in others or ["3" if field.kind in ("count", "number") else "4090"]:
            phase = value if field.name == "phase" else field.phase or "finetune"
            asked = {"gpu": "h100", "model": LLAMA, "phase": phase, "gpus": "2", field.name: value}
            asked |= {"samples": "3"} if field.name == "epochs" else {}
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


FROM = {"gpu": "4090", "from": "axolotl.yaml", **DATA}


def test_the_bundle_answers_with_the_standard_library_alone(tmp_path: Path, chosen: Path) -> None:
    with zipfile.ZipFile(BytesIO(bundle())) as archive:
        archive.extractall(tmp_path)
    code = f"""
import json, sys
sys.path.insert(0, {str(tmp_path)!r})
from whichlora.page.questions import answer
for question in {QUESTIONS!r}:
    print(json.loads(next(answer(json.dumps(question))))["document"])
print("---")
print(json.loads(list(answer(json.dumps({{"gpu": "l4"}})))[-1])["title"])
print("---")
print(json.loads(list(answer(json.dumps({{"gpu": "l4", "model": "some/other"}})))[-1])["text"])
print("---")
beside = {{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)
assert beside <= {{"whichlora", "__main__"}}, beside
print(json.loads(next(answer(json.dumps({FROM!r}))))["document"])
beside = {{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)
assert beside <= {{"whichlora", "__main__", "ruamel"}}, beside
assert sys.modules["ruamel.yaml"].__file__.startswith({str(tmp_path)!r})
"""
    isolated = [sys.executable, "-I", "-S", "-c", code]  # no site-packages
    done = subprocess.run(isolated, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    documents, title, refusal, from_file = done.stdout.split("\n---\n")
    asked = [*QUESTIONS, FROM]
    here = [json.loads(next(answer(json.dumps(question))))["document"] for question in asked]
    assert [*documents.splitlines(), *from_file.splitlines()] == "\n".join(here).splitlines()
    assert title.startswith("gemma-3-27b-pt qlora")
    assert "not in the database and the hub can't be asked" in refusal
