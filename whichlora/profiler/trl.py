"""A few optimizer steps of TRL's trainers, timed one by one.

The model is built as for every profile: a trainer gets one that has its adapters, not a name and a
`peft_config`. Rows are random tokens, all of them completions.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedTokenizerFast

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
from whichlora.profiler.images import has_fields, with_fields
from whichlora.profiler.meter import Meter
from whichlora.spec.run import RunConfig
from whichlora.trainers import get_trainer
from whichlora.trainers.base import Rollout

Batch = dict[str, Any]
_REFERENCE = "ref"  # TRL's name of the frozen copy of an adapter that it is given


def measure_trl(
    model: Any,
    run: RunConfig,
    meter: Meter,
    seq_lens: Sequence[int],
    is_done: Callable[[Sequence[float]], bool] = lambda _: False,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """As `finetune.measure_finetune`, of the trainer of TRL that `run` names.

    Raises:
        MeasurementError: TRL is not installed.
    """
    trainer = get_trainer(run.trainer)
    try:
        from datasets import Dataset

        library_class = resolve_name(trainer.library_class)
        config_class = resolve_name(trainer.config_class)
    except ImportError as error:
        raise MeasurementError(
            f"trainer: {run.trainer} needs TRL, which is not installed ({error}); pip install trl"
        ) from None
    lengths, timer = timed_steps(meter, seq_lens, is_done, tell)
    watch_moments(model, meter)
    rows, writes = random_rows(model.config, run, lengths), trainer.writes_answers
    prepared = _prepared(library_class)
    # a `Dataset` alone is accepted; it holds the numbers of the rows
    numbers: dict[str, Sequence[Any]] = {"row": range(len(rows))}
    if writes:
        rollout = trainer.rollout(run)
        assert rollout is not None
        prepared = _writing(prepared, run, rows, rollout)
        feeding: dict[str, Any] = {"reward_funcs": _reward}
        numbers = {"prompt": [str(row) for row in range(len(rows))] * rollout.batch_size}
    else:
        made = _BATCHES[run.trainer]

        def collator(batch: Sequence[Mapping[str, int]]) -> Batch:
            made_batch = made([rows[each["row"]] for each in batch])
            if not has_fields(model.config, run):
                return made_batch
            return with_fields(model.config, run, made_batch)

        feeding = {"data_collator": collator}
    with tempfile.TemporaryDirectory() as output_dir:
        with _reference(library_class, model, run) as given:
            tuned = prepared(
                model=model,
                args=config_class(
                    **_usual_settings(run, meter, output_dir, max_steps=len(lengths)),
                    **_own_settings(config_class, run),
                ),
                train_dataset=_tokenised(Dataset).from_dict(numbers),
                processing_class=_tokenizer(),
                callbacks=[timer, *updating(run)],
                **feeding,
                **given,
            )
        if any(trainer.narrows(run, name) for name, _ in model.named_modules()):
            # a trainer that makes the adapters casts by itself (build.py), and has autocast then
            tuned._peft_has_been_casted_to_bf16 = True
        if _REFERENCE in getattr(model, "peft_config", {}):
            # of an adapter that is handed over trained; a `peft_config` makes none
            model.delete_adapter(_REFERENCE)
        tuned.train()
    return measured(tuned, timer, meter, seq_lens)


def _writing(
    prepared: Any, run: RunConfig, rows: Sequence[Mapping[str, Any]], rollout: Rollout
) -> Any:
    """`prepared` for prompts that are tokenised; on fake tensors the answers are, too.

    Source: TRL 1.16 `GRPOTrainer._tokenize_prompts`, and what `_prepare_inputs` returns.
    """

    class Writing(prepared):  # type: ignore[misc]
        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            ids = [rows[int(prompt)]["input_ids"].tolist() for prompt in prompts]
            return [row[: -rollout.new_tokens] for row in ids], None, {}

        def _prepare_inputs(self, batch: list[dict[str, str]]) -> Any:
            if not isinstance(next(self.model.parameters()), FakeTensor):
                return super()._prepare_inputs(batch)
            micro_batch = [rows[int(each["prompt"])] for each in batch[: run.batch_size]]
            device, cut = self.accelerator.device, -rollout.new_tokens
            given = {name: value.to(device) for name, value in collate(micro_batch).items()}
            ids, mask = given["input_ids"], given["attention_mask"]
            answered = ids[:, cut:].shape
            learnt = {
                "prompt_ids": ids[:, :cut].clone(),
                "prompt_mask": mask[:, :cut].clone(),
                "completion_ids": ids[:, cut:].clone(),
                "completion_mask": mask[:, cut:].clone(),
                "advantages": torch.zeros(answered[0], device=device),
                "num_items_in_batch": torch.tensor(float(answered.numel()), device=device),
            }
            if get_trainer(run.trainer).forwards(run).reference:
                learnt["ref_per_token_logps"] = torch.zeros(answered, device=device)
            return learnt

    return Writing


def _reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Half of the answers are good, so that there is something to learn."""
    return [float(number % 2) for number in range(len(completions))]


