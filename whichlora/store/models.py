"""The model database: a hub id, an alias or a short name to its architecture, without network."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from whichlora import families
from whichlora.errors import ConfigError, DataFileError
from whichlora.serving.gguf import STORED_AS
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.wide_modules import UNKNOWN_MODULES
from whichlora.store.jsonfiles import check_schema_version, read_object, write_object
from whichlora.store.paths import data_folder, user_models_folder
from whichlora.store.quantised_names import StoredForm, quantised
from whichlora.store.spellings import MAX_NEAR, match, match_start, nearest

SCHEMA_VERSION = 1


# Organisations that upload others' models again, under the same names: to the hub, to ModelScope
_DYNAMIC = "-unsloth-bnb-4bit"
# Uploads under another name than their model: of HuggingFaceH4/mistral-7b-sft-beta, whose shapes
# are those of its base. Source: unsloth 2026.10 `models/mapper.py`.
_OTHER_NAMES = {"zephyr-sft": "mistralai/Mistral-7B-v0.1"}
_UPLOADERS = (
    *("unsloth", "LLM-Research", "AI-ModelScope", "modelscope", "ZhipuAI"),
    *("NousResearch", "casperhansen"),  # of examples of Axolotl
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """One architecture of the database, as a listing shows it.

    Args:
        aliases: further hub ids of the same shapes; context length and dtype may differ.
        params: parameters, each tied tensor once.
        check: "exact" or "rounded": how our count agrees with the published one; "module": it is
            that of the module of transformers; "none".
        gated: whether the hub asks for an agreement, None where that is unknown.
    """

    hub_id: str
    aliases: tuple[str, ...]
    model_type: str
    params: int
    check: str
    license: str
    gated: bool | None
    release_year: int | None


def find_model(name: str) -> ModelSpec | None:
    """The architecture known under `name`, or None.

    Args:
        name: a hub id or alias in any case, or its part after the slash where only one
            architecture has it ("llama-3.1-8b").

    Raises:
        ConfigError: a short name that several architectures have.
        DataFileError: the database is broken.
    """
    index = _index()
    stem = _stem(name, index)
    if stem is None:
        return None
    record = _record(stem, index)
    return _spec(_path(stem), _spelling(name, record), record.hub_id)


@cache
def _spec(path: Path, known_as: str, hub_id: str) -> ModelSpec:
    """The architecture that `path` has, read once, as the index is.

    An alias may have other positions, which the file states (`positions`), or be written anew in
    the code of another type (`rewritten`: keys of its config). Its `draft_note` says what layers
    for drafts hold, which are not counted without an engine that loads them.
    """
    values = read_object(path)
    check_schema_version(values, SCHEMA_VERSION, str(path))
    config = values.get("config")
    if not isinstance(config, dict):
        raise DataFileError(f"{path}: config: must be an object, got {type(config).__name__}")
    positions = values.get("positions", {}).get(known_as)
    if positions is not None:
        config = {**config, "max_position_embeddings": positions}
    config = {**config, **values.get("rewritten", {}).get(known_as, {})}
    try:
        spec = families.build(config, name=known_as)
    except ConfigError as error:
        raise DataFileError(f"{path}: config: {error}") from error
    notes = spec.notes
    is_other = known_as != hub_id
    if is_other and positions is None:
        notes += (f"shapes of {hub_id}; context length and dtype may differ",)
    elif is_other:
        notes += (f"shapes of {hub_id}, with its own {positions} positions; dtype may differ",)
    draft_note = str(values.get("draft_note", ""))
    notes += tuple(str(note) for note in (values.get("note"), draft_note) if note)
    shapes_of = hub_id if is_other and positions is None else ""
    return replace(spec, notes=notes, draft_note=draft_note, shapes_of=shapes_of)


def is_gated(name: str) -> bool:
    """Whether the hub is known to give the weights of `name` only to who has agreed to its terms.

    Raises:
        ConfigError: as `find_model`.
    """
    index = _index()
    stem = _stem(name, index)
    return stem is not None and _record(stem, index).gated is True


def list_models() -> tuple[ModelRecord, ...]:
    """Every architecture of the database, by hub id in alphabetical order."""
    index = _index()
    records = (_record(stem, index) for stem in index["models"])
    return tuple(sorted(records, key=lambda record: record.hub_id.lower()))


def resolve_name(name: str) -> tuple[str, str]:
    """The hub id or path that `name` means, and a note; "" where the name is exact.

    An exact name wins, then an existing path. A full hub id that the database lacks stays as it
    is: the hub may have it. Any other name is matched by its words: the plain or base model
    where `name` says neither base nor instruct, and the newest of its releases.

    Raises:
        ConfigError: the name is ambiguous, several, or means a quantised copy of a model.
    """
    index = _index()
    wanted = name.strip().lower()
    if wanted in index["names"]:
        return _spelling(name, _record(index["names"][wanted], index)), ""
    if not wanted or os.path.exists(os.path.expanduser(name)):
        return name, ""
    if "," in name:
        raise ConfigError(f"model: {name!r} are several names; give one, or a list where one fits")
    if _is_path_or_hub_id(name):
        return name, ""
    refusal = refuse_copy(name)
    if refusal:
        raise ConfigError(refusal)
    if _base_of_copy(name)[0] is not None:
        return name, ""
    try:
        hub_id = _match(name)
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None
    return (name, "") if hub_id is None else (hub_id, f"{name}: taken as {hub_id}")


def refuse_copy(name: str) -> str:
    """Why a name such as Llama-2-7B-EXL2 is refused, and the name to give; "" for any other."""
    form, base = _base_of_copy(name)
    if form is None or (base and form.config):
        return ""
    return (
        f"model: {name!r} is a quantised copy ({form.label}), which is not predicted by its name; "
        f"give {base or 'a path of its config.json, or the model it was made from'} with "
        f"{form.instead}"
    )


def _base_of_copy(name: str) -> tuple[StoredForm | None, str]:
    """How a quantised copy is stored, and the model it was made from; "" where that is unknown."""
    owner, _, own_name = name.rpartition("/")
    copy = quantised(own_name.replace("___", ".").rpartition("__")[2], owner)
    if copy is None:
        return None, ""
    form, base_name = copy
    base = None
    with contextlib.suppress(ConfigError):
        hyphened = base_name.replace(" ", "-")
        base = _OTHER_NAMES.get(hyphened.lower()) or _match(base_name)
        base = _rewritten_by(owner, hyphened, base)
    return form, base or ""


def _rewritten_by(owner: str, base_name: str, base: str | None) -> str | None:
    """The owner's own copy in 16 bit where that is in the code of another type, else `base`."""
    model, own = find_model(base) if base else None, find_model(f"{owner}/{base_name}")
    is_other = model is not None and own is not None and own.model_type != model.model_type
    return own.name if own is not None and is_other else base


