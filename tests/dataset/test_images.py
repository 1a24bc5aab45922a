"""Rows with images: columns and parts that name them, their sizes, tokens and patches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whichlora.dataset import count_tokens, data_format, open_dataset
from whichlora.dataset.images import (
    RowImages,
    found_in,
    heaviest,
    image_size,
    image_tokens,
    patches,
    sizes_of,
    typical,
)
from whichlora.dataset.media import MEDIA
from whichlora.dataset.rendering import rendering
from whichlora.errors import ConfigError, DataFileError
from whichlora.families.towers.clip import CroppedGrid
from whichlora.families.towers.pixtral import PixtralGrid
from whichlora.families.towers.qwen import QwenGrid
from whichlora.spec.data_format import IMAGE_ROWS, DataFormat
from whichlora.spec.plan import DatasetConfig

Image = pytest.importorskip("PIL.Image")
QWEN = QwenGrid(patch=14, merge=2, values=1176, least=3136, most=12_845_056)
CLIP = CroppedGrid(side=336, patch=14, channels=3)
PIXTRAL = PixtralGrid(patch=14, merge=2, channels=3, longest=1540)
TEXT, PLACE = {"type": "text", "text": "Why?"}, {"type": "image"}
ANSWER = {"role": "assistant", "content": "So."}
IN_PARTS = {"role": "assistant", "content": [{"type": "text", "text": "So."}]}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (56, 84)).save(tmp_path / "a.png")
    Image.new("RGB", (280, 140)).save(tmp_path / "b.jpg")
    return tmp_path


@pytest.fixture
def data(folder: Path) -> Callable[..., DatasetConfig]:
    def written(*rows: dict[str, Any], **settings: Any) -> DatasetConfig:
        path = folder / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DatasetConfig(path=str(path), validation_fraction=0.0, **settings)

    return written


@pytest.mark.parametrize(
    ("row", "user"),
    [
        ({"messages": [said(PLACE, TEXT), ANSWER], "images": ["a.png"]}, [PLACE, TEXT]),
        ({"messages": [said(PLACE | {"image": "a.png"}, TEXT), ANSWER]}, [PLACE, TEXT]),
        ({"messages": [said(TEXT, PLACE | {"path": "a.png"}), ANSWER]}, [TEXT, PLACE]),
        (
            {
                "messages": [
                    said({"type": "image_url", "image_url": {"url": "a.png"}}, TEXT),
                    ANSWER,
                ]
            },
            [PLACE, TEXT],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "<image>Why?"},
                    {"from": "gpt", "value": "So."},
                ],
                "image": "a.png",
            },
            [PLACE, TEXT],
        ),
        (
            {"messages": [{"role": "user", "content": "Why?"}, ANSWER], "images": ["a.png"]},
            [PLACE, TEXT],
        ),
    ],
)
def test_images_are_read_from_a_column_or_from_parts_of_messages(
    data: Callable[..., DatasetConfig], folder: Path, row: dict[str, Any], user: Any
) -> None:
    dataset = open_dataset(data(row))
    (example,) = dataset.splits()["train"]
    assert example["messages"] == [said(*user), IN_PARTS]
    assert example["images"] == [str(folder / "a.png")]
    assert data_format(dataset) == IMAGE_ROWS


@pytest.mark.parametrize("answer", ["completion", "answer"])
def test_a_prompt_and_its_answer_are_messages_where_there_are_images(
    data: Callable[..., DatasetConfig], folder: Path, answer: str
) -> None:
    prompt = "prompt" if answer == "completion" else "question"
    dataset = open_dataset(data({prompt: "Why?", answer: "So.", "images": ["a.png", "b.jpg"]}))
    (example,) = dataset.splits()["train"]
    assert example["prompt"] == [said(PLACE, PLACE, TEXT)]
    assert example["completion"] == [IN_PARTS]
    assert sizes_of(example) == ((56, 84), (280, 140))
    assert "(images: images)" in dataset.describe()


def test_rows_with_and_without_images_are_of_one_format(
    data: Callable[..., DatasetConfig],
) -> None:
    rows = [{"prompt": "Why?", "completion": "So.", "image": path} for path in ("a.png", "", None)]
    (one, two, three) = open_dataset(data(*rows)).splits()["train"]
    assert len(one["images"]) == 1
    assert two["images"] == three["images"] == []


def test_columns_that_are_named_alone_are_texts(data: Callable[..., DatasetConfig]) -> None:
    row = {"messages": [{"role": "user", "content": "Why?"}, ANSWER], "image": "a.png"}
    texts = open_dataset(data(row, messages_column="messages"))
    assert data_format(texts) == DataFormat(kind="messages", conversational=True)
    seen = open_dataset(data(row, messages_column="messages", images_column="image"))
    assert data_format(seen) == IMAGE_ROWS


FAULTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "missing": (
        [{"prompt": "p", "completion": "c", "image": "gone.png"}],
        ":1: image .*gone.png: is missing; correct the path",
    ),
    "broken": (
        [{"prompt": "p", "completion": "c", "image": "data.jsonl"}],
        ":1: image .*data.jsonl: can't be read as an image",
    ),
    "no path": (
        [{"prompt": "p", "completion": "c", "image": {"bytes": "x"}}],
        ":1: an image must be the path of a file, got dict; save it as a file",
    ),
    "an address": (
        [{"prompt": "p", "completion": "c", "image": "https://a.org/b.png"}],
        ":1: an image must be a file, got 'https://a.org/b.png'; download it",
    ),
    "too few places": (
        [{"messages": [said(PLACE, TEXT), ANSWER], "images": ["a.png", "b.jpg"]}],
        ":1: has 2 images, and its messages have 1 places for them",
    ),
    "named twice": (
        [{"messages": [said(PLACE | {"image": "a.png"}, TEXT), ANSWER], "images": ["b.jpg"]}],
        ":1: has images in the column 'images' and in its messages",
    ),
    "the first row without": (
        [
            {"messages": [said(TEXT), ANSWER]},
            {"messages": [said(PLACE | {"image": "a.png"}), ANSWER]},
        ],
        ":2: has images in its messages, and only text is trained on here",
    ),
}


@pytest.mark.parametrize(("rows", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_an_image_is_told_with_its_line(
    data: Callable[..., DatasetConfig], rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(DataFileError, match=message):
        open_dataset(data(*rows))


def test_a_column_of_images_beside_plain_texts_is_refused() -> None:
    config = DatasetConfig(path="a.jsonl", text_column="text", images_column="image")
    with pytest.raises(ConfigError, match="images_column: 'image' goes with messages"):
        rendering(config, {"text": "a", "image": "a.png"})


def test_a_path_starts_in_the_folder_of_the_data(folder: Path) -> None:
    assert found_in(folder, {"images": ["a.png"]}) == {"images": [str(folder / "a.png")]}
    assert found_in(folder, {"text": "a"}) == {"text": "a"}


def test_an_image_is_turned_as_its_exif_says(folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(folder / "turned.jpg", exif=exif)
    assert image_size(str(folder / "turned.jpg")) == (20, 30)


def test_paths_and_parts_of_a_row_without_images_stay_empty() -> None:
    row = {"prompt": "p", "completion": "c", "images": []}
    _, words = rendering(DatasetConfig(path="a.jsonl"), row)
    assert "images" in words
    example = {"prompt": [{"role": "user", "content": "p"}], "completion": [ANSWER.copy()]}
    assert MEDIA[0].in_parts(example, [])["images"] == []


def test_rows_are_as_long_as_their_texts_and_images(data: Callable[..., DatasetConfig]) -> None:
    row = {"prompt": "Why?", "completion": "So.", "images": ["a.png", "b.jpg"]}
    dataset = open_dataset(data(row, row | {"images": []}))
    counted = count_tokens(dataset, tokenizer=None, offline=True, max_length=10**6, grid=QWEN)
    seen, plain = counted.lengths["train"]
    assert seen - plain == 6 + 50  # 2 x 3 and 10 x 5 merged patches
    assert counted.image_sizes["train"] == (((56, 84), (280, 140)), ())
    (example, _) = dataset.splits()["train"]
    assert image_tokens(example, QWEN) == 56
    assert image_tokens(example, PIXTRAL) == 56 + 3 + 5  # a mark after each row


def test_rows_whose_images_exceed_the_length_are_left_out(
    data: Callable[..., DatasetConfig],
) -> None:
    rows = [{"prompt": "p", "completion": "c", "image": path} for path in ("a.png", "b.jpg")]
    counted = count_tokens(
        open_dataset(data(*rows)), tokenizer=None, offline=True, max_length=40, grid=QWEN
    )
    assert counted.num_sequences() == 1
    assert "1 rows are left out: within 40 tokens there is no room" in counted.describe()
    with pytest.raises(ConfigError, match="no row has room within 4 tokens for its images and"):
        count_tokens(
            open_dataset(data(*rows)), tokenizer=None, offline=True, max_length=4, grid=QWEN
        )


def test_a_model_that_sees_nothing_is_refused(data: Callable[..., DatasetConfig]) -> None:
    dataset = open_dataset(data({"prompt": "p", "completion": "c", "image": "a.png"}))
    with pytest.raises(ConfigError, match="rows have images, and those of org/model are not"):
        count_tokens(dataset, tokenizer="org/model", offline=True, max_length=40)


def test_the_heaviest_row_and_one_of_mean_weight_stand_for_all() -> None:
    rows = [((280, 280),), ((560, 560),), ((280, 280), (280, 280)), ()]
    assert [patches(sizes, QWEN) for sizes in rows] == [400, 1600, 800, 0]
    assert heaviest(rows, QWEN) == RowImages(1, (560, 560))
    assert typical(rows, QWEN) == RowImages(2, (280, 280))
    assert heaviest([(), ()], QWEN) is None
    assert typical([(), ()], QWEN) is None
    assert heaviest(rows, CLIP) == RowImages(2, (280, 280))  # every square has as many


@pytest.mark.parametrize("grid", [QWEN, PIXTRAL, CLIP])
def test_images_of_several_sizes_become_equal_ones_of_no_more_patches(grid: Any) -> None:
    sizes = ((1024, 768), (300, 400), (640, 480))
    shown = RowImages.of(sizes, grid)
    together = patches((shown.image_size,) * shown.images, grid)
    assert 0.9 * patches(sizes, grid) <= together <= patches(sizes, grid)