@contextlib.contextmanager
def _reference(library_class: Any, model: Any, run: RunConfig) -> Iterator[dict[str, Any]]:
    """The argument that is a frozen copy of the model, which the trainer would load by its name.

    Where adapters can be off there is none. A class that takes none gets it in place of the loaded.
    """
    if not get_trainer(run.trainer).forwards(run).reference or hasattr(model, "peft_config"):
        yield {}
        return
    copied = copy.deepcopy(model).requires_grad_(False)
    if "ref_model" in inspect.signature(library_class.__init__).parameters:
        yield {"ref_model": copied}
        return
    module: Any = sys.modules[library_class.__module__]
    loads = module.create_model_from_path
    module.create_model_from_path = lambda *_, **__: copied
    try:
        yield {}
    finally:
        module.create_model_from_path = loads


def _prepared(library_class: Any) -> Any:
    """`library_class` for rows that are tokenised, in the given order."""

    class Prepared(in_given_order(library_class)):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def create_model_card(self, *_: Any, **__: Any) -> None:
            pass

    return Prepared


def _tokenised(dataset_class: Any) -> Any:
    """`dataset_class` for rows that are tokenised, which a trainer in `__init__` maps once more."""

    class Tokenised(dataset_class):  # type: ignore[misc]
        def map(self, *_: Any, **__: Any) -> Any:
            return self

    return Tokenised


def _usual_settings(
    run: RunConfig, meter: Meter, output_dir: str, *, max_steps: int
) -> dict[str, Any]:
    """Those of the Trainer, with checkpointing by the old name, which TRL 1.16 reads."""
    options = training_options(run, meter, output_dir, max_steps=max_steps)
    return {
        name.replace("activation_checkpointing", "gradient_checkpointing"): value
        for name, value in options.items()
    }


def _own_settings(config_class: Any, run: RunConfig) -> dict[str, Any]:
    """The trainer's options, and a length that cuts no row."""
    known = {field.name for field in dataclasses.fields(config_class)}
    arguments = get_trainer(run.trainer).arguments(run)
    options = {name: value for name, value in arguments.items() if name in known}
    fixed: dict[str, Any] = {"max_length": None, "remove_unused_columns": False}
    if "generation_kwargs" in known:  # every answer has its full length
        fixed["generation_kwargs"] = {"min_new_tokens": options["max_completion_length"]}
    return options | {name: value for name, value in fixed.items() if name in known}


def _tokenizer() -> Any:
    """A tokenizer that names a pad and an end, which is all that is read of it."""
    vocab = {"<pad>": 0, "<eos>": 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


# --- batches, as the collators of the trainers make them ------------------------------------------


def _pairs(rows: list[Mapping[str, Any]]) -> Batch:
    """Source: TRL 1.16 `DataCollatorForPreference`: chosen rows, then rejected ones."""
    return _completions([*rows, *rows])


def _completions(rows: list[Mapping[str, Any]]) -> Batch:
    batch = collate(rows)
    del batch["labels"]
    mask = batch["attention_mask"].clone()
    mask[:, 0] = 0  # a prompt of one token
    return batch | {"completion_mask": mask}


def _chosen_and_rejected(rows: list[Mapping[str, Any]]) -> Batch:
    """Source: TRL 1.16 `DPODataCollatorWithPadding` of experimental/utils.py."""
    answers = collate(rows)
    answers["labels"][:, 0] = -100  # a prompt of one token
    sides = ("chosen", "rejected")
    return {f"{side}_{name}": value.clone() for side in sides for name, value in answers.items()}


def _scored(rows: list[Mapping[str, Any]]) -> Batch:
    """Source: TRL 1.16 `DataCollatorForPreference` of reward_trainer.py."""
    batch = collate([*rows, *rows])
    del batch["labels"]
    return batch


def _kto(rows: list[Mapping[str, Any]]) -> Batch:
    """Beside the rows the mismatched ones of the KL term.

    Source: TRL 1.16 `DataCollatorForUnpairedPreference`.
    """
    batch = _completions(rows)
    mismatched = {f"KL_{name}": value.clone() for name, value in batch.items()}
    label = torch.tensor([bool(number % 2) for number in range(len(rows))])
    return batch | mismatched | {"label": label}


_BATCHES: dict[str, Callable[[list[Mapping[str, Any]]], Batch]] = {
    "sft": collate,
    "dpo": _pairs,
    "kto": _kto,
    "reward": _scored,
    "orpo": _chosen_and_rejected,
    "cpo": _chosen_and_rejected,
}
