"""Special tokens that each reader of rows puts around a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whichlora.dataset.encoders import Encode, Estimate, Frame, encoder_of

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def encode(tmp_path: Path) -> Encode:
    """Each word is a token; the tokenizer begins a text with <s>, and does not end it."""
    words = ["<s>", "</s>", "a", "b", "?"]
    fast = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    )
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(words[:2])
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    encoder, method = encoder_of(str(tmp_path), offline=True)
    assert method == f"tokenizer {tmp_path}"
    return encoder


@pytest.mark.parametrize(
    ("text", "frame", "number"),
    [
        ("a b", "none", 2),
        ("a b", "tokenizer", 3),
        ("a b", "ended", 4),
        ("a b </s>", "ended", 4),
        ("a b", "eos", 4),
        ("a b</s>", "eos", 4),
        ("a b", "bos and eos", 4),
        ("<s>a b</s>", "bos and eos", 4),  # as a chat template may have rendered it
        ("<s>a b", "tokenizer", 4),  # what TRL's other trainers avoid by adding none
    ],
)
def test_a_text_has_the_special_tokens_of_its_frame(
    encode: Encode, text: str, frame: Frame, number: int
) -> None:
    assert encode([text], frame) == [number]


def test_a_prompt_ends_where_its_answer_changes_its_tokens(encode: Encode) -> None:
    assert encode.shared("a b", "a b a", "eos") == 3
    assert encode.shared("a b", "a bb a", "eos") == 2  # merged with the answer's first
    assert encode.shared("a b", "a b a", "none") == 2
    assert encode.shared("a b", "a b a", "bos and eos") == 3
    assert encode.shared("a b", "a bb a", "bos and eos") == 2


def test_an_estimate_counts_an_end_where_there_is_one() -> None:
    estimate = Estimate(bytes_per_token=2)
    assert [estimate(["abc"], frame)[0] for frame in ("none", "eos", "bos and eos")] == [2, 3, 3]
    assert estimate.shared("abc", "abcdef", "eos") == 2
