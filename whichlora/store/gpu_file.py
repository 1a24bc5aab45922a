"""One accelerator on disk: the schema of `calibration/<key>/gpu.json`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whichlora.errors import DataFileError
from whichlora.spec.backends import BACKENDS
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import is_number
from whichlora.store.jsonfiles import check_fields, check_schema_version, is_slug, read_object

SCHEMA_VERSION = 1
KINDS = tuple(BACKENDS)
DTYPES = ("bf16", "fp16", "tf32", "fp32", "int8", "fp4")
_RATES = (1e6, 1e21)  # per second: a slipped unit is outside, every device since the 1980s inside
_RATE = f"a number from {_RATES[0]:g} to {_RATES[1]:g}"


def read_gpu(path: Path) -> GpuSpec:
    """The accelerator that the gpu.json at `path` describes.

    Raises:
        DataFileError: naming path, key, what is accepted and what to do.
    """
    values = read_object(path)
    check_schema_version(values, SCHEMA_VERSION, str(path))
    check_fields(values, _FIELDS, str(path))
    if values["key"] != path.parent.name:
        raise DataFileError(
            f"{path}: key: is {values['key']!r}, the folder is {path.parent.name!r}; "
            "rename one of them"
        )
    if values["kind"] == "cuda" and str(values.get("compute_capability")).startswith("gfx"):
        raise DataFileError(
            f"{path}: compute_capability: {values['compute_capability']} is not of kind cuda; "
            "correct one of them"
        )
    peaks = {f"peak_flops_per_s.{dtype}" for dtype in values["peak_flops_per_s"]}
    for fact in (*values["sources"], *values["unverified"]):
        if fact not in peaks and fact not in _FIELDS:
            raise DataFileError(
                f"{path}: sources or unverified: {fact!r} is no field of this file; correct it"
            )
    return GpuSpec(
        key=values["key"],
        name=values["name"],
        kind=values["kind"],
        memory_bytes=values["memory_bytes"],
        bandwidth_bytes_per_s=float(values["bandwidth_bytes_per_s"]),
        peak_flops_per_s={dtype: float(peak) for dtype, peak in values["peak_flops_per_s"].items()},
        measured_flops_per_s=values.get("measured_flops_per_s") or {},
        power_w=values.get("power_w"),
        num_multiprocessors=values.get("num_multiprocessors"),
        l2_bytes=values.get("l2_bytes"),
        compute_capability=values.get("compute_capability"),
        context_bytes=values.get("context_bytes"),
        aliases=tuple(values["aliases"]),
        names=tuple(values["names"]),
        sources=values["sources"],
        unverified=tuple(values["unverified"]),
    )


# CUDA's compute capability, AMD's architecture, SYCL's without its "intel_gpu_"
_CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]{1,2}|gfx[0-9a-f]{3,8}|[a-z]{3}(_[a-z]{1,2}[0-9]*)?")


def is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != "" and value.isprintable()


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 10**15  # 1 PB: no device, but a slipped unit


def is_between(value: object, least: float, most: float) -> bool:
    # a comparison refuses NaN
    return is_number(value) and least <= value <= most


def is_rate(value: object) -> bool:
    return is_between(value, *_RATES)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _is_peaks(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and value.keys() <= set(DTYPES)
        and all(map(is_rate, value.values()))
    )


def _is_sources(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_text, value.values()))


# Accepted values of each field, in words and as a check; a missing field is checked as null.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "schema_version": ("a whole number", lambda value: type(value) is int),
    "key": ("the name of the folder", lambda value: isinstance(value, str) and is_slug(value)),
    "name": ("a text", is_text),
    "kind": (f"one of {', '.join(KINDS)}", lambda value: value in KINDS),
    "memory_bytes": ("a whole number above 0 and below 10**15", _is_count),
    "nominal_memory_gb": (
        "a number from 0.001 to 1e6, or null",
        lambda v: v is None or is_between(v, 1e-3, 1e6),
    ),
    "bandwidth_bytes_per_s": (_RATE, is_rate),
    "peak_flops_per_s": (f"an object of {', '.join(DTYPES)}, each {_RATE}", _is_peaks),
    "measured_flops_per_s": (
        f"an object of {', '.join(DTYPES)}, each {_RATE}, or null",
        lambda value: not value or _is_peaks(value),
    ),
    "power_w": (
        "a number from 0.1 to 1e6, or null",
        lambda v: v is None or is_between(v, 0.1, 1e6),
    ),
    "num_multiprocessors": ("a count, or null", lambda v: v is None or _is_count(v)),
    "l2_bytes": ("a count, or null", lambda v: v is None or _is_count(v)),
    "compute_capability": (
        "a text such as 9.0, for kind rocm such as gfx942, for kind xpu such as bmg_g21, or null",
        lambda v: v is None or (is_text(v) and _CAPABILITY.fullmatch(v) is not None),
    ),
    "context_bytes": ("a count, or null", lambda v: v is None or _is_count(v)),
    "aliases": ("a list of texts", _is_texts),
    "names": ("a list of texts", _is_texts),
    "usual_for": ("a list of texts, or null", lambda v: v is None or _is_texts(v)),
    "sources": ("an object: field to text or link", _is_sources),
    "unverified": ("a list of field names", _is_texts),
}
