"""Anybody's table of runs as CSV, with units: read, checked, written."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from whichlora.architecture import ModelSpec
from whichlora.errors import ConfigError, DataFileError, WhichLoraError
from whichlora.results import Measurement
from whichlora.sharing.physics import impossible
from whichlora.specs import GpuSpec, RunConfig
from whichlora.store.record import MAX_LINE_BYTES, encode_record
from whichlora.units import parse_bytes

MAX_ROWS = 1_000_000
BASE_UNIT = {"time": "s", "bytes": "bytes"}
# Column without its unit: the record's field, the kind of quantity, whether it holds several.
QUANTITIES: dict[str, tuple[str, str, bool]] = {
    "step": ("step_s", "time", True),
    "prefill": ("prefill_s", "time", True),
    "decode_per_token": ("decode_s_per_token", "time", True),
    "generate": ("generate_s", "time", True),
    "device_time": ("device_s", "time", False),
    "peak_allocated": ("peak_allocated_bytes", "bytes", False),
    "peak_reserved": ("peak_reserved_bytes", "bytes", False),
    "device_used": ("device_used_bytes", "bytes", False),
}
SETTINGS = tuple(field.name for field in dataclasses.fields(RunConfig))
PLAIN = ("id", "gpu", "date", "outcome", "detail", "source", "batch_seq_len", "model_config")
FREE = ("environment", "provenance")  # any column below them: environment.driver
# A default there would be a guess about what was measured.
_REQUIRED = ("model", "gpu", "phase", "batch_size", "date")
_REQUIRED_IN = {
    "finetune": ("method", "seq_len", "precision", "gradient_checkpointing"),
    "inference": ("prompt_len", "max_new_tokens", "precision"),
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0}
_HEADER = re.compile(r"([a-z_.]+?)(?:_|\s*[\[(]\s*)([A-Za-zµ]+)\s*[\])]?")
_CELL = re.compile(r"([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ]*)")
_BITS = re.compile(r"[KMGTkmgt]i?b")

FindModel = Callable[[str], ModelSpec]
FindGpu = Callable[[str], GpuSpec]


@dataclass(frozen=True, slots=True)
class Column:
    """What one column of a table means.

    Args:
        name: a setting, a quantity without its unit, or one of the plain columns.
        unit: of the quantity, where the header states it.
    """

    name: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """What a file held: records, and the rows that are none, each with line and reason."""

    records: Sequence[Measurement]
    refused: Sequence[str]


def read_table(path: Path, *, find_model: FindModel, find_gpu: FindGpu) -> Table:
    """Every row of the CSV file at `path` as a record, or the reason why it is none.

    Raises:
        DataFileError: no such table at all: not readable, no or an unknown column.
    """
    rows = _rows(path)
    try:
        header, _ = next(rows)
    except StopIteration:
        raise DataFileError(f"{path}: is empty; the first line must name the columns") from None
    columns = _columns(header, str(path))
    gpus: dict[str, GpuSpec] = {}
    models: dict[str, ModelSpec] = {}
    records: dict[str, Measurement] = {}
    refused = []
    for cells, line in rows:
        where = f"{path}:{line}"
        try:
            row = _row(columns, cells)
            gpu_name, model_name = row["gpu"], row["model"]
            if gpu_name not in gpus:
                gpus[gpu_name] = find_gpu(gpu_name)
            record = _record(row, columns, gpus[gpu_name])
            if record.model_config is None and model_name not in models:
                models[model_name] = find_model(model_name)
            encode_record(record, where)
            model = _model_of(record, models)
            fault = impossible(record, model, gpus[gpu_name])
            if fault:
                raise ConfigError(fault)
            if records.setdefault(record.id, record) != record:
                raise ConfigError(
                    f"id: {record.id!r} is another record further up; give each run its own"
                )
        except WhichLoraError as error:
            text = str(error)
            refused.append(text if text.startswith(where) else f"{where}: {text}")
    return Table([*records.values()], refused)


def _model_of(record: Measurement, models: Mapping[str, ModelSpec]) -> ModelSpec:
    from whichlora.families import build

    name = str(record.config["model"])
    if record.model_config is not None:
        return build(record.model_config, name=name)
    return models[name]


def _rows(path: Path) -> Iterator[tuple[list[str], int]]:
    """Cells and line number of every row that is not blank."""

    def lines() -> Iterator[str]:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES or number > MAX_ROWS:
                    raise DataFileError(
                        f"{path}:{number}: more than {MAX_LINE_BYTES} bytes in a line, or more "
                        f"than {MAX_ROWS} lines; split the table"
                    )
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")

    reader = csv.reader(lines(), strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield [cell.strip() for cell in cells], reader.line_num
    except OSError as error:
        raise DataFileError(f"{path}: can't be read ({error.strerror}); check the file") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataFileError(
            f"{path}:{reader.line_num + 1}: is not CSV in UTF-8 ({error}); correct it"
        ) from None


def _columns(header: Sequence[str], where: str) -> list[Column]:
    known = {*SETTINGS, *PLAIN, *QUANTITIES, "tokens_per_s"}
    known |= {f"{name}_unit" for name in QUANTITIES}
    columns = []
    for text in header:
        if text in known or text.partition(".")[0] in FREE:
            columns.append(Column(text))
            continue
        match = _HEADER.fullmatch(text)
        if match is None or match[1] not in QUANTITIES:
            raise DataFileError(
                f"{where}: column {text[:40]!r} is not known; known are "
                f"{', '.join((*PLAIN, *SETTINGS, *QUANTITIES))}, tokens_per_s, environment.<name> "
                "and provenance.<name>; rename or remove it"
            )
        kind = QUANTITIES[match[1]][1]
        if _factor(match[2], kind) is None:
            raise DataFileError(f"{where}: column {text!r}: {_no_unit(match[2], kind)}")
        columns.append(Column(match[1], match[2]))
    names = [column.name for column in columns]
    missing = [name for name in _REQUIRED if name not in names]
    if not any(name == "source" or name.startswith("provenance.") for name in names):
        missing.append("source")
    twice = [name for name in names if names.count(name) > 1]
    if missing or twice:
        problem = f"{missing[0]!r} is missing" if missing else f"{twice[0]!r} comes twice"
        raise DataFileError(f"{where}: column {problem}; needed are {', '.join(_REQUIRED)}, source")
    return columns


def _row(columns: Sequence[Column], cells: Sequence[str]) -> dict[str, str]:
    """The cells that hold something, by column name."""
    if len(cells) != len(columns):
        raise ConfigError(
            f"has {len(cells)} cells, the header names {len(columns)} columns; correct it"
        )
    row = {column.name: cell for column, cell in zip(columns, cells, strict=True) if cell}
    needed = [*_REQUIRED, *_REQUIRED_IN.get(row.get("phase", ""), ())]
    if "method" in row and row["method"] != "full":
        needed.append("r")
    if not any(name.startswith("provenance.") for name in row):
        needed.append("source")
    for name in needed:
        if name not in row:
            raise ConfigError(f"{name}: is empty; a default would be a guess about what was run")
    return row


def _record(row: Mapping[str, str], columns: Sequence[Column], gpu: GpuSpec) -> Measurement:
    hints = get_type_hints(RunConfig)
    config = {name: _setting(name, row[name], hints[name]) for name in SETTINGS if name in row}
    run = RunConfig.from_dict(config)
    values: dict[str, Any] = {
        field: _quantity(row, column)
        for column in columns
        if column.name in row and column.name in QUANTITIES
        for field in (QUANTITIES[column.name][0],)
    }
    if "tokens_per_s" in row:
        if run.phase != "finetune" or "step_s" in values:
            raise ConfigError("tokens_per_s: is for fine-tuning, in place of step; leave it out")
        tokens = run.batch_size * run.seq_len * run.gradient_accumulation_steps
        values["step_s"] = tuple(tokens / rate for rate in _numbers("tokens_per_s", row))
    if "batch_seq_len" in row:
        values["batch_seq_len"] = tuple(int(n) for n in _numbers("batch_seq_len", row))
    outcome = row.get("outcome", "ok")
    if outcome == "ok" and not values:
        raise ConfigError(f"nothing was measured; give one of {', '.join(QUANTITIES)}")
    free: dict[str, dict[str, Any]] = {name: {} for name in FREE}
    for name, cell in row.items():
        group, dot, key = name.partition(".")
        if dot and group in FREE:
            free[group][key] = _decode(cell)
    if "source" in row:
        free["provenance"]["source"] = row["source"]
    if "model_config" in row:
        values["model_config"] = _decode(row["model_config"])
    record = Measurement(
        id=row.get("id", ""),
        gpu=gpu.key,
        date=row["date"],
        config=run.to_dict(),
        outcome=outcome,  # type: ignore[arg-type]  # checked when it is encoded
        detail=row.get("detail", ""),
        environment=free["environment"],
        provenance=free["provenance"],
        **values,
    )
    if record.id:
        return record
    # settings at their defaults are left out: one that is added must not make another record of it
    known = record.to_dict() | {"config": run.chosen()}
    if not record.warm_up_s:
        del known["warm_up_s"]
    content = json.dumps(known, sort_keys=True)
    return dataclasses.replace(
        record, id=f"import-{hashlib.sha256(content.encode()).hexdigest()[:32]}"
    )


# --- cells --------------------------------------------------------------------------------


def _factor(unit: str, kind: str) -> float | None:
    """Base units in one `unit`; None where that is no unit of this kind."""
    if kind == "time":
        return _SECONDS.get(unit)
    if unit.lower() == "bytes":
        return 1.0
    if _BITS.fullmatch(unit) and not unit.islower():
        return None  # Gb is bits; gb all in lower case can only be meant as bytes
    try:
        return float(parse_bytes(f"1{unit}")) if unit else None
    except ConfigError:
        return None


def _no_unit(unit: str, kind: str) -> str:
    accepted = ", ".join(_SECONDS) if kind == "time" else "B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
    said = f"{unit!r} is not a unit of it" if unit else "has no unit"
    return f"{said}; write it into the header or a unit column, one of {accepted}"


def _numbers(name: str, row: Mapping[str, str]) -> list[float]:
    found = []
    for cell in row[name].split(";"):
        match = _CELL.fullmatch(cell.strip())
        try:
            value = float(match[1]) if match and not match[2] else 0.0
        except ValueError:
            value = 0.0
        if not value > 0:
            raise ConfigError(f"{name}: {cell[:40]!r} is not a number above 0")
        found.append(value)
    return found


def _quantity(row: Mapping[str, str], column: Column) -> Any:
    """The value or values of a measured cell, in base units."""
    name = column.name
    _, kind, several = QUANTITIES[name]
    stated = {column.unit, row.get(f"{name}_unit", "")} - {""}
    found: list[float] = []
    for cell in row[name].split(";") if several else [row[name]]:
        match = _CELL.fullmatch(cell.strip())
        if match is None:
            raise ConfigError(f"{name}: {cell[:40]!r} is not a number with a unit")
        units = stated | ({match[2]} - {""})
        factors = {_factor(unit, kind) for unit in units} or {None}
        if None in factors:
            raise ConfigError(f"{name}: {_no_unit(', '.join(sorted(units)), kind)}")
        if len(factors) > 1:
            raise ConfigError(f"{name}: has two units, {' and '.join(sorted(units))}; keep one")
        try:
            value = float(match[1]) * (factors.pop() or 0.0)
        except ValueError:
            value = -1.0
        if not (0 < value < math.inf or (value == 0 and name == "device_time")):
            raise ConfigError(f"{name}: {cell[:40]!r} is not above 0, or beyond any number")
        found.append(value)
    if kind == "bytes":
        return round(found[0])
    return tuple(found) if several else found[0]


def _setting(name: str, cell: str, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (hint,) = (one for one in get_args(hint) if one is not type(None))
        return _setting(name, cell, hint)
    if hint is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if cell.lower() not in words:
            raise ConfigError(f"{name}: {cell[:40]!r} is not true or false")
        return words[cell.lower()]
    if hint in (int, float):
        try:
            return hint(cell)
        except ValueError:
            raise ConfigError(f"{name}: {cell[:40]!r} is not a number") from None
    if origin is tuple:
        return re.split(r"[;\s]+", cell) if hint == tuple[str, ...] else _decode(cell)
    assert hint is str or origin is Literal
    return cell


def _decode(cell: str) -> Any:
    """A free-form cell: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell


