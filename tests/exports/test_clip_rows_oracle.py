"""Rows with clips beside messages in the written job: what is read and learned, and a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import written_job
from audio_checkpoints import WINDOW_S, write_listener
from clips import tone, write_clip
from train_runs import run_ranks, run_script
from written_job import script_of

from whichlora.dataset import count_tokens, open_dataset
from whichlora.families import build
from whichlora.profiler.images import image_fields
from whichlora.spec.data_format import AUDIO_ROWS
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import DatasetConfig
from whichlora.spec.run import RunConfig

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")

ON_CPU = Path(__file__).parents[1] / "spread_on_cpu.py"
SEQ_LEN = 256
CLIP = {"type": "audio"}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


ROWS: list[tuple[list[dict[str, str]], str, list[Any]]] = [
    ([CLIP, said("What is heard?")], "A tone.", ["0.wav"]),
    ([said("First "), CLIP, said(" then "), CLIP], "Two.", ["1.wav", "2.wav"]),
    ([said("No clip at all.")], "None.", []),
    ([CLIP], "In the row", [{"array": tone(0.7).tolist(), "sampling_rate": 16_000}]),
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_clip(tmp_path / "0.wav", 1.0)
    write_clip(tmp_path / "1.wav", 0.5, rate=44_100, width=3)
    write_clip(tmp_path / "2.wav", 1.5, channels=2, rate=8_000)
    write_rows(tmp_path, ROWS)
    return write_listener(tmp_path / "model")


def write_rows(folder: Path, rows: list[tuple[list[dict[str, str]], str, list[Any]]]) -> None:
    with (folder / "train.jsonl").open("w") as file:
        for parts, answer, clips in rows:
            messages = [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": [said(answer)]},
            ]
            file.write(json.dumps({"messages": messages, "audios": clips}) + "\n")


def write_job(checkpoint: Path, epochs: float = 1.0, **settings: Any) -> Path:
    settings = {"audios": 1, "audio_seconds": 1.0, "seq_len": SEQ_LEN, **settings}
    return written_job.write_job(
        checkpoint, AUDIO_ROWS, settings, epochs=epochs, learning_rate=1e-2
    )


def read(checkpoint: Path) -> tuple[Any, Any, list[dict[str, Any]]]:
    script = script_of(write_job(checkpoint))
    processor = script.AutoProcessor.from_pretrained(checkpoint)
    processor.tokenizer.chat_template = processor.chat_template
    return script, processor, script.read_rows(checkpoint.parent / "train.jsonl", processor)


def test_answers_are_learned_and_no_token_of_a_clip(checkpoint: Path) -> None:
    script, processor, rows = read(checkpoint)
    assert len(rows) == len(ROWS)
    batch = script.AudioBatches(processor)(rows)
    tokenizer = processor.tokenizer
    for ids, labels, (_, answer, _) in zip(batch["input_ids"], batch["labels"], ROWS, strict=True):
        assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
        assert tokenizer.decode(labels[labels != -100]) == f"{answer}<|im_end|>\n"
    assert batch["input_features"].shape == (4, 80, 100 * WINDOW_S)
    texts = script.AudioBatches(processor)([rows[2]])
    assert "input_features" not in texts


def test_a_clip_has_the_tokens_that_are_predicted(checkpoint: Path) -> None:
    script, processor, rows = read(checkpoint)
    tower = build(json.loads((checkpoint / "config.json").read_text()), name="m").tower
    assert tower is not None
    place = processor.audio_token_id
    for row, seconds in zip(rows, ((1.0,), (0.5, 1.5), (), (0.7,)), strict=True):
        ids = script.AudioBatches(processor)([row])["input_ids"][0]
        assert int((ids == place).sum()) == sum(
            tower.grid(1, round(16_000 * each)).tokens for each in seconds
        )
        assert len(ids) == len(row["labels"])


def test_rows_are_counted_as_the_processor_cuts_them(checkpoint: Path) -> None:
    script, processor, rows = read(checkpoint)
    tower = build(json.loads((checkpoint / "config.json").read_text()), name="m").tower
    assert tower is not None
    data = DatasetConfig(path=str(checkpoint.parent / "train.jsonl"), validation_fraction=0.0)
    counted = count_tokens(
        open_dataset(data),
        tokenizer=str(checkpoint),
        offline=True,
        max_length=SEQ_LEN,
        grid=tower.grid,
        window_s=float(WINDOW_S),
    )
    assert counted.is_counted
    batches = script.AudioBatches(processor)
    real = [int(batches([row])["attention_mask"].sum()) for row in rows]
    assert list(counted.lengths["train"]) == real


def test_a_batch_has_what_a_profile_makes_up(checkpoint: Path) -> None:
    script, processor, rows = read(checkpoint)
    batch = script.AudioBatches(processor)([rows[0], rows[0]])
    run = RunConfig(model="m", audios=1, audio_seconds=1.0, batch_size=2)
    config = script.AutoModelForMultimodalLM.from_pretrained(checkpoint).config
    made_up = image_fields(config, run, batch["input_ids"])
    assert {name: batch[name].shape for name in made_up} == {
        name: values.shape for name, values in made_up.items()
    }
    assert batch["input_features"].dtype == made_up["input_features"].dtype
    masks = (each["feature_attention_mask"].long() for each in (batch, made_up))
    assert torch.equal(*masks)
    assert set(batch) == {*made_up, "attention_mask", "labels"}


def test_rows_that_are_too_long_are_left_out(checkpoint: Path) -> None:
    write_clip(checkpoint.parent / "long.wav", WINDOW_S + 0.1)
    long = [([CLIP], "b", ["long.wav"]), ([CLIP, said("c" * SEQ_LEN)], "c", ["0.wav"])]
    write_rows(checkpoint.parent, [ROWS[0], *long])
    _, _, rows = read(checkpoint)
    assert [row["audios"] for row in rows] == [["0.wav"]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora"},
        {"method": "lora", "freeze_vision_tower": True, "gradient_checkpointing": True},
        {"method": "full", "gradient_checkpointing": True},
        {"method": "lora", "precision": "bf16-no-autocast"},
    ],
)
def test_a_job_learns_the_answers(checkpoint: Path, settings: dict[str, Any]) -> None:
    path = write_job(checkpoint, epochs=8, **settings)
    done = run_script(path)
    assert done.returncode == 0, done.stderr[-3000:]
    output = path.parent / "output"
    (state,) = output.glob("checkpoint-16/trainer_state.json")
    history = json.loads(state.read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    if settings.get("freeze_vision_tower"):
        from safetensors.torch import load_file

        names = list(load_file(output / "adapter_model.safetensors"))
        assert names
        assert not [name for name in names if "audio_tower" in name or "projector" in name]


def test_two_processes_train_on_clips(checkpoint: Path) -> None:
    path = write_job(checkpoint, parallel=ParallelConfig(strategy="ddp", gpus=2), batch_size=1)
    printed = "".join(run_ranks(ON_CPU, str(path), world_size=2, logs_folder=checkpoint.parent))
    assert printed.count("final_loss: ") == 1
    result = json.loads((path.parent / "output" / "result.json").read_text())
    assert result["num_steps"] == 2
