"""A Python script or notebook → what it hands to the libraries that train.

The text is parsed, and nothing of it is run.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports.notebook import code_cells
from whichlora.imports.peft_configs import LORA, config_classes
from whichlora.imports.python_releases import OLD_ARGUMENTS
from whichlora.imports.python_values import (
    TRAINING,
    Unread,
    Values,
    last_name,
    unreached,
    values_of,
)
from whichlora.trainers import Trainer, list_trainers

IMPORT = "import "  # before the name of a library
ENVIRONMENT = "environ"  # of the script: variables that it sets
EARLIER = "Trainer.earlier"  # trainers that another one follows
ARGUMENTS = "arguments"  # of the trainer: their class
LOADS = "from_pretrained"  # whose value is the class, or the trainer, that loads the model
MADE = "of_config"  # of a model without the weights of a checkpoint
_NO_MODELS = ("Tokenizer", "Processor", "Config", "Peft", "FeatureExtractor", "GenerationConfig")
# Arguments of TRL's trainers that are not predicted; the others declare theirs.
_OTHER_ARGUMENTS = frozenset({"RLOOConfig", "PPOConfig", "GKDConfig", "BCOConfig"})
_QUANTISES = "BitsAndBytesConfig"
_LENGTHS = ("seq_len", "seq_length", "max_len", "max_length", "max_seq_len", "max_seq_length")
_OWN_PARSER = "HfArgumentParser"  # which reads training arguments of a command, too
_INIT = "model_init_kwargs"
_LONGEST = "model_max_length"
# Of json and yaml, and LLaMA-Factory's `train.tuner.run_exp`
_WRITES = frozenset({"dump", "dumps", "safe_dump", "run_exp"})
_PREPARES = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function or class that is called.

    Args:
        owner: what stands before the name: "AutoModelForCausalLM" of a `from_pretrained`.
        line: where it stands, from 1 on; of a notebook, the number of the cell of code.
    """

    name: str
    owner: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    line: int


def _calls_in(path: Path, text: str, options: Mapping[str, Any]) -> tuple[list[Call], Values]:
    """The calls of a script or notebook, as they stand in it, and what its names are set to.

    Raises:
        ConfigError: no Python.
    """
    tree = _of_notebook(path, text) if path.suffix == ".ipynb" else _parsed(path, text)
    try:
        values = values_of(tree, options)
        left_out = unreached(tree, values)
        calls = [
            _call(node, values)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and node not in left_out
        ]
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply to be read") from None
    return sorted(calls, key=lambda call: call.line), values


def configuration_in(path: Path, text: str) -> Mapping[str, Any]:
    """The configuration of a tool that a script writes to a file, or hands to the tool.

    Of several it is that of a training. Empty where there is none.

    Raises:
        ConfigError: no Python.
    """
    calls, _ = _calls_in(path, text, {})
    handed = [call.arguments[0] for call in calls if call.name in _WRITES and call.arguments]
    found = [
        each
        for value in handed
        for each in (value.values if isinstance(value, Unread) else (value,))
        if isinstance(each, dict)
    ]
    training = [each for each in found if each.get("do_train") is True]
    return next(iter((*training, *found)), {})


