"""A few optimizer steps of LLaMA-Factory's trainers of preferences, timed one by one.

The model is built as for every profile, and rows are random tokens, all of them answers. Its
trainers extend those of TRL 0.24 and older.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from transformers import TrainingArguments

from whichlora.errors import MeasurementError
from whichlora.profiler.finetune import (
    collate,
    in_given_order,
    measured,
    random_rows,
    timed_steps,
    training_options,
    updating,
    watch_moments,
)
from whichlora.profiler.meter import Meter
from whichlora.spec.run import RunConfig
from whichlora.trainers import get_trainer

Batch = dict[str, Any]


def measure_llamafactory(
    model: Any,
    run: RunConfig,
    meter: Meter,
    seq_lens: Sequence[int],
    is_done: Callable[[Sequence[float]], bool] = lambda _: False,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """As `finetune.measure_finetune`, of the trainer of LLaMA-Factory that `run` names.

    Raises:
        MeasurementError: LLaMA-Factory, or the TRL that it needs, is not installed.
    """
    trainer = get_trainer(run.trainer)
    try:
        library_class = resolve_name(trainer.library_class)
        arguments_class = resolve_name("llamafactory.hparams.FinetuningArguments")
    except (ImportError, RuntimeError) as error:
        raise MeasurementError(
            f"trainer: {run.trainer} needs LLaMA-Factory and its TRL ({error}); "
            "pip install llamafactory"
        ) from None
    lengths, timer = timed_steps(meter, seq_lens, is_done, tell)
    watch_moments(model, meter)
    rows = random_rows(model.config, run, lengths)
    made = _BATCHES[trainer.rows]
    with tempfile.TemporaryDirectory() as output_dir:
        tuned = in_given_order(library_class)(
            model=model,
            ref_model=_reference(model, run),
            args=TrainingArguments(
                **training_options(run, meter, output_dir, max_steps=len(lengths)),
                remove_unused_columns=False,
            ),
            finetuning_args=arguments_class(
                stage=trainer.library_class.split(".")[2], **_own_settings(arguments_class, run)
            ),
            processor=None,
            tokenizer=None,
            train_dataset=rows,
            data_collator=made,
            callbacks=[timer, *updating(run)],
        )
        tuned.train()
    return measured(tuned, timer, meter, seq_lens)


def _own_settings(arguments_class: Any, run: RunConfig) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(arguments_class)}
    return {name: value for name, value in run.trainer_options if name in known}


def _reference(model: Any, run: RunConfig) -> Any:
    """The frozen copy of a model whose weights are all trained, as `create_ref_model` loads it."""
    if not get_trainer(run.trainer).forwards(run).reference or hasattr(model, "peft_config"):
        return None
    return copy.deepcopy(model).requires_grad_(False)


def _pairs(rows: list[Mapping[str, Any]]) -> Batch:
    """Source: LLaMA-Factory 0.9.5 `PairwiseDataCollatorWithPadding`: chosen, then rejected."""
    return _answers([*rows, *rows])


def _answers(rows: list[Mapping[str, Any]]) -> Batch:
    batch = collate(rows)
    batch["labels"][:, 0] = -100  # a prompt of one token
    return batch


def _labelled(rows: list[Mapping[str, Any]]) -> Batch:
    """Source: LLaMA-Factory 0.9.5 `KTODataCollatorWithPadding`."""
    batch = _answers(rows)
    mismatched = {f"kl_{name}": value.clone() for name, value in batch.items()}
    tags = torch.tensor([bool(number % 2) for number in range(len(rows))])
    return batch | mismatched | {"kto_tags": tags}


_BATCHES: dict[str, Callable[[list[Mapping[str, Any]]], Batch]] = {
    "pairs": _pairs,
    "labelled": _labelled,
}
