"""Rows with images in the written job: what is read, what is learned, and a real training."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import written_job
from image_checkpoints import MODELS, write_checkpoint
from train_runs import run_ranks, run_script
from written_job import script_of

from whichlora.dataset import count_tokens, open_dataset
from whichlora.families import build
from whichlora.spec.data_format import IMAGE_ROWS
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import DatasetConfig
from whichlora.spec.tower import limited_sides

pytestmark = pytest.mark.oracle
Image = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")

ON_CPU = Path(__file__).parents[1] / "spread_on_cpu.py"
SEQ_LEN = 288
SIZES = ((56, 84), (280, 140), (31, 200), (90, 64))
PLACE = {"type": "image"}
NEEDS_TRL = pytest.mark.skipif(find_spec("trl") is None, reason="pip install --no-deps trl")
TRAINERS = ["transformers", pytest.param("sft", marks=NEEDS_TRL)]


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


ROWS = [
    ([PLACE, said("Which colour?")], "Red, all of it.", [0]),
    ([said("First "), PLACE, said(" and then "), PLACE], "Two.", [1, 2]),
    ([said("No image at all.")], "None.", []),
    ([said("What of this: "), PLACE], "A wide one, and a longer answer to it.", [3]),
]


@pytest.fixture(params=sorted(MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    for number, size in enumerate(SIZES):
        Image.new("RGB", size, (60 * number, 20, 90)).save(tmp_path / f"{number}.png")
    with (tmp_path / "train.jsonl").open("w") as file:
        for parts, answer, images in ROWS:
            messages = [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": [said(answer)]},
            ]
            row = {"messages": messages, "images": [f"{number}.png" for number in images]}
            file.write(json.dumps(row) + "\n")
    return write_checkpoint(tmp_path / "model", request.param)


def write_job(checkpoint: Path, **settings: Any) -> Path:
    settings = {"images": 1, "image_size": SIZES[0], "seq_len": SEQ_LEN, **settings}
    return written_job.write_job(checkpoint, IMAGE_ROWS, settings)


def read(script: ModuleType, checkpoint: Path) -> tuple[Any, list[dict[str, Any]]]:
    processor = script.AutoProcessor.from_pretrained(checkpoint)
    processor.tokenizer.chat_template = processor.chat_template
    return processor, script.read_rows(checkpoint.parent / "train.jsonl", processor)


def test_answers_are_learned_and_no_token_of_an_image(checkpoint: Path) -> None:
    script = script_of(write_job(checkpoint))
    processor, rows = read(script, checkpoint)
    assert len(rows) == len(ROWS)
    batch = script.ImageBatches(processor)(rows)
    tokenizer = processor.tokenizer
    for ids, labels, (_, answer, _) in zip(batch["input_ids"], batch["labels"], ROWS, strict=True):
        assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))
        assert tokenizer.decode(labels[labels != -100]) == f"{answer}</s>"
    pixels = batch["pixel_values"]
    if "aspect_ratio_ids" in batch:  # rows are filled up to as many images
        pixels = pixels[batch["aspect_ratio_ids"] > 0]
    assert len(pixels) == sum(len(images) for _, _, images in ROWS)


@NEEDS_TRL
def test_ids_labels_and_pixels_are_those_of_trl_s_collator(checkpoint: Path) -> None:
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    script = script_of(write_job(checkpoint))
    processor, rows = read(script, checkpoint)
    rows = [row for row in rows if row["images"]]
    ours = script.ImageBatches(processor)(rows)
    examples = [
        {
            "prompt": [{"role": "user", "content": parts}],
            "completion": [{"role": "assistant", "content": [said(answer)]}],
            "images": [Image.open(checkpoint.parent / f"{number}.png") for number in images],
        }
        for parts, answer, images in ROWS
        if images
    ]
    theirs = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)(examples)
    assert torch.equal(ours["pixel_values"], theirs["pixel_values"])
    begin = processor.tokenizer.bos_token_id
    for name in ("input_ids", "labels"):
        for our_row, ids, values in zip(ours[name], theirs["input_ids"], theirs[name], strict=True):
            # Llama 3.2 Vision's processor begins TRL's answers once more
            kept = (ids != begin) | (torch.arange(len(ids)) == 0)
            width = min(int(kept.sum()), len(our_row))
            assert torch.equal(our_row[:width], values[kept][:width]), name


def test_a_row_with_an_image_comes_first(checkpoint: Path) -> None:
    script = script_of(write_job(checkpoint))
    processor, rows = read(script, checkpoint)
    batch = script.ImageBatches(processor)(rows[2:])
    answers = [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert answers == [f"{ROWS[number][1]}</s>" for number in (3, 2)]
    texts = script.ImageBatches(processor)([rows[2]])
    assert "pixel_values" not in texts


@pytest.mark.parametrize("most", [None, 4000])
def test_rows_are_counted_as_the_processor_cuts_them(checkpoint: Path, most: int | None) -> None:
    script = script_of(write_job(checkpoint, image_max_pixels=most))
    processor, rows = read(script, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    tower = build(config, name="m").tower
    assert tower is not None
    data = DatasetConfig(path=str(checkpoint.parent / "train.jsonl"), validation_fraction=0.0)
    counted = count_tokens(
        open_dataset(data),
        tokenizer=str(checkpoint),
        offline=True,
        max_length=SEQ_LEN,
        grid=tower.limited(most),
    )
    assert counted.is_counted
    batches = script.ImageBatches(processor)
    real = [int(batches([row])["attention_mask"].sum()) for row in rows]
    assert list(counted.lengths["train"]) == real


def test_rows_whose_images_exceed_the_length_are_left_out(checkpoint: Path) -> None:
    script = script_of(write_job(checkpoint))
    _, rows = read(script, checkpoint)
    shortest = min(len(row["labels"]) for row in rows if row["images"])
    script.SEQ_LEN = shortest  # type: ignore[attr-defined]
    _, kept = read(script, checkpoint)
    assert sorted(len(row["images"]) for row in kept) == sorted(
        len(row["images"]) for row in rows if not row["images"] or len(row["labels"]) <= shortest
    )
    assert len(kept) < len(rows)


# Each with one of the methods, whose trainings take seconds.
METHODS = [(model, ("lora", "full")[i % 2]) for i, model in enumerate(sorted(MODELS))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("checkpoint", "method"), METHODS, indirect=["checkpoint"])
def test_a_frozen_tower_stays_as_it_is(checkpoint: Path, method: str, trainer: str) -> None:
    path = write_job(checkpoint, method=method, trainer=trainer, freeze_vision_tower=True)
    done = run_script(path)
    assert done.returncode == 0, done.stderr[-3000:]
    output = path.parent / "output"
    result = json.loads((output / "result.json").read_text())
    assert result["num_steps"] == 2
    assert 0 < result["final_loss"] < 20
    from safetensors.torch import load_file

    if method == "lora":
        names = list(load_file(output / "adapter_model.safetensors"))
        assert names
        assert not [name for name in names if "vision_tower" in name or "projector" in name]
        return
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, output))
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed
    assert not [name for name in changed if "vision_tower" in name or "projector" in name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("checkpoint", sorted(MODELS)[::2], indirect=True)
def test_two_processes_train_on_images(checkpoint: Path, trainer: str) -> None:
    parallel = ParallelConfig(strategy="ddp", gpus=2)
    path = write_job(checkpoint, trainer=trainer, parallel=parallel, batch_size=1)
    printed = "".join(run_ranks(ON_CPU, str(path), world_size=2, logs_folder=checkpoint.parent))
    assert printed.count("final_loss: ") == 1
    result = json.loads((path.parent / "output" / "result.json").read_text())
    assert result["num_steps"] == 2


def test_larger_images_are_shrunk_before_the_processor_sees_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = script_of(write_job(checkpoint, image_max_pixels=4000))
    processor, rows = read(script, checkpoint)
    seen: list[tuple[int, int]] = []
    reads = type(processor.image_processor).__call__

    def noting(self: Any, images: Any, **options: Any) -> Any:
        seen.extend(image.size for row in images for image in row)
        return reads(self, images, **options)

    monkeypatch.setattr(type(processor.image_processor), "__call__", noting)
    script.ImageBatches(processor)(rows)
    sides = [limited_sides(height, width, 4000) for width, height in SIZES]
    assert seen == [(width, height) for height, width in sides]
    assert max(width * height for width, height in seen) <= 4000
    assert seen[0] != SIZES[0]
