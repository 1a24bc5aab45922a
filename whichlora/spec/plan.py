"""What one `whichlora run` is asked to do: candidates, limits, data and policy."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from whichlora.errors import ConfigError
from whichlora.spec.costs import Grid, Offer, cheapest
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.quality import Score
from whichlora.spec.run import AttentionKernel, Optimizer, Quant, RunConfig, Serve

ProfilePolicy = Literal["none", "frontier", "all"]
Prefer = Literal["size", "quality", "time", "memory", "price", "order"]
Collator = Literal["longest", "grouped", "fixed", "packed", "packed-bfd"]
TrainOn = Literal["completions", "all"]
DatasetKind = Literal["counts", "class", "file", "hub"]

_Z95 = NormalDist().inv_cdf(0.95)
_MOST_P95 = math.exp(_Z95**2 / 2)  # of the mean: no log-normal has a larger 95 % quantile

DATA_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the answer must meet; None is no limit.

    Args:
        time_per_token_s: inference, whole generation over generated tokens of all sequences.
        inference_bytes: peak device memory of inference.
        total_time_s: the whole fine-tuning.
        finetune_bytes: peak device memory of fine-tuning.
        ttft_s, tpot_s: of a serving engine, time to the first token and for each further one.
        requests_per_s: of a serving engine, the fewest that it answers.
    """

    time_per_token_s: float | None = None
    inference_bytes: int | None = None
    total_time_s: float | None = None
    finetune_bytes: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    requests_per_s: float | None = None

    @property
    def on_waits(self) -> bool:
        """Whether they limit what the users of a serving engine wait."""
        waits = (self.time_per_token_s, self.ttft_s, self.tpot_s, self.requests_per_s)
        return any(limit is not None for limit in waits)

    def but(self, overrides: Limits) -> Limits:
        """These limits, replaced by those that `overrides` sets."""
        changed = {name: value for name, value in asdict(overrides).items() if value is not None}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Which of the candidates that meet every limit is the answer.

    Args:
        prefer: the largest model ("size"), or the first of `order` ("order"), with its fastest
            variant and best batch; or whatever takes the least time, memory or money.
        order: models, the best first where the user's order is asked for.
        scores: by model, for "quality"; a model without one ranks after them, by its size.
        prices: of an hour, by device key.
    """

    prefer: Prefer = "size"
    order: tuple[str, ...] = ()
    scores: Mapping[str, Score] = field(default_factory=dict)
    prices: Mapping[str, Sequence[Offer]] = field(default_factory=dict)

    def offer(self, gpu: str, num_gpus: int = 1) -> Offer | None:
        """The cheapest price of `num_gpus` on demand; None where none is known."""
        return cheapest(self.prices.get(gpu, ()), num_gpus)

    def money(self, gpu: str, num_gpus: int, seconds: float) -> float | None:
        """What `seconds` of `num_gpus` cost; None where no price is known."""
        offer = self.offer(gpu, num_gpus)
        return None if offer is None else offer.per_hour(num_gpus) * seconds / 3600

    def place(self, model: str, num_params: int) -> float:
        """What goes before any time or memory, the least first."""
        if self.prefer == "size":
            return -float(num_params)
        if self.prefer == "quality":
            better = sorted({each.score for each in self.scores.values()}, reverse=True)
            score = self.scores.get(model)
            return len(better) + 1 / num_params if score is None else better.index(score.score)
        return float(self.order.index(model)) if self.prefer == "order" else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop measuring.

    Args:
        confidence: that no other candidate beats the answer, at which the search ends.
        runs, device_s: most runs and most device seconds to spend; None is no limit.
    """

    confidence: float = 0.95
    runs: int | None = None
    device_s: float | None = None


