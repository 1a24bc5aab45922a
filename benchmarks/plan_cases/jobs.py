"""The job that a plan hands out, run for real on this CPU with a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

from plan_cases.folder import Folder
from plan_cases.registry import case, expect

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
PAIR = {"prompt": "two and two is", "completion": " four"}
CHAT = {
    "messages": [
        {"role": "user", "content": "two and two?"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "and one?"},
        {"role": "assistant", "content": "five"},
    ]
}

GENERATE = """\
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("runs/plan/output")
model = AutoModelForCausalLM.from_pretrained("runs/plan/output")
ids = tokenizer(sys.argv[1], return_tensors="pt", add_special_tokens=False)
ids.pop("token_type_ids", None)
new = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1]:]
text = tokenizer.decode(new, skip_special_tokens=True)
print(json.dumps([text, int(new[-1]) == tokenizer.eos_token_id]))
"""


def plan(folder: Folder, rows: list[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    """A dry run of the tiny model; its answer."""
    folder.write("tiny/config.json", json.dumps(TINY_MODEL))
    folder.write_rows("data.jsonl", rows)
    settings: dict[str, Any] = {
        "gpu": "cpu",
        "models": "./tiny",
        "weights": "random",
        "precision": "fp32",
        "optimizer": "adamw_torch",
        "gradient_checkpointing": False,
        "methods": "full",
        "learning_rate": 0.003,
        "profile": "none",
        "sequence_length": 128,
        "dataset": {"path": "data.jsonl", "validation_fraction": 0},
        "stage1_profile": {"batch_size": 1, "prefill_length": 16, "tokens_to_generate": 8},
        "stage2_profile": {"batch_size": 4},
        "confidence": 0.5,
    }
    folder.write_plan(**(settings | keys))
    result = folder.whichlora("run", "plan.yaml")
    expect(result.code == 0, result.last_line)
    return folder.answer()


def train(folder: Folder, *arguments: str) -> dict[str, Any]:
    """Run the job to its end; what it reported."""
    result = folder.call(sys.executable, "runs/plan/train.py", *arguments)
    expect(result.code == 0, result.last_line)
    text = (folder.path / "runs/plan/output/result.json").read_text(encoding="utf-8")
    reported: dict[str, Any] = json.loads(text)
    return reported


@case("Does the trained model answer, and stop?")
def learns_the_answer_and_its_end(folder: Folder) -> str:
    plan(folder, [PAIR] * 160, epochs=3)
    reported = train(folder)
    generated = folder.call(sys.executable, "-c", GENERATE, PAIR["prompt"])
    expect(generated.code == 0, generated.last_line)
    text, stopped = json.loads(generated.stdout.splitlines()[-1])
    expect(text == PAIR["completion"] and stopped, f"{text!r}, stopped: {stopped}")
    return f"{text!r}, then the end of text; loss {reported['final_loss']:.3f}"


@case("Are steps and longest batch of the plan those of the job?")
def steps_of_the_plan(folder: Folder) -> str:
    rows = [{"text": "x" * (10 + 7 * (number % 30))} for number in range(90)]
    answer = plan(folder, rows, epochs=2)
    reported = train(folder)
    steps = int(answer["tokens"].split(" steps")[0].rsplit(" ", 1)[-1])
    expect(reported["num_steps"] == steps, f"{reported['num_steps']} steps, planned {steps}")
    return f"{steps} steps"


@case("Killed after its first checkpoint and resumed: is anything lost?")
def killed_and_resumed(folder: Folder) -> str:
    rows = [{"text": f"row {number} " * 5} for number in range(400)]
    plan(folder, rows, save_steps=20, methods="lora", ranks=4)
    whole = train(folder)
    output = folder.path / "runs/plan/output"
    output.rename(folder.path / "whole")
    command = [sys.executable, "runs/plan/train.py"]
    job = subprocess.Popen(
        command, cwd=folder.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not list(output.glob("checkpoint-*/trainer_state.json")):
        expect(job.poll() is None and time.monotonic() < deadline, "no checkpoint was written")
        time.sleep(0.05)
    job.send_signal(signal.SIGKILL)
    job.wait()
    resumed = train(folder, "--resume")
    figures = [(run["num_steps"], round(run["final_loss"], 4)) for run in (whole, resumed)]
    expect(figures[0] == figures[1], f"{figures}")
    return f"{figures[1][0]} steps, final loss {figures[1][1]}, both times"


@case("A conversation: is only the assistant taught?")
def assistant_turns_only(folder: Folder) -> str:
    plan(folder, [CHAT] * 160, epochs=3, sequence_length=256)
    reported = train(folder)
    # the users' turns cannot be learnt from their own text: a loss near zero is of the answers
    expect(reported["final_loss"] < 0.5, f"final loss {reported['final_loss']:.2f}")
    written = folder.rows("runs/plan/train.jsonl")[0]
    expect(written == CHAT, f"{written}")
    return f"rows are conversations; final loss {reported['final_loss']:.3f}"


@case("A train and a validation file")
def validation_is_reported(folder: Folder) -> str:
    folder.write_rows("data/validation.jsonl", [PAIR] * 8)
    folder.write_rows("data/train.jsonl", [PAIR] * 64)
    plan(folder, [PAIR], dataset="./data")
    reported = train(folder)
    expect("validation_loss" in reported, f"{sorted(reported)}")
    return f"validation loss {reported['validation_loss']:.3f}"


@case("The model's config.json changed between two starts: is the old measurement taken?")
def changed_model_is_measured_again(folder: Folder) -> str:
    rows = [{"text": "some words to learn"}] * 32
    keys: dict[str, Any] = {"profile": "all", "num_batches": 2, "methods": "lora"}
    plan(folder, rows, **keys)
    changed = TINY_MODEL | {"num_hidden_layers": 6, "hidden_size": 128}
    folder.write("tiny/config.json", json.dumps(changed))
    result = folder.whichlora("run", "plan.yaml")
    expect(result.code == 0, result.last_line)
    measured = folder.answer()["search"]["runs"]
    expect(measured >= 2, f"{measured} runs in the second start")
    again = folder.whichlora("run", "plan.yaml")
    expect("resumed" in again.stderr, "the third start measured the same model again")
    return f"{measured} runs measured again, then resumed"
