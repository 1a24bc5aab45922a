"""Rows with clips in the written job: what is read, what is learned, and a real training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import written_job
from audio_checkpoints import WINDOW_S, write_checkpoint
from clips import tone, write_clip
from train_runs import run_ranks, run_script
from written_job import script_of

from whichlora.dataset import count_tokens, open_dataset
from whichlora.spec.data_format import TRANSCRIPTS
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import DatasetConfig

pytestmark = pytest.mark.oracle
np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

ON_CPU = Path(__file__).parents[1] / "spread_on_cpu.py"
SEQ_LEN = 40
EPOCHS = 8
TEXTS = ("A tone.", "Another one, louder.", "Two channels of it", "In the row", "slower")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_clip(tmp_path / "0.wav", 1.0)
    write_clip(tmp_path / "1.wav", 0.5, rate=44_100, width=3)
    write_clip(tmp_path / "2.wav", 1.5, channels=2, width=4)
    in_row = {"array": tone(0.7).tolist(), "sampling_rate": 16_000}
    write_clip(tmp_path / "4.wav", 2.0, rate=8_000, width=1)
    clips = ["0.wav", "1.wav", "2.wav", in_row, "4.wav"]
    write_rows(tmp_path, [*zip(clips, TEXTS, strict=True)])
    return write_checkpoint(tmp_path / "model")


def write_rows(folder: Path, rows: list[tuple[Any, str]]) -> None:
    with (folder / "train.jsonl").open("w") as file:
        for clip, text in rows:
            file.write(json.dumps({"audio": clip, "text": text}) + "\n")


def write_job(checkpoint: Path, **settings: Any) -> Path:
    epochs = EPOCHS if "parallel" not in settings else 1
    settings = {"seq_len": SEQ_LEN, **settings}
    return written_job.write_job(
        checkpoint, TRANSCRIPTS, settings, epochs=epochs, learning_rate=1e-2
    )


def read(checkpoint: Path, **settings: Any) -> tuple[Any, Any, list[dict[str, Any]]]:
    script = script_of(write_job(checkpoint, **settings))
    processor = script.AutoProcessor.from_pretrained(checkpoint)
    return script, processor, script.read_rows(checkpoint.parent / "train.jsonl", processor)


def test_transcripts_are_learned_behind_what_the_model_puts_there(checkpoint: Path) -> None:
    script, processor, rows = read(checkpoint)
    batch = script.TranscriptBatches(processor)(rows)
    assert batch["input_features"].shape == (len(TEXTS), 80, 100 * WINDOW_S)
    model = script.AutoModelForSpeechSeq2Seq.from_pretrained(checkpoint)
    for labels, text in zip(batch["labels"], TEXTS, strict=True):
        whole = processor(text=text)["input_ids"]
        assert labels[labels != -100].tolist() == whole[1:]
        assert whole[0] == model.config.decoder_start_token_id


def test_rows_are_counted_as_the_processor_cuts_them(checkpoint: Path) -> None:
    _, processor, rows = read(checkpoint)
    data = DatasetConfig(path=str(checkpoint.parent / "train.jsonl"), validation_fraction=0.0)
    counted = count_tokens(
        open_dataset(data),
        tokenizer=str(checkpoint),
        offline=True,
        max_length=SEQ_LEN,
        window_s=WINDOW_S,
    )
    assert counted.is_counted
    assert list(counted.lengths["train"]) == [len(row["labels"]) for row in rows]
    assert counted.lengths["train"][0] == len(processor(text=TEXTS[0])["input_ids"]) - 1


def test_rows_that_are_too_long_are_left_out(checkpoint: Path) -> None:
    folder = checkpoint.parent
    write_clip(folder / "long.wav", WINDOW_S + 0.1)
    write_rows(folder, [("0.wav", "a"), ("long.wav", "b"), ("0.wav", "c" * SEQ_LEN)])
    _, _, rows = read(checkpoint)
    data = DatasetConfig(path=str(folder / "train.jsonl"), validation_fraction=0.0)
    settings = {"tokenizer": str(checkpoint), "offline": True, "window_s": WINDOW_S}
    counted = count_tokens(open_dataset(data), max_length=SEQ_LEN, **settings)
    assert len(rows) == counted.num_sequences() == 1
    assert "2 rows are left out: they are longer than 2 s of audio, or than 40" in str(
        counted.describe()
    )


def test_a_clip_is_read_as_its_samples_whatever_holds_it(checkpoint: Path) -> None:
    script, _, rows = read(checkpoint)
    for row, seconds in zip(rows, (1.0, 0.5, 1.5, 0.7, 2.0), strict=True):
        samples = script.read_clip(row["audio"], 16_000)
        assert script.clip_seconds(row["audio"]) == seconds
        assert samples.dtype == np.float32
        inner = slice(800, -800)  # where resampling has no edge
        assert np.abs(samples - tone(seconds))[inner].max() < 0.01


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora"},
        {"method": "full", "gradient_checkpointing": True},
        {"method": "lora", "precision": "bf16-no-autocast", "gradient_checkpointing": True},
    ],
)
def test_a_job_learns_the_transcripts(checkpoint: Path, settings: dict[str, Any]) -> None:
    if settings.get("gradient_checkpointing"):
        settings = settings | {"use_reentrant": False}
    path = write_job(checkpoint, **settings)
    done = run_script(path)
    assert done.returncode == 0, done.stderr[-3000:]
    output = path.parent / "output"
    state = json.loads((output / f"checkpoint-{3 * EPOCHS}" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    result = json.loads((output / "result.json").read_text())
    assert result["num_steps"] == 3 * EPOCHS


def test_two_processes_train_on_clips(checkpoint: Path) -> None:
    path = write_job(checkpoint, parallel=ParallelConfig(strategy="ddp", gpus=2), batch_size=1)
    printed = "".join(run_ranks(ON_CPU, str(path), world_size=2, logs_folder=checkpoint.parent))
    assert printed.count("final_loss: ") == 1
    result = json.loads((path.parent / "output" / "result.json").read_text())
    assert result["num_steps"] == 3