def find_copy(name: str) -> ModelSpec | None:
    """The copy that `name` names of a model of the database, or None.

    It has the shapes of that model. A quantised one has a config that says how it is stored, as far
    as its name does; a plain one is of an organisation that uploads others' models again.

    Raises:
        DataFileError: the database is broken.
    """
    form, base = _base_of_copy(name)
    if form is None:
        return _find_upload(name)
    if form.config is None or not base:
        return None
    model = find_model(base)
    if model is None:
        return None
    stored = dict(form.config)
    own = model.config.get("quantization_config") or {}
    if stored["quant_method"] == "gguf" and own.get("quant_method") in STORED_AS:
        stored.setdefault("file_type", STORED_AS[own["quant_method"]])
    note = f"{name}: taken as {base}, stored as its name says ({form.label})"
    if name.lower().endswith(_DYNAMIC):
        stored |= {"llm_int8_skip_modules": UNKNOWN_MODULES}
    config = {**model.config, "quantization_config": stored}
    return replace(model, name=name, config=config, notes=(*model.notes, note))


def named_by_path(path: str) -> str:
    """The hub id of the only model that the end of a path names; empty where there is none.

    The end is its last part, that with the organisation before it, or a folder of a cache:
    `models--Qwen--Qwen3-8B` of the hub's, `Qwen/Qwen2___5-7B` of ModelScope's, `Qwen__Qwen3-8B`.
    Else it is the model that the last part begins with: `Qwen2_5_7B`, `Qwen2.5-7B-Instruct-sft`.
    """
    parts = [part.replace("___", ".") for part in re.split(r"[/\\]+", path.strip()) if part]
    cached = [part.split("--")[1:] for part in parts if part.startswith("models--")]
    ends = [cached[-1][-2:]] if cached else [parts[-2:], parts[-1:]]
    ends += [re.split(r"__|[._]", part, maxsplit=1) for part in parts[-1:]]  # Qwen.Qwen2.5-7B
    for end in filter(None, ends):
        with contextlib.suppress(ConfigError):
            model = find_model("/".join(end))
            if model is not None:
                return model.name
    if not parts or quantised(parts[-1]):
        return ""
    return match_start(parts[-1], _preferred_names(*_sources()), _num_params(*_sources())) or ""


