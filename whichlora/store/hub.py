"""A model's name to its architecture: the database, a local folder, then the Hugging Face hub."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.serving import get_engine
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.options import OptionValue, by_own_names
from whichlora.spec.run import RunConfig
from whichlora.store.jsonfiles import read_object
from whichlora.store.models import (
    find_copy,
    find_model,
    find_sibling,
    near_matches,
    refuse_copy,
    resolve_name,
)
from whichlora.store.online import why_offline
from whichlora.store.quantised_names import PLAIN_WORDS

_FILE = "config.json"
# Of ModelOpt, whose older exports say nothing of it in `config.json`. Source: vLLM 0.33.0
# quantization/modelopt.py `get_config_filenames`.
_QUANT_FILE = "hf_quant_config.json"
_OF_MODELOPT = re.compile(r"nvfp4|fp4|mxfp8|fp8", re.IGNORECASE)
# "llama3.1:8b" of Ollama's library, whose tags without a type are files of this one.
# Source: https://docs.ollama.com/import#quantizing-a-model, and the tags of https://ollama.com/library
_TAG = re.compile(r"[^/:\s]+:[^/:\s]+")
_TYPE_OF_TAG = "Q4_K_M"
_OF_QAT = re.compile(r"(?<=\w)-qat$", re.IGNORECASE)  # whose files are of one type
_PAGE = "https://huggingface.co/"


class _UnknownModelError(ConfigError):
    """Neither the database nor the hub has the name, or the hub can't be asked."""


def load_model(name: str, *, offline: bool = False, trust_remote_code: bool = False) -> ModelSpec:
    """The architecture of the model called `name`; only its `config.json` is ever read.

    Args:
        name: a hub id, the path of a folder or of a `config.json`, or a name as people write it,
            such as "llama 3.1 8b"; a note says which model that was taken as.
        offline: ask the hub's cache on this host, never the network; `HF_HUB_OFFLINE` does too.
        trust_remote_code: accepted so that a call reads like one to transformers. Code from
            the hub is never run: a config either describes a known family or is refused.

    Raises:
        ConfigError: no such model, or an architecture we can't describe.
        DataFileError: a config that is no JSON object.
    """
    if not name.strip():
        raise ConfigError("model: is empty; give a hub id, or the path of a config.json")
    is_tag = _TAG.fullmatch(name.strip()) is not None
    asked = _OF_QAT.sub("-q4_0", name.strip()) if is_tag else name
    name, note = resolve_name(asked)
    packaged = find_model(name)
    if packaged is None:
        return _load_other(name, offline=offline)
    if not note:
        return packaged
    word = asked.strip().lower().rpartition("-")[2]
    file_type = PLAIN_WORDS.get(word, _TYPE_OF_TAG) if is_tag else ""
    return replace(packaged, notes=(note, *packaged.notes), file_type=file_type)


def load_model_of(run: RunConfig) -> ModelSpec:
    """The model of `run`, with another one that drafts for it where its engine is asked so.

    Raises:
        ConfigError, DataFileError: as `load_model`, of each.
    """
    return with_drafter(load_model(run.model), run.serving, run.serving_options)


def with_drafter(
    model: ModelSpec, serving: str, options: Iterable[tuple[str, OptionValue]]
) -> ModelSpec:
    """`model`, with another one that drafts for it where an engine is asked so by `options`."""
    engine = get_engine(serving)
    name = engine.drafter_of(dict(by_own_names(engine.options, options)))
    if not name:
        return model
    try:
        return replace(model, drafter=load_model(name))
    except ConfigError as error:
        raise ConfigError(f"{engine.drafted_by}: {error}") from None


def _load_other(name: str, *, offline: bool) -> ModelSpec:
    """A model that the database lacks; a quantised copy, which the hub can't tell of, by its name.

    Raises:
        ConfigError: no such model, or an architecture we can't describe.
        DataFileError: a config that is no JSON object.
    """
    try:
        config = load_config(name, offline=offline)
    except ConfigError as error:
        found = find_copy(name)
        if found is None and isinstance(error, _UnknownModelError):
            found = find_sibling(name)
        if found is None:
            raise
        return found
    return families.build(config, name=name)


