"""The written `train.py` of an encoder-decoder, run on a CPU with a tiny T5 of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import written_job
from train_runs import run_script
from written_job import script_of

from whichlora.spec.data_format import CHAT_PAIRS, CHAT_ROWS, TEXT_PAIRS, DataFormat

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAIRS = [
    {"prompt": f"summarize: number {n} is said at some length, {'on and ' * n}on", "completion": c}
    for n, c in enumerate(("zero", "one", "two", "three, which is a long one" * 4))
]


def as_messages(row: dict[str, str]) -> dict[str, Any]:
    said = [{"role": "user", "content": row["prompt"]}]
    return {"messages": [*said, {"role": "assistant", "content": row["completion"]}]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from oracle_tokenizer import byte_tokenizer
    from tokenizers import processors

    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", end)]
    )
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2}
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": end}
    config = transformers.T5Config(vocab_size=len(tokenizer), **sizes, **tokens)
    folder = tmp_path / "model"
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_rows(tmp_path, PAIRS)
    return folder


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    for name, some in (("train", rows), ("validation", rows[:2])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text)


def write_job(
    checkpoint: Path, data_format: DataFormat = TEXT_PAIRS, epochs: float = 1.0, **settings: Any
) -> Path:
    settings = {"target_len": 16, "learning_rate": 0.01} | settings
    rate = settings.pop("learning_rate")
    return written_job.write_job(
        checkpoint, data_format, settings, epochs=epochs, learning_rate=rate
    )


def read(path: Path) -> list[dict[str, Any]]:
    script = script_of(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(script.MODEL)
    rows: list[dict[str, Any]] = script.read_rows(path.parent / "train.jsonl", tokenizer)
    return rows


def test_sources_and_targets_are_cut_to_lengths_of_their_own(checkpoint: Path) -> None:
    rows = read(write_job(checkpoint))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert [len(row["labels"]) for row in rows] == [5, 4, 4, 16]
    assert [len(row["input_ids"]) for row in rows] == [47, 54, 61, 64]
    assert tokenizer.decode(rows[1]["labels"]) == "one</s>"
    assert rows[3]["labels"][-1] == tokenizer.eos_token_id
    from transformers import DataCollatorForSeq2Seq

    batch = DataCollatorForSeq2Seq(tokenizer)(rows[:2])
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (2, 54),
        "attention_mask": (2, 54),
        "labels": (2, 5),
    }


def test_messages_are_the_same_pairs(checkpoint: Path) -> None:
    pairs = read(write_job(checkpoint))
    write_rows(checkpoint.parent, [as_messages(row) for row in PAIRS])
    assert read(write_job(checkpoint, CHAT_ROWS)) == pairs
    split = [as_messages(row)["messages"] for row in PAIRS]
    rows = [{"prompt": said[:1], "completion": said[1:]} for said in split]
    write_rows(checkpoint.parent, rows)
    assert read(write_job(checkpoint, CHAT_PAIRS)) == pairs


def test_a_conversation_that_ends_with_a_question_is_refused(checkpoint: Path) -> None:
    path = write_job(checkpoint, CHAT_ROWS)
    question = {"messages": [{"role": "user", "content": "And?"}]}
    write_rows(checkpoint.parent, [as_messages(PAIRS[0]), question])
    with pytest.raises(SystemExit, match=r"jsonl:2: ValueError: the last message is not"):
        read(path)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora", "r": 8},
        {"method": "full", "gradient_checkpointing": True, "learning_rate": 0.003},
        {"method": "dora", "precision": "bf16", "gradient_checkpointing": True},
    ],
)
def test_a_job_learns_the_targets(checkpoint: Path, settings: dict[str, Any]) -> None:
    path = write_job(checkpoint, epochs=12, **settings)
    done = run_script(path)
    assert done.returncode == 0, done.stderr[-3000:]
    output = path.parent / "output"
    states = sorted(output.glob("checkpoint-*/trainer_state.json"))
    history = json.loads(states[-1].read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    assert json.loads((output / "result.json").read_text())["num_steps"] == 24