def _parsed(path: Path, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(f"{path}{line}: is no Python that can be read; nothing is run") from None


def _of_notebook(path: Path, text: str) -> ast.Module:
    """The code of its cells; one that is no Python is left out."""
    sources = code_cells(text)
    if sources is None:
        raise ConfigError(f"{path}: is no notebook that can be read")
    tree = ast.Module(body=[], type_ignores=[])
    for number, source in enumerate(sources, 1):
        joined = source.replace("\\\n", " ")  # a command of the shell may go over several lines
        lines = (line for line in joined.splitlines() if not line.startswith("%%"))
        with contextlib.suppress(ConfigError):
            cell = _parsed(path, "\n".join(map(_without_magic, lines)))
            for node in ast.walk(cell):
                if hasattr(node, "lineno"):
                    node.lineno = number
            tree.body += cell.body
    return tree


def _without_magic(line: str) -> str:
    """`line`, or "pass" in its place where the shell, and no Python, has it."""
    words = line.lstrip()
    return f"{line[: len(line) - len(words)]}pass" if words[:1] in ("!", "%") else line


def _call(node: ast.Call, values: Values) -> Call:
    options: dict[str, Any] = {}
    for keyword in node.keywords:
        value = values.read(keyword.value)
        if keyword.arg is not None:
            options[keyword.arg] = value
        elif isinstance(value, dict):
            options |= value
        else:
            options["**"] = value
    owner = last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    return Call(
        name=last_name(node.func),
        owner=owner,
        arguments=tuple(values.read(each) for each in node.args),
        options=options,
        line=node.lineno,
    )


def _model_loads(calls: Sequence[Call]) -> Iterator[tuple[Call, dict[str, Any]]]:
    """Those that load a model, and what they are given.

    Then the trainers that are handed one which the script makes itself, by no class's method.
    """
    config: dict[str, Any] = {}
    for call in calls:
        first = {"model": call.arguments[0]} if call.arguments else {}
        if call.name == "from_config" and config:
            yield call, {**config, **call.options, MADE: True}
        elif call.name != "from_pretrained":
            continue
        elif call.owner == "AutoConfig":
            config = config or {**first, **call.options}
        elif not any(word in call.owner for word in _NO_MODELS):
            yield call, {**first, **call.options}
    for call in calls:
        if is_trainer(call.name) and "model" in call.options:
            yield replace(call, owner=""), _some(call.options, "model")


def settings_in(
    path: Path, text: str, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """What a script hands to transformers, PEFT, TRL and Unsloth, and the line of each key.

    Keys of training arguments have no prefix; others that of their function or class, such as
    "LoraConfig.r". "Trainer" and "from_pretrained" name classes; "import trl" is a library. Of
    several calls of a kind the first counts, of trainers of several classes the last. A model that
    a trainer is given by name is its own to load, with `model_init_kwargs`.

    Args:
        options: that the script is given, beside the defaults of its own arguments.

    Raises:
        ConfigError: no Python.
    """
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}

    def note(line: int, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            if name not in values:
                values[name], lines[name] = value, line

    every, named = _calls_in(path, text, options)
    adapters, arguments = config_classes(), _argument_classes()
    calls, left_out = _without_earlier(every)
    note(1, left_out)
    for call in calls:
        note(call.line, _handed_over(call, adapters, arguments))
        if "Tokenizer" in call.owner:  # its `from_pretrained`
            note(call.line, _prefixed("tokenizer", _some(call.options, _LONGEST)))
        if "truncation" in call.options:
            note(call.line, _prefixed("tokenizer", _some(call.options, "padding")))
            name, earlier = "tokenizer.max_length", values.get("tokenizer.max_length")
            length = call.options.get("max_length", earlier)
            note(call.line, {} if length is None else {name: length})
            if length != values.get(name):
                both = [each for each in (length, earlier) if isinstance(each, int)]
                values[name] = max(both, default=length)
                note(call.line, {"tokenizer.several": True})
    for parser in (call for call in calls if call.name == _OWN_PARSER):
        note(1, _parsed_arguments(parser, named, options, arguments))
    load, given = next(_model_loads(calls), (None, {}))
    if load is not None and LOADS not in values:
        note(load.line, {LOADS: load.owner, **_prefixed(LOADS, given)})
    if is_trainer(str(values.get(LOADS))):
        line, init = lines.get(_INIT, 1), values.pop(_INIT, {})
        init = init if isinstance(init, dict) else {"dtype": init} if init is not None else {}
        note(line, _prefixed(LOADS, init))
    trainer = model_wrappers().get(str(values.get(LOADS)))
    if trainer is not None:
        settings = [option.name for option in trainer.options]
        for call in calls:
            if call.name.endswith(trainer.loss_ending):
                note(call.line, {**_some(call.options, *settings), "loss": call.name})
        if "max_seq_length" in named.attributes:
            note(1, {"max_seq_length": named.read(named.attributes["max_seq_length"])})
    if _LONGEST in named.attributes:  # which is set after the tokenizer is loaded
        values[f"tokenizer.{_LONGEST}"] = named.read(named.attributes[_LONGEST])
        lines.setdefault(f"tokenizer.{_LONGEST}", 1)
    note(1, {f"{IMPORT}{module}": True for module in sorted(named.modules)})
    note(1, _prefixed(ENVIRONMENT, {n: named.read(v) for n, v in named.environment.items()}))
    for name in named.names:
        several = named.named(name) if name.lower() in _LENGTHS else []
        if len(several) == 1 and isinstance(several[0], int):
            note(1, {"length": several[0]})
    return values, lines


def _without_earlier(calls: Sequence[Call]) -> tuple[Sequence[Call], dict[str, Any]]:
    """`calls` without those of trainers that one of another class follows, whose names are noted.

    Arguments go with their trainer: SFTConfig with SFTTrainer.
    """
    trainers = [call.name for call in calls if is_trainer(call.name) and call.options]
    earlier = tuple(name for name in dict.fromkeys(trainers) if name != trainers[-1])
    own = trainers[-1].removesuffix("Trainer") if trainers else ""
    dropped = {f"{name.removesuffix('Trainer')}Config" for name in earlier} - {f"{own}Config"}
    left = [call for call in calls if call.name not in {*earlier, *dropped}]
    return left, {EARLIER: list(earlier)} if earlier else {}


def _parsed_arguments(
    parser: Call, named: Values, options: Mapping[str, Any], arguments: Container[str]
) -> dict[str, Any]:
    """What a parser of dataclasses makes of `options`: training arguments, and their class."""
    stated = {name: value for name, value in options.items() if name not in named.own}
    classes = re.findall(r"\w+", repr(parser.arguments))
    holding = [name for name in classes if _holds_arguments(name, arguments)]
    return {**named.training, **stated, **({ARGUMENTS: holding[0]} if holding else {})}


def _handed_over(call: Call, adapters: Container[str], arguments: Container[str]) -> dict[str, Any]:
    """What a call hands to a library that trains; empty where it is of another kind.

    Args:
        adapters: configs of PEFT but for LoRA's.
        arguments: classes of training arguments.
    """
    if _holds_arguments(call.name, arguments):
        return {ARGUMENTS: call.name, **call.options}
    if is_trainer(call.name) and call.options:
        of_old_trl = _some(call.options, "max_seq_length", "max_length", "packing")  # before 0.13
        old = _prefixed("Trainer", dict.fromkeys(OLD_ARGUMENTS & call.options.keys(), True))
        return {"Trainer": call.name, **_loaded_by(call), **of_old_trl, **old}
    if call.name in model_wrappers() and call.arguments:
        options = call.options.get("model_kwargs", {})
        model_options = options if isinstance(options, dict) else {}
        return {LOADS: call.name, **_prefixed(LOADS, {"model": call.arguments[0], **model_options})}
    if call.name == _QUANTISES:
        return _prefixed(call.name, call.options)
    if call.name == LORA or call.name in adapters:
        return {call.name: True, **_prefixed(call.name, call.options)}
    if call.name == "get_peft_model":
        return {call.name: call.owner or True, **_prefixed(call.name, call.options)}
    if call.name in _PREPARES:
        return {_PREPARES[0]: call.options.get("use_gradient_checkpointing", True)}
    return {call.name: True} if call.name == "gradient_checkpointing_enable" else {}


def _holds_arguments(name: str, arguments: Container[str]) -> bool:
    """Whether it is a class of training arguments, of `arguments` or derived by the script."""
    return name.endswith(TRAINING) or name in arguments


def _loaded_by(trainer: Call) -> dict[str, Any]:
    """What loads the model where its name is what the trainer is given, as TRL's takes it."""
    model = trainer.options.get("model", next(iter(trainer.arguments), None))
    return {LOADS: trainer.name, f"{LOADS}.model": model} if isinstance(model, str) else {}


def is_trainer(name: str) -> bool:
    """Whether a class trains: one of a library, or one that a script derives from it."""
    return name.endswith("Trainer")


def model_wrappers() -> dict[str, Trainer]:
    """Classes that hold a model of transformers, with the trainer of each."""
    wrapping = (trainer for trainer in list_trainers().values() if trainer.model_class)
    return {trainer.model_class.rpartition(".")[2]: trainer for trainer in wrapping}


def _argument_classes() -> frozenset[str]:
    """Classes of training arguments, but for those that a script derives."""
    declared = (trainer.config_class for trainer in list_trainers().values())
    return _OTHER_ARGUMENTS | {name.rpartition(".")[2] for name in declared if name}


def _prefixed(prefix: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in options.items()}


def _some(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}
