"""Before step 1: will it fit, how long will it take; from then on: predicted against actual."""

from __future__ import annotations

import math
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from whichlora.calibration.load import calibration_roots, load_calibration
from whichlora.errors import ConfigError, WhichLoraError
from whichlora.integrations.batches import Batches, RowReader, read_batches
from whichlora.integrations.live import read_job, read_parallel, read_trainer
from whichlora.integrations.peers import Peers
from whichlora.predict.coefficients import Calibration
from whichlora.predict.judgement import time_interval
from whichlora.predict.predict import predict
from whichlora.predict.quantities import step_features
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.profiler.meter import Meter
from whichlora.profiler.worker import environment
from whichlora.spec.results import Interval, Measurement, Prediction
from whichlora.store.gpus import find_gpu
from whichlora.store.measurements import MeasurementLog
from whichlora.text import visible
from whichlora.timing.model import log_deviation, seconds
from whichlora.units import format_bytes, format_seconds

MAX_RECORDED_STEPS = 64
_LONG_BATCH = 1.5  # times the median: then the longest batch alone decides, which is worth a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the callback said before step 1.

    Args:
        prediction: at the longest batch; `total_s` is of all steps over their real widths.
    """

    job: ResolvedRun
    prediction: Prediction
    calibration: Calibration
    batches: Batches
    num_steps: int
    total_s: float
    total_interval_s: Interval

    def step_s(self, width: int) -> float:
        """Predicted seconds of an optimizer step whose batches have this width."""
        if self.job.layout is not None:  # with what the ranks send
            return self.at(width, padded=self.batches.padded).time.step_s or math.nan
        model = self.calibration.time["finetune"]
        return float(seconds(model, step_features(self.job, seq_len=width))[0])

    def at(self, width: int, *, padded: bool) -> Prediction:
        """The prediction for batches of another width."""
        run = replace(
            self.job.run,
            seq_len=width,
            padding="padded" if padded else "none",
        )
        return predict(self.job.model, run, self.job.gpu, self.calibration)


@dataclass(slots=True)
class _Step:
    """One optimizer step as it happened: its micro-batches' shapes and its seconds."""

    shapes: list[tuple[int, int]]
    padded: bool = False
    seconds: float = 0.0
    timed: bool = True

    @property
    def width(self) -> int:
        """Of its widest batch."""
        return max((width for _, width in self.shapes), default=0)


def _never_raises(event: Callable[..., None]) -> Callable[..., None]:
    """`event`, which says a fault of its own and is silent from then on."""

    @wraps(event)
    def guarded(self: WhichLoRACallback, *arguments: Any, **live: Any) -> None:
        try:
            event(self, *arguments, **live)
        except Exception as error:
            if self.forecast is not None:
                self._say(f"no comparison, {_fault(error)}")
            self.forecast = None

    return guarded


