"""Measured runs → samples that a fit learns from: features, the measured value, what it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Self

from whichlora import timing
from whichlora.memory.ledger import PARTS
from whichlora.prediction import (
    ALLOCATED_PARTS,
    forward_features,
    ledger,
    mean_context,
    part_bytes,
    step_features,
)
from whichlora.resolution import Job
from whichlora.results import Measurement
from whichlora.timing import prior_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

FOLDS = 10
_MOST_PROMPT = 0.3  # of a generation whose parts were not timed; beyond it, nothing is learned


@dataclass(frozen=True, slots=True)
class Sample:
    """One observation: features, the measured value, and the model it belongs to.

    Args:
        record: id of the measurement it is from.
        shape: the settings whose range limits what the fit may be asked.
        older: measured on other library versions than the current ones.
    """

    group: str
    features: Mapping[str, float]
    value: float
    record: str = ""
    shape: Mapping[str, float] = field(default_factory=dict)
    older: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Samples as columns, so that a fold is a selection and not another pass over them."""

    samples: Sequence[Sample]
    columns: Mapping[str, Array]
    values: Array

    @classmethod
    def of(cls, samples: Sequence[Sample], names: Sequence[str]) -> Self:
        import numpy as np

        columns = {name: np.array([one.features[name] for one in samples]) for name in names}
        return cls(samples, columns, np.array([one.value for one in samples]))

    def older(self) -> NDArray[np.bool_]:
        import numpy as np

        return np.array([one.older for one in self.samples], dtype=bool)

    def judged(self) -> NDArray[np.intp]:
        """The samples that tell how good a fit is: of the current versions where there are any."""
        import numpy as np

        older = self.older()
        return np.flatnonzero(older) if older.all() else np.flatnonzero(~older)

    def take(self, chosen: NDArray[np.intp]) -> Table:
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return Table([self.samples[i] for i in chosen.tolist()], columns, self.values[chosen])


def folds(samples: Sequence[Sample]) -> list[list[int]]:
    """Held-out index sets: whole models where there are three or more, else single runs.

    Up to `FOLDS` sets: with no more models than that, each is left out alone.
    """
    groups = sorted({sample.group for sample in samples})
    if len(groups) < 3:
        count = min(FOLDS, len(samples))
        return [list(range(start, len(samples), count)) for start in range(count)]
    fold_of = {group: number % FOLDS for number, group in enumerate(groups)}
    found: list[list[int]] = [[] for _ in range(min(FOLDS, len(groups)))]
    for i, sample in enumerate(samples):
        found[fold_of[sample.group]].append(i)
    return found


def held_out_rows(table: Table, judge: Callable[[Table, Table], Array]) -> Array:
    """What `judge` says of samples left out of the fit that predicts them, a row for each.

    Where some were measured on the current versions, those alone are left out and judged.

    Args:
        judge: of the kept and the held samples, numbers by row of the latter.
    """
    import numpy as np

    judged = table.judged()
    found: list[Array] = []
    order: list[int] = []
    everything = np.arange(len(table.samples))
    for chosen in folds([table.samples[i] for i in judged.tolist()]):
        held = judged[chosen]
        kept = np.delete(everything, held)
        found.append(judge(table.take(kept), table.take(held)))
        order += chosen
    return np.asarray(np.concatenate(found)[np.argsort(order)])


def time_samples(job: Job, measurement: Measurement) -> dict[str, list[Sample]]:
    """Observations by phase in one measurement: the median of its repetitions."""
    found: dict[str, list[Sample]] = {}

    def add(phase: str, features: dict[str, float], seconds: list[float], length: int) -> None:
        sample = _sample(job, measurement, features, median(seconds), length)
        found.setdefault(phase, []).append(sample)

    if measurement.step_s:
        by_length: dict[int, list[float]] = {}
        for length, step_s in zip(measurement.step_lengths, measurement.step_s, strict=True):
            by_length.setdefault(length, []).append(step_s)
        for length, times in by_length.items():
            add("finetune", step_features(job, seq_len=length), times, length)
    prompt = job.run.prompt_len
    if measurement.prefill_s:
        features = forward_features(job, context=prompt, decoding=False)
        add("prefill", features, list(measurement.prefill_s), prompt)
    if measurement.decode_s_per_token:
        context = mean_context(prompt, job.run.max_new_tokens)
        features = forward_features(job, context=context, decoding=True)
        add("decode", features, list(measurement.decode_s_per_token), context)
    elif measurement.generate_s and job.run.max_new_tokens > 1 and job.model.task != "encoder":
        context, steps = mean_context(prompt, job.run.max_new_tokens), job.run.max_new_tokens - 1
        whole = median(measurement.generate_s)
        first = _first_token_s(job)
        if first < _MOST_PROMPT * whole:
            features = forward_features(job, context=context, decoding=True)
            add("decode", features, [(whole - first) / steps], context)
    return found


def _first_token_s(job: Job) -> float:
    """Seconds of the prompt pass as the datasheet and priors have it."""
    features = forward_features(job, context=job.run.prompt_len, decoding=False)
    return float(timing.seconds(prior_model(job.gpu, "prefill"), features)[0])


def _sample(
    job: Job, measurement: Measurement, features: Mapping[str, float], value: float, length: int
) -> Sample:
    shape = {"batch_size": job.run.batch_size, "tokens": length}
    older = bool(job.run.libraries)  # a run names its versions where they are not the current ones
    return Sample(job.run.model, features, value, measurement.id, shape, older)


def memory_samples(job: Job, measurement: Measurement) -> list[Sample]:
    """Parts of the ledger at its peak against the measured counters, one sample each."""
    found = ledger(job)
    parts = {k: float(v) for k, v in part_bytes(job, found, found.peak_moment).items()}
    none = dict.fromkeys(PARTS, 0.0)
    live = none | {name: parts[name] for name in ALLOCATED_PARTS}
    run = job.run
    length = run.seq_len if run.phase == "finetune" else run.prompt_len + run.max_new_tokens
    counters = (
        (measurement.peak_allocated_bytes, live),
        (measurement.peak_reserved_bytes, live | {"allocator": parts["allocator"]}),
        (measurement.device_used_bytes, parts),
    )
    return [
        _sample(job, measurement, features, float(measured), length)
        for measured, features in counters
        if measured
    ]
