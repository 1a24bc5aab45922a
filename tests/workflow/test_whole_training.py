"""The whole training of one prediction: steps, time and cost."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from plan_runs import Silent

from whichlora import estimate
from whichlora.errors import ConfigError, DataFileError
from whichlora.workflow.run import run_plan

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Ten rows of 80 bytes and ten of 400: 21 and 101 tokens, by estimate."""
    path = tmp_path / "train.jsonl"
    texts = ["x" * 80, "x" * 400] * 10
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def test_of_rows_of_full_length_it_is_their_steps() -> None:
    (one,) = estimate(LLAMA, "l4", method="qlora")
    (run,) = estimate(LLAMA, "l4", method="qlora", samples=1000, epochs=3)
    total = run.training
    assert total is not None
    assert (total.num_steps, total.num_tokens, total.longest) == (3000, 2048 * 1000, 2048)
    assert one.time.step_s is not None
    assert total.total_s == pytest.approx(3000 * one.time.step_s)
    assert total.interval_s == pytest.approx([3000 * bound for bound in one.time.interval_s])
    assert run.memory == one.memory
    assert run.cost is not None
    money = run.cost.money(total.total_s)
    assert run.to_dict()["training"]["cost"]["money"] == money


def test_of_a_file_it_sums_over_the_lengths_of_all_its_rows(rows: Path) -> None:
    (run,) = estimate(LLAMA, "l4", method="qlora", data=rows, epochs=2)
    steps = [
        prediction.time.step_s
        for length in (21, 101)
        for prediction in estimate(LLAMA, "l4", method="qlora", seq_len=length)
    ]
    total = run.training
    assert total is not None
    assert (total.num_sequences, total.num_steps, total.num_tokens) == (20, 40, 10 * 122)
    assert total.total_s == pytest.approx(20 * math.fsum(step or math.nan for step in steps))
    assert total.interval_s[0] < total.total_s < total.interval_s[1]
    assert run.run.seq_len == total.longest > 101  # estimated lengths may be longer
    assert any("lengths are estimated" in note for note in run.notes)


def test_longer_rows_are_cut_and_a_changed_file_is_counted_again(rows: Path) -> None:
    (run,) = estimate(LLAMA, "l4", method="qlora", data=rows, seq_len=64)
    assert run.run.seq_len == 64
    assert run.training is not None
    assert (run.training.num_truncated, run.training.num_tokens) == (10, 10 * (21 + 64))
    rows.write_text(json.dumps({"text": "x" * 80}), encoding="utf-8")
    os.utime(rows, ns=(1, 1))
    (run,) = estimate(LLAMA, "l4", method="qlora", data=rows)
    assert run.training is not None
    assert run.training.num_sequences == 1


def test_batches_are_padded_and_gpus_share_the_rows(rows: Path) -> None:
    (one,) = estimate(LLAMA, "l4", method="qlora", data=rows, batch_size=2)
    (two,) = estimate(LLAMA, "2xl4", method="qlora", data=rows, parallel="ddp", batch_size=2)
    assert one.run.padding == "padded"
    assert one.training is not None
    assert two.training is not None
    assert (one.training.num_steps, two.training.num_steps) == (10, 5)


def test_a_plan_takes_a_batch_of_one_as_an_estimate_does(rows: Path, tmp_path: Path) -> None:
    """It carries no padding, and transformers drops its mask of ones."""
    plan = {
        "gpu": "l4",
        "models": [LLAMA],
        "methods": ["qlora"],
        "dataset": str(rows),
        "stage2_profile": {"batch_size": [1, 2]},
        "profile": "none",
        "output_dir": str(tmp_path / "out"),
    }
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(plan), encoding="utf-8")
    planned = {
        each.run.batch_size: each.run.padding for each in run_plan(path, progress=Silent()).finetune
    }
    assert planned == {1: "none", 2: "padded"}
    estimated = estimate(LLAMA, "l4", method="qlora", data=rows, batch_size=[1, 2])
    assert [each.run.padding for each in estimated] == ["none", "padded"]


def test_two_answers_are_padded_to_one_length_in_a_batch_of_one(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"prompt": "x", "chosen": "y" * size, "rejected": "z"} for size in (40, 400)]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (run,) = estimate(LLAMA, "l4", method="qlora", data=pairs, trainer="dpo")
    assert run.run.padding == "padded"


