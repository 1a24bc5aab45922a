"""Errors of pydantic → problems in our words, with accepted values and suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from whichlora.config.document import Loc, Problem
from whichlora.config.schema import json_schema
from whichlora.spec.numeric import is_number
from whichlora.spec.words import SYNONYMS, alternatives
from whichlora.store.quantised_names import PLAIN_GGUF_TYPES, gguf_type_named
from whichlora.units import LENGTHS

_FAULTS = {
    "missing": "is required",
    "extra_forbidden": "is not a setting",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_type": "is not a number",
    "bool_type": "is not true or false",
    "string_type": "is not text",
    "literal_error": "is not known",
    "greater_than": "is out of range",
    "greater_than_equal": "is out of range",
    "less_than": "is out of range",
    "less_than_equal": "is out of range",
    "finite_number": "is not a finite number",
    "too_short": "is an empty list",
    "string_pattern_mismatch": "is blank",
    "tuple_type": "is not a value or a list",
    "dict_type": "is not a mapping",
    "model_type": "is not a mapping",
}

_YAML_1_1_BOOLS = {"yes": "true", "on": "true", "no": "false", "off": "false"}

# Names of our settings in other tools.
_SYNONYMS = {
    "alpha": "lora_alpha",
    "data": "dataset",
    "dropout": "lora_dropout",
    "dtype": "precision",
    "strategy": "parallel",
    "num_gpus": "gpus",
    "limit": "peak_memory",
    "lora_r": "ranks",
    "lr": "learning_rate",
    "max_length": "sequence_length",
    "max_new_tokens": "tokens_to_generate",
    "max_seq_length": "sequence_length",
    "max_source_length": "sequence_length",
    "max_target_length": "target_length",
    "method": "methods",
    "model": "models",
    "model_name": "models",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "prompt_len": "prefill_length",
    "r": "ranks",
    "rank": "ranks",
    "seq_len": "sequence_length",
    "target_len": "target_length",
}

_MANY = 20  # settings; where one is likely meant, nobody reads as many

# A plan compares sizes, since the largest is not the fastest; `estimate` answers the largest.
_LARGEST = {
    "batch_size": "a list such as [1, 2, 4, 8, 16], of which the search takes the best; "
    "`whichlora estimate --batch-size max` says the largest",
    "sequence_length": "a length; `whichlora estimate --seq-len max` says the largest",
}


def problems_of(error: ValidationError) -> Iterator[Problem]:
    """Each error of pydantic as a problem, in our words."""
    for details in error.errors(include_url=False, include_context=False):
        kind, loc = details["type"], tuple(details["loc"])
        if kind == "too_short" and details["input"]:
            continue  # the list is not empty: its items are wrong, and reported
        if kind in {"extra_forbidden", "invalid_key"}:
            kind = "extra_forbidden"
            known = _properties(_subschema(loc[:-1]))
            fault = _FAULTS[kind]
            hint = _meant_setting(loc)
            accepted = "" if hint and len(known) > _MANY else ", ".join(known)
        else:
            fault = _FAULTS.get(kind, details["msg"])
            accepted = _phrase(_subschema(loc))
            if kind == "tokens":
                accepted += f", such as {LENGTHS}"
            hint = _meant_value(details["input"], _subschema(loc))
            if loc[0] == "gpus":
                hint = "gpu, which takes types"
            if loc[0] in ("quant", "serve") and gguf_type_named(str(details["input"])):
                word = str(details["input"])[:20]
                hint = f"serving llama-cpp with serving_options {{file_type: {word}}}"
                if precision := PLAIN_GGUF_TYPES.get(gguf_type_named(word)):
                    hint = f"none with precision {precision}, or {hint}"
            if details["input"] == "max":
                hint = next((_LARGEST[part] for part in loc if part in _LARGEST), hint)
        yield Problem(
            loc=loc,
            fault=fault,
            accepted=accepted,
            hint=hint,
            show_value=kind != "missing",
        )


def _phrase(schema: Mapping[str, Any]) -> str:
    """What `schema` accepts, in words."""
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        *others, last = schema["anyOf"]
        first = ", ".join(map(_phrase, others))
        if last.get("type") == "array":
            return f"{first}, or a list of such"
        return f"{first}, or {_phrase(_resolve(last))}"
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "integer":
            return f"a whole number{_range(schema)}"
        case "number":
            return f"a number{_range(schema)}"
        case ["string", *_]:  # unquoted, the name of a GPU is a number
            return "text"
        case "string":
            examples = schema.get("examples", ["text"])
            listed = alternatives(examples)
            return f"text such as {listed}" if len(examples) > 1 else listed
        case "object" if "properties" in schema:
            return f"a mapping with {', '.join(schema['properties'])}"
    values = _values(schema)
    if "properties" in values:
        return f"a mapping from name to {_phrase(values)}"
    return f"a mapping from name to {'number' if values.get('type') == 'number' else 'name'}"


def _range(schema: Mapping[str, Any]) -> str:
    match schema:
        case {"minimum": low, "maximum": high}:
            return f" from {low:,} to {high:,}"
        case {"minimum": low, "exclusiveMaximum": high}:
            return f" of {low:,} or more, below {high:,}"
        case {"exclusiveMinimum": low, "maximum": high}:
            return f" above {low:,}, at most {high:,}"
    return ""


def _resolve(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema`, or the definition that it refers to."""
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    resolved: Mapping[str, Any] = json_schema()["$defs"][name] if name else schema
    return resolved


