"""The largest batch or length with which a run fits, and what a run lacks that never does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from whichlora.errors import ConfigError
from whichlora.predict.alike import SharedLedgers
from whichlora.predict.coefficients import Calibration
from whichlora.predict.counted import count_run
from whichlora.predict.judged import judge_moments, judged_memory, judged_run
from whichlora.predict.parallel_choice import best_spread
from whichlora.predict.predict import predict, predict_counted
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.predict.serving import bounded
from whichlora.serving.base import Start
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import last_between
from whichlora.spec.parallel import AUTO
from whichlora.spec.results import Prediction, ServingPrediction
from whichlora.spec.run import MOST_COUNT, RunConfig
from whichlora.trainers import get_trainer
from whichlora.units import format_bytes

Size = Literal["batch_size", "seq_len", "context"]
MAX_SIZE = MOST_COUNT  # no run is that large; a search beyond ends here


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest value of one setting with which a run fits.

    Args:
        value: the run fits with it and not with one more; 0 where not even 1 fits.
        possible: the largest value that the interval does not rule out, at least `value`.
        positions: the model's, where they ended the search before memory did.
        least: the smallest value that is possible.
        lacks_bytes: what a run with that needs beyond the device, where it does not fit.
    """

    setting: Size
    value: int
    possible: int
    positions: int | None = None
    least: int = 1
    lacks_bytes: int = 0

    @property
    def note(self) -> str:
        """One sentence that qualifies the number."""
        if not self.value:
            lacks = f"{self.setting} {self.least} lacks {format_bytes(self.lacks_bytes)}"
            if not self.possible:
                return lacks
            return f"{lacks} at the upper bound; up to {self.possible} may fit, a profile decides"
        text = f"{self.setting} {self.value} is the largest whose upper bound fits"
        if self.positions:
            return f"{self.setting} {self.value} fits; the model has no more positions"
        if self.possible > self.value:
            text += f"; up to {self.possible} may fit, a profile decides"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One run on one accelerator.

    Args:
        prediction: of the run as it was asked; None where the device cannot run it.
        batch_size: the largest that fits; 0 where not even the least does.
        refusal: why the device cannot run it.
    """

    gpu: GpuSpec
    prediction: Prediction | None
    batch_size: int = 0
    refusal: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of `whichlora where --json`: extended but never broken."""
        return {
            "gpu": self.gpu.key,
            "memory_bytes": self.gpu.memory_bytes,
            "unverified": list(self.gpu.unverified),
            "largest_batch_size": self.batch_size,
            "refusal": self.refusal,
            "prediction": self.prediction.to_dict() if self.prediction else None,
        }