def find_sibling(name: str) -> ModelSpec | None:
    """The model of the same organisation that `name` names in other words, or None.

    Such as Qwen/Qwen3-Coder-Next for its base: those of one name have the same shapes.
    """
    owner, _, own_name = name.partition("/")
    base = None
    with contextlib.suppress(ConfigError):
        base = _match(own_name)
    if base is None or base.partition("/")[0].lower() != owner.lower():
        return None
    model = find_model(base)
    note = f"{name}: is not known by this name; taken as {base}"
    return None if model is None else replace(model, name=name, notes=(*model.notes, note))


def _find_upload(name: str) -> ModelSpec | None:
    organisation, _, upload = name.partition("/")
    base = None
    if organisation in _UPLOADERS:
        with contextlib.suppress(ConfigError):
            base = _OTHER_NAMES.get(upload.lower()) or _match(upload)
    model = find_model(base) if base else None
    if model is None:
        return None
    return replace(
        model, name=name, notes=(*model.notes, f"{name}: taken as {base}, uploaded again")
    )


def _match(name: str) -> str | None:
    return _match_in(name.strip(), *_sources())


@lru_cache(maxsize=1024)  # every answer of the page asks for its model again
def _match_in(name: str, *sources: Any) -> str | None:
    return match(name, _preferred_names(*sources), _num_params(*sources))


def _is_path_or_hub_id(name: str) -> bool:
    return name.startswith((".", "/", "~")) or (
        "/" in name and " " not in name.strip() and ":" not in name
    )


@cache
def _num_params(*sources: Any) -> Mapping[str, int]:
    """Parameters of every architecture."""
    index = _index_of(*sources)
    return {stem: _record(stem, index).params for stem in index["models"]}


@cache
def _preferred_names(*sources: Any) -> Mapping[str, str]:
    """Every name in the hub's letter case to its architecture, each hub id before its aliases."""
    index = _index_of(*sources)
    records = {stem: _record(stem, index) for stem in index["models"]}
    return {
        name: stem
        for stem, record in records.items()
        for name in (record.hub_id, *record.aliases)
        if "/" in name
    }


def near_matches(name: str, limit: int = MAX_NEAR) -> tuple[str, ...]:
    """Hub ids and aliases spelled most like `name`, best first, one per architecture."""
    stems = _preferred_names(*_sources())
    best: dict[str, str] = {}
    with contextlib.suppress(ConfigError):
        meant = _match(name.rpartition("/")[2])
        best |= {stems[meant]: meant} if meant else {}
    for candidate in nearest(name, stems, limit=4 * limit):
        best.setdefault(stems[candidate], candidate)
    return tuple(best.values())[:limit]


def _folder() -> Path:
    return data_folder("models_db")