def test_a_file_that_packs_has_rows_of_full_length(rows: Path, tmp_path: Path) -> None:
    config = tmp_path / "axolotl.yaml"
    config.write_text(
        f"base_model: {LLAMA}\nload_in_4bit: true\nadapter: qlora\nlora_target_linear: true\n"
        "sequence_len: 256\nsample_packing: true\nmicro_batch_size: 1\n",
        encoding="utf-8",
    )
    (run,) = estimate(from_file=config, gpu="l4", data=rows)
    assert run.run.seq_len == 256
    assert run.training is not None
    assert run.training.num_steps == 5  # 1,220 tokens


@pytest.mark.parametrize(
    ("keys", "asked", "epochs"),
    [
        ("num_epochs: 4\n", None, 4),
        ("num_epochs: 4\n", 2, 2),
        ("num_epochs: 4\nmax_steps: 100\n", None, 1),  # it counts steps
        ("", None, 1),
    ],
)
def test_a_file_says_how_many_epochs_there_are(
    tmp_path: Path, keys: str, asked: float | None, epochs: int
) -> None:
    config = tmp_path / "axolotl.yaml"
    config.write_text(
        f"base_model: {LLAMA}\nadapter: lora\nlora_target_linear: true\nsequence_len: 256\n"
        f"micro_batch_size: 1\nsample_packing: true\n{keys}",
        encoding="utf-8",
    )
    (run,) = estimate(from_file=config, gpu="l4", samples=10, epochs=asked)
    assert run.training is not None
    assert run.training.num_steps == 10 * epochs


def test_an_amount_of_memory_has_steps_and_no_time() -> None:
    (run,) = estimate(LLAMA, "24GB", method="qlora", samples=10)
    assert run.training is not None
    assert run.training.num_steps == 10
    assert run.to_dict()["training"]["total_s"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 3}, "epochs: of how much data?"),
        ({"samples": 0}, "samples: must be a whole number from 1"),
        ({"samples": 5, "epochs": 0}, "epochs: must be a number above 0"),
        ({"samples": 5, "data": "rows.jsonl"}, "give one of both"),
        ({"samples": 5, "phase": "inference"}, "data: is of phase finetune"),
        ({"samples": 5, "trainer": "grpo", "batch_size": 8}, "data: trainer grpo writes"),
    ],
)
def test_what_has_no_whole_training_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate(LLAMA, "a100-sxm-80gb", **settings)  # type: ignore[arg-type]


def test_a_broken_file_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    with pytest.raises(DataFileError, match=r"broken.jsonl:2: is not JSON"):
        estimate(LLAMA, "l4", data=path)


def chats(path: Path, *roles: str) -> Path:
    """Rows of one question, whose answers are of these roles."""
    rows = ([{"role": role, "content": "Hi"} for role in ("user", role)] for role in roles)
    lines = (json.dumps({"messages": messages}) + "\n" for messages in rows)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_training_that_learns_nothing_has_no_price(tmp_path: Path) -> None:
    path = chats(tmp_path / "chats.jsonl", "user", "user")
    with pytest.raises(ConfigError, match="nothing is learned, as no turn is the assistant's"):
        estimate(LLAMA, "l4", method="qlora", data=path)
    encoder = "google-bert/bert-base-uncased"  # which learns of every text
    (run,) = estimate(encoder, "l4", method="lora", data=path)
    assert run.training is not None
    assert run.training.num_sequences == 2


def test_conversations_without_an_answer_are_left_out_as_in_a_run(tmp_path: Path) -> None:
    path = chats(tmp_path / "chats.jsonl", "assistant", "user", "assistant")
    (run,) = estimate(LLAMA, "l4", method="qlora", data=path)
    assert run.training is not None
    assert run.training.num_sequences == 2
    assert "1 rows are left out: no turn in them is the assistant's" in run.notes


def test_a_role_that_is_nearly_the_assistants_is_named(tmp_path: Path) -> None:
    path = chats(tmp_path / "chats.jsonl", "assistant", "Asistant")
    with pytest.raises(DataFileError, match=r":2: .*'Asistant'; did you mean assistant; correct"):
        estimate(LLAMA, "l4", method="qlora", data=path)
