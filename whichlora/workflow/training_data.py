"""The data of a plan as each model's tokenizer cuts it, counted once per tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from whichlora.dataset import (
    BYTE_LEVEL,
    UNCUT,
    BaseDataset,
    TokenLengths,
    Workload,
    count_tokens,
    data_format,
    evaluation_widths,
    open_dataset,
    workload,
)
from whichlora.dataset.audio import PlayedClips
from whichlora.dataset.encoders import why_estimated
from whichlora.dataset.images import Grid, RowImages, heaviest
from whichlora.dataset.label_tokens import num_classes
from whichlora.dataset.media import read_by
from whichlora.dataset.sources import CountedDataset
from whichlora.errors import ConfigError
from whichlora.predict.evaluation_and_saving import num_evaluations
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.data_format import AUDIOS, TRANSCRIPTS, DataFormat
from whichlora.spec.plan import Plan
from whichlora.spec.run import RunConfig
from whichlora.tasks import rows_of, task_of
from whichlora.trainers import Repeats, Trainer, get_trainer, with_trainer
from whichlora.workflow.whole_training import cut_rows, cut_targets

Key: TypeAlias = tuple[str | None, int, bool, Grid | None, float, int]
"""A tokenizer, the length that rows are cut to, whether prompts are learned, a rule of images,
seconds of a clip, and the length that targets are cut to.