def _path(stem: str) -> Path:
    packaged = stem in _packaged_index(_folder())["models"]
    return (_folder() if packaged else user_models_folder()) / f"{stem}.json"


def _index() -> Mapping[str, Any]:
    return _index_of(*_sources())


def _sources() -> tuple[Path, Path | None, int]:
    """The packaged folder, the user's own, and when a file changed last in that one (ns)."""
    users = user_models_folder()
    return (_folder(), users, users.stat().st_mtime_ns) if users.is_dir() else (_folder(), None, 0)


@cache
def _index_of(folder: Path, own: Path | None, changed_ns: int) -> Mapping[str, Any]:
    """What both folders hold: a packaged name always means the packaged model."""
    packaged = _packaged_index(folder)
    if own is None:
        return packaged
    added = index_of({path.stem: _checked_entry(path) for path in sorted(own.glob("*--*.json"))})
    return {
        "names": {**added["names"], **packaged["names"]},
        "models": {**added["models"], **packaged["models"]},
    }


def _checked_entry(path: Path) -> dict[str, Any]:
    values = read_object(path)
    check_schema_version(values, SCHEMA_VERSION, str(path))
    needed = {field.name for field in fields(ModelRecord)} - {"model_type"} | {"config"}
    missing = sorted(needed - set(values))
    if missing:
        raise DataFileError(f"{path}: {missing[0]}: missing; 'whichlora models add' writes it")
    return values


def index_of(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a look-up and a listing need of `entries`, the files of a folder by their stems.

    Raises:
        DataFileError: two files claim one name.
    """
    names: dict[str, str] = {}
    for stem, entry in entries.items():
        for name in (entry["hub_id"], *entry["aliases"]):
            taken = names.setdefault(name.lower(), stem)
            if taken != stem:
                raise DataFileError(f"{name}: named by both {taken} and {stem}; remove one")
    return {
        "schema_version": SCHEMA_VERSION,
        "names": dict(sorted(names.items())),
        "models": {
            stem: {
                field.name: (entry["config"] if field.name == "model_type" else entry)[field.name]
                for field in fields(ModelRecord)
            }
            for stem, entry in sorted(entries.items())
        },
    }


def add_model(model: ModelSpec, *, check: str, source: str) -> Path:
    """Keep the config of `model` in this user's folder, for look-ups without the hub.

    Args:
        check: as `ModelRecord.check`.
        source: where the config came from.

    Returns:
        The file.

    Raises:
        DataFileError: the disk refused.
    """
    path = user_models_folder() / f"{model.name.replace('/', '--')}.json"
    write_object(
        path,
        {
            "schema_version": SCHEMA_VERSION,
            "hub_id": model.name,
            "aliases": [],
            "params": model.num_params,
            "check": check,
            "source": source,
            "license": "",
            "gated": None,
            "release_year": None,
            "note": "",
            "config": dict(model.config),
        },
    )
    return path


@cache
def _packaged_index(folder: Path) -> Mapping[str, Any]:
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
    try:
        values = index["models"][stem]
        return ModelRecord(**{**values, "aliases": tuple(values["aliases"])})
    except (KeyError, TypeError) as error:
        where = f"{_folder() / 'index.json'}: models.{stem}"
        raise DataFileError(f"{where}: {error}; reinstall whichlora") from error


def _spelling(name: str, record: ModelRecord) -> str:
    """The hub id that `name` means, in the hub's own letter case."""
    wanted = name.strip().lower()
    # reversed: where two differ in case only or in organisation only, the hub id itself wins
    full = {name.lower(): name for name in reversed((record.hub_id, *record.aliases))}
    short = {lower.rpartition("/")[2]: spelled for lower, spelled in full.items()}
    return full.get(wanted) or short.get(wanted) or record.hub_id


def is_known_model(name: str) -> bool:
    """Whether every installation has `name`, so that a record need not carry its config."""
    return _stem(name, _packaged_index(_folder())) is not None
