"""Encode and decode a measured run as one line of JSON, and refuse impossible records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from datetime import datetime
from typing import get_args

from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.results import SCHEMA_VERSION, Measurement, Outcome
from whichlora.spec.run import MOST_COUNT, RunConfig
from whichlora.store.compiled import MAX_BYTES, MAX_SECONDS, parse_record
from whichlora.store.jsonfiles import check_schema_version, parse_object

MAX_LINE_BYTES = 1 << 20
_ID = re.compile(rb'\{"schema_version": \d+, "id": "([ !#-\[\]-~]+)"')  # as our writer begins


def encode_record(measurement: Measurement, where: str) -> bytes:
    """The line of one record.

    Raises:
        DataFileError: a reader would refuse it; starting with `where` and the key.
    """
    line = json.dumps(measurement.to_dict()).encode()
    # Write only what can be read back; this also refuses NaN.
    decode_record(line, where)
    if len(line) >= MAX_LINE_BYTES:
        raise DataFileError(
            f"{where}: has {len(line) + 1} bytes, at most {MAX_LINE_BYTES} are accepted; "
            "shorten its detail or environment"
        )
    return line + b"\n"


def decode_record(line: bytes, where: str) -> Measurement:
    """The record in `line`: compiled checks accept it, or checks in Python decide and explain.

    Raises:
        DataFileError: starting with `where` and the key.
    """
    record = parse_record(line)
    if record is None or not _is_name(record.id) or not _is_date(record.date):
        record = check_record(line, where)
    _check_plausible(record, where)
    return record


def id_of_record(line: bytes, where: str) -> str:
    """The id of the record in `line`, without reading the rest of it.

    Raises:
        DataFileError: a line that is no record; starting with `where`.
    """
    match = _ID.match(line)
    record_id = match[1].decode() if match else parse_object(line, where).get("id")
    if not isinstance(record_id, str) or not _is_name(record_id):
        problem = "missing" if record_id is None else f"got {_shortened(record_id)}"
        raise DataFileError(f"{where}: id: {problem}; must be {_CHECKS['id'][0]}")
    return record_id


def check_record(line: bytes, where: str) -> Measurement:
    """The record in `line`, after checks of every field that explain what is wrong.

    Raises:
        DataFileError: starting with `where` and the key.
    """
    values = parse_object(line, where)
    check_schema_version(values, SCHEMA_VERSION, where)
    del values["schema_version"]
    for key, value in values.items():
        check = _CHECKS.get(key)
        if check is None:
            raise DataFileError(
                f"{where}: {key}: is not a field; known are {', '.join(_CHECKS)}; "
                "remove it, or upgrade whichlora"
            )
        accepted, is_valid = check
        if not is_valid(value):
            raise DataFileError(
                f"{where}: {key}: got {_shortened(value)}; must be {accepted}; remove the record"
            )
        if type(value) is list:
            values[key] = tuple(value)
    for key in _REQUIRED:
        if key not in values:
            raise DataFileError(f"{where}: {key}: missing; must be {_CHECKS[key][0]}")
    measurement = Measurement(**values)
    try:
        RunConfig.from_dict(measurement.config)
    except (ConfigError, TypeError) as error:
        raise DataFileError(f"{where}: config: {error}") from None
    return measurement


def _check_plausible(measurement: Measurement, where: str) -> None:
    allocated, reserved = measurement.peak_allocated_bytes, measurement.peak_reserved_bytes
    counted = (allocated, reserved, measurement.device_used_bytes)
    if measurement.outcome == "ok" and 0 in counted:
        raise DataFileError(
            f"{where}: peak_allocated_bytes, peak_reserved_bytes, device_used_bytes: a run that "
            "ended ok used more than 0 bytes; write null where nothing was counted"
        )
    if allocated is not None and reserved is not None and allocated > reserved:
        raise DataFileError(
            f"{where}: peak_allocated_bytes: {allocated} is more than the {reserved} that the "
            "allocator had reserved; remove the record"
        )


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


def _is_date(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_seconds(value: object) -> bool:
    # By type, since bool is an int in Python; the comparison refuses NaN.
    return type(value) in (int, float) and 0 <= value <= MAX_SECONDS  # type: ignore[operator]


def _are_seconds(value: object) -> bool:
    return type(value) is list and all(map(_is_seconds, value))


def _are_durations(value: object) -> bool:
    return _are_seconds(value) and 0 not in value  # type: ignore[operator]


def _are_lengths(value: object) -> bool:
    return type(value) is list and all(
        type(length) is int and 0 < length <= MOST_COUNT for length in value
    )


def _is_bytes_or_null(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < MAX_BYTES)


def _are_bytes(value: object) -> bool:
    return type(value) is list and all(
        size is not None and _is_bytes_or_null(size) for size in value
    )


def _are_bytes_by_name(value: object) -> bool:
    return isinstance(value, dict) and _are_bytes(list(value.values()))


def _are_numbers_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(
        type(number) in (int, float) and abs(number) <= MAX_BYTES for number in value.values()
    )


_SECONDS = f"from 0 to {MAX_SECONDS} seconds"
_BYTES = f"a whole number of bytes from 0 to below {MAX_BYTES}, or null"
_COUNTS = f"whole numbers of bytes from 0 to below {MAX_BYTES}"

# Accepted values of each field, in words and as a check.
_CHECKS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "id": ("a printable text of 1 to 200 characters", _is_name),
    "gpu": ("the name of the folder", _is_name),
    "date": ("a date in ISO 8601", _is_date),
    "config": ("an object", _is_object),
    "outcome": (f"one of {', '.join(get_args(Outcome))}", get_args(Outcome).__contains__),
    "model_config": ("an object, or null", lambda value: value is None or _is_object(value)),
    "detail": ("a text", lambda value: isinstance(value, str)),
    "step_s": (f"a list of numbers {_SECONDS}, none of them 0", _are_durations),
    "batch_seq_len": ("a list of whole numbers above 0", _are_lengths),
    "generate_s": (f"a list of numbers {_SECONDS}, none of them 0", _are_durations),
    "prefill_s": (f"a list of numbers {_SECONDS}", _are_seconds),
    "decode_s_per_token": (f"a list of numbers {_SECONDS}", _are_seconds),
    "peak_allocated_bytes": (_BYTES, _is_bytes_or_null),
    "peak_reserved_bytes": (_BYTES, _is_bytes_or_null),
    "device_used_bytes": (_BYTES, _is_bytes_or_null),
    "moment_peak_bytes": (f"an object of {_COUNTS}", _are_bytes_by_name),
    "largest_blocks_bytes": (f"a list of {_COUNTS}", _are_bytes),
    "engine_log": (f"an object of numbers up to {MAX_BYTES}", _are_numbers_by_name),
    "device_s": (f"a number {_SECONDS}", _is_seconds),
    "build_s": (f"a number {_SECONDS}", _is_seconds),
    "warm_up_s": (f"a number {_SECONDS}", _is_seconds),
    "environment": ("an object", _is_object),
    "provenance": ("an object", _is_object),
}
_REQUIRED = tuple(
    field.name
    for field in fields(Measurement)
    if field.default is MISSING and field.default_factory is MISSING
)
assert set(_CHECKS) == {field.name for field in fields(Measurement)}
