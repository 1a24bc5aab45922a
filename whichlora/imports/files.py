"""Files → their keys and places, and what other files they name."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whichlora.config.document import parse_document, read_text
from whichlora.errors import ConfigError
from whichlora.imports.command import Command, Subcommands, is_script, only_command
from whichlora.imports.pins import pins_of
from whichlora.imports.python_calls import LOADS, configuration_in, settings_in
from whichlora.units import MiB

Kind = Literal["settings", "accelerate", "deepspeed", "command"]
_PYTHON = (".py", ".ipynb")
_MOST_CODE_BYTES = 32 * MiB  # of a notebook, which may hold images
_COMPOSE = re.compile(r"^services:[ \t]*(?:#.*)?$", re.MULTILINE)
_DEEPSPEED = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, by what it holds.

    Args:
        values: its keys; empty for a command.
        is_code: whether they are of Python, which reads the command's options itself.
        places: key → path, line and column.
        pins: library → version that it installs.
    """

    path: Path
    kind: Kind
    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    command: Command | None = None
    is_code: bool = False
    pins: Mapping[str, str] = field(default_factory=dict)


def read_source(path: Path, tools: Subcommands, options: Mapping[str, Any] | None = None) -> Source:
    """The file at `path`: YAML, JSON, a shell script, Python or a notebook.

    Args:
        tools: whose commands may train.
        options: that a script in Python is given.

    Raises:
        ConfigError: it can't be read, or is none of these.
    """
    if path.suffix in _PYTHON:
        text = read_text(path, most_bytes=_MOST_CODE_BYTES)
        return _of_python(path, text, options or {})
    text = read_text(path)
    if not text.strip():
        raise ConfigError(f"{path}: is empty; give the configuration of a training")
    if text.lstrip().startswith("{"):
        return _of_mapping(path, _json(path, text), {})
    if is_script(text, tools) and not _COMPOSE.search(text):
        command = only_command(path, text, tools)
        return Source(path=path, kind="command", command=command, pins=pins_of(path, text))
    document = parse_document(path, text, example="base_model: Qwen/Qwen3-8B")
    faults = list(document.structure_problems(empty=False))
    if faults:
        raise document.error(faults)
    values = {str(key): value for key, value in document.data.items()}
    if isinstance(values.get("services"), Mapping):
        command = only_command(path, _as_shell(values["services"]), tools)
        return Source(path=path, kind="command", command=command)
    return _of_mapping(path, values, {key: document.place(key) for key in values})


def _as_shell(services: Mapping[str, Any]) -> str:
    """Services of a compose file as the commands of a shell that start their containers.

    Source: https://docs.docker.com/reference/compose-file/services/
    """
    lines = []
    for service in services.values():
        if not isinstance(service, Mapping) or not isinstance(service.get("image"), str):
            continue
        stated = service.get("environment") or ()
        if isinstance(stated, Mapping):
            stated = [f"{name}={value}" for name, value in stated.items()]
        sets = [f"-e {shlex.quote(str(each))}" for each in stated]
        words = [service.get("entrypoint") or "", service.get("command") or ""]
        texts = [shlex.join(map(str, each)) if isinstance(each, list) else each for each in words]
        joined = " ".join(" ".join(map(str, texts)).split("\n"))
        lines.append(f"docker run {' '.join(sets)} {shlex.quote(service['image'])} {joined}")
    return "\n".join(lines)


def _of_python(path: Path, text: str, options: Mapping[str, Any]) -> Source:
    values, lines = settings_in(path, text, options)
    if LOADS not in values:
        written = configuration_in(path, text)
        if written:
            return Source(path=path, kind="settings", values=written, pins=pins_of(path, text))
        raise ConfigError(
            f"{path}: loads no model with from_pretrained, nor hands a trainer its name; give the "
            "configuration or the command of the training, or its settings as options"
        )
    places = {name: f"{path}:{line}" for name, line in lines.items()}
    pins = pins_of(path, text)
    return Source(path=path, kind="settings", values=values, places=places, is_code=True, pins=pins)


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from None
    return {str(key): value for key, value in values.items()}


def _of_mapping(path: Path, values: Mapping[str, Any], places: Mapping[str, str]) -> Source:
    kind: Kind = "settings"
    if "distributed_type" in values or "compute_environment" in values:
        kind = "accelerate"
    elif _DEEPSPEED & values.keys():
        kind = "deepspeed"
    return Source(path=path, kind=kind, values=values, places=places)


class MissingFileError(ConfigError):
    """A file that another one names is not here."""


def find_file(where: str, name: str, *, beside: Path) -> Path:
    """The file that another one names: in the folder of that one, or in this one.

    Raises:
        MissingFileError: there is none.
    """
    for path in (beside / name, Path(name)):
        if os.path.isfile(path):  # which takes names that no file can have
            return path
    raise MissingFileError(f"{where}: there is no file {name[:80]!r}; give it with another --from")
