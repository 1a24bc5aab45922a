"""What a task is: what a model learns instead of writing texts, and the head that it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.data_format import Rows
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

Labels = Literal["class", "number", "per_token", "span", "none"]


def _no_settings(run: RunConfig) -> Mapping[str, Any]:
    return {}


def _no_notes(model: ModelSpec, run: RunConfig) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a model is loaded for, where that is not what its type implies.

    Args:
        auto_class: the class of transformers that loads it.
        peft_task: PEFT's `TaskType`.
        copied: names of modules that PEFT copies and trains with that type.
        linears_by_name: PEFT's all-linear takes the head, too, of which it can then make no copy,
            so that it must be told names.
        prepare: the model with its head for this task; refuses a model that has none.
        labels: what the batch has beside tokens: a class or a number of each sequence, a class of
            each token, the first and last position of an answer, or nothing.
        rows: what it learns from; None where the trainer says.
        trainers: those that can train it; a run that names none gets the first.
        options: its own settings.
        config: what it writes into the model's config, by transformers' names.
        notes: what a user must know of a model.
    """

    name: str
    summary: str
    auto_class: str
    peft_task: str
    copied: tuple[str, ...]
    prepare: Callable[[ModelSpec, RunConfig], ModelSpec]
    labels: Labels
    linears_by_name: bool = False
    rows: Rows | None = None
    trainers: tuple[str, ...] = ("transformers", "loop", "loop-function")
    options: tuple[Option, ...] = ()
    config: Callable[[RunConfig], Mapping[str, Any]] = _no_settings
    notes: Callable[[ModelSpec, RunConfig], tuple[str, ...]] = _no_notes
