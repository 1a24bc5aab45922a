"""A few optimizer steps of sentence-transformers' trainer, timed one by one.

The model is built as for every profile and put into the modules of the library; rows are random
tokens, and every column of an example has as many.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from whichlora.errors import MeasurementError
from whichlora.profiler.finetune import (
    collate,
    in_given_order,
    measured,
    own_optimizer,
    random_rows,
    timed_steps,
    training_options,
    updating,
    watch_moments,
)
from whichlora.profiler.meter import Meter
from whichlora.spec.run import RunConfig
from whichlora.tasks.embedding import pooling_of
from whichlora.trainers import get_trainer

# the library calls `forward`, which passes the hooks over that tell the moments of a step
_CALLED = "__call__"
_TEXT = {"text": {"method": _CALLED, "method_output_name": "last_hidden_state"}}


def measure_sentence_transformers(
    model: Any,
    run: RunConfig,
    meter: Meter,
    seq_lens: Sequence[int],
    is_done: Callable[[Sequence[float]], bool] = lambda _: False,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """As `finetune.measure_finetune`, of sentence-transformers' trainer.

    Raises:
        MeasurementError: sentence-transformers is not installed.
    """
    try:
        import sentence_transformers
        from datasets import Dataset
    except ImportError as error:
        raise MeasurementError(
            f"trainer: {run.trainer} needs sentence-transformers, which is not installed ({error});"
            " pip install sentence-transformers"
        ) from None
    lengths, timer = timed_steps(meter, seq_lens, is_done, tell)
    watch_moments(model, meter)
    rows = random_rows(model.config, run, lengths)
    texts = get_trainer(run.trainer).sequences(run)

    def collator(batch: Sequence[Mapping[str, int]]) -> dict[str, Any]:
        return columns_of([rows[each["row"]] for each in batch], texts)

    embedder = embedder_of(model, run)
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = _prepared(sentence_transformers.SentenceTransformerTrainer)(
            model=embedder,
            args=sentence_transformers.SentenceTransformerTrainingArguments(
                **training_options(run, meter, output_dir, max_steps=len(lengths)),
                remove_unused_columns=False,
            ),
            train_dataset=Dataset.from_dict({"row": range(len(rows))}),
            data_collator=collator,
            loss=loss_of(embedder, run),
            callbacks=[timer, *updating(run)],
            optimizers=(own_optimizer(model, run), None),
        )
        trainer.train()
    return measured(trainer, timer, meter, seq_lens)


def embedder_of(model: Any, run: RunConfig) -> Any:
    """A `SentenceTransformer` of `model`, which is loaded, and of its pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    class Loaded(Transformer):  # type: ignore[misc]
        """The library's module, which loads a model by its name."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.model = model
            self.modality_config = _TEXT
            self.module_output_name = "token_embeddings"
            self._method_signature_cache = {_CALLED: {"input_ids", "attention_mask", "return_dict"}}

    width = model.config.get_text_config().hidden_size
    modules = [Loaded(), Pooling(width, pooling_mode=pooling_of(run))]
    return SentenceTransformer(modules=modules, device="cpu").to(model.device)


def loss_of(embedder: Any, run: RunConfig) -> Any:
    """The loss that `run` names."""
    loss = get_trainer(run.trainer).loss(run)
    assert loss is not None
    return resolve_name(f"{loss.module}:{loss.name}")(embedder, **loss.settings)


def columns_of(rows: list[Mapping[str, Any]], texts: int) -> dict[str, torch.Tensor]:
    """A batch whose examples have so many columns, as `BaseDataCollator` names them."""
    batch = collate(rows)
    del batch["labels"]
    return {
        f"text_{column}_{name}": value.clone()
        for column in range(texts)
        for name, value in batch.items()
    }


def _prepared(library_class: Any) -> Any:
    """`library_class` for rows that are tokenised, in the given order, without a model card."""

    class Prepared(in_given_order(library_class)):  # type: ignore[misc]
        def preprocess_dataset(self, dataset: Any, **_: Any) -> Any:
            return dataset

        def get_train_dataloader(self) -> Any:  # its own samples batches at random
            return Trainer.get_train_dataloader(self)

        def add_model_card_callback(self, *_: Any) -> None:
            pass

    return Prepared