class WhichLoRACallback(TrainerCallback):  # type: ignore[misc]
    """Add to the `callbacks` of a `transformers.Trainer`, or of a trainer of TRL.

    Whose steps it predicts it reads from the class of the arguments.

    It reads the model, the arguments and the data that are there, says before step 1 whether the
    run will fit and how long it will take, and compares as it goes. What it can't read it says in
    one line, and stays silent then. It never stops a training.

    A CPU has no memory counters, so there the second step runs under the profiler.

    On several GPUs it takes the strategy from the accelerator, and each rank measures itself; rank
    0 says what the largest of them has reached. The model is read before it is divided, so that
    the callback must be among those that the Trainer is made with. Such runs are not recorded.

    Args:
        record: add the run to the calibration database of this device, so that the next
            prediction here is better.
        calibration_dir: that database; None is the user's own.
        say: takes each line; None prints to stderr.

    Attributes:
        forecast: what was predicted, once the training has begun; None where it was refused.
        measurement: what was measured, once it has ended.
    """

    def __init__(
        self,
        *,
        record: bool = False,
        calibration_dir: Path | str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.forecast: Forecast | None = None
        self.measurement: Measurement | None = None
        self._record = record
        self._calibration_dir = None if calibration_dir is None else Path(calibration_dir)
        self._say = say or _to_stderr
        self._undivided: ResolvedRun | WhichLoraError | None = None
        self._peers: Peers | None = None

    # --- events of the Trainer

    def on_init_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        if args.world_size == 1 or live.get("model") is None:
            return
        try:
            self._undivided = read_job(
                live["model"],
                args,
                None,
                gpu=find_gpu(_device_name(args.device)),
                batch_size=args.train_batch_size,
                seq_len=1,  # the batches are not there yet
                padded=True,
                parallel=read_parallel(args),
            )
        except WhichLoraError as error:
            self._undivided = error
        except Exception as error:  # as in `on_train_begin`
            self._undivided = WhichLoraError(_fault(error))

    def on_train_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        self.forecast = self.measurement = None
        self._steps: list[_Step] = []
        self._current: _Step | None = None
        self._first_step = state.global_step
        self._num_said = 0
        self._hook: Any = None
        self._peers = Peers.of(args.world_size)
        if not state.is_world_process_zero:
            self._say = _say_nothing
        try:
            self.forecast = self._forecast(args, state, live)
        except WhichLoraError as error:
            self._say(f"no prediction: {error}")
            return
        except Exception as error:  # a training of days must not end for a line of advice
            self._say(f"no prediction, {_fault(error)}")
            return
        for line in announcement(self.forecast):
            self._say(line)
        self._meter = Meter(args.device.type)
        self._meter.forget_peak()
        self._peak_bytes: int | None = None
        self._peak_step: _Step | None = None
        self._begin_s = time.perf_counter()
        self._mark_s = self._meter.now()
        self._hook = live["model"].register_forward_pre_hook(self._on_forward, with_kwargs=True)

    @_never_raises
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.forecast is None:
            return
        done = state.global_step - self._first_step
        # the first step is not like the others: it makes the optimizer state
        self._current = _Step(shapes=[], timed=done > 0)
        if self._meter.needs_extra_run and done == min(1, self.forecast.num_steps - 1):
            self._current.timed = False
            self._peak_step = self._current
            self._meter.start_extra_run()

    @_never_raises
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.forecast is None or self._current is None:
            return
        if self._current is self._peak_step:
            self._meter.stop_extra_run()
        now = self._meter.now()
        self._current.seconds = now - self._mark_s
        self._mark_s = now
        self._steps.append(self._current)
        self._current = None

    @_never_raises
    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.forecast is not None and len(self._steps) > max(1, self._num_said):
            self._num_said = len(self._steps)
            self._say(self._progress(self.forecast))
        self._forget_pause()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._forget_pause()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._forget_pause()

    @_never_raises
    def on_train_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.forecast is None or not self._steps:
            return
        self.measurement = self._measured(self.forecast)
        peak_bytes = self.measurement.peak_allocated_bytes
        largest = self._peers.largest(peak_bytes) if self._peers and peak_bytes else None
        self._say(self._summary(self.forecast, largest))
        if self._record and self._peers:
            self._say("not recorded: records are of runs on one GPU")
        elif self._record:
            self._keep(self.measurement)

    # --- what they do

    def _forecast(self, args: Any, state: Any, live: dict[str, Any]) -> Forecast:
        accumulation = args.gradient_accumulation_steps
        batch_size = state.train_batch_size or args.train_batch_size
        gpu = find_gpu(_device_name(args.device))
        num_steps = state.max_steps - state.global_step
        strategy = str(getattr(args, "train_sampling_strategy", "random"))
        batches = read_batches(
            live["train_dataloader"],
            reader=_row_reader(args, live.get("processing_class")),
            batch_size=batch_size,
            num_micro_steps=num_steps * accumulation,
            seed=args.seed,
            grouped=strategy in ("group_by_length", "batch_rebalance"),
        )
        if args.world_size > 1:
            job = self._with_batches(batches)
        else:
            read_parallel(args)  # refuses what one process spreads
            job = read_job(
                live["model"],
                args,
                live.get("optimizer"),
                gpu=gpu,
                batch_size=batch_size,
                seq_len=batches.longest,
                padded=batches.padded,
            )
        calibration = load_calibration(gpu, self._calibration_dir)
        prediction = predict(job.model, job.run, gpu, calibration)
        forecast = Forecast(
            job=job,
            prediction=prediction,
            calibration=calibration,
            batches=batches,
            num_steps=num_steps,
            total_s=math.nan,
            total_interval_s=(math.nan, math.nan),
        )
        if not prediction.time.is_known:
            return forecast
        total = sum(
            count / accumulation * forecast.step_s(width) for width, count in batches.widths.items()
        )
        return replace(forecast, total_s=total, total_interval_s=_interval(forecast, total))

    def _with_batches(self, batches: Batches) -> ResolvedRun:
        """What was read before the model was divided, with the batches that are there now.

        Raises:
            WhichLoraError: it could not be read.
        """
        if self._undivided is None:
            raise ConfigError(
                "on several GPUs the model is read before it is divided; give the callback in "
                "callbacks= of the Trainer"
            )
        if isinstance(self._undivided, WhichLoraError):
            raise self._undivided
        job = self._undivided
        run = replace(
            job.run,
            seq_len=batches.longest,
            padding="padded" if batches.padded else "none",
        )
        return resolve(job.model, run, job.gpu)

    def _on_forward(self, module: Any, positional: Any, named: dict[str, Any]) -> None:
        if self._current is None or not module.training or not torch.is_grad_enabled():
            return  # of a reference, or while a trainer writes answers
        ids = named.get("input_ids", positional[0] if positional else None)
        if ids is not None and ids.dim() == 2:
            self._current.shapes.append((ids.shape[0], ids.shape[1]))
            mask = named.get("attention_mask")
            # once per step is enough to know; asking a GPU costs a synchronisation
            if mask is not None and not self._current.padded and len(self._steps) < 2:
                self._current.padded = bool((mask == 0).any())

    def _forget_pause(self) -> None:
        """What happened since the step ended (logging, evaluation, saving) is not training."""
        if self.forecast is not None and self._hook is not None:
            self._mark_s = self._meter.now()

    def _like(self, forecast: Forecast) -> list[_Step]:
        """Timed steps whose batches are whole and of one width each."""
        run, rows = forecast.job.run, forecast.job.num_sequences
        return [
            step
            for step in self._steps
            if step.timed
            and len(step.shapes) == run.gradient_accumulation_steps
            and set(step.shapes) == {(rows, step.width)}
        ]

    def _peak(self, forecast: Forecast) -> tuple[int, int] | None:
        """Peak of live tensors so far, and its prediction at the widest batch it has seen."""
        bytes_now = self._meter.peaks()["peak_allocated_bytes"]
        if not bytes_now:
            return None
        width, padded = self._peak_width()
        predicted = forecast.at(width, padded=padded).memory.peak_allocated_bytes
        return bytes_now, predicted

    def _peak_width(self) -> tuple[int, bool]:
        steps = self._steps if self._peak_step is None else [self._peak_step]
        return max(step.width for step in steps), any(step.padded for step in steps)

    def _progress(self, forecast: Forecast) -> str:
        timed = [step for step in self._steps if step.timed]
        is_known = forecast.prediction.time.is_known
        parts = [f"step {len(self._steps)} of {forecast.num_steps}"]
        if timed and not is_known:
            seconds_each = sum(step.seconds for step in timed) / len(timed)
            parts.append(f"{format_seconds(seconds_each)} a step")
        if timed and is_known:
            actual = sum(step.seconds for step in timed)
            predicted = sum(forecast.step_s(step.width) for step in timed)
            parts.append(
                f"{format_seconds(actual / len(timed))} a step "
                f"(predicted {format_seconds(predicted / len(timed))}, {_off(predicted, actual)})"
            )
            fraction_left = 1 - len(self._steps) / forecast.num_steps
            parts.append(
                f"{format_seconds(forecast.total_s * actual / predicted * fraction_left)} left"
            )
        peak = self._peak(forecast)
        if peak:
            parts.append(f"peak {_compared(*peak)}")
        return ", ".join(parts)

    def _summary(self, forecast: Forecast, largest: tuple[int, int, int] | None) -> str:
        """What is said at the end.

        Args:
            largest: on several GPUs: the largest peak of a rank, its number, and how many told.
        """
        actual = time.perf_counter() - self._begin_s
        predicted = forecast.total_s
        text = f"{len(self._steps)} steps in {format_seconds(actual)}"
        text += ", everything between them included"
        if forecast.prediction.time.is_known:
            text += f" (predicted {format_seconds(predicted)}, {_off(predicted, actual)})"
        peak = self._peak(forecast)
        if peak:
            text += f"; peak at {self._peak_width()[0]} tokens {_compared(*peak)}"
        if peak and largest:
            num_bytes, rank, told = largest
            text += f"; largest of {told} ranks: {_compared(num_bytes, peak[1])} on rank {rank}"
        return text

    def _measured(self, forecast: Forecast) -> Measurement:
        """The run as an ordinary record."""
        width, padded = self._peak_width()
        run = forecast.at(width, padded=padded).run
        steps = self._like(forecast)[:MAX_RECORDED_STEPS]
        peaks: dict[str, Any] = self._meter.peaks()
        return Measurement(
            id=uuid.uuid4().hex,
            gpu=forecast.job.gpu.key,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            config=run.to_dict(),
            outcome="ok",
            model_config=dict(forecast.job.model.config),
            step_s=tuple(step.seconds for step in steps),
            batch_seq_len=tuple(step.width for step in steps),
            device_s=time.perf_counter() - self._begin_s,
            environment=environment("cuda" if self._meter.is_cuda else "cpu"),
            provenance={
                "run_id": uuid.uuid4().hex,
                "command": " ".join(sys.argv),
                "source": "WhichLoRACallback",
            },
            **peaks,
        )

    def _keep(self, measurement: Measurement) -> None:
        root = calibration_roots(self._calibration_dir)[0]
        run_id = str(measurement.provenance["run_id"])
        log = MeasurementLog(root, measurement.gpu, run_id)
        try:
            log.append(measurement)
        except WhichLoraError as error:
            self._say(f"not recorded: {error}")
            return
        recorded = "time and memory" if measurement.step_s else "memory alone (batches too uneven)"
        self._say(
            f"recorded {recorded} in {log.path}; fit it with: "
            f"whichlora calibrate --gpu {measurement.gpu}"
        )


def announcement(forecast: Forecast) -> list[str]:
    """What is said before step 1."""
    prediction, run = forecast.prediction, forecast.job.run
    memory = prediction.memory
    low, high = memory.interval_bytes
    verdict = {"fits": "fits", "fails": "does NOT fit", "undecided": "may not fit"}[
        prediction.verdict
    ]
    spread = run.parallel
    on_gpus = f", {spread.in_words} on {spread.gpus} GPUs" if spread.gpus > 1 else ""
    steps = f"{forecast.num_steps} steps: the time is not known"
    if prediction.time.is_known:
        steps = (
            f"{forecast.num_steps} steps will take {format_seconds(forecast.total_s)} "
            f"(90 %: {format_seconds(forecast.total_interval_s[0])} to "
            f"{format_seconds(forecast.total_interval_s[1])})"
        )
    lines = [
        f"{run.model}, {run.method}, batch {run.batch_size}, longest {run.seq_len} tokens"
        f"{on_gpus}: "
        f"{verdict} {prediction.gpu}: {format_bytes(memory.device_used_bytes)} of "
        f"{format_bytes(prediction.usable_bytes)} "
        f"(95 %: {format_bytes(low)} to {format_bytes(high)})",
        f"{steps}; {prediction.basis}",
    ]
    batches = forecast.batches
    if batches.longest > _LONG_BATCH * batches.median:
        usual = forecast.at(batches.median, padded=batches.padded).memory.device_used_bytes
        lines.append(
            f"the longest batch has {batches.longest} tokens (row {batches.longest_row}), the "
            f"median row {batches.median}: it alone needs {format_bytes(memory.device_used_bytes)} "
            f"where {format_bytes(usual)} would do; it comes at any step"
        )
    return lines + [f"note: {note}" for note in prediction.notes]


def _interval(forecast: Forecast, total_s: float) -> Interval:
    """Of the seconds of all steps: as wide as that of one with the widest batches."""
    if forecast.job.layout is not None:
        time = forecast.prediction.time
        low, high = time.interval_s
        step_s = time.step_s or math.nan
        return total_s * low / step_s, total_s * high / step_s
    model = forecast.calibration.time["finetune"]
    widest = step_features(forecast.job, seq_len=max(forecast.batches.widths))
    deviation = log_deviation(model, widest, float(seconds(model, widest)[0]))
    return time_interval(total_s, deviation)


def _fault(error: Exception) -> str:
    return (
        f"by a fault of whichlora: {type(error).__name__}: {error}; "
        "please report it; the training goes on"
    )


def _row_reader(args: Any, tokenizer: Any) -> RowReader:
    """How the trainer of `args` turns rows into sequences."""
    trainer = read_trainer(args)
    longest = getattr(args, trainer.length_argument) if trainer.length_argument else None
    answered = getattr(args, "max_completion_length", 0) if trainer.writes_answers else 0
    return RowReader(trainer=trainer, longest=longest, tokenizer=tokenizer, answered=answered)


def _say_nothing(line: str) -> None:
    """Rank 0 speaks for all."""


def _device_name(device: Any) -> str:
    """The device as the catalog finds it."""
    if device.type != "cuda":
        return str(device.type)
    import torch

    return torch.cuda.get_device_name(device)  # type: ignore[no-any-return]


def _compared(actual: int, predicted: int) -> str:
    return (
        f"{format_bytes(actual)} (predicted {format_bytes(predicted)}, {_off(predicted, actual)})"
    )


def _off(predicted: float, actual: float) -> str:
    return f"{round(100 * (predicted / actual - 1)):+d} %"


def _to_stderr(line: str) -> None:
    print(visible(f"whichlora: {line}"), file=sys.stderr, flush=True)


__all__ = ["Forecast", "WhichLoRACallback", "announcement"]
