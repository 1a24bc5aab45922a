"""The model database: a hub id, an alias or a short name to its architecture, without network."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from whichlora import families
from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.architecture import ModelSpec
from whichlora.store.jsonfiles import check_schema_version, read_object
from whichlora.store.paths import data_folder
from whichlora.store.spellings import MAX_NEAR, match, nearest, quantised

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """One architecture of the database, as a listing shows it.

    Args:
        aliases: further hub ids of the same shapes; context length and dtype may differ.
        params: parameters, each tied tensor once.
        check: "exact" or "rounded": how our count agrees with the published one.
        gated: whether the hub asks for an agreement, None where that is unknown.
    """

    hub_id: str
    aliases: tuple[str, ...]
    model_type: str
    params: int
    check: str
    license: str
    gated: bool | None
    release_year: int


def find_model(name: str) -> ModelSpec | None:
    """The architecture known under `name`, or None.

    Args:
        name: a hub id or alias in any case, or its part after the slash where only one
            architecture has it ("llama-3.1-8b").

    Raises:
        ConfigError: a short name that several architectures have.
        DataFileError: the database is broken.
    """
    index = _index(_folder())
    stem = _stem(name, index)
    if stem is None:
        return None
    record = _record(stem, index)
    return _spec(_folder() / f"{stem}.json", _spelling(name, record), record.hub_id)


@cache
def _spec(path: Path, known_as: str, hub_id: str) -> ModelSpec:
    """The architecture that `path` has, read once, as the index is."""
    values = read_object(path)
    check_schema_version(values, SCHEMA_VERSION, str(path))
    config = values.get("config")
    if not isinstance(config, dict):
        raise DataFileError(f"{path}: config: must be an object, got {type(config).__name__}")
    try:
        spec = families.build(config, name=known_as)
    except ConfigError as error:
        raise DataFileError(f"{path}: config: {error}") from error
    notes = spec.notes
    if known_as != hub_id:
        notes += (f"shapes of {hub_id}; context length and dtype may differ",)
    if values.get("note"):
        notes += (str(values["note"]),)
    return replace(spec, notes=notes)


def list_models() -> tuple[ModelRecord, ...]:
    """Every architecture of the database, by hub id in alphabetical order."""
    index = _index(_folder())
    records = (_record(stem, index) for stem in index["models"])
    return tuple(sorted(records, key=lambda record: record.hub_id.lower()))


def resolve_name(name: str) -> tuple[str, str]:
    """The hub id or path that `name` means, and a note; "" where the name is exact.

    An exact name wins, then an existing path. A full hub id that the database lacks stays as it
    is: the hub may have it. Any other name is matched by its words: the plain or base model
    where `name` says neither base nor instruct, and the newest of its releases.

    Raises:
        ConfigError: the name is ambiguous, or means a quantised copy of a model.
    """
    index = _index(_folder())
    wanted = name.strip().lower()
    if wanted in index["names"]:
        return _spelling(name, _record(index["names"][wanted], index)), ""
    if not wanted or os.path.exists(os.path.expanduser(name)) or _is_path_or_hub_id(name):
        return name, ""
    refusal = refuse_copy(name)
    if refusal:
        raise ConfigError(refusal)
    try:
        hub_id = _match(name)
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None
    return (name, "") if hub_id is None else (hub_id, f"{name}: taken as {hub_id}")


def refuse_copy(name: str) -> str:
    """Why a name such as Llama-2-7B-GPTQ is refused, and the name to give; "" for any other."""
    copy = quantised(name.rpartition("/")[2])
    if copy is None:
        return ""
    form, base_name, instead = copy
    base = None
    with contextlib.suppress(ConfigError):
        base = _match(base_name)
    return (
        f"model: {name!r} is a quantised copy ({form}), not a base to train; "
        f"give {base or 'the model it was made from'} with {instead}"
    )


def _match(name: str) -> str | None:
    index = _index(_folder())
    params = {stem: _record(stem, index).params for stem in index["models"]}
    return match(name.strip(), _preferred_names(), params)


def _is_path_or_hub_id(name: str) -> bool:
    return name.startswith((".", "/", "~")) or (
        "/" in name and " " not in name.strip() and ":" not in name
    )


def _preferred_names() -> dict[str, str]:
    """Every name in the hub's letter case to its architecture, each hub id before its aliases."""
    index = _index(_folder())
    records = {stem: _record(stem, index) for stem in index["models"]}
    return {
        name: stem
        for stem, record in records.items()
        for name in (record.hub_id, *record.aliases)
        if "/" in name
    }


def near_matches(name: str, limit: int = MAX_NEAR) -> tuple[str, ...]:
    """Hub ids and aliases spelled most like `name`, best first, one per architecture."""
    stems = _preferred_names()
    best: dict[str, str] = {}
    with contextlib.suppress(ConfigError):
        meant = _match(name.rpartition("/")[2])
        best |= {stems[meant]: meant} if meant else {}
    for candidate in nearest(name, stems, limit=4 * limit):
        best.setdefault(stems[candidate], candidate)
    return tuple(best.values())[:limit]


def _folder() -> Path:
    return data_folder("models_db")


@cache
def _index(folder: Path) -> Mapping[str, Any]:
    path = folder / "index.json"
    values = read_object(path)
    check_schema_version(values, SCHEMA_VERSION, str(path))
    for key in ("names", "models"):
        if not isinstance(values.get(key), dict):
            raise DataFileError(f"{path}: {key}: must be an object; reinstall whichlora")
    return values


def _stem(name: str, index: Mapping[str, Any]) -> str | None:
    wanted = name.strip().lower()
    exact = index["names"].get(wanted)
    if exact is not None or not wanted or "/" in wanted:
        return exact if exact is None else str(exact)
    matches = {
        stem: full_name
        for full_name, stem in index["names"].items()
        if full_name.endswith(f"/{wanted}")
    }
    if len(matches) > 1:
        raise ConfigError(
            f"model: {name!r} is ambiguous: {', '.join(sorted(matches.values()))}; "
            "give one of these hub ids"
        )
    return next(iter(matches), None)


def _record(stem: str, index: Mapping[str, Any]) -> ModelRecord:
    where = f"{_folder() / 'index.json'}: models.{stem}"
    try:
        values = index["models"][stem]
        return ModelRecord(**{**values, "aliases": tuple(values["aliases"])})
    except (KeyError, TypeError) as error:
        raise DataFileError(f"{where}: {error}; reinstall whichlora") from error


def _spelling(name: str, record: ModelRecord) -> str:
    """The hub id that `name` means, in the hub's own letter case."""
    wanted = name.strip().lower()
    # reversed: where two differ in case only or in organisation only, the hub id itself wins
    full = {name.lower(): name for name in reversed((record.hub_id, *record.aliases))}
    short = {lower.rpartition("/")[2]: spelled for lower, spelled in full.items()}
    return full.get(wanted) or short.get(wanted) or record.hub_id


def is_known_model(name: str) -> bool:
    """Whether the database holds `name`, so that a record need not carry its config."""
    return find_model(name) is not None
