"""Commands that start a serving engine: each option is the engine's own, as its file declares it.

Sources: `vllm serve --help` of 0.33.0, SGLang 0.5.23 srt/server_args.py, llama.cpp common/arg.cpp.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports.base import Keys, Launch, Tool
from whichlora.serving import BUILT_IN
from whichlora.serving.base import Engine
from whichlora.serving.stated import PRECISIONS, QUANTISED
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.options import OptionValue, by_own_names, with_suffix, written
from whichlora.spec.versions import Libraries
from whichlora.store.hub import load_model, with_drafter
from whichlora.store.models import find_copy, named_by_path

MODEL = "model"  # what stands before all options
_AS_STORED = ("auto", "compressed-tensors", "none")
_AUTO = ("auto", "-1", "0")
_RELEASE = re.compile(r"v?(\d+\.\d+(?:\.\d+)?)(?![\w.])")  # of an image's tag


def _read(engine: Engine, keys: Keys, launch: Launch) -> Mapping[str, Any]:
    if engine.takes_beginnings:
        _spell_out(engine, keys)
    options = _options(engine, keys, launch)
    model = _model(engine, keys)
    settings: dict[str, Any] = {
        "model": model,
        "phase": "inference",
        "serving": engine.name,
        "serving_options": tuple(sorted(options.items())),
    }
    release = _RELEASE.match(launch.tag)
    libraries = launch.libraries
    if release and engine.library and not launch.states_libraries:
        settings["libraries"] = ((engine.library, release[1]),)
        libraries = Libraries.of(settings["libraries"])
    stated = {name: keys.raw(name) for name in engine.elsewhere if name in keys}
    for name, value in stated.items():
        setting = engine.elsewhere[name]
        if setting == "quant":
            settings |= _quant(keys, name, str(value).lower(), model)
        elif setting == "precision":
            settings |= _precision(keys, name, str(value).lower())
        elif str(value).lower() not in _AUTO:
            settings[setting] = _tokens(keys, name, value)
    spec = _spec(model)
    if spec is not None:
        settings["serving_options"] = _with_drafts(engine, keys, options, spec)
        if "context" not in settings:
            settings |= _own_context(engine, keys, libraries, spec)
    return settings


def _spell_out(engine: Engine, keys: Keys) -> None:
    """Give a flag that stands there by its beginning its whole name: --mem-frac.

    Source: `allow_abbrev` of Python's argparse.
    """
    others = (*engine.elsewhere, *engine.refused, *engine.ignored, *engine.model_flags)
    flags = {name: name for name in others} | {
        name: option.name
        for option in engine.options
        for name in (option.name, *option.other_names)
    }
    for name in keys.names_in_file():
        begun = {whole for flag, whole in flags.items() if flag.startswith(name)}
        if name not in flags and len(begun) == 1:
            keys.take({begun.pop(): keys.raw(name)})


def _spec(name: str) -> ModelSpec | None:
    """The model; None where it is not known, which is said of it later."""
    with contextlib.suppress(ConfigError):
        return load_model(name) if name else None
    return None


def _with_drafts(
    engine: Engine, keys: Keys, options: Mapping[str, OptionValue], model: ModelSpec
) -> tuple[tuple[str, OptionValue], ...]:
    """`options` without drafts that are not predicted of `model`, and a note."""
    fault = _fault_of_drafts(engine, options, model) if engine.drafted_by in options else ""
    if not fault:
        return tuple(sorted(options.items()))
    keys.assume(engine.drafted_by, f"is left out, and drafts take memory of their own: {fault}")
    keys.is_lower_bound = True
    left_out = {engine.drafted_by, *engine.drafting}
    return tuple(sorted((name, each) for name, each in options.items() if name not in left_out))


def _fault_of_drafts(engine: Engine, options: Mapping[str, OptionValue], model: ModelSpec) -> str:
    """Why the drafts that `options` ask for are not predicted; empty where they are."""
    try:
        if not engine.has_drafts(model, dict(by_own_names(engine.options, options.items()))):
            return "these drafts are not predicted of this model"
        with_drafter(model, engine.name, options.items())
    except ConfigError as error:
        return str(error).removeprefix(f"{engine.drafted_by}: ")
    return ""


def _model(engine: Engine, keys: Keys) -> str:
    """The model, or what the server calls it where the command has a path that says nothing."""
    model = keys.model(*engine.model_flags)
    called = keys.raw("served_model_name") if not model else None
    if isinstance(called, str) and (name := _known(called)):
        keys.refused.pop("model", None)
        keys.assume("served_model_name", f"names the model; taken as {name}")
        return name
    return model


def _known(name: str) -> str:
    return named_by_path(name) or (name if find_copy(name) is not None else "")


def _options(engine: Engine, keys: Keys, launch: Launch) -> dict[str, OptionValue]:
    """The engine's own options by the names that the command has for them."""
    options: dict[str, OptionValue] = {}
    for option in engine.options:
        for name in (option.name, *option.other_names):
            if name in keys:
                options[name] = _value(keys, name)
            elif name in launch.environment:
                options[name] = written(launch.environment[name])
            elif (denied := f"no_{name}") in keys:
                keys.read_elsewhere(denied)
                options[name] = False
            elif parts := keys.under(name):  # --speculative-config.method mtp
                named = {part: _value(keys, f"{name}.{part}") for part in parts}
                options[name] = json.dumps(named)
        stated = [name for name in (option.name, *option.other_names) if name in options]
        if option.joiner and stated:
            values = [launch.repeated.get(name, (str(options.pop(name)),)) for name in stated]
            options[option.name] = option.joiner.join(value for each in values for value in each)
    for name, fault in engine.refused.items():
        if name in keys and name not in engine.ignored and _matters(engine, keys, name):
            if name not in engine.set_aside:
                raise keys.fault(name, fault)
            keys.assume(name, f"is left out: it {fault.partition(';')[0]}")
    return options


