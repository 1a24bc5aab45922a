"""`answer.json` as the report reads it: checked once, so that nothing below checks again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whichlora.errors import DataFileError
from whichlora.spec.results import SCHEMA_VERSION
from whichlora.store.jsonfiles import check_schema_version, read_object
from whichlora.text import visible

_MOST = 1e40  # bytes, seconds or parameters, and the widest interval of the largest plan

STAGES = ("cold", "before", "after")  # of a prediction: datasheet, when chosen, last refit

# What a release before the report did not write, and what the report lacks without it.
_PARTS_OF_REPORT = {
    "explanation": "the reasons",
    "limits": "the limit lines",
    "comparison": "predicted against measured",
    "side_by_side": "methods and ranks side by side",
    "dataset": "total time against dataset size",
    "provenance": "device, versions and calibration",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value with its bounds, which equal it if it was measured."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate of either stage.

    Args:
        tokens: length of a training sequence, or prompt and new tokens, as text.
        outcome: how a profile ended ("ok", "oom", …); empty where there was none.
        time_per_token_s: None, like every time, if only an amount of memory is given.
        breakdown: predicted bytes by part; empty in answers of a release before the report.
    """

    name: str
    stage: str
    model: str
    method: str
    variant: str
    gpu: str
    batch_size: int
    tokens: str
    num_params: int
    num_trainable_params: int
    peak_bytes: Estimate
    predicted_peak_bytes: float
    time_per_token_s: Estimate | None
    total_s: Estimate | None
    usable_bytes: float | None
    measured: bool
    outcome: str
    verdict: str
    reason: str
    breakdown: Mapping[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.outcome not in ("", "ok")

    @property
    def over_memory(self) -> bool:
        """Ran out of memory, or is predicted to need more than the device has."""
        too_large = self.usable_bytes is not None and self.peak_bytes.value > self.usable_bytes
        return self.outcome == "oom" or (not self.measured and too_large)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured quantity and its predictions, by stage of the run."""

    name: str
    quantity: str
    measured: float
    predicted: Mapping[str, Estimate]
    confidence: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    """The result on one GPU of the plan, as `gpu_choice.OnGpu` was written.

    Args:
        winner: its name; empty if there is none, and `without_winner` has the reason.
        marks: what is best about it: "recommended", "fastest", "cheapest".
    """

    gpu: str
    winner: str
    without_winner: str
    peak_bytes: float | None
    total_s: float | None
    cost: float | None
    currency: str
    measured: bool
    marks: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What so many users of a serving engine wait for a further token, and get in all."""

    engine: str
    concurrency: int
    tpot_s: Estimate
    output_tokens_per_s: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the winner takes at the largest moment of one stage of its life."""

    name: str
    device_used_bytes: float
    host_bytes: float
    disk_bytes: float
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Everything that the report shows.

    Args:
        explanation: the answer and its reasons in lines of text.
        num_sequences: of the training data; None where this is not known.
        texts: texts that are shown literally, by key of the answer.
        start: the command that starts `job`, on as many GPUs as the winner has.
        points: the candidates of both stages; `winner` is the index of the best one, `front` the
            Pareto front of fine-tuning candidates in time and memory.
        side_by_side: one shape with every method and rank.
        gpus: every GPU of the plan's list; empty where it has one.
        waits: of the winner, where an engine serves it.
        stages: of the winner on one GPU, from its download to its resumption.
        missing: parts of the report that this answer has no data for.
    """

    texts: Mapping[str, str]
    explanation: Sequence[str]
    limits: Mapping[str, float]
    num_sequences: float | None
    job: str
    start: str
    trained_s: float | None
    provenance: Mapping[str, Any]
    points: Sequence[Point]
    winner: int | None
    front: Sequence[int]
    side_by_side: Sequence[Point]
    comparison: Sequence[Compared]
    missing: Sequence[str]
    gpus: Sequence[OnGpu] = ()
    waits: Sequence[Wait] = ()
    stages: Sequence[Stage] = ()

    def limit(self, name: str) -> float | None:
        """The limit called `name`; None where there is none."""
        return self.limits.get(name)

    def indices(self, stage: str) -> list[int]:
        return [i for i, point in enumerate(self.points) if point.stage == stage]


def read_source(place: Path) -> Source:
    """The answer in a run directory, or in the JSON file at `place`.

    Raises:
        DataFileError: no answer there, one of a newer release, or one that is damaged.
    """
    path = place / "answer.json" if os.path.isdir(place) else place
    if not os.path.exists(path):  # os.path: what no file system can hold is not there
        raise DataFileError(
            f"{place}: has no answer.json; give the output directory of a finished `whichlora run`"
        )
    values = _all_visible(read_object(path))
    check_schema_version(values, SCHEMA_VERSION, str(path))
    try:
        return _source(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataFileError(
            f"{path}: is not an answer of whichlora run ({type(error).__name__}: {error}); "
            "write it again with `whichlora run`"
        ) from None


def _all_visible(value: Any) -> Any:
    """`value` of a JSON file from anybody, with invisible characters of its texts made visible."""
    if isinstance(value, dict):
        return {visible(key): _all_visible(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_all_visible(item) for item in value]
    return visible(value) if isinstance(value, str) else value


def _number(value: Any, *, positive: bool = False) -> float:
    """`value`, if it is a number that bytes, seconds or counts can have.

    Raises:
        ValueError: it is not.
    """
    if type(value) in (int, float) and 0 <= value <= _MOST and not (positive and value == 0):
        return float(value)
    wanted = "above 0" if positive else "from 0"
    raise ValueError(f"{str(value)[:40]!r} is not a number {wanted} to {_MOST:g}")


def _count(value: Any, *, positive: bool = False) -> int:
    number = _number(value, positive=positive)
    if not number.is_integer():
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{str(values)[:40]!r} is no list")
    return [str(value) for value in values]


def _provenance(values: Mapping[str, Any]) -> dict[str, Any]:
    """Where the figures are from, with the types that the page shows."""
    device = _object(values, "device")
    if device:
        unverified = _texts(device.get("unverified", ()))
        device |= {"memory_bytes": _number(device["memory_bytes"]), "unverified": unverified}
    environments = values.get("environments", ())
    if not all(isinstance(environment, dict) for environment in environments):
        raise TypeError("environments are no objects")
    date = values.get("date")
    return dict(values) | {
        "device": device,
        "date": None if date is None else str(date),
        "notes": _texts(values.get("notes", ())),
        "environments": environments,
        **{key: _object(values, key) for key in ("calibration", "libraries")},
    }


def _source(values: Mapping[str, Any]) -> Source:
    gpu = str(values["gpu"])
    points = [_point(row, gpu) for stage in ("inference", "finetune") for row in values[stage]]
    best = values["winner"]
    missing = [part for key, part in _PARTS_OF_REPORT.items() if key not in values]
    if not any(point.breakdown for point in points):
        missing.append("bytes by part")
    sequences = _object(values, "dataset").get("num_sequences")
    trained = _object(values, "training").get("train_s")
    limits = _object(values, "limits")
    job = str(_object(values, "files").get("job") or "")
    return Source(
        texts={key: str(values.get(key) or "") for key in ("config", "gpu", "basis", "tokens")},
        explanation=[str(line) for line in values.get("explanation", ())],
        limits={
            name: _number(bound, positive=True)
            for name, bound in limits.items()
            if bound is not None
        },
        num_sequences=None if sequences is None else _number(sequences),
        job=job,
        start=str(values.get("start") or f"python {job}"),  # answers before it was written
        trained_s=None if trained is None else _number(trained),
        provenance=_provenance(_object(values, "provenance")),
        points=points,
        winner=None if best is None else _place(points, _point(best, gpu)),
        front=[_place(points, _point(row, gpu)) for row in values.get("front", ())],
        side_by_side=[_point(row, gpu) for row in values.get("side_by_side", ())],
        comparison=[_compared(row) for row in values.get("comparison", ())],
        missing=missing,
        gpus=[_on_gpu(row) for row in values.get("gpus", ())],
        waits=[_wait(row) for row in values.get("waits", ())],
        stages=[_stage(row) for row in _object(values, "life").get("stages", ())],
    )


def _stage(row: Mapping[str, Any]) -> Stage:
    device, host, disk = (
        _number(row[name]) for name in ("device_used_bytes", "host_bytes", "disk_bytes")
    )
    return Stage(
        name=str(row["name"]),
        device_used_bytes=device,
        host_bytes=host,
        disk_bytes=disk,
        verdict=str(row["verdict"]),
    )


def _wait(row: Mapping[str, Any]) -> Wait:
    def within(quantity: str) -> Estimate:
        low, high = row[f"interval_{quantity}"]
        value = _number(row[quantity], positive=True)
        return Estimate(
            value=value, low=_number(low, positive=True), high=_number(high, positive=True)
        )

    return Wait(
        engine=str(row["engine"]),
        concurrency=_count(row["concurrency"], positive=True),
        tpot_s=within("tpot_s"),
        output_tokens_per_s=within("output_tokens_per_s"),
    )


def _on_gpu(row: Mapping[str, Any]) -> OnGpu:
    winner = row["winner"] or {}
    name = ""
    if winner:
        short = str(winner["model"]).rsplit("/", 1)[-1]
        name = f"{short} {winner['method']}, batch {winner['batch_size']}"
    values = {
        key: None if row[key] is None else float(row[key])
        for key in ("peak_bytes", "total_time_s", "cost")
    }
    return OnGpu(
        gpu=str(row["gpu"]),
        winner=name,
        without_winner=str(  # of answers before it was written
            row.get("without_winner") or row["refusal"] or "nothing meets every limit"
        ),
        peak_bytes=values["peak_bytes"],
        total_s=values["total_time_s"],
        cost=values["cost"],
        currency=str(row.get("currency") or ""),  # of answers before it was written
        measured=bool(row["measured"]),
        marks=[mark for mark in ("recommended", "fastest", "cheapest") if row[mark]],
    )


def _place(points: Sequence[Point], wanted: Point) -> int:
    if wanted not in points:
        raise ValueError(f"{wanted.name} is not among the candidates")
    return points.index(wanted)


def _object(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under `key`; empty where there is none."""
    entry = values.get(key)
    if not isinstance(entry, dict | None):
        raise TypeError(f"{key} is no object")
    return entry or {}


def _compared(row: Mapping[str, Any]) -> Compared:
    stages = {stage: row[stage] for stage in STAGES}
    return Compared(
        name=str(row["name"]),
        quantity=str(row["quantity"]),
        measured=_number(row["measured"], positive=True),
        predicted={
            stage: Estimate(
                value=_number(interval["value"]),
                low=_number(interval["low"]),
                high=_number(interval["high"]),
            )
            for stage, interval in stages.items()
        },
        confidence={stage: _number(interval["confidence"]) for stage, interval in stages.items()},
    )


def _point(row: Mapping[str, Any], gpu: str) -> Point:
    training = row["phase"] == "finetune"
    rank = f" r={row['r']}" if row["r"] != "" else ""
    variant = f"{row['method']}{rank}" if training else "inference"
    lengths = ("seq_len",) if training else ("prompt_len", "max_new_tokens")
    tokens = "+".join(str(_count(row[name])) for name in lengths)
    short = str(row["model"]).rsplit("/", 1)[-1]
    usable = row.get("usable_bytes")
    return Point(
        name=str(row.get("name", f"{short} {variant}, batch {row['batch_size']}, {tokens} tokens")),
        stage=str(row["phase"]),
        model=str(row["model"]),
        method=str(row["method"]) if training else "inference",
        variant=str(row.get("variant", variant)),
        gpu=str(row.get("gpu", gpu)),
        batch_size=_count(row["batch_size"]),
        tokens=tokens,
        num_params=_count(row["num_params"], positive=True),
        num_trainable_params=_count(row.get("num_trainable_params", 0)),
        peak_bytes=_estimate(row, "peak", "bytes"),
        predicted_peak_bytes=_number(row.get("predicted_peak_bytes", row["peak_bytes"])),
        time_per_token_s=_time(row, "time_per_token"),
        total_s=_time(row, "total_time"),
        usable_bytes=None if usable is None else _number(usable),
        measured=row["source"] == "measured",
        outcome=str(row["outcome"]),
        verdict=str(row["verdict"]),
        reason=str(row["reason"]),
        breakdown={str(part): _count(size) for part, size in row.get("breakdown", {}).items()},
    )


def _time(row: Mapping[str, Any], quantity: str) -> Estimate | None:
    return None if row[f"{quantity}_s"] == "" else _estimate(row, quantity, "s")


def _estimate(row: Mapping[str, Any], quantity: str, unit: str) -> Estimate:
    return Estimate(
        value=_number(row[f"{quantity}_{unit}"]),
        low=_number(row[f"{quantity}_low_{unit}"]),
        high=_number(row[f"{quantity}_high_{unit}"]),
    )