def _values(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of the values of a mapping whose keys are names; empty for anything else."""
    return next((_resolve(pattern) for pattern in schema.get("patternProperties", {}).values()), {})


def _subschema(loc: Loc) -> Mapping[str, Any]:
    """The schema at `loc`; parts that are no key or index are skipped."""
    schema: Mapping[str, Any] = json_schema()
    for part in loc:
        options = [_resolve(option) for option in schema.get("anyOf", [schema])]
        for option in options:
            if isinstance(part, int) and "items" in option:
                schema = _resolve(option["items"])
                break
            if part in option.get("properties", {}):
                schema = _resolve(option["properties"][part])
                break
            if isinstance(part, str) and _values(option):
                schema = _values(option)
                break
    return schema


def _properties(schema: Mapping[str, Any]) -> list[str]:
    for option in schema.get("anyOf", [schema]):
        if properties := _resolve(option).get("properties"):
            return list(properties)
    return []


def _meant_setting(loc: Loc) -> str:
    """The setting that an unknown key at `loc` looks like: in its section, then in the others."""
    key = str(loc[-1]).lower().replace("-", "_")
    here = str(loc[0]) if len(loc) > 1 else ""
    sections = {"": _properties(json_schema())}
    for name in ("stage1_profile", "stage2_profile", "dataset", "slurm"):
        sections[name] = _properties(_subschema((name,)))
    key = _SYNONYMS.get(key, key)
    joined = next((each for each in sections.get(here, []) if _same(key, each)), "")
    if here and joined:
        return f"{here}.{joined}"
    key = next((each for keys in sections.values() for each in keys if _same(key, each)), key)
    exact = [".".join(filter(None, (name, key))) for name, keys in sections.items() if key in keys]
    if exact:
        outside = f", which stands outside of {here}" if here and key in sections[""] else ""
        return " or ".join(exact) + outside
    near = difflib.get_close_matches(key, sections.get(here, []), n=1)
    return ".".join(filter(None, (here, *near))) if near else ""


def _same(key: str, setting: str) -> bool:
    """Whether they differ in what joins their words alone: batchsize."""
    return key.replace("_", "") == setting.replace("_", "")


def _meant_value(value: Any, schema: Mapping[str, Any]) -> str:
    """A value that `value` looks like and that is accepted."""
    if "enum" in schema and isinstance(value, str):
        names = [str(name) for name in schema["enum"]]
        meant = SYNONYMS.get(value.lower(), "")
        near = difflib.get_close_matches(value.lower(), names, n=1)
        return meant if meant in names else next(iter(near), "")
    if schema.get("type") == "boolean":
        return _YAML_1_1_BOOLS.get(str(value).lower(), "")
    if schema.get("type") in ("integer", "number") and isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return f"{value.strip()} without quotes"
    if schema.get("type") == "string" and "examples" not in schema and is_number(value):
        return f'"{value}" in quotes'
    return ""
