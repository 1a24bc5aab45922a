"""Anybody's table of runs as CSV, with units: read, checked, written."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from whichlora.calibration.share.physics import impossible
from whichlora.errors import ConfigError, DataFileError, WhichLoraError
from whichlora.methods import get_method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.record import MAX_LINE_BYTES, encode_record
from whichlora.text import csv_text, from_csv_cell
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
    "build": ("build_s", "time", False),
    "warm_up": ("warm_up_s", "time", False),
    "peak_allocated": ("peak_allocated_bytes", "bytes", False),
    "peak_reserved": ("peak_reserved_bytes", "bytes", False),
    "device_used": ("device_used_bytes", "bytes", False),
}
MAY_BE_ZERO = (  # as in a record, which refuses no bytes of a run that ended well
    *("prefill", "decode_per_token", "device_time", "build", "warm_up"),
    *("peak_allocated", "peak_reserved", "device_used"),
)
SETTINGS = tuple(field.name for field in dataclasses.fields(RunConfig))
PLAIN = ("id", "gpu", "date", "outcome", "detail", "source", "batch_seq_len", "model_config")
COUNTED = ("moment_peak_bytes", "largest_blocks_bytes", "engine_log")  # as a record has them
# Any column below them: environment.driver. The bare name holds the whole as JSON.
FREE = ("environment", "provenance")
# A default there would be a guess about what was measured.
_REQUIRED = ("model", "gpu", "phase", "batch_size", "date")
_REQUIRED_IN = {
    "finetune": ("method", "seq_len", "precision", "gradient_checkpointing"),
    "inference": ("prompt_len", "max_new_tokens", "precision"),
}
NOTHING = "null"  # a setting that a record states to be none, unlike one that it lacks
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
                yield cells, reader.line_num
    except OSError as error:
        raise DataFileError(f"{path}: can't be read ({error.strerror}); check the file") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataFileError(
            f"{path}:{reader.line_num + 1}: is not CSV in UTF-8 ({error}); correct it"
        ) from None


def _columns(header: Sequence[str], where: str) -> list[Column]:
    accepted = {*SETTINGS, *PLAIN, *COUNTED, *QUANTITIES, "tokens_per_s"}
    accepted |= {f"{name}_unit" for name in QUANTITIES}
    columns = []
    for text in map(str.strip, header):
        if text in accepted or text.partition(".")[0] in FREE:
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
    if not any(name == "source" or name.partition(".")[0] == "provenance" for name in names):
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
    row = {
        column.name: from_csv_cell(cell if column.name == "detail" else cell.strip())
        for column, cell in zip(columns, cells, strict=True)
        if cell
    }
    row = {name: cell for name, cell in row.items() if cell}
    needed = [*_REQUIRED, *_REQUIRED_IN.get(row.get("phase", ""), ())]
    if "method" in row and "r" not in get_method(row["method"]).ignores:
        needed.append("r")
    if not any(name.partition(".")[0] == "provenance" for name in row):
        needed.append("source")
    for name in needed:
        if name not in row:
            raise ConfigError(f"{name}: is empty; a default would be a guess about what was run")
    return row


def _record(row: Mapping[str, str], columns: Sequence[Column], gpu: GpuSpec) -> Measurement:
    hints = get_type_hints(RunConfig)
    config = {name: _setting(name, row[name], hints[name]) for name in SETTINGS if name in row}
    run = RunConfig.from_dict(config)
    settings = run.to_dict()
    if "id" in row:  # of a record, which a later release must not lengthen
        settings = {name: settings[name] for name in config if name in settings}
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
    values |= {name: _counted(name, row[name]) for name in COUNTED if name in row}
    outcome = row.get("outcome", "ok")
    if outcome == "ok" and not values:
        raise ConfigError(f"nothing was measured; give one of {', '.join(QUANTITIES)}")
    free: dict[str, dict[str, Any]] = {name: {} for name in FREE}
    for name, cell in row.items():
        group, dot, key = name.partition(".")
        if group in FREE and dot:
            free[group][key] = _decode(cell)
        elif group in FREE:
            free[group] |= _object(name, cell)
    if "source" in row:
        free["provenance"]["source"] = row["source"]
    if "model_config" in row:
        values["model_config"] = _decode(row["model_config"])
    record = Measurement(
        id=row.get("id", ""),
        gpu=gpu.key,
        date=row["date"],
        config=settings,
        outcome=outcome,  # type: ignore[arg-type]  # checked when it is encoded
        detail=row.get("detail", ""),
        environment=free["environment"],
        provenance=free["provenance"],
        **values,
    )
    if record.id:
        return record
    # settings at their defaults are left out: one that is added must not make another record of it
    chosen = record.to_dict() | {"config": run.chosen()}
    for name in ("build_s", "warm_up_s", "engine_log"):
        if not chosen[name]:
            del chosen[name]
    content = json.dumps(chosen, sort_keys=True)
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
    fault = f"{unit!r} is not a unit of it" if unit else "has no unit"
    return f"{fault}; write it into the header or a unit column, one of {accepted}"


def _numbers(name: str, row: Mapping[str, str]) -> list[float]:
    numbers = []
    for cell in row[name].split(";"):
        match = _CELL.fullmatch(cell.strip())
        try:
            value = float(match[1]) if match and not match[2] else 0.0
        except ValueError:
            value = 0.0
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}: {cell[:40]!r} is not a number above 0")
        numbers.append(value)
    return numbers


def _quantity(row: Mapping[str, str], column: Column) -> Any:
    """The value or values of a measured cell, in base units."""
    name = column.name
    _, kind, several = QUANTITIES[name]
    stated = {column.unit, row.get(f"{name}_unit", "")} - {""}
    amounts: list[float] = []
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
        if not (0 < value < math.inf or (value == 0 and name in MAY_BE_ZERO)):
            raise ConfigError(f"{name}: {cell[:40]!r} is not above 0, or beyond any number")
        amounts.append(value)
    if kind == "bytes":
        return round(amounts[0])
    return tuple(amounts) if several else amounts[0]


def _setting(name: str, cell: str, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (hint,) = (member for member in get_args(hint) if member is not type(None))
        if cell == NOTHING:
            return None
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
    if hint is ParallelConfig:
        return _object(name, cell)
    if origin is tuple:
        is_list = hint == tuple[str, ...] and not cell.startswith("[")
        return re.split(r"[;\s]+", cell) if is_list else _decode(cell)
    assert hint is str or origin is Literal
    return cell


def _object(name: str, cell: str) -> dict[str, Any]:
    value = _decode(cell)
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: {cell[:40]!r} is not a JSON object")
    return value


def _counted(name: str, cell: str) -> Any:
    """Bytes by moment, or of blocks; `encode_record` checks what they are."""
    value = _decode(cell)
    return tuple(value) if isinstance(value, list) else value


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
    """`records` as CSV in base units, no cell a formula; `read_table` gives them back."""
    spread = {name: _keys(records, name) for name in FREE}
    free = [f"{name}.{key}" for name, keys in spread.items() for key in keys]
    plain = [name for name in PLAIN if name != "source"]
    quantities = {
        f"{name}_{BASE_UNIT[kind]}": field for name, (field, kind, _) in QUANTITIES.items()
    }
    table = [[*plain, *SETTINGS, *quantities, *COUNTED, *FREE, *free]]
    for record in records:
        values = record.to_dict()
        row = [_plain(values[name]) for name in plain]
        row += [_setting_cell(record.config, name) for name in SETTINGS]
        row += [_plain(values[field]) for field in quantities.values()]
        row += [json.dumps(values[name]) if values[name] else "" for name in COUNTED]
        row += [_whole(getattr(record, name), spread[name]) for name in FREE]
        for name, keys in spread.items():
            group = getattr(record, name)
            row += [_encode(group[key]) if key in group else "" for key in keys]
        table.append(row)
    return csv_text(table)


def _keys(records: Sequence[Measurement], name: str) -> list[str]:
    """Keys of a free group that may head a column."""
    keys = {key for record in records for key in getattr(record, name)}
    return sorted(key for key in keys if key.isprintable() and key == key.strip() != "")


def _whole(group: Mapping[str, Any], keys: Sequence[str]) -> str:
    """What the columns of a free group do not hold: odd keys, or that it is empty."""
    remainder = {key: value for key, value in group.items() if key not in keys}
    return json.dumps(remainder) if remainder or not group else ""


def _setting_cell(config: Mapping[str, Any], name: str) -> str:
    if name not in config:
        return ""
    value = config[name]
    if isinstance(value, list | tuple):
        plain = all(isinstance(item, str) and not re.search(r"[;\s]", item) for item in value)
        return ";".join(value) if value and plain else json.dumps(list(value))
    return NOTHING if value is None else _plain(value)


def _plain(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ";".join(map(str, value))
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
