"""Good records in one pass of compiled code; whatever it refuses is for the checks to explain.

Reading is most of what a large database costs: per record the checks in Python take 30
microseconds and this takes 10. It accepts less than they do, never more, and a test compares them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from whichlora.spec.results import SCHEMA_VERSION, Measurement, Outcome
from whichlora.spec.run import MOST_COUNT, MOST_RATIO, RunConfig

MAX_BYTES = 10**15  # 1 PB: no device, but a slipped unit
MAX_SECONDS = 10**7  # four months

_PREFIX = b'{"schema_version": %d, ' % SCHEMA_VERSION  # as our writer begins every record


def parse_record(line: bytes) -> Measurement | None:
    """The record in `line`, or None where the slow checks must decide.

    `gpu`, `date` and relations between fields are the caller's to check.
    """
    # JSON has neither, compiled code lets both pass in free-form objects
    if not line.startswith(_PREFIX) or b"NaN" in line or b"Infinity" in line:
        return None
    return _validator()(b"{" + line[len(_PREFIX) :])


@cache
def _validator() -> Callable[[bytes], Measurement | None]:
    from pydantic_core import SchemaValidator, ValidationError

    validate = SchemaValidator(_record_schema()).validate_json

    def parse(data: bytes) -> Measurement | None:
        try:
            found: Measurement = validate(data)
        except ValidationError:
            return None
        return found

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
        "device_s": seconds(ge=0),
        "warm_up_s": seconds(ge=0),
        "environment": free,
        "provenance": free,
    }
    given = []
    for one in fields(Measurement):
        schema = schemas[one.name]
        if one.default is not MISSING:
            schema = core.with_default_schema(schema, default=one.default)
        elif one.default_factory is not MISSING:
            schema = core.with_default_schema(schema, default_factory=one.default_factory)
        given.append(core.dataclass_field(one.name, schema, kw_only=True))
    arguments = core.dataclass_args_schema("Measurement", given, extra_behavior="forbid")
    return core.dataclass_schema(Measurement, arguments, [*schemas], slots=True)


def _config_schema() -> Any:
    """What every setting alone must be; all that `RunConfig` asks of them."""
    from pydantic_core import core_schema as core

    settings = {
        name: core.typed_dict_field(_setting_schema(hint), required=name == "model")
        for name, hint in get_type_hints(RunConfig).items()
    }
    # what RunConfig refuses beside a wrong type
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
        (inner,) = (one for one in get_args(hint) if one is not type(None))
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
