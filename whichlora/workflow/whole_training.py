"""One prediction and its data → steps, time and cost of the whole fine-tuning."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from whichlora.dataset.audio import PlayedClips
from whichlora.dataset.base import data_format
from whichlora.dataset.expected import binned, expected_widths
from whichlora.dataset.images import Grid, RowImages, Size, heaviest, typical
from whichlora.dataset.lengths import UNCUT
from whichlora.dataset.media import read_by
from whichlora.dataset.sources import open_dataset
from whichlora.dataset.tokens import count_tokens
from whichlora.dataset.workload import are_padded, count_steps
from whichlora.errors import ConfigError
from whichlora.predict.coefficients import Calibration
from whichlora.predict.judged import judged_time
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.data_format import AUDIOS, TRANSCRIPTS
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import ceil_div, is_number
from whichlora.spec.plan import DatasetConfig
from whichlora.spec.results import FileKey, Prediction, TrainingTotal
from whichlora.spec.run import RunConfig
from whichlora.tasks import rows_of, task_of
from whichlora.trainers import get_trainer, with_trainer
from whichlora.workflow.evaluation import uncounted

MOST_EPOCHS = 1000
MOST_SAMPLES = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderReleases:
    """A script under the releases of `month`: `settings`, as `combinations.grid` takes them."""

    path: str
    month: str
    settings: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromFiles:
    """What files of another tool say of a training beside the settings of a step.

    Args:
        notes: what a user must know of them.
        packed: its rows are full of packed texts.
        epochs: passes over the data; None where they do not say.
        eval_batch_size: rows that an evaluation reads at once; 0 where there is none.
        stated: names of the settings that they or the user give; None where nobody tells.
        is_lower_bound: its rows have images, which can't be counted.
        keys: of the file, by the setting that each alone says.
        older: what the first releases that take a script of older ones make of it; None for none.
    """

    notes: tuple[str, ...] = ()
    eval_batch_size: int = 0
    is_lower_bound: bool = False
    packed: bool = False
    epochs: float | None = None
    stated: frozenset[str] | None = None
    keys: Mapping[str, FileKey] = field(default_factory=dict)
    older: OlderReleases | None = None

    def notes_of_step(self, run: RunConfig) -> tuple[str, ...]:
        """`notes`, and one of evaluations, for who predicts steps of `run` alone."""
        return (*self.notes, *uncounted(run, self.eval_batch_size))


NO_FILES = FromFiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What a fine-tuning learns from: the answers of conversations, and every other row.

    Args:
        path: a file, a folder or a dataset of the hub; empty where only `samples` are known.
        samples: rows, each of the tokens of the run.
        epochs: passes over it.
        packed: rows of the run are full of packed texts.
        offline: there is no tokenizer, as in a browser; lengths are the same for every model.

    Raises:
        ConfigError: neither or both of path and samples, or a number out of range.
    """

    path: str = ""
    samples: int | None = None
    epochs: float = 1.0
    packed: bool = False
    offline: bool = False

    def __post_init__(self) -> None:
        if bool(self.path) == (self.samples is not None):
            raise ConfigError("data and samples: give one of both; data has its own rows")
        is_count = type(self.samples) is int and 1 <= self.samples <= MOST_SAMPLES
        if self.samples is not None and not is_count:
            raise ConfigError(
                f"samples: must be a whole number from 1 to {MOST_SAMPLES:,}, got {self.samples!r}"
            )
        if not is_number(self.epochs) or not 0 < self.epochs <= MOST_EPOCHS:
            raise ConfigError(
                f"epochs: must be a number above 0, at most {MOST_EPOCHS}, got {self.epochs!r}"
            )

    @classmethod
    def asked(
        cls,
        path: str | None,
        samples: int | None,
        epochs: float | None,
        said: FromFiles = NO_FILES,
        *,
        offline: bool = False,
    ) -> Self | None:
        """The data that settings state; None where they state none.

        Args:
            said: by files of another tool, whose epochs stand where `epochs` is None.

        Raises:
            ConfigError: epochs of nothing.
        """
        if path is None and samples is None:
            if epochs is not None:
                raise ConfigError("epochs: of how much data? give data, or a number of samples")
            return None
        passes = said.epochs if epochs is None else epochs
        return cls(
            path=path or "",
            samples=samples,
            epochs=1.0 if passes is None else passes,
            packed=said.packed,
            offline=offline,
        )

    def rows(self, run: RunConfig, model: ModelSpec) -> Rows:
        """Its rows as `run` reads them.

        Raises:
            ConfigError: a run that learns from no rows of a file.
            DataFileError: a fault of the file, with its line.
        """
        if run.phase != "finetune":
            raise ConfigError("data: is of phase finetune; leave it out")
        if get_trainer(run.trainer).repeats(run) is not None:
            raise ConfigError(
                f"data: trainer {run.trainer} writes its answers, of which a file holds none; "
                "`whichlora run` counts its training"
            )
        if self.samples is not None:
            return Rows(counts={run.seq_len: self.samples}, others=0, longest=run.seq_len)
        path = Path(os.path.expanduser(self.path))
        changed = path.stat().st_mtime_ns if path.is_file() else 0
        # texts are the same rows for every run
        reader = None if rows_of(run) == "texts" else run
        tokenizer = None if self.offline else model.name
        grid, window, tower = None, None, model.tower
        if tower is not None and tower.hears:
            window = tower.window_s, cut_rows(run, model) if tower.transcribes else UNCUT
        if read_by(tower):
            assert tower is not None
            limit = None if tower.hears else run.image_max_pixels
            grid = read_by(tower), tower.limited(limit)
        target = cut_targets(run, model)
        whole_path = os.path.abspath(path)
        # as of a plan: packed rows are several, and masked words are of every text
        answers = not self.packed and model.task != "encoder"
        return _rows(
            whole_path, self.path, changed, tokenizer, reader, grid, window, target, answers
        )

    def sized(self, run: RunConfig, model: ModelSpec, *, largest_batch: bool = False) -> RunConfig:
        """`run` at the length of its longest batch, padded where rows of a batch differ.

        Args:
            largest_batch: the batch size of `run` is open.

        Raises:
            ConfigError, DataFileError: as of `rows`.
        """
        seq_len = cut_rows(run, model)
        rows = self.rows(run, model).within(seq_len)
        for setting in ("images", "audios"):
            if getattr(run, setting) and rows.grid is not None:
                raise ConfigError(f"{setting}: the data has its own; leave {setting} out")
        run = rows.shown(run)
        if rows.longest_target is not None:
            run = replace(run, target_len=rows.longest_target)
        if self.packed:
            return replace(run, seq_len=seq_len)
        trainer = get_trainer(run.trainer)
        is_padded = are_padded(
            rows.counts,
            batch_size=max(run.batch_size, 2 if largest_batch else 1),
            seq_len=seq_len,
            sequences=trainer.sequences(run),
            repeats=trainer.repeats(with_trainer(run)),
        )
        padding = "padded" if is_padded else run.padding
        return replace(run, seq_len=min(seq_len, rows.longest), padding=padding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows by their tokens.

    Args:
        counts: tokens of the longest sequence of a row to the number of rows.
        others: tokens of the other sequences, where a row is a pair.
        longest: an upper bound of the longest, where lengths are estimated.
        longest_target: tokens of the longest target of an encoder-decoder, whose sources `counts`
            are of; else None.
        alternatives: other plausible counts, where they are.
        images: tokens, and sizes of the images, of each row; empty where no row may have one.
        most, mean: images of the heaviest row, and of one as heavy as all in the mean.
        notes: how they were counted where no tokenizer did, and which are left out.
    """

    counts: Mapping[int, int]
    others: int
    longest: int
    longest_target: int | None = None
    alternatives: tuple[Mapping[int, int], ...] = ()
    notes: tuple[str, ...] = ()
    images: tuple[tuple[int, tuple[Size, ...]], ...] = ()
    most: RowImages | None = None
    mean: RowImages | None = None
    grid: Grid | None = None

    def within(self, seq_len: int) -> Self:
        """The rows that a training of so many tokens reads: those with images are never cut.

        Raises:
            ConfigError: there are none.
        """
        if self.grid is None:
            return self
        kept = [(length, sizes) for length, sizes in self.images if length <= seq_len or not sizes]
        if not kept:
            least = min(length for length, _ in self.images)
            raise ConfigError(
                f"data: no row with its images or clips is within {seq_len} tokens, the shortest "
                f"has {least}; raise seq_len, or set image_max_pixels (589824 is 768x768)"
            )
        notes = self.notes
        if num_left_out := len(self.images) - len(kept):
            rows = "1 row is" if num_left_out == 1 else f"{num_left_out} rows are"
            notes = (
                *notes,
                f"{rows} left out, whose images or clips exceed the sequence; image_max_pixels "
                "shrinks images",
            )
        sizes = [sizes for _, sizes in kept]
        return replace(
            self,
            counts=Counter(length for length, _ in kept),
            longest=max(length for length, _ in kept) if num_left_out else self.longest,
            notes=notes,
            images=tuple(kept),
            most=heaviest(sizes, self.grid),
            mean=typical(sizes, self.grid),
        )

    def shown(self, run: RunConfig, *, on_average: bool = False) -> RunConfig:
        """`run` with the images of its heaviest row, or with as many as there are in the mean."""
        if self.grid is None:
            return run
        images = self.mean if on_average else self.most
        if images is None:
            return replace(run, images=0, audios=0)
        return images.shown(run)


def cut_rows(run: RunConfig, model: ModelSpec) -> int:
    """Tokens that rows are cut to: those of `run`, but no more than `model` can look up."""
    return min(run.seq_len, model.longest_row or run.seq_len)


def cut_targets(run: RunConfig, model: ModelSpec) -> int:
    """Tokens that targets are cut to; 0 where `model` has no decoder beside its encoder."""
    has_target = task_of(run) is None
    return has_target * model.cut_target(run.target_len, cut_rows(run, model))


@lru_cache(maxsize=64)
def _rows(
    path: str,
    name: str,
    changed: int,
    tokenizer: str | None,
    run: RunConfig | None,
    grid: tuple[str, Grid] | None,
    window: tuple[float, int] | None,
    target_length: int,
    answers: bool,
) -> Rows:
    """The rows of a file, counted once until it changes.

    Args:
        grid: what the model reads beside messages, and how its processor cuts that.
        window: seconds and tokens that a clip and its transcript may have.
        target_length: tokens that targets are cut to, of an encoder-decoder.
        answers: of conversations these are learned, and rows without any left out.
    """
    config = DatasetConfig(path=path if changed else name, validation_fraction=0.0)
    dataset = open_dataset(config, "texts" if run is None else rows_of(run))
    window_s, longest, cuts = 0.0, UNCUT, None
    if grid is not None or window is not None:
        has = data_format(dataset)
        if has == TRANSCRIPTS and grid is not None and grid[0] == AUDIOS:
            dataset = PlayedClips(dataset)
            has = data_format(dataset)
        if grid is not None and has.media == grid[0]:
            cuts = grid[1]
        if window is not None and (has == TRANSCRIPTS or has.audios):
            window_s, longest = window
    lengths = count_tokens(
        dataset,
        tokenizer=tokenizer,
        offline=tokenizer is None,
        max_length=longest,
        completions_only=answers,
        run=run,
        grid=cuts,
        window_s=window_s,
        target_length=target_length,
    )
    sizes = lengths.image_sizes.get("train", ())
    notes = [] if lengths.is_counted else [f"lengths are {lengths.method}"]
    notes += lengths.changed()
    return Rows(
        counts=Counter(lengths.lengths["train"]),
        others=sum(lengths.others.get("train", ())),
        longest=lengths.longest(),
        longest_target=lengths.longest_target,
        alternatives=tuple(Counter(each.lengths["train"]) for each in lengths.alternatives),
        notes=tuple(notes),
        images=tuple(zip(lengths.lengths["train"], sizes, strict=True)) if sizes else (),
        grid=cuts if sizes else None,
    )


def with_training(
    prediction: Prediction, data: Data, model: ModelSpec, gpu: GpuSpec, calibration: Calibration
) -> Prediction:
    """`prediction` with what the whole training takes, where times are known.

    Raises:
        ConfigError, DataFileError: as of `Data.rows`.
    """
    rows = data.rows(prediction.run, model).within(prediction.run.seq_len)
    notes = (*prediction.notes, *rows.notes)
    job = resolve(model, rows.shown(prediction.run, on_average=True), gpu)
    total = training_total(job, calibration, rows, epochs=data.epochs, packed=data.packed)
    if not prediction.time.is_known:
        total = replace(total, total_s=math.nan, interval_s=(math.nan, math.nan))
    return replace(prediction, training=total, notes=notes)


def training_total(
    job: ResolvedRun, calibration: Calibration, rows: Rows, *, epochs: float, packed: bool = False
) -> TrainingTotal:
    """Optimizer steps of all epochs and their time, on average over the order of the rows.

    Kind: estimate; the interval joins the error of a step with that of the lengths.
    Source: `expected_widths`, `count_steps`.
    """
    run, seq_len = job.run, job.run.seq_len
    cut = _cut(rows.counts, seq_len)
    tokens = sum(length * number for length, number in cut.items()) + rows.others
    if packed:
        cut = {seq_len: ceil_div(tokens, seq_len)}
    num_batches = ceil_div(sum(cut.values()), run.batch_size * job.at_once)
    accumulation = run.gradient_accumulation_steps
    num_steps, all_batches = count_steps(num_batches, accumulation, epochs)
    scale = all_batches / num_batches / accumulation
    widths = expected_widths(cut, batch_size=run.batch_size, at_once=job.at_once)
    total, low, high = 0.0, 0.0, 0.0
    for width, number in binned(widths).items():
        step = judged_time(job, calibration, seq_len=width)
        bounds = step.interval()
        total += scale * number * float(step.total_s)
        low += scale * number * float(bounds[0])
        high += scale * number * float(bounds[1])
    reach = _reach(rows, seq_len)
    return TrainingTotal(
        num_sequences=sum(rows.counts.values()),
        epochs=epochs,
        num_tokens=tokens,
        longest=min(rows.longest, seq_len),
        num_truncated=sum(n for length, n in rows.counts.items() if length > seq_len),
        num_steps=num_steps,
        total_s=total,
        interval_s=(_joined(total, low, reach), _joined(total, high, reach)),
    )


def _cut(counts: Mapping[int, int], seq_len: int) -> dict[int, int]:
    cut: Counter[int] = Counter()
    for length, number in counts.items():
        cut[min(length, seq_len)] += number
    return cut


def _reach(rows: Rows, seq_len: int) -> float:
    """Logarithm of how far the number of tokens may be off."""

    def mean(counts: Mapping[int, int]) -> float:
        cut = _cut(counts, seq_len)
        return sum(length * number for length, number in cut.items()) / sum(cut.values())

    others = (abs(math.log(mean(each) / mean(rows.counts))) for each in rows.alternatives)
    return max(others, default=0.0)


def _joined(total: float, bound: float, reach: float) -> float:
    """`bound` of `total` with an independent error of that logarithm."""
    if not total > 0 or not bound > 0:
        return bound
    log = math.log(bound / total)
    return total * math.exp(math.copysign(math.hypot(log, reach), log))
