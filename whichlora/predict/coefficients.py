"""Coefficients of one device with their covariance and held-out error."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from whichlora.errors import DataFileError
from whichlora.memory.allocator import derived_context_bytes
from whichlora.memory.training import PARTS
from whichlora.serving.base import LoggedTimes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.links import LinkSpec
from whichlora.spec.numeric import Real
from whichlora.spec.run import TRANSFORMERS
from whichlora.timing.model import (
    DEVICE_RATES,
    FEATURES,
    REGIMES,
    STACK_FEATURES,
    TimeModel,
    of_another_engine,
    prior_model,
    regime_of_parts,
    with_launch,
)

TIME_PHASES = ("finetune", "prefill", "decode")

# Standard deviation of the factor on every part of the ledger before any run. Weights and states
# are arithmetic; what the allocator and the context take is the least known. Of 150 measured peaks
# that are 15 % temporaries or more, 95 % are off by at most 11 % of these
# (`benchmarks/part_spread.py`).
_PART_SPREAD = {
    "weights": 0.003,
    "adapters": 0.003,
    "gradients": 0.01,
    "optimizer_states": 0.01,
    "activations": 0.03,
    "logits_and_loss": 0.02,
    "temporary": 0.1,
    "kv_cache": 0.02,
    "allocator": 0.75,
    "context": 0.5,
}
# Of a context that `gpu.json` states: of 95 % of 76 runs on an H100 it is at most 9 % off, of 55
# on an H200 at most 4 % (`benchmarks/part_spread.py`).
_STATED_CONTEXT_SPREAD = 0.06
# Of one that is derived from the card's threads (`benchmarks/contexts.py`).
_DERIVED_CONTEXT_SPREAD = 0.2
PRIOR_MEMORY_NOISE = 0.015
# Bounds of the numbers in a file: no device has coefficients beyond them.
_MOST_FACTOR = 1e6
_MOST_NOISE = 10.0  # of a log: a factor of 20,000
_MOST_RUNS = 10**9
_BOUND_BY = {"host": "the host", "unpacking": "unpacking weights", "device": "the device"}
_NOT_STORED = (
    "asked_engine",
    "fallback",
    "launch_s",
    "machines",
    "this_host_bytes",
    "logged_times",
)
_REBUILD = "rebuild it with whichlora calibrate --gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Factors on the ledger's parts, one for a device whose stack behaves as read and traced.

    Args:
        mean: factor by part.
        covariance: of the factors, in the order of `PARTS`.
        noise: standard deviation of the log of a measured peak around the model.
    """

    mean: Mapping[str, float]
    covariance: tuple[tuple[float, ...], ...]
    noise: float
    num_runs: int