Tokenizers that are not at hand are None: all estimate the same lengths.
"""
Counted: TypeAlias = dict[Key, TokenLengths]


def _check_classes(run: RunConfig, dataset: BaseDataset) -> None:
    """Refuse rows that name more classes than the head tells apart.

    Raises:
        ConfigError: there are more.
    """
    task = task_of(run)
    named = None if task is None else task.config(run).get("num_labels")
    if named in (None, 1) or isinstance(dataset, CountedDataset):
        return
    num_found = num_classes(dataset)
    if num_found > named:
        raise ConfigError(
            f"task_options: the rows have {num_found} classes, and num_labels is {named}; "
            f"give {{num_labels: {num_found}}}"
        )


class TrainingData:
    """Token lengths by model, and the batches that a training makes of them.

    Args:
        lengths: what was counted so far; runs on the same data on other devices
            share it.
    """

    def __init__(
        self, plan: Plan, models: Mapping[str, ModelSpec], lengths: Counted | None = None
    ) -> None:
        self.dataset: BaseDataset = open_dataset(plan.dataset, rows_of(plan.finetune))
        _check_classes(plan.finetune, self.dataset)
        self._plan = plan
        self._models = models
        self._lengths: Counted = {} if lengths is None else lengths
        self._estimated: dict[str, str] = {}  # why, by tokenizer
        self._evaluated: dict[tuple[Key, int, int, int], dict[int, float]] = {}
        self._workloads: dict[tuple[Key, int, int, int], Workload] = {}

    @staticmethod
    def _trainer(plan: Plan) -> Trainer:
        return get_trainer(plan.finetune.trainer)

    def tokenizer(self, model: str) -> str:
        """The tokenizer that `model` is trained with."""
        if self._plan.weights == "random":
            return BYTE_LEVEL
        return self._plan.tokenizers.get(model, model)

    def seq_len(self, model: str) -> int:
        """Tokens that rows are cut to: as the plan says, but no more than `model` can look up."""
        return cut_rows(self._plan.finetune, self._models[model])

    def target_length(self, model: str) -> int:
        """Tokens that targets are cut to; 0 where `model` has no decoder beside its encoder."""
        return cut_targets(self._plan.finetune, self._models[model])

    def target_len(self, model: str) -> int | None:
        """Tokens of the longest target; None where rows have none apart from their texts."""
        return self.lengths(model).longest_target

    def lengths(self, model: str) -> TokenLengths:
        """Token lengths of the data as the tokenizer of `model` cuts them."""
        key = self._key(model)
        tokenizer, seq_len, completions_only, grid, _, target_length = key
        joins = self._plan.collator == "packed"  # before it cuts
        if key not in self._lengths:
            self._lengths[key] = count_tokens(
                self.dataset_of(model),
                tokenizer=self.tokenizer(model),
                offline=self._plan.weights == "random",
                max_length=UNCUT if joins else seq_len,
                completions_only=completions_only,
                run=self._plan.finetune,
                grid=grid,
                window_s=self._window_s(model),
                target_length=target_length,
            )
        lengths = self._lengths[key]
        if tokenizer or isinstance(self.dataset, CountedDataset):
            return lengths
        return replace(lengths, method=self._why_estimated(model))

    def _why_estimated(self, model: str) -> str:
        """Why the lengths are, where nothing of the model's tokenizer is at hand; else ""."""
        tokenizer, offline = self.tokenizer(model), self._plan.weights == "random"
        if tokenizer not in self._estimated:
            self._estimated[tokenizer] = why_estimated(tokenizer, offline=offline)
        return self._estimated[tokenizer]

    @cached_property
    def _format(self) -> DataFormat | None:
        """What its rows look like; None where only counts are known."""
        return None if isinstance(self.dataset, CountedDataset) else data_format(self.dataset)

    def dataset_of(self, model: str) -> BaseDataset:
        """The rows as `model` reads them, which may answer clips with their transcripts."""
        plays = self._format == TRANSCRIPTS and read_by(self._models[model].tower) == AUDIOS
        return PlayedClips(self.dataset) if plays else self.dataset

    def media(self, model: str) -> str:
        """What stands beside the messages of the rows of `model`; "" where nothing does."""
        return "" if self._format is None else data_format(self.dataset_of(model)).media

    def _window_s(self, model: str) -> float:
        """Seconds that `model` reads of a clip of the rows; 0 where it or they have none."""
        tower = self._models[model].tower
        transcribes = tower is not None and tower.transcribes and self._format == TRANSCRIPTS
        reads = transcribes or self._grid(model) is not None
        return tower.window_s if tower is not None and reads else 0.0

    def _grid(self, model: str) -> Grid | None:
        """How the processor of `model` cuts what is beside messages; None where nothing is."""
        tower = self._models[model].tower
        if tower is None or not self.media(model) or read_by(tower) != self.media(model):
            return None
        return tower.grid if tower.hears else tower.limited(self._plan.finetune.image_max_pixels)

    def unread(self, model: str) -> str:
        """Why `model` can't learn of rows with images or sound; "" where it can, or of others."""
        if self._format == TRANSCRIPTS:
            if not self._window_s(model):
                return "rows have clips with transcripts, and this model writes none"
        elif not self.media(model):
            return ""
        elif self._grid(model) is None:
            has = self.media(model)
            return f"rows have {has}, and this model reads none, or none that are predicted"
        try:
            self.lengths(model)
        except ConfigError as error:
            return str(error)
        return ""

    def images(self, model: str) -> RowImages | None:
        """The images of the heaviest row that is trained on; None where no row has one."""
        rows, grid = self.lengths(model).image_sizes.get("train", ()), self._grid(model)
        return None if grid is None else heaviest(rows, grid)

    def _rows(self, model: str) -> TokenLengths:
        """The lengths of the data, with room in each row for the images of the heaviest.

        Kind: upper bound, where rows have different images: a run states one number of them.
        """
        lengths, images, grid = self.lengths(model), self.images(model), self._grid(model)
        if images is None or grid is None:
            return lengths
        return lengths.at_least(images.room(grid))

    def _key(self, model: str) -> Key:
        """What the lengths depend on; the last is whether the job leaves rows out.

        It does where nothing in a row is learned; a packed row is several, and who fills in masked
        words learns of every text.
        """
        packs = self._plan.collator.startswith("packed")
        masks = self._models[model].task == "encoder"
        completions_only = self._plan.train_on == "completions" and not packs and not masks
        tokenizer = None if self._why_estimated(model) else self.tokenizer(model)
        window_s = self._window_s(model)
        length, grid = self.seq_len(model), self._grid(model)
        return tokenizer, length, completions_only, grid, window_s, self.target_length(model)

    def cautions(self, model: str) -> tuple[str, ...]:
        """What of the data must be known before a plan is acted on."""
        lengths = self.lengths(model)
        cautions = []
        if not lengths.is_counted:
            cautions.append(f"lengths are {lengths.method}")
        cautions += lengths.changed()
        _, _, not_trained_on = self.dataset.describe().partition("; ")
        return (*cautions, *([not_trained_on] if not_trained_on else ()))

    def workload(
        self, model: str, batch_size: int, *, at_once: int = 1, accumulation: int | None = None
    ) -> Workload:
        """The batches of a whole training of `model`.

        Args:
            at_once: micro-batches that GPUs compute at the same time.
            accumulation: micro-steps of an optimizer step; None: as the plan says.
        """
        accumulation = accumulation or self._plan.finetune.gradient_accumulation_steps
        key = (self._key(model), batch_size, at_once, accumulation)
        if key not in self._workloads:
            load = workload(
                self._rows(model),
                collator=self._plan.collator,
                batch_size=batch_size,
                seq_len=self.seq_len(model),
                accumulation=accumulation,
                at_once=at_once,
                epochs=self._plan.epochs,
                seed=self._plan.seed,
                sequences=self._trainer(self._plan).sequences(self._plan.finetune),
                repeats=self._repeats(batch_size, accumulation),
            )
            self._workloads[key] = replace(
                load, images=self.images(model), target_len=self.target_len(model)
            )
        return self._workloads[key]

    def _repeats(self, batch_size: int, accumulation: int) -> Repeats | None:
        run = replace(
            self._plan.finetune, batch_size=batch_size, gradient_accumulation_steps=accumulation
        )
        return self._trainer(self._plan).repeats(with_trainer(run))

    def evaluation(
        self, model: str, batch_size: int, *, at_once: int = 1, accumulation: int | None = None
    ) -> dict[int, float]:
        """Padded length to the number of evaluation batches of a whole training of `model`.

        Args:
            at_once, accumulation: as of `workload`.
        """
        plan = self._plan
        if self._trainer(plan).writes_answers:
            return {}  # `train.py` evaluates none
        load = self.workload(model, batch_size, at_once=at_once, accumulation=accumulation)
        key = (self._key(model), batch_size, at_once, load.num_steps)
        if key not in self._evaluated:
            passes = num_evaluations(plan.keeping, num_steps=load.num_steps, epochs=plan.epochs)
            widths = evaluation_widths(
                self._rows(model),
                batch_size=batch_size,
                collator=plan.collator,
                seq_len=self.seq_len(model),
                at_once=at_once,
            )
            self._evaluated[key] = {
                width: passes * count for width, count in widths.items() if passes
            }
        return self._evaluated[key]
