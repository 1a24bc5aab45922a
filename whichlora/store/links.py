"""The links of machines on disk: `calibration/links/<machine>.json`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whichlora.errors import DataFileError
from whichlora.spec.links import LinkSpec, NetworkSpec
from whichlora.store.gpu_file import is_between, is_rate, is_text
from whichlora.store.jsonfiles import (
    check_fields,
    check_schema_version,
    is_slug,
    read_object,
    write_object,
)
from whichlora.timing.links import RING_FACTORS
from whichlora.units import MAX_BYTES

SCHEMA_VERSION = 1
FOLDER = "links"


@dataclass(frozen=True)
class LinkFiles(Mapping[str, LinkSpec]):
    """Machines by name, of several folders; a name in an earlier folder goes before.

    Nothing is read before a machine is asked for: most runs have one GPU.

    Args:
        roots: folders that hold calibrations.
    """

    roots: tuple[Path, ...]

    def __getitem__(self, name: str) -> LinkSpec:
        return _machines(self.roots)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_machines(self.roots))

    def __len__(self) -> int:
        return len(_machines(self.roots))

    def __deepcopy__(self, memo: Any) -> LinkFiles:
        return self


@functools.cache
def _machines(roots: tuple[Path, ...]) -> Mapping[str, LinkSpec]:
    machines: dict[str, LinkSpec] = {}
    for root in roots:
        for path in sorted((root / FOLDER).glob("*.json")):
            if path.stem not in machines:
                machines[path.stem] = read_links(path)
    return machines


def read_links(path: Path) -> LinkSpec:
    """The machine that the file at `path` describes.

    Raises:
        DataFileError: naming path, key, what is accepted and what to do.
    """
    values = read_object(path)
    check_schema_version(values, SCHEMA_VERSION, str(path))
    check_fields(values, _FIELDS, str(path))
    if values["key"] != path.stem:
        raise DataFileError(
            f"{path}: key: is {values['key']!r}, the file is {path.stem!r}; rename one of them"
        )
    for fact in values["sources"]:
        if fact not in _FIELDS:
            raise DataFileError(f"{path}: sources: {fact!r} is no field of this file; correct it")
    measured, like = values, values.get("like")
    if like is not None:
        measured = read_object(path.with_name(f"{like}.json"))
        check_fields(measured, _FIELDS, str(path.with_name(f"{like}.json")))
    tables = measured.get("microseconds") or {}
    sizes = tuple(measured.get("sizes_bytes") or ())
    for collective, by_size in tables.items():
        for number, times in by_size.items():
            if len(times) != len(sizes):
                raise DataFileError(
                    f"{path}: microseconds.{collective}.{number}: has {len(times)} times for "
                    f"{len(sizes)} sizes_bytes; give one each"
                )
    network = values.get("network")
    return LinkSpec(
        key=values["key"],
        name=values["name"],
        gpus=tuple(values["gpus"]),
        gpus_per_node=values["gpus_per_node"],
        sizes_bytes=sizes,
        seconds={
            collective: {
                int(number): tuple(1e-6 * time for time in times)
                for number, times in by_size.items()
            }
            for collective, by_size in tables.items()
        },
        bandwidth_bytes_per_s=values.get("bandwidth_bytes_per_s"),
        latency_s=values["latency_s"],
        host_bytes_per_s=float(values["host_bytes_per_s"]),
        host_thread_bytes_per_s=values.get("host_thread_bytes_per_s"),
        host_update_bytes_per_s=values.get("host_update_bytes_per_s"),
        host_memory_bytes=values.get("host_memory_bytes"),
        contention=float(values["contention"]),
        relative_deviation=float(values["relative_deviation"]),
        interval_scale=float(values.get("interval_scale") or 1.0),
        network=None if network is None else NetworkSpec(**network),
        sources=values["sources"],
    )


def write_links(root: Path, key: str, values: Mapping[str, Any]) -> Path:
    """Replace the machine `key` of the folder `root`; returns the path.

    Args:
        values: the fields of the file, but for its key and schema.
    """
    path = root / FOLDER / f"{key}.json"
    fields = {**values, "schema_version": SCHEMA_VERSION, "key": key}
    check_fields(fields, _FIELDS, str(path))
    write_object(path, fields)
    _machines.cache_clear()
    return path


_SECONDS = (1e-9, 1.0)
_COLLECTIVES = (*RING_FACTORS, "send")


def _are_sizes(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(type(size) is int and size > 0 for size in value)
        and value == sorted(set(value))
    )


def _are_times(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= set(_COLLECTIVES)
        and all(isinstance(tables, dict) and tables for tables in value.values())
        and all(
            number.isdecimal() and int(number) > 1 and isinstance(times, list)
            for tables in value.values()
            for number, times in tables.items()
        )
        and all(
            is_between(time, 1e-3, 1e9)
            for tables in value.values()
            for times in tables.values()
            for time in times
        )
    )


def _is_network(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "bandwidth_bytes_per_s", "reached_share", "latency_s"}
        and is_text(value["name"])
        and is_rate(value["bandwidth_bytes_per_s"])
        and is_between(value["reached_share"], 0.01, 1.0)
        and is_between(value["latency_s"], *_SECONDS)
    )


def _are_keys(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(key, str) and is_slug(key) for key in value
    )


# Accepted values of each field, in words and as a check; a missing field is checked as null.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "schema_version": ("a whole number", lambda value: type(value) is int),
    "key": ("the name of the file", lambda value: isinstance(value, str) and is_slug(value)),
    "name": ("a text", is_text),
    "gpus": ("a list of accelerators' keys", _are_keys),
    "gpus_per_node": ("a whole number above 1", lambda v: type(v) is int and 1 < v < 10**4),
    "like": (
        "the machine whose measured times hold here, or null",
        lambda v: v is None or (isinstance(v, str) and is_slug(v)),
    ),
    "sizes_bytes": ("rising whole numbers, or null", lambda v: v is None or _are_sizes(v)),
    "microseconds": (
        f"an object: {', '.join(_COLLECTIVES)} to an object: number of GPUs to times, or null",
        lambda v: v is None or _are_times(v),
    ),
    "bandwidth_bytes_per_s": ("a rate, or null", lambda v: v is None or is_rate(v)),
    "latency_s": ("seconds", lambda value: is_between(value, *_SECONDS)),
    "host_bytes_per_s": ("a rate", is_rate),
    "host_thread_bytes_per_s": ("a rate, or null", lambda v: v is None or is_rate(v)),
    "host_update_bytes_per_s": ("a rate, or null", lambda v: v is None or is_rate(v)),
    "host_memory_bytes": (
        "a whole number, or null",
        lambda v: v is None or (type(v) is int and 0 < v <= MAX_BYTES),
    ),
    "contention": ("a number from 0 to 3", lambda value: is_between(value, 0.0, 3.0)),
    "relative_deviation": ("a number from 0.01 to 3", lambda value: is_between(value, 0.01, 3.0)),
    "interval_scale": (
        "a number from 0.1 to 10, or null",
        lambda v: v is None or is_between(v, 0.1, 10.0),
    ),
    "network": (
        "an object of name, bandwidth_bytes_per_s, reached_share and latency_s, or null",
        lambda v: v is None or _is_network(v),
    ),
    "sources": (
        "an object: field to text or link",
        lambda v: isinstance(v, dict) and all(map(is_text, v.values())),
    ),
}
