"""Rows for tools that take neither preferences nor prompts as separate messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.exports.recipe import DATA_FILE, VALIDATION_FILE, Recipe
from whichlora.spec.data_format import (
    CHAT_PAIRS,
    CHAT_PREFERENCES,
    CHAT_ROWS,
    TEXT_PAIRS,
    TEXT_PREFERENCES,
    DataFormat,
)
from whichlora.trainers import get_trainer

TRAINED = "train"  # of a message: whether it is learned

_SIMPLER: Mapping[DataFormat, DataFormat] = {
    CHAT_PAIRS: CHAT_ROWS,
    CHAT_PREFERENCES: CHAT_ROWS,
    TEXT_PREFERENCES: TEXT_PAIRS,
}


def simpler_format(data: DataFormat) -> DataFormat:
    """The format that `simpler_row` converts rows of format `data` to."""
    return _SIMPLER.get(data, data)


def rows_format(recipe: Recipe) -> DataFormat:
    """The format of the rows that a tool gets: a trainer on texts learns the chosen answers."""
    learns_texts = get_trainer(recipe.run.trainer).rows == "texts"
    return simpler_format(recipe.data_format) if learns_texts else recipe.data_format


def file_names(recipe: Recipe) -> tuple[str, str]:
    """The files of rows for training and for validation."""
    if rows_format(recipe) != recipe.data_format:
        return "train_sft.jsonl", "validation_sft.jsonl"
    return DATA_FILE, VALIDATION_FILE


def made_of(recipe: Recipe) -> dict[str, str]:
    """File → the file whose rows `simpler_row` converts; empty if no conversion is needed."""
    pairs = zip(file_names(recipe), (DATA_FILE, VALIDATION_FILE), strict=True)
    files = {file: source for file, source in pairs if file != source}
    return dict(list(files.items())[: 1 + recipe.validation])


def simpler_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as one list of messages, or as prompt and completion.

    The answer is the completion or the chosen text; without a prompt, its last message.
    """
    answer = row["completion"] if "completion" in row else row["chosen"]
    if isinstance(answer, str):
        return {"prompt": row.get("prompt", ""), "completion": answer}
    prompt = row.get("prompt", answer[:-1])
    answer = answer if "prompt" in row else answer[-1:]
    return {
        "messages": [
            message | {TRAINED: learned}
            for messages, learned in ((prompt, False), (answer, True))
            for message in messages
        ]
    }
