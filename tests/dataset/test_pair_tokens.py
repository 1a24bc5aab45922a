"""Sources and targets of an encoder-decoder, counted as its `train.py` cuts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whichlora.dataset import BYTE_LEVEL, TokenLengths, count_tokens, open_dataset
from whichlora.dataset.pair_tokens import PairTokens, source_and_target
from whichlora.errors import ConfigError
from whichlora.spec.data_format import CHAT_PAIRS, CHAT_ROWS, IMAGE_ROWS, TEXT_PAIRS, TEXT_ROWS
from whichlora.spec.plan import DatasetConfig

USER, ASSISTANT = "user", "assistant"


def counted(folder: Path, rows: list[dict[str, Any]], **lengths: int) -> TokenLengths:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = open_dataset(DatasetConfig(path=str(path), validation_fraction=0.0), "texts")
    sizes = {"max_length": 64, "target_length": 16} | lengths
    return count_tokens(dataset, tokenizer=BYTE_LEVEL, offline=True, **sizes)


def test_sources_are_counted_and_the_longest_target_is_kept(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a" * 100, "completion": "b" * 9},
        {"prompt": "a" * 10, "completion": "b" * 12},
    ]
    lengths = counted(tmp_path, rows)
    assert lengths.lengths["train"] == (64, 10)
    assert lengths.longest_target == 12
    assert lengths.num_truncated == 1
    assert counted(tmp_path, rows, target_length=5).longest_target == 5
    assert counted(tmp_path, rows, target_length=0).longest_target is None
    assert counted(tmp_path, rows, target_length=0, max_length=200).longest() > 100


def test_messages_and_questions_are_the_same_pairs(tmp_path: Path) -> None:
    answer = {"role": ASSISTANT, "content": "yes"}
    said = [{"role": "system", "content": "Be brief."}, {"role": USER, "content": "Well?"}]
    for row in ({"messages": [*said, answer]}, {"prompt": said, "completion": [answer]}):
        assert source_and_target(row) == ("Be brief.\n\nWell?", "yes")
        lengths = counted(tmp_path, [row])
        assert (lengths.lengths["train"], lengths.longest_target) == ((16,), 3)


def test_rows_without_a_target_are_left_out(tmp_path: Path) -> None:
    question = [{"role": USER, "content": "Well?"}]
    pair = {"messages": [*question, {"role": ASSISTANT, "content": "yes"}]}
    lengths = counted(tmp_path, [pair, {"messages": question}])
    assert lengths.num_sequences() == lengths.num_unlearned == 1
    assert "they have no target" in lengths.describe()
    with pytest.raises(ConfigError, match="the last message must be the assistant's"):
        counted(tmp_path, [{"messages": question}])


def test_an_estimated_target_is_an_upper_bound(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "a" * 100, "completion": "b" * 28}) + "\n")
    dataset = open_dataset(DatasetConfig(path=str(path), validation_fraction=0.0), "texts")
    lengths = count_tokens(dataset, tokenizer=None, offline=True, max_length=64, target_length=64)
    assert lengths.lengths["train"] == (25,)
    assert lengths.longest_target == 10


def test_texts_and_images_are_no_pairs() -> None:
    formats = (TEXT_PAIRS, CHAT_PAIRS, CHAT_ROWS, TEXT_ROWS, IMAGE_ROWS)
    assert [PairTokens.reads(each) for each in formats] == [True, True, True, False, False]
