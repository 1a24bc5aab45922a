"""Tokens of pairs, labelled answers and prompts: what is cut, what is left out, what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whichlora.dataset import TokenLengths, count_tokens, open_dataset, workload
from whichlora.dataset.answer_tokens import AnswerTokens
from whichlora.errors import ConfigError
from whichlora.spec.plan import DatasetConfig
from whichlora.spec.run import RunConfig
from whichlora.trainers import Repeats, get_trainer


def counted(
    folder: Path, trainer: str, *rows: dict[str, Any], max_length: int = 20
) -> TokenLengths:
    """`rows` by a tokenizer of bytes, whose one special token ends a text."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = open_dataset(
        DatasetConfig(path=str(path), validation_fraction=0.0), get_trainer(trainer).rows
    )
    run = RunConfig(model="tiny", trainer=trainer, trainer_options=OPTIONS.get(trainer, ()))
    return count_tokens(data, tokenizer="bytes", offline=True, max_length=max_length, run=run)


OPTIONS = {"grpo": (("max_completion_length", 8),)}
SHORT = {"prompt": "12345", "chosen": "1234", "rejected": "12"}
CUT = {"prompt": "12345", "chosen": "1" * 30, "rejected": "12"}
FULL = {"prompt": "1" * 20, "chosen": "1", "rejected": "12"}


@pytest.mark.parametrize("trainer", ["dpo", "orpo", "cpo"])
def test_a_pair_has_two_sequences_and_is_left_out_where_its_prompt_fills_the_length(
    tmp_path: Path, trainer: str
) -> None:
    lengths = counted(tmp_path, trainer, SHORT, CUT, FULL)
    assert lengths.lengths["train"] == (10, 20)  # the longer of each pair, its end with it
    assert lengths.others["train"] == (8, 8)
    assert lengths.changed() == [
        "1 row is cut to 20 tokens",
        "1 rows are left out: their prompts fill 20 tokens",
    ]
    assert lengths.describe().startswith("2 pairs, 46 tokens an epoch, longest 20")


def test_a_reward_model_does_not_learn_of_pairs_that_are_longer(tmp_path: Path) -> None:
    lengths = counted(tmp_path, "reward", SHORT, CUT, FULL)
    assert lengths.lengths["train"] == (10,)
    assert lengths.changed() == ["2 rows are left out: they have more than 20 tokens"]
    with pytest.raises(ConfigError, match="all rows are left out: they have more than 20 tokens"):
        counted(tmp_path, "reward", CUT)


def test_a_prompt_is_counted_with_the_answer_that_the_model_writes(tmp_path: Path) -> None:
    lengths = counted(tmp_path, "grpo", {"prompt": "123"}, {"prompt": "1" * 13})
    assert lengths.lengths["train"] == (11,)
    assert lengths.changed() == ["1 rows are left out: prompt and answer have more than 20 tokens"]


def test_an_unlabelled_prompt_within_both_answers_is_what_they_share(tmp_path: Path) -> None:
    row = {"chosen": "1" * 20 + "a", "rejected": "1" * 20 + "b"}
    lengths = counted(tmp_path, "dpo", SHORT, row | {"prompt": ""})
    assert lengths.lengths["train"] == (10, 20)  # an empty prompt leaves room
    with pytest.raises(ConfigError, match="their prompts fill 20 tokens"):
        counted(tmp_path, "dpo", row)


def test_a_batch_of_pairs_is_twice_as_many_sequences(tmp_path: Path) -> None:
    lengths = counted(tmp_path, "dpo", SHORT, SHORT, CUT, CUT)
    load = workload(lengths, batch_size=2, sequences=2)
    assert load.num_batches == 2
    assert load.longest == 20
    assert load.real_tokens == 2 * (10 + 8) + 2 * (20 + 8)
    assert load.padded_tokens == 2 * sum(2 * width * n for width, n in load.widths.items())


def test_prompts_come_back_with_each_of_their_answers(tmp_path: Path) -> None:
    lengths = counted(tmp_path, "grpo", *({"prompt": "1" * number} for number in range(1, 8)))
    # 8 answers at once, 4 to a prompt; learnt from twice, in two micro-batches of 4 answers
    repeats = Repeats(answers=8, per_row=4, micro_batches=4)
    load = workload(lengths, batch_size=4, accumulation=2, repeats=repeats)
    assert load.num_batches == 7 // 2 * 4  # the last prompt has no partner
    assert load.num_steps == 6
    assert load.padded_tokens == 4 * sum(width * n for width, n in load.widths.items())
    spread = workload(lengths, batch_size=4, at_once=3, accumulation=2, repeats=repeats)
    assert spread.num_batches == 7 // 6 * 4
    with pytest.raises(ConfigError, match="has 7 prompts, fewer than the 8 that answers are"):
        workload(lengths, batch_size=16, repeats=Repeats(answers=16, per_row=2, micro_batches=1))


def test_a_reader_names_the_answers_of_a_row() -> None:
    def reader(trainer: str) -> AnswerTokens:
        run = RunConfig(model="tiny", trainer=trainer)
        return AnswerTokens(run=run, max_length=20, render=None)

    assert reader("dpo").answers == ("chosen", "rejected")
    assert reader("kto").answers == ("completion",)
    assert reader("grpo").answers == ()
