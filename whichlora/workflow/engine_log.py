"""`calibrate --from-log`: a running engine's log or metrics → a record, beside its prediction."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whichlora import __version__
from whichlora.calibration.load import calibration_roots, load_calibration
from whichlora.calibration.share.physics import impossible
from whichlora.errors import ConfigError, DataFileError
from whichlora.predict.predict import predict
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.serving import list_engines
from whichlora.serving.base import Engine
from whichlora.serving.log import EngineLog, LogReading, read_log
from whichlora.serving.stated import PRECISIONS, QUANTISED
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.options import Option, OptionValue
from whichlora.spec.results import Measurement, Outcome
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model, load_model_of
from whichlora.store.jsonfiles import check_plain_file
from whichlora.store.measurements import LOG_ID, MeasurementLog, record_ids
from whichlora.store.models import find_copy, find_model
from whichlora.units import MiB

MOST_BYTES = 64 * MiB  # of a log
# What an answer calls a number that logs state, too.
_OF_ANSWER = ("kv_pool_bytes", "kv_pool_tokens", "num_blocks", "max_concurrency")
_OF_ALL = ("kv_pool_tokens", "max_concurrency")
_OF_TIMES = ("ttft_s", "tpot_s", "output_tokens_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """What a log was recorded as.

    Args:
        predicted: by name of the numbers in the record that are predicted.
        is_new: whether the database did not hold it.
    """

    path: Path
    record: Measurement
    reading: LogReading
    predicted: Mapping[str, float]
    is_new: bool

    @property
    def note(self) -> str:
        """What of the log was read, in one line."""
        reading = self.reading
        text = f"read {reading.num_read} of {reading.num_lines} lines"
        if not reading.not_understood:
            return text
        shown = ", ".join(map(str, reading.not_understood[:8]))
        more = len(reading.not_understood) - 8
        rest = f" and {more} more" if more > 0 else ""
        return f"{text}; not understood, though they speak of memory: {shown}{rest}"


def record_log(
    path: Path, gpu: str, *, model: str | None = None, calibration_dir: Path | None = None
) -> LogRecord:
    """Record what a serving engine's log or metrics at `path` state of a start on `gpu`.

    Args:
        model: in place of the name in the log, which may be a folder of another machine.

    Raises:
        ConfigError: an unknown model or accelerator, or settings that are not predicted.
        DataFileError: no log of an engine that is known, or one that can't be read or recorded, or
            that states what `gpu` can't have.
    """
    device = find_gpu(gpu)
    text = _text(path)
    engine, reading = _reading(path, text)
    run = _run(engine, reading, path, model)
    measured = dict(reading.values)
    record = Measurement(
        id="",
        gpu=device.key,
        date=datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds"),
        config=run.to_dict(),
        outcome=_outcome(reading),
        detail=reading.refusal[:300],
        engine_log=measured,
        environment={"device": device.name, "libraries": dict(run.libraries)},
        provenance={"source": f"log {path.name}", "whichlora": __version__},
    )
    digest = hashlib.sha256("\n".join((text, device.key, record.date, run.model)).encode())
    record = replace(record, id=f"{LOG_ID}{digest.hexdigest()[:32]}")
    roots = calibration_roots(calibration_dir)
    if fault := impossible(record, load_model_of(run), device):
        raise DataFileError(f"{path}: {fault}; check the log, and that it is of this --gpu")
    is_new = record.id not in record_ids(roots, device.key)
    log = MeasurementLog(roots[0], device.key, record.id)
    predicted = _predicted(run, device, measured, calibration_dir)
    if is_new:
        log.prepare()
        log.append(record)
    return LogRecord(
        path=log.path, record=record, reading=reading, predicted=predicted, is_new=is_new
    )


def _text(path: Path) -> str:
    try:
        check_plain_file(path, MOST_BYTES)
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataFileError(f"{path}: can't be read ({error.strerror}); check the file") from None


def _reading(path: Path, text: str) -> tuple[Engine, LogReading]:
    """The engine of which most lines were read, and what they state.

    Raises:
        DataFileError: there is none.
    """
    engines = [engine for engine in list_engines().values() if engine.log is not None]
    readings = [
        (each, read_log(_log_of(each), text.removesuffix("\n").split("\n"))) for each in engines
    ]
    engine, reading = max(readings, key=lambda pair: (len(pair[1].values), pair[1].num_read))
    if not reading.values and not reading.refusal:
        names = " or ".join(each.name for each in engines)
        raise DataFileError(
            f"{path}: has no line of {names} that states memory or times; give the log of its "
            "start, or what its /metrics answers"
        )
    return engine, reading


def _log_of(engine: Engine) -> EngineLog:
    assert engine.log is not None
    return engine.log


def _outcome(reading: LogReading) -> Outcome:
    return "error" if reading.refusal else "ok"


def _run(engine: Engine, reading: LogReading, path: Path, model: str | None) -> RunConfig:
    """The run that the log is of; settings at the engine's defaults are left out."""
    stated = _stated(engine, reading)
    named = model or stated.get("model", "")
    spec = find_model(named) or (find_copy(named) if named else None)
    if spec is None and model is not None:
        spec = load_model(model)
    if spec is None:
        name = stated.get("model", "")
        fault = f"model {name!r} of the log is not in the database" if name else "names no model"
        if not name and (names := _differing(engine, reading)):
            fault = f"has metrics of several models, {', '.join(map(repr, names))}"
        raise DataFileError(f"{path}: {fault}; name it with --model")
    quantization = stated.get("quantization", "None")
    if quantization not in ("None", "", *QUANTISED):
        raise ConfigError(
            f"{path}: quantization {quantization} is not predicted; known are "
            f"{', '.join(QUANTISED)}"
        )
    means: dict[str, Any] = {
        name: max(1, round(reading.values[mean]))
        for name, mean in (
            ("prompt_len", "mean_prompt_tokens"),
            ("max_new_tokens", "mean_output_tokens"),
        )
        if mean in reading.values
    }
    if running := reading.values.get("num_running"):
        means["batch_size"] = round(running)
    context = reading.values.get("context_tokens") or _whole(stated.get("context", ""))
    dtype = stated.get("dtype", "").removeprefix("torch.")
    version = ((engine.library, reading.version),) if reading.version else ()
    return RunConfig(
        model=spec.name,
        phase="inference",
        precision=PRECISIONS.get(dtype, "bf16"),  # type: ignore[arg-type]
        quant=QUANTISED.get(quantization, "none"),  # type: ignore[arg-type]
        serve="merged",
        serving=engine.name,
        serving_options=_options(engine, reading.settings),
        libraries=version,
        context=None if context is None else int(context),
        **means,
    )