def load_config(name: str, *, offline: bool = False) -> dict[str, Any]:
    """The `config.json` of a model that the database lacks, of a known family or not.

    Raises:
        ConfigError: no such model, or its class is not part of transformers.
        DataFileError: a config that is no JSON object.
    """
    config = _local_config(name)
    if config is None:
        config = _hub_config(name, offline=offline)
    if config.get("auto_map") and config.get("model_type") not in families.known_types():
        raise ConfigError(
            f"{name}: model_type {config.get('model_type')!r} needs code from its repository, "
            "which whichlora never runs; use a model whose class is part of transformers"
        )
    return config


def _local_config(name: str) -> dict[str, Any] | None:
    """The config at the path `name`, None where the path does not exist.

    Raises:
        ConfigError: a folder without a `config.json`.
        DataFileError: the file is no JSON object.
    """
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path):  # os.path: False for a path that no file system can hold
        return read_object(path)
    if not os.path.isdir(path):
        return None
    if (path / "config.json").is_file():
        config, beside = read_object(path / "config.json"), path / _QUANT_FILE
        return with_quant_file(config, read_object(beside)) if beside.is_file() else config
    if (path / "adapter_config.json").is_file():
        base = read_object(path / "adapter_config.json").get("base_model_name_or_path")
        raise ConfigError(f"{name}: is an adapter, not a model; give its base model, {base!r}")
    raise ConfigError(f"{name}: has no config.json; give the folder that save_pretrained wrote")


def _hub_config(name: str, *, offline: bool) -> dict[str, Any]:
    """`config.json` of a repository, from the hub's cache or the hub.

    Raises:
        ConfigError: not there, not allowed, or not reachable.
        DataFileError: the hub's answer is no JSON object.
    """
    if name.startswith(_PAGE):
        raise ConfigError(f"{name}: is a page; give the hub id, {name.removeprefix(_PAGE)!r}")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        near = ", ".join(near_matches(name))
        hint = f", or give a model of the hub in its place: {near}" if near else ""
        raise ConfigError(f"{name}: no such file or folder; check the path{hint}")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ModuleNotFoundError:  # in a browser, where predicting needs the standard library alone
        raise _unknown(name, "and the hub can't be asked without huggingface_hub") from None

    away = "the hub is switched off" if offline else why_offline()
    try:
        path = hf_hub_download(name, _FILE, local_files_only=away is not None)
    except GatedRepoError:  # before RepositoryNotFoundError, which it inherits
        raise ConfigError(
            f"{name}: is gated; accept its terms on the hub and log in with `hf auth login`, "
            "or give a local config.json"
        ) from None
    except LocalEntryNotFoundError:  # before EntryNotFoundError, which it inherits
        raise _unknown(name, f"and {away}") from None
    except EntryNotFoundError:
        raise ConfigError(
            f"{name}: has no config.json on the hub (an adapter, a GGUF or a data set?); "
            "give its base model"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise _unknown(name, "nor a public repository on the hub") from None
    config = read_object(Path(path))
    if "quantization_config" in config or not _OF_MODELOPT.search(name):
        return config
    with contextlib.suppress(EntryNotFoundError, LocalEntryNotFoundError):
        beside = hf_hub_download(name, _QUANT_FILE, local_files_only=away is not None)
        return with_quant_file(config, read_object(Path(beside)))
    return config


def with_quant_file(config: dict[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with what ModelOpt's file beside it states, where it states none itself."""
    if "quantization_config" in config:
        return config
    return {**config, "quantization_config": {**stated, "quant_method": "modelopt"}}


def _unknown(name: str, reason: str) -> ConfigError:
    if refusal := refuse_copy(name):
        return ConfigError(refusal)
    near = near_matches(name)
    hint = f"did you mean {', '.join(near)}? Or give" if near else "give a full hub id, or"
    return _UnknownModelError(
        f"model: {name!r} is not in the database {reason}; {hint} the path of a config.json"
    )