SAVED_SHARE = 0.1  # of a run, between two checkpoints where the plan does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a training writes and evaluates on its way.

    Args:
        save_steps: optimizer steps between checkpoints; None: a tenth of the run; 0: none.
        save_total_limit: checkpoints that are kept, the newest.
        eval_steps: optimizer steps between evaluations; None: at the end of each epoch; 0: none.

    Raises:
        ConfigError: no whole number, or below its least.
    """

    save_steps: int | None = None
    save_total_limit: int = 2
    eval_steps: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("save_steps", 0), ("save_total_limit", 1), ("eval_steps", 0)):
            value = getattr(self, name)
            if value is None and least == 0:
                continue
            if type(value) is not int or not least <= value <= 10**9:
                raise ConfigError(
                    f"{name}: must be a whole number from {least} to 1,000,000,000, got {value!r}"
                )

    @property
    def saves(self) -> bool:
        return self.save_steps != 0

    @property
    def evaluates(self) -> bool:
        return self.eval_steps != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """Where the training text comes from and how a row becomes text.

    Args:
        path: a local JSONL, CSV, Parquet or text file (or a folder with one named `train` and
            perhaps one named `validation`), a Hugging Face dataset id, or `module:Class` or
            `file.py:Class` of a `BaseDataset` subclass; empty where only counts are known.
        validation_path: a file with the rows to evaluate on, beside the file of `path`.
        template: format string over a row's columns; without it and the columns below, columns
            are recognised by their names.
        text_column, messages_column: which column holds plain text or chat messages.
        prompt_column, completion_column: which columns hold a question and its answer.
        chosen_column, rejected_column, label_column: which hold the better and the worse answer,
            or whether an answer is wanted, for trainers on such rows.
        images_column: which holds the paths of images, beside messages or a prompt.
        audio_column: which holds a clip of sound, whose transcript `text_column` holds.
        validation_fraction: share of rows kept for validation where the source has no split.
        split, config_name: of a Hugging Face dataset.
        num_samples, mean_tokens: size of the training split, for planning without the data.
        p95_tokens, max_tokens: of its sequences, where they are known.

    Raises:
        ConfigError: a template that does not name columns, or an answer's column alone.
    """

    path: str = ""
    validation_path: str | None = None
    template: str | None = None
    text_column: str | None = None
    messages_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    chosen_column: str | None = None
    rejected_column: str | None = None
    label_column: str | None = None
    images_column: str | None = None
    audio_column: str | None = None
    validation_fraction: float = 0.05
    split: str = "train"
    config_name: str | None = None
    num_samples: int | None = None
    mean_tokens: float | None = None
    p95_tokens: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.template is not None and not self.template_columns:
            raise ConfigError(f"dataset.template: names no column in braces, got {self.template!r}")
        if self.prompt_column is None and self.completion_column is not None:
            raise ConfigError(
                "dataset: prompt_column and completion_column go together; give both or none"
            )
        if self.mean_tokens is not None and self.p95_tokens is not None:
            most = _MOST_P95 * self.mean_tokens
            if not self.mean_tokens <= self.p95_tokens <= most:
                raise ConfigError(
                    f"dataset.p95_tokens: must be from {math.ceil(self.mean_tokens)} to "
                    f"{math.floor(most)} around a mean of {self.mean_tokens:.5g}, "
                    f"got {self.p95_tokens}"
                )

    @property
    def spread(self) -> float | None:
        """Standard deviation of the logarithm of the lengths, where `p95_tokens` tells it.

        Kind: exact. Source: the mean of a log-normal is exp(m + s²/2), its quantile exp(m + z s).
        """
        if self.mean_tokens is None or self.p95_tokens is None:
            return None
        log_ratio = math.log(self.p95_tokens / self.mean_tokens)
        return _Z95 - math.sqrt(max(0.0, _Z95**2 - 2 * log_ratio))

    @property
    def kind(self) -> DatasetKind:
        """How `path` is meant, decided from its spelling alone."""
        if not self.path:
            return "counts"
        if ":" in self.path:
            return "class"
        is_path = self.path.startswith((".", "/", "~"))
        return "file" if is_path or self.path.endswith(DATA_FILE_SUFFIXES) else "hub"

    @property
    def template_columns(self) -> tuple[str, ...]:
        """Columns that `template` names, in their order."""
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(self.template or "")]
        except ValueError as error:  # a lone brace
            raise ConfigError(
                f"dataset.template: {error}, got {self.template!r}; write {{{{ for a plain brace"
            ) from None
        columns = tuple(dict.fromkeys(field for field in fields if field is not None))
        for column in columns:
            if not column or not column.isprintable() or set(column) & set(".[]{}"):
                raise ConfigError(
                    f"dataset.template: {column!r} is not a column name, got {self.template!r}"
                )
        return columns


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """How batch scripts ask a Slurm cluster for a GPU, and what they do before they measure.

    Args:
        partitions, clusters: where to look and submit; empty is everywhere, and here.
        time_limit_s: of every job; None: from the predictions.
        startup_s: what a job may take to load the libraries, before anything is measured.
        memory_bytes: host memory of a job; None is the cluster's default.
        options: further options of `sbatch`, each as it is.
        command: how a node calls this program; None: this interpreter, which a shared file
            system also shows there.
        gpus: Slurm's type or feature to a key of the catalogue, where the name does not tell.
        max_parallel: array tasks that run at once; None is no limit of ours.
        pretend_memory_bytes: for tests of a cluster without GPUs: tasks measure on the CPU, with
            this much memory, and their records name the GPU that was asked for.
    """

    account: str | None = None
    partitions: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    merge_partition: str | None = None
    qos: str | None = None
    time_limit_s: float | None = None
    startup_s: float = 600.0
    cpus_per_task: int = 4
    memory_bytes: int | None = None
    max_parallel: int | None = None
    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    command: str | None = None
    gpus: Mapping[str, str] = field(default_factory=dict)
    pretend_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run: stage 1 over models and serving shapes, stage 2 over models, variants, batches.

    Args:
        source: path of the config file.
        gpu: a key, alias or device name, or "auto" for the device of this machine.
        gpus: all that it is asked for, of which `gpu` is the first.
        spreads: numbers of GPUs and strategies that fine-tunings are searched over; the strategy
            "auto" stands for every one that accepts the run.
        tokenizers: model name to tokenizer name, where they differ.
        inference, finetune: settings that all candidates of a stage share; their `model`,
            `batch_size` and the other listed dimensions are replaced by the lists here.
        lora_alpha: None: twice the rank of each candidate.
        gradient_checkpointing: None: on where the model has it.
        serve: the form in which stage 1 judges a model: with its adapter unmerged on the base that
            it was trained on, merged, or merged and quantised that way; None: as each method says.
        collator: how batches are made: rows padded to the longest of their batch, in random order
            or of similar lengths ("grouped"), or all to the longest allowed ("fixed"); or texts
            joined and cut into blocks ("packed"), or whole texts put together ("packed-bfd").
        train_on: what has a loss: completions and the assistant's turns where the data has such,
            or all tokens.
        gpu_limits: by device key, what takes the place of `limits` there.
        num_batches, num_runs: measured steps per fine-tuning profile, measured generations per
            inference profile.
        weights: "pretrained" for the handed-out job; "random" builds from the config, for
            trying the whole path where nothing can be downloaded.
        learning_rate: of the job; None is the usual one of its method and trainer.
        train: run the winning job at the end.
        timeout_s: device seconds after which one profile is stopped.
        grid: the electricity of the country where it runs; None where that is not said.
        notes: names of models that do not mean them exactly, and what they were taken as.
    """

    source: Path
    output_dir: Path
    gpu: str
    gpus: tuple[str, ...] = ()
    spreads: tuple[ParallelConfig, ...] = (ONE_GPU,)
    models: tuple[str, ...]
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    inference: RunConfig
    inference_batch_sizes: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    max_new_tokens: tuple[int, ...]
    finetune: RunConfig
    methods: tuple[str, ...]
    ranks: tuple[int, ...]
    lora_alpha: int | None = None
    serve: Serve | Quant | None = None
    finetune_batch_sizes: tuple[int, ...]
    gradient_checkpointing: tuple[bool | None, ...] = (None,)
    attn: tuple[AttentionKernel, ...] = ("sdpa",)
    optimizers: tuple[Optimizer, ...] = ("adamw_torch_fused",)
    limits: Limits
    gpu_limits: Mapping[str, Limits] = field(default_factory=dict)
    objective: Objective = field(default_factory=Objective)
    budget: Budget = field(default_factory=Budget)
    dataset: DatasetConfig
    collator: Collator = "longest"
    train_on: TrainOn = "completions"
    keeping: Keeping = field(default_factory=Keeping)
    epochs: float = 1.0
    learning_rate: float | None = None
    seed: int = 0
    profile: ProfilePolicy = "frontier"
    num_batches: int = 5
    num_runs: int = 5
    timeout_s: float = 600.0
    weights: Literal["pretrained", "random"] = "pretrained"
    train: bool = False
    trust_remote_code: bool = False
    calibration_dir: Path | None = None
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    grid: Grid | None = None
    notes: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_spread(self) -> bool:
        """Whether several GPUs may share a fine-tuning."""
        return any(config.gpus > 1 for config in self.spreads)

    @property
    def most_gpus(self) -> int:
        """Of all that may share a fine-tuning; a model may be served on as many."""
        return max(config.gpus for config in self.spreads)

    def limits_on(self, gpu: str) -> Limits:
        """The limits on the device with key `gpu`."""
        return self.limits.but(self.gpu_limits.get(gpu, Limits()))