def _matters(engine: Engine, keys: Keys, name: str) -> bool:
    """Whether a flag that is no option has a say in what is predicted."""
    if engine.refused[name] in engine.idle_faults:
        return False
    return str(keys.raw(name)).lower() != "false"


def _value(keys: Keys, name: str) -> OptionValue:
    value = keys.raw(name)
    if isinstance(value, list):  # words behind the value are no option's
        value = value[0]
    return written(value) if isinstance(value, str) else bool(value)


def _tokens(keys: Keys, name: str, value: Any) -> int:
    number = with_suffix(str(value))
    if isinstance(number, str):
        if not number.isdecimal():
            raise keys.fault(name, "is not a number of tokens")
        number = int(number)
    assert isinstance(number, int)
    return number


def _quant(keys: Keys, name: str, value: str, model: str) -> dict[str, Any]:
    """How weights are stored, where the model's name or files do not say it."""
    if value in _AS_STORED or (model and find_copy(model) is not None):
        return {}
    if value not in QUANTISED:
        keys.refuse("quant", name, f"{value!r} is not predicted; {', '.join(QUANTISED)} are")
    return {"quant": QUANTISED.get(value, "none")}


def _precision(keys: Keys, name: str, value: str) -> dict[str, Any]:
    if value == "auto":
        return {}
    if value not in PRECISIONS:
        raise keys.fault(name, f"is no dtype; known are {', '.join(PRECISIONS)}")
    return {"precision": PRECISIONS[value]}


def _own_context(
    engine: Engine, keys: Keys, libraries: Libraries, model: ModelSpec
) -> dict[str, Any]:
    """The most tokens of a sequence that the engine takes where the command does not say."""
    flags = [name for name, setting in engine.elsewhere.items() if setting == "context"]
    stated = next((name for name in flags if name in keys), "")
    why = f"is {keys.raw(stated)}" if stated else "is not stated"
    if engine.own_context is None:
        keys.assume(
            stated or flags[0],
            f"{why}, and as many tokens as fit are taken; assumed: those of --prompt-len and "
            "--max-new-tokens; --context max says how many fit",
        )
        return {}
    context = engine.own_context(model, libraries)
    if context is None:
        return {}
    keys.assume(stated or flags[0], f"{why}; assumed: {context}, as of the model")
    return {"context": context}


def _tool(engine: Engine) -> Tool:
    idle = [name for name, fault in engine.refused.items() if fault in engine.idle_faults]
    return Tool(
        name=engine.name,
        summary=f"a command that starts {engine.name}",
        models=frozenset(),
        marks=frozenset(),
        programs=frozenset(engine.programs),
        read=partial(_read, engine),
        without_effect=(*engine.ignored, *idle, "lora_modules"),
        reads_files=False,
        reads_commands=False,
        positional=MODEL,
        images=engine.images,
        epochs=("", 0.0),
    )


TOOLS = tuple(_tool(engine) for engine in BUILT_IN.values() if engine.programs)