def _stated(engine: Engine, reading: LogReading) -> dict[str, str]:
    """The settings of a run by our names, as text."""
    stated: dict[str, str] = {}
    for theirs, ours in _log_of(engine).names.items():
        if theirs in reading.settings:
            stated.setdefault(ours, reading.settings[theirs])
    return stated


def _differing(engine: Engine, reading: LogReading) -> tuple[str, ...]:
    """The models of a log that does not say which of them it is of."""
    named = [theirs for theirs, ours in _log_of(engine).names.items() if ours == "model"]
    return next((reading.differing[name] for name in named if name in reading.differing), ())


def _options(engine: Engine, settings: Mapping[str, str]) -> tuple[tuple[str, OptionValue], ...]:
    """The engine's own options that differ from their defaults."""
    options: list[tuple[str, OptionValue]] = []
    for option in sorted(engine.options, key=lambda option: option.name):
        value = _value(option, settings.get(option.name, "None"))
        if value is None or value == option.default:
            continue
        checked = option.checked(value)
        if checked is not None:
            options.append((option.name, checked))
    return tuple(options)


def _value(option: Option, text: str) -> OptionValue | None:
    """The value of `option` in a log; None where it is not stated."""
    if text in ("None", "", "auto"):
        return None
    if option.choices or option.kind is str:
        return text
    if isinstance(option.default, bool) or option.kind is bool:
        return text == "True"
    if isinstance(option.default, float) or option.kind is float:
        try:
            return float(text)
        except ValueError:
            return None
    number = _whole(text.removeprefix("-"))
    number = -number if number and text.startswith("-") else number
    return None if number is None or number < option.least else number


def _whole(text: str) -> int | None:
    plain = text.replace(",", "")
    return int(plain) if plain.isdecimal() and 0 < len(plain) < 12 else None


def _predicted(
    run: RunConfig, gpu: GpuSpec, measured: Mapping[str, float], calibration_dir: Path | None
) -> dict[str, float]:
    """What is predicted of the numbers in `measured`, on a GPU with the memory that they state."""
    if total := measured.get("total_bytes"):
        gpu = replace(gpu, memory_bytes=round(total))
    model = load_model_of(run)
    job = resolve(model, run, gpu)
    serving = predict(model, run, gpu, load_calibration(gpu, calibration_dir)).serving
    assert serving is not None  # an engine with a log has a pool
    predicted = _of_start(job)
    predicted |= {name: getattr(serving, name) for name in _OF_ANSWER}
    for name in _OF_ALL:  # each of the engines that share experts logs its own
        predicted[name] /= _copies(job)
    is_told = "num_running" in measured or _log_of(job.engine).one_by_one
    if serving.time is not None and is_told:
        predicted |= {name: getattr(serving.time, name) for name in _OF_TIMES}
    return {name: value for name, value in predicted.items() if name in measured}


def _copies(job: ResolvedRun) -> int:
    """Engines that share experts."""
    assert job.engine.start is not None
    return job.engine.start(job.served).copies


def _of_start(job: ResolvedRun) -> dict[str, float]:
    """Bytes of a start by the numbers that a log has of them."""
    assert job.engine.start is not None
    assert job.engine.log is not None
    entries = job.engine.start(job.served).entries_at(job.served.context)
    held = {
        line.states: float(sum(e.num_bytes for e in entries if e.fact in line.facts))
        for line in job.engine.log.lines
        if line.facts
    }
    return {name: num_bytes for name, num_bytes in held.items() if num_bytes}
