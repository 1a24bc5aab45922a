"""Parse valid records in one pass of compiled code; `record` explains what this refuses.

Reading dominates the time of a large database. Per record the checks in Python take 30
microseconds, this takes 10. It never accepts more than they do; a test compares them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from whichlora.spec.results import SCHEMA_VERSION, Measurement, Outcome
from whichlora.spec.run import MOST_COUNT, MOST_RATIO, RunConfig

MAX_BYTES = 10**15  # 1 PB: no device, but a slipped unit
MAX_SECONDS = 10**7  # four months

_PREFIX = b'{"schema_version": %d, ' % SCHEMA_VERSION  # as our writer begins every record


def parse_record(line: bytes) -> Measurement | None:
    """The record in `line`, or None where the slow checks must decide.

    The caller checks `gpu`, `date` and relations between fields.
    """
    # JSON has neither, but compiled code accepts both in free-form objects
    if not line.startswith(_PREFIX) or b"NaN" in line or b"Infinity" in line:
        return None
    return _validator()(b"{" + line[len(_PREFIX) :])


@cache
def _validator() -> Callable[[bytes], Measurement | None]:
    from pydantic_core import SchemaValidator, ValidationError

    validate = SchemaValidator(_record_schema()).validate_json

    def parse(data: bytes) -> Measurement | None:
        try:
            record: Measurement = validate(data)
        except ValidationError:
            return None
        return record

    return parse


def _record_schema() -> Any:
    from pydantic_core import core_schema as core

    def seconds(**least: float) -> Any:
        return core.float_schema(strict=True, le=MAX_SECONDS, allow_inf_nan=False, **least)  # type: ignore[arg-type]

    text = core.str_schema(strict=True)
    times = core.tuple_variable_schema(seconds(ge=0))
    durations = core.tuple_variable_schema(seconds(gt=0))
    free = core.dict_schema(text, core.any_schema())
    count = core.int_schema(strict=True, ge=0, lt=MAX_BYTES)
    size = core.nullable_schema(count)
    length = core.int_schema(strict=True, gt=0, le=MOST_COUNT)
    schemas: dict[str, Any] = {
        "id": core.str_schema(strict=True, min_length=1, max_length=200),
        "gpu": text,
        "date": text,
        "config": _config_schema(),
        "outcome": core.literal_schema(list(get_args(Outcome))),
        "model_config": core.nullable_schema(free),
        "detail": text,
        "step_s": durations,
        "batch_seq_len": core.tuple_variable_schema(length),
        "generate_s": durations,
        "prefill_s": times,
        "decode_s_per_token": times,
        "peak_allocated_bytes": size,
        "peak_reserved_bytes": size,
        "device_used_bytes": size,
        "moment_peak_bytes": core.dict_schema(text, count),
        "largest_blocks_bytes": core.tuple_variable_schema(count),
        "engine_log": core.dict_schema(
            text, core.float_schema(strict=True, ge=-MAX_BYTES, le=MAX_BYTES, allow_inf_nan=False)
        ),
        "device_s": seconds(ge=0),
        "build_s": seconds(ge=0),
        "warm_up_s": seconds(ge=0),
        "environment": free,
        "provenance": free,
    }
    arguments = []
    for field in fields(Measurement):
        schema = schemas[field.name]
        if field.default is not MISSING:
            schema = core.with_default_schema(schema, default=field.default)
        elif field.default_factory is not MISSING:
            schema = core.with_default_schema(schema, default_factory=field.default_factory)
        arguments.append(core.dataclass_field(field.name, schema, kw_only=True))
    signature = core.dataclass_args_schema("Measurement", arguments, extra_behavior="forbid")
    return core.dataclass_schema(Measurement, signature, [*schemas], slots=True)


def _config_schema() -> Any:
    """Schema of each setting alone, as `RunConfig` checks it."""
    from pydantic_core import core_schema as core

    settings = {
        name: core.typed_dict_field(_setting_schema(hint), required=name == "model")
        for name, hint in get_type_hints(RunConfig).items()
        if not is_dataclass(hint)  # several GPUs are for the slow checks
    }
    # RunConfig refuses more than a wrong type
    targets = core.list_schema(_name_schema(), min_length=1)
    settings["target_modules"] = core.typed_dict_field(targets, required=False)
    fraction = core.float_schema(strict=True, ge=0, lt=1)
    settings["lora_dropout"] = core.typed_dict_field(fraction, required=False)
    return core.typed_dict_schema(settings, extra_behavior="forbid")


def _setting_schema(hint: Any) -> Any:
    from pydantic_core import core_schema as core

    origin = get_origin(hint)
    if origin is Literal:
        return core.literal_schema(list(get_args(hint)))
    if origin in (Union, types.UnionType):
        (inner,) = (option for option in get_args(hint) if option is not type(None))
        return core.nullable_schema(_setting_schema(inner))
    if hint == tuple[str, ...]:
        return core.list_schema(_name_schema())
    if origin is tuple:  # structured settings are rare: absent, or for the slow checks
        return core.dict_schema(max_length=0)
    plain: dict[Any, Any] = {
        bool: core.bool_schema(strict=True),
        float: core.float_schema(strict=True, ge=1, le=MOST_RATIO, allow_inf_nan=False),  # a ratio
        int: core.int_schema(strict=True, ge=1, le=MOST_COUNT),
        str: _name_schema(),
    }
    return plain[hint]


def _name_schema() -> Any:
    from pydantic_core import core_schema as core

    def check(name: str) -> str:
        if not name.strip() or not name.isprintable():
            raise ValueError
        return name

    return core.no_info_after_validator_function(check, core.str_schema(strict=True))