def place(
    model: ModelSpec,
    run: RunConfig,
    gpu: GpuSpec,
    calibration: Calibration,
    shared: SharedLedgers | None = None,
) -> Placement:
    """`run` on `gpu`: what it needs there, and the largest batch that would fit.

    Args:
        shared: of the same run on other cards.
    """
    shared = shared or SharedLedgers()
    try:
        if run.parallel.strategy == AUTO:
            prediction = best_spread(run, lambda each: predict(model, each, gpu, calibration))
            job = resolve(model, replace(run, parallel=prediction.run.parallel), gpu)
        else:
            job = resolve(model, run, gpu)
            counted = count_run(job, moments_of=shared.run_moments)
            prediction = predict_counted(counted, calibration)
    except ConfigError as error:
        return Placement(gpu=gpu, prediction=None, refusal=str(error))
    smaller, notes = bounded(job)
    if notes:
        prediction = predict(model, smaller, gpu, calibration)
        prediction = replace(prediction, notes=(*notes, *prediction.notes))
    if prediction.serving is not None:  # whatever is asked for beyond waits
        return Placement(gpu=gpu, prediction=prediction, batch_size=prediction.serving.max_running)
    step, moments_of = least_size(job.run, "batch_size"), shared.batches(job)

    def fits_by_estimate(number: int) -> bool:
        """Without a replay: hundreds of cards are asked at once."""
        judged = judge_moments(job, moments_of(step * number), calibration)
        return bool(judged.bounds()[2] <= job.gpu.memory_bytes)

    batch_size = step * last_that(fits_by_estimate, MAX_SIZE // step)
    if prediction.exceeds_host:
        batch_size = 0
    if prediction.fits:  # by a replay, which the estimate may be above
        batch_size = max(batch_size, run.batch_size)
    return Placement(gpu=gpu, prediction=prediction, batch_size=batch_size)


def smallest_first(placements: Iterable[Placement]) -> list[Placement]:
    """Cards that fit, the smallest first; then those that may, and those that come closest."""

    def order(placement: Placement) -> tuple[int, float, str]:
        gpu, prediction = placement.gpu, placement.prediction
        if prediction is None:
            return 3, 0.0, gpu.key
        if prediction.verdict == "fits":
            return 0, gpu.memory_bytes, gpu.key
        lacks = prediction.memory.interval_bytes[1] - gpu.memory_bytes
        return (1 if prediction.verdict == "undecided" else 2), lacks, gpu.key

    return sorted(placements, key=order)


def largest_that_fits(
    model: ModelSpec, run: RunConfig, gpu: GpuSpec, calibration: Calibration, setting: Size
) -> Largest:
    """The largest `setting` with which `run` fits on `gpu`; its own value there is ignored.

    Raises:
        ConfigError: settings that exclude each other.
    """
    positions = None
    if setting == "seq_len":
        positions = model.max_position_embeddings
    step = least_size(run, setting)
    job = resolve(model, with_size(run, setting, step), gpu)
    most = positions or MAX_SIZE
    sizes = most // step
    value = step * last_that(lambda size: _fits(job, setting, step * size, calibration), sizes)
    possible = step * last_that(
        lambda size: _may_fit(job, setting, step * size, calibration), sizes
    )
    lacks = 0
    if not value:
        _, _, high = judged_run(job, calibration).bounds()
        lacks = high - gpu.memory_bytes
    return Largest(
        setting=setting,
        value=value,
        possible=max(value, possible),
        positions=positions if value == positions else None,
        least=step,
        lacks_bytes=lacks,
    )


def largest_served(
    prediction: Prediction,
    setting: Size,
    start_of: Callable[[RunConfig], Start],
    positions: int | None,
) -> tuple[int, str]:
    """The most that the engine of `prediction` serves, and a sentence that says so.

    An engine that allocates at the start what sequences take may lay a part of the model on the
    host instead. Then it is the most with all of the model on GPUs. Where not even 1 has that, it
    is the longest context that starts, and as many sequences as leave there what one does.

    Args:
        start_of: its start for another size.
        positions: of the model.

    Raises:
        ConfigError: `setting` is neither sequences at once nor their length.
    """
    serving, run = prediction.serving, prediction.run
    if serving is None or setting == "seq_len":
        raise ConfigError(f"{setting}: max is not of serving {run.serving}")
    least = start_of(with_size(run, setting, 1))
    is_length = setting == "context"
    nothing = "it starts for no length" if is_length else "it runs no sequence of that length"
    if least.pool_fact is not None:
        most = serving.max_context if is_length else serving.max_running
        if not most:
            return most, nothing
        if is_length:
            return _longest_served(serving, start_of(run), positions)
        return most, f"{most} sequences of {serving.context} tokens run at once, more wait"

    keeps = least.is_whole or not is_length

    def holds(size: int) -> bool:
        start = start_of(with_size(run, setting, size))
        return not start.fault and (start.held == least.held or not keeps)

    limit = positions if is_length else least.max_num_seqs(serving.context)
    ends = "the model has no more positions" if is_length else "the engine has no more slots"
    if least.shared_cells is not None and not is_length:
        limit, ends = least.shared_cells // serving.context, "the slots share one cache of so many"
    most = last_that(holds, limit or MAX_SIZE)
    if not most:
        return most, nothing
    what, kind = f"context {most}", "longest"
    if not is_length:
        what, kind = f"concurrency {most} of {serving.context} tokens", "most"
    held = start_of(with_size(run, setting, max(1, most))).held
    having = f" with {held}" if held else ""
    if most == limit:
        return most, f"{what} starts{having}; {ends}"
    if held and keeps:
        return most, f"{what} is the {kind}{having}; beyond it more of the model lies on the host"
    return most, f"{what} is the {kind} that starts{having}"


def _longest_served(
    serving: ServingPrediction, start: Start, positions: int | None
) -> tuple[int, str]:
    """The longest context of which a sequence fits even the least pool that is predicted.

    Where none does, the longest that fits the pool: whether it starts is left open.
    """
    possible, least_bytes = serving.max_context, serving.interval_kv_pool_bytes[0]
    most = start.max_context(
        start.longest_context or positions, serving.kv_pool_bytes - least_bytes
    )
    if not most:
        return possible, f"context {possible} is the longest of which a sequence may fit the pool"
    if most == possible == positions:
        return most, f"context {most} fits the pool; the model has no more positions"
    note = f"context {most} is the longest of which a sequence surely fits the pool"
    return most, f"{note}; up to {possible} may" if possible > most else note


def least_size(run: RunConfig, setting: Size) -> int:
    """The least of `setting`, whose multiples are possible: trainers may write whole groups."""
    is_batch = setting == "batch_size" and run.phase == "finetune"
    return get_trainer(run.trainer).least_batch(run) if is_batch else 1


def with_size(run: RunConfig, setting: Size, value: int) -> RunConfig:
    """`run` with another value of `setting`."""
    if setting == "batch_size":
        return replace(run, batch_size=value)
    if setting == "context":
        return replace(run, context=value)
    return replace(run, seq_len=value)


def _may_fit(job: ResolvedRun, setting: Size, value: int, calibration: Calibration) -> bool:
    """Whether not even live tensors rule the size out, which needs no replay."""
    least, _, _ = judged_memory(job, calibration, **{setting: value}).bounds()
    return bool(least <= job.gpu.memory_bytes)


def _fits(job: ResolvedRun, setting: Size, value: int, calibration: Calibration) -> bool:
    """Whether a prediction of the run with that size says that it fits."""
    if not _may_fit(job, setting, value, calibration):
        return False
    sized = replace(job, run=with_size(job.run, setting, value))
    _, _, high = judged_run(sized, calibration).bounds()
    return bool(high <= job.gpu.memory_bytes)


def last_that(holds: Callable[[int], bool], most: int) -> int:
    """The last of 1 … `most` that `holds` before one that does not; 0 where 1 does not."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    return last_between(holds, low, min(high - 1, most))