def prior_memory_model(gpu: GpuSpec) -> MemoryModel:
    """The ledger as it is, with what each part may be off by."""
    spread = dict(_PART_SPREAD)
    if gpu.context_bytes is not None:
        spread["context"] = _STATED_CONTEXT_SPREAD
    elif derived_context_bytes(gpu):
        spread["context"] = _DERIVED_CONTEXT_SPREAD
    return MemoryModel(
        mean=dict.fromkeys(PARTS, 1.0),
        covariance=tuple(tuple(spread[a] ** 2 if a == b else 0.0 for b in PARTS) for a in PARTS),
        noise=PRIOR_MEMORY_NOISE,
        num_runs=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Relative error of a model on runs it was not fitted to.

    Args:
        typical: the mean of the logs' sizes, as a relative error; None in older files.
    """

    num_runs: int
    median: float
    worst: float
    typical: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A run so far from the others that the fit down-weighted it.

    Args:
        record: id of the measurement.
        phase: "memory" or a time phase.
        weight: of its squared error in the fit, one for an ordinary run.
        ratio: measured over fitted value.
    """

    record: str
    phase: str
    weight: float
    ratio: float


def _unknown() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Predictor corrections of one device.

    Args:
        gpu: device key.
        num_records: measurements behind it, failures included.
        held_out: leave-out errors by "memory" and the time phases.
        held_out_by_regime: those of times by what decides them (`timing.model.REGIMES`).
        cold: errors of the priors alone on the same runs: what the calibration is worth.
        ranges: least and greatest of each setting among the runs of a phase; a prediction
            outside is an extrapolation.
        outliers: runs that the fit down-weighted.
        left_out: why a record taught nothing, by its id, or its place where it can't be read;
            failed runs are not listed.
        digest: of the record ids it was fitted to, so that a stale file is noticed.
        formulas: digest of the formulas it was fitted with; coefficients of others mean nothing.
        num_older: of the records, those measured on other library versions.
        by_datasheet: phases ("memory" is one) whose fit was worse on left-out runs than datasheet
            and priors alone, which then stayed.
        engine: whose runs its times are of; `stacks` are the publishers and versions of older ones.
        launch_s: what a launch takes on this host, as measured or stated; never stored itself.
        asked_engine: of `for_engine`: another one, that it is asked about; never stored itself.
        fallback: why stored coefficients are not used; never stored itself.
        machines: links between GPUs, by name of the machine; never stored itself.
        this_host_bytes: memory of this machine's host, None where it has no such GPU; never
            stored itself.
        logged_times: what logs of serving engines on this device state; never stored itself.
    """

    gpu: str
    memory: MemoryModel
    time: Mapping[str, TimeModel]
    num_records: int = 0
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)
    held_out_by_regime: Mapping[str, Mapping[str, HeldOut]] = field(default_factory=dict)
    cold: Mapping[str, HeldOut] = field(default_factory=dict)
    ranges: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    outliers: tuple[Outlier, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    formulas: str = ""
    num_older: int = 0
    by_datasheet: tuple[str, ...] = ()
    engine: str = TRANSFORMERS
    stacks: tuple[str, ...] = ()
    asked_engine: str = ""
    launch_s: float | None = None
    fallback: str = ""
    machines: Mapping[str, LinkSpec] = field(default_factory=dict)
    this_host_bytes: Callable[[], int | None] = _unknown
    logged_times: Callable[[], Sequence[LoggedTimes]] = tuple

    def for_engine(self, engine: str, gpu: GpuSpec) -> Self:
        """The same for serving by `engine`: of another one it knows the device's rates alone.

        Launches, overheads and other kernels are then the prior's. Training stays as it is.
        """
        if engine == (self.asked_engine or self.engine):
            return self
        inference = [phase for phase in self.time if phase != "finetune"]
        others = {
            phase: of_another_engine(self.time[phase], prior_model(gpu, phase))
            for phase in inference
            if self.time[phase].num_runs
        }
        if not others:
            return self
        return replace(self, time={**self.time, **others}, asked_engine=engine)

    def with_launch(self, launch_s: float, *, other_host: bool) -> Self:
        """The same where a launch is known to take `launch_s` on this host.

        Args:
            other_host: the coefficients are of runs beside other hosts.
        """
        times = {
            phase: with_launch(model, launch_s, other_host=other_host)
            for phase, model in self.time.items()
        }
        return replace(self, time=times, launch_s=launch_s)

    def basis(
        self, *, memory_runs: int, time_runs: int, passes: Mapping[str, Mapping[str, Real]]
    ) -> str:
        """One line that names the runs behind a prediction.

        Args:
            passes: seconds by feature of each phase that its time is made of.
        """
        runs = self._known_of_runs(memory_runs, time_runs, passes)
        if self.launch_s is None or not passes:
            return runs
        return f"{runs}; a launch takes {1e6 * self.launch_s:.3g} µs on this host"

    def _known_of_runs(
        self, memory_runs: int, time_runs: int, passes: Mapping[str, Mapping[str, Real]]
    ) -> str:
        other_runs = sum(model.num_runs for name, model in self.time.items() if name not in passes)
        memory = "memory by the config"
        if memory_runs:
            memory += f", corrected by {_runs(memory_runs)}"
        if not passes:
            return memory
        if not (memory_runs or time_runs or self.asked_engine or other_runs):
            return f"{memory}, times by the datasheet (no run on this device yet)"
        runs = f"{time_runs} of {_runs(self.num_records)} on {self.gpu}"
        older = f" ({self.num_older} with other versions)" if self.num_older else ""
        learned = ""
        if not time_runs and other_runs and not self.asked_engine:
            learned = f"; the speed is from {_runs(other_runs)} of other phases"
        if self.asked_engine and "decode" in passes:
            learned += (
                f"; its times are not of {self.asked_engine}: arithmetic and bandwidth are from "
                f"{self.engine} on this device, all else from priors"
            )
        else:
            learned += "".join(self._left_out_error(phase, passes[phase]) for phase in passes)
        return f"{memory}; times fitted to {runs}{older}{learned}"

    def _left_out_error(self, phase: str, parts: Mapping[str, Real]) -> str:
        """How far times that the same decides were off in runs which the fit did not see."""
        if phase in self.by_datasheet:
            return f"; {phase} by the datasheet, which is better on runs left out of a fit"
        if not parts:  # of a time that is not known
            return ""
        regime = regime_of_parts(self.time[phase], parts)
        error = self.held_out_by_regime.get(phase, {}).get(regime)
        if error is None:
            return ""
        return (
            f"; {phase} bound by {_BOUND_BY[regime]} {error.median:.0%} off on "
            f"{error.num_runs} left out"
        )

    def to_dict(self) -> dict[str, Any]:
        """The content of `coefficients.json`, without its schema version."""
        values = dataclasses.asdict(self)
        for name in _NOT_STORED:
            del values[name]
        return values | {"device_rates": DEVICE_RATES, "stack_features": STACK_FEATURES}

    @classmethod
    def from_dict(cls, payload: Mapping[str, Any], *, source: str) -> Self:
        """The inverse of `to_dict`.

        Raises:
            DataFileError: a missing or wrong field; the message starts with `source`.
        """
        try:
            memory = payload["memory"]
            calibration = cls(
                gpu=str(payload["gpu"]),
                memory=MemoryModel(
                    mean={part: float(memory["mean"][part]) for part in PARTS},
                    covariance=_square(memory["covariance"], len(PARTS)),
                    noise=float(memory["noise"]),
                    num_runs=int(memory["num_runs"]),
                ),
                time={
                    phase: TimeModel(
                        mean={name: float(model["mean"][name]) for name in FEATURES},
                        covariance=_square(model["covariance"], len(FEATURES)),
                        noise=float(model["noise"]),
                        num_runs=int(model["num_runs"]),
                        overlaps=bool(model["overlaps"]),
                        interval_scale=float(model.get("interval_scale", 1.0)),
                        regime_scales={
                            name: float(model["regime_scales"][name])
                            for name in REGIMES
                            if name in model.get("regime_scales", {})
                        },
                    )
                    for phase, model in ((p, payload["time"][p]) for p in TIME_PHASES)
                },
                num_records=int(payload["num_records"]),
                held_out=_errors(payload.get("held_out", {})),
                held_out_by_regime={
                    str(phase): _errors(by_regime)
                    for phase, by_regime in payload.get("held_out_by_regime", {}).items()
                },
                cold=_errors(payload.get("cold", {})),
                ranges={
                    phase: {name: (float(low), float(high)) for name, (low, high) in bounds.items()}
                    for phase, bounds in payload.get("ranges", {}).items()
                },
                outliers=tuple(
                    Outlier(
                        record=str(outlier["record"]),
                        phase=str(outlier["phase"]),
                        weight=float(outlier["weight"]),
                        ratio=float(outlier["ratio"]),
                    )
                    for outlier in payload.get("outliers", ())
                ),
                left_out={
                    str(record): str(why) for record, why in payload.get("left_out", {}).items()
                },
                digest=str(payload.get("digest", "")),
                formulas=str(payload.get("formulas", "")),
                num_older=int(payload.get("num_older", 0)),
                by_datasheet=tuple(str(phase) for phase in payload.get("by_datasheet", ())),
                engine=str(payload.get("engine", TRANSFORMERS)),
                stacks=tuple(str(stack) for stack in payload.get("stacks", ())),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise DataFileError(
                f"{source}: {error}: is missing or wrong; {_REBUILD} {payload.get('gpu')}"
            ) from error
        for key, value, accepted in _numbers(calibration):
            if not accepted[0] <= value <= accepted[1]:  # refuses NaN, too
                shown = f"{value:g}" if isinstance(value, float) else str(value)[:20]
                raise DataFileError(
                    f"{source}: {key}: got {shown}; must be from {accepted[0]:g} to "
                    f"{accepted[1]:g}; {_REBUILD} {calibration.gpu}"
                )
        return calibration


def _numbers(calibration: Calibration) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Every number that predictions read: its key, its value and the bounds that physics sets.

    Time, memory and variances are never negative.
    """
    models: list[tuple[str, Iterable[str], MemoryModel | TimeModel]]
    models = [("memory", PARTS, calibration.memory)]
    models += [(f"time.{phase}", FEATURES, model) for phase, model in calibration.time.items()]
    for where, names, model in models:
        for name in names:
            yield f"{where}.mean.{name}", model.mean[name], (0.0, _MOST_FACTOR)
        for row, values in enumerate(model.covariance):
            for column, value in enumerate(values):
                least = 0.0 if row == column else -(_MOST_FACTOR**2)
                yield f"{where}.covariance[{row}][{column}]", value, (least, _MOST_FACTOR**2)
        yield f"{where}.noise", model.noise, (0.0, _MOST_NOISE)
        yield f"{where}.num_runs", model.num_runs, (0, _MOST_RUNS)
    for phase, time in calibration.time.items():
        yield f"time.{phase}.interval_scale", time.interval_scale, (0.0, _MOST_FACTOR)
        for name, scale in time.regime_scales.items():
            yield f"time.{phase}.regime_scales.{name}", scale, (0.0, _MOST_FACTOR)


def _errors(payload: Mapping[str, Any]) -> dict[str, HeldOut]:
    return {
        name: HeldOut(
            num_runs=int(error["num_runs"]),
            median=float(error["median"]),
            worst=float(error["worst"]),
            typical=None if error.get("typical") is None else float(error["typical"]),
        )
        for name, error in payload.items()
    }


def _square(rows: Any, size: int) -> tuple[tuple[float, ...], ...]:
    matrix = tuple(tuple(float(value) for value in row) for row in rows)
    if len(matrix) != size or any(len(row) != size for row in matrix):
        raise ValueError(f"covariance must be {size} x {size}")
    return matrix


def digest_of(ids: Iterable[str]) -> str:
    """Names a set of record ids, whatever their order."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()[:16]


def prior_calibration(gpu: GpuSpec) -> Calibration:
    """The calibration of a device without any record: datasheet and priors."""
    return Calibration(
        gpu=gpu.key,
        memory=prior_memory_model(gpu),
        time={phase: prior_model(gpu, phase) for phase in TIME_PHASES},
    )


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
