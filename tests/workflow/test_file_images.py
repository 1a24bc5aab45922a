"""Files that train on images, which do not say of how many and how large."""

from pathlib import Path
from typing import Any

import pytest

from whichlora import estimate
from whichlora.spec.results import Prediction

SEES = "Qwen/Qwen2.5-VL-3B-Instruct"
LLAMAFACTORY = f"""
model_name_or_path: {SEES}
stage: sft
finetuning_type: lora
lora_target: all
template: qwen2_vl
freeze_vision_tower: true
cutoff_len: 2048
bf16: true
"""
SWIFT = f"swift sft --model {SEES} --torch_dtype bfloat16 --freeze_vit true"


def predicted(folder: Path, text: str, **settings: Any) -> Prediction:
    path = folder / ("train.sh" if text.startswith("swift") else "train.yaml")
    path.write_text(text)
    settings = {"gpu": "a100-sxm-80gb", "from_file": path, **settings}
    (prediction,) = estimate(**settings)
    return prediction


def test_one_image_of_the_tools_largest_is_counted_and_said_first(tmp_path: Path) -> None:
    found = predicted(tmp_path, LLAMAFACTORY)
    assert (found.run.images, found.run.image_size) == (1, (768, 768))
    assert "one image of 768x768 is counted in each row, at most 589,824 pix" in found.notes[0]
    none = predicted(tmp_path, LLAMAFACTORY, images=0)
    assert none.run.images == 0
    assert none.memory.device_used_bytes < found.memory.device_used_bytes


def test_without_a_limit_an_image_is_as_large_as_its_processor_makes_it(tmp_path: Path) -> None:
    found = predicted(tmp_path, SWIFT)
    assert found.run.images == 1
    assert found.run.seq_len == 2048 + 16384  # `max_pixels` of Qwen2-VL, 28 x 28 for a token
    assert "the largest of its processor, as no limit is set" in found.notes[0]


@pytest.mark.parametrize("limit", ["MAX_PIXELS=401408 {}", "{} --max_pixels 401408"])
def test_a_limit_and_a_length_hold(limit: str, tmp_path: Path) -> None:
    text = limit.format(f"{SWIFT} --max_length 1024")
    path = tmp_path / "train.sh"
    path.write_text(text)
    (found,) = estimate(from_file=path, gpu="a100-sxm-80gb")
    assert (found.run.image_size, found.run.seq_len) == ((633, 633), 1024)


def test_a_row_holds_no_larger_image_than_its_length(tmp_path: Path) -> None:
    found = predicted(tmp_path, f"{SWIFT} --max_length 1024")
    assert found.run.seq_len == 1024
    assert "the largest that 1,024 tokens hold" in found.notes[0]


@pytest.mark.parametrize("gpus", [4, 1])  # of which one has ZeRO's buffers, too
def test_images_are_counted_where_deepspeed_divides_a_model(tmp_path: Path, gpus: int) -> None:
    found = predicted(tmp_path, LLAMAFACTORY + "deepspeed: ds_z3_config.json\n", gpus=gpus)
    assert (found.run.images, found.verdict) == (1, "fits")


def test_images_that_can_not_be_counted_leave_no_plain_yes(tmp_path: Path) -> None:
    found = predicted(tmp_path, LLAMAFACTORY.replace("stage: sft", "stage: dpo"), gpu="h200")
    assert found.run.images == 0
    assert found.verdict == "undecided"
    assert "no image is counted, so that it may need more" in found.notes[0]


def test_a_file_without_a_sign_of_images_gets_the_note_alone(tmp_path: Path) -> None:
    text = LLAMAFACTORY.replace("template: qwen2_vl\nfreeze_vision_tower: true\n", "")
    assert predicted(tmp_path, text).run.images == 1  # its name has VL
    found = predicted(tmp_path, text.replace(SEES, "google/gemma-3-4b-it"))
    assert (found.run.images, found.verdict) == (0, "fits")
    assert "no image is counted: --images 1" in found.notes[0]


def test_a_model_that_reads_texts_alone_gets_none(tmp_path: Path) -> None:
    found = predicted(tmp_path, LLAMAFACTORY.replace(SEES, "Qwen/Qwen2.5-3B-Instruct"))
    assert found.run.images == 0
    assert not any("image" in note for note in found.notes)


def test_rows_hold_the_images_that_the_user_states_where_the_file_has_no_length(
    tmp_path: Path,
) -> None:
    """github.com/modelscope/ms-swift/issues/2753, whose rows have several images each"""
    limited = f"MAX_PIXELS=602112 {SWIFT}"
    found = predicted(tmp_path, limited, images=11, image_size="1024x768")
    each = (predicted(tmp_path, limited, images=1, image_size="1024x768").run.seq_len) - 2048
    assert found.run.seq_len == 2048 + 11 * each
    assert each >= 700
    bounded = predicted(tmp_path, f"{limited} --max_length 4096", images=2)
    assert bounded.run.seq_len == 4096
    assert predicted(tmp_path, limited, images=0).run.seq_len == 2048