def _encode(value: object) -> str:
    """The inverse of `_decode`: text stays as it is unless it would read as something else."""
    if isinstance(value, str) and value and value == value.strip() and _decode(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


# --- writing ------------------------------------------------------------------------------


def format_table(records: Sequence[Measurement]) -> str:
    """`records` as CSV in base units; `read_table` gives them back."""
    free = sorted(
        {f"{name}.{key}" for record in records for name in FREE for key in getattr(record, name)}
    )
    plain = [name for name in PLAIN if name != "source"]
    quantities = {
        f"{name}_{BASE_UNIT[kind]}": field for name, (field, kind, _) in QUANTITIES.items()
    }
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*plain, *SETTINGS, *quantities, *free])
    for record in records:
        values = record.to_dict()
        row = [_plain(values[name]) for name in plain]
        row += [_plain(record.config.get(name)) for name in SETTINGS]
        row += [_plain(values[field]) for field in quantities.values()]
        for column in free:
            name, _, key = column.partition(".")
            group = getattr(record, name)
            row.append(_encode(group[key]) if key in group else "")
        writer.writerow(row)
    return text.getvalue()


def _plain(value: object) -> str:
    if value is None or value == {}:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ";".join(map(str, value))
    return _encode(value) if isinstance(value, Mapping) else str(value)
