"""What an importer is, and what becomes of each key that it reads."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports.python_values import Unread
from whichlora.methods import list_methods
from whichlora.spec.options import Option, OptionValue
from whichlora.spec.results import FileKey
from whichlora.spec.run import (
    ALL_LINEAR,
    FOUR_BIT_BNB,
    OPTIMIZER_NAMES,
    RunConfig,
    usual_optimizer,
)
from whichlora.spec.targets import PATTERN
from whichlora.spec.versions import Libraries
from whichlora.spec.words import meant
from whichlora.store.models import find_copy, named_by_path, near_matches
from whichlora.units import counted

_SWITCHES = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_COMPUTED = "is computed, which is not read"
_OF_SHELL = "has a variable that the file does not set"
_NAMES = re.compile(r"[\w.,\s-]*")
_SHORT = 3  # letters of keys that others are never taken for
_PATH = re.compile(r"^[/.~]|\\|/.*/|/$")  # what no hub id looks like
_OF_IMAGES = re.compile(r"image|pixels?\b|vision|vit\b|vit_|multi_modal|aligner", re.IGNORECASE)
# Classes and models that are made for images; others read them, too.
_FOR_IMAGES = re.compile(r"VL(?!L)|[Vv]ision|Image|[Ll]lava|[Pp]ixtral")
_LOADS = "from_pretrained"  # whose value is a class
_PLAIN = RunConfig(model="")
READ_AS = "read as"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A run as files of another tool describe it.

    Args:
        path: the file that was read, or the first of them.
        tool: name of the importer.
        settings: one value of each, by the names that `combinations.grid` takes.
        unknown: keys that the importer does not know, and so did not use; meant: those that some
            of them are spelled like.
        without_effect: keys that change neither bytes nor time of a step.
        assumed: key and what was predicted in its place.
        refused: setting → why the file's value can't be predicted; the user's own value may.
        epochs: passes over its data; None where it counts steps.
        eval_batch_size: rows that an evaluation reads at once; 0 where there is none.
        shows_images: its keys or its model have to do with images, so that its rows have some.
        is_lower_bound: something that is assumed away takes memory.
        keys: of the file, by the setting that each alone says.
        oldest: month whose releases take all that a script of older ones asks for; empty for none.
    """

    path: str
    tool: str
    settings: Mapping[str, Any]
    unknown: tuple[str, ...] = ()
    meant: Mapping[str, str] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    epochs: float | None = None
    eval_batch_size: int = 0
    shows_images: bool = False
    is_lower_bound: bool = False
    keys: Mapping[str, FileKey] = field(default_factory=dict)
    oldest: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: unknown keys, assumptions, and whose file it is."""
        near = {name: f"{name} ({key}?)" for name, key in self.meant.items()}
        named = ", ".join(near.get(name, name) for name in self.unknown)
        unknown = [f"unknown keys, not used: {named}"] if self.unknown else []
        read = f"{READ_AS} {self.tool}"
        if self.without_effect:
            keys = counted(len(self.without_effect), "key")
            read += f"; {keys} without effect on memory and time of a step"
        return tuple(f"{self.path}: {text}" for text in (*unknown, *self.assumed, read))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the processes of a run are started, as far as its files say.

    Args:
        gpus: over all nodes; None is not said.
        accelerate: accelerate's config file, or the same keys as options of its launcher.
        environment: variables that the command sets.
        has_launcher: another program than the tool's own starts the processes.
        trainer: whose file the user says it is; empty is not said.
        libraries: versions that it runs with, which decide defaults.
        states_libraries: the user gives them.
        pins: those that the files install; empty where the user states versions. A tool that has
            another trainer in place of its own returns no `libraries` for them.
        tag: of the container's image that it runs in; empty where there is none.
        repeated: as of the command.
        deepspeed_configs, fsdp_configs: those of the tool.
        read_file: JSON file that another file names → its content.
    """

    gpus: int | None = None
    nodes: int = 1
    accelerate: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    has_launcher: bool = False
    program: str = ""
    trainer: str = ""
    libraries: Libraries = Libraries()  # noqa: RUF009
    states_libraries: bool = False
    pins: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    repeated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    deepspeed_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fsdp_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    read_file: Callable[[str, str], Mapping[str, Any]] = lambda where, name: {}


class Keys:
    """The keys of a file, and what became of each.

    Args:
        values: by key.
        where: where a key stands, such as "axolotl.yaml:3:1".
        from_shell: keys that a command line has, where "$" starts a variable.
        asked_model: that the user names; empty for the file's.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: Callable[[str], str],
        *,
        from_shell: Collection[str] = (),
        asked_model: str = "",
    ) -> None:
        self._values = values
        self._where = where
        self._from_shell = from_shell
        self.asked_model = asked_model
        self.used: dict[str, None] = {}
        self.assumed: list[str] = []
        self.refused: dict[str, str] = {}
        self.unknown: dict[str, None] = {}  # of files beside this one
        self.saying: dict[str, FileKey] = {}  # by setting
        self._names_in_file: Mapping[str, str] | None = None  # where they are renamed
        self.eval_batch_size = 0
        self.is_lower_bound = False
        self.oldest = ""

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names_in_file(self) -> tuple[str, ...]:
        """All keys, in their order."""
        return tuple(self._values)

    def states_none(self, name: str) -> bool:
        """Whether the key has an empty value, which switches off what has a default."""
        return name in self._values and self._values[name] is None

    def under(self, prefix: str) -> list[str]:
        """Names after `prefix` and a dot, in their order."""
        start = f"{prefix}."
        return [name.removeprefix(start) for name in self._values if name.startswith(start)]

    def renamed(self, names: Mapping[str, str]) -> Keys:
        """The keys of `names` under their new names; notes and refusals are shared."""
        keys = self._with({new: self.raw(old) for old, new in names.items() if old in self})
        keys._names_in_file = {new: old for old, new in names.items()}
        return keys

    def over(self, defaults: Mapping[str, Any]) -> Keys:
        """The same keys, and those of `defaults` that are not stated."""
        return self._with({**defaults, **self._values})

    def take(self, values: Mapping[str, Any]) -> None:
        """Add what the file says under other names, where it has no value of these."""
        self._values = {**values, **self._values}

    def _with(self, values: Mapping[str, Any]) -> Keys:
        keys = Keys(values, self._where, asked_model=self.asked_model)
        keys.assumed, keys.refused, keys.used = self.assumed, self.refused, self.used
        keys.saying, keys._names_in_file = self.saying, self._names_in_file
        return keys

    def where(self, name: str) -> str:
        return f"{self._where(name)}: {name}"

    def fault(self, name: str, text: str) -> ConfigError:
        shown = repr(self._values.get(name))
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return ConfigError(f"{self.where(name)}: {shown} {text}")

    def raw(self, name: str) -> Any:
        """The value as it is; None where the key is missing or empty."""
        value = self._values.get(name)
        self.used[name] = None
        if self._has_variable(name):
            raise self.fault(name, f"{_OF_SHELL}; write the value")
        if isinstance(value, Unread):
            raise self.fault(name, f"{_COMPUTED}; write the value")
        return value

    def file(self, name: str) -> Any:
        """The value as it is; of a path whose folder the shell names, its last part."""
        folder, _, last = str(self._values.get(name)).rpartition("/")
        if "$" in folder and "$" not in last and self._has_variable(name):
            self.used[name] = None
            return last
        return self.raw(name)

    def read_elsewhere(self, name: str) -> None:
        """Mark a key as read, whose content other keys hold."""
        self.used[name] = None

    def is_unread(self, name: str) -> bool:
        """Whether the value is computed, as a script may do."""
        return isinstance(self._values.get(name), Unread)

    def refuse_unread(self, setting: str, name: str) -> bool:
        """Whether the value is computed, or the shell's; then the user has to give `setting`."""
        why = _COMPUTED if self.is_unread(name) else _OF_SHELL if self._has_variable(name) else ""
        if why:
            self.refuse(setting, name, f"{self._values[name]!r} {why}")
        return bool(why)

    def _has_variable(self, name: str) -> bool:
        """Whether the value is a variable of the shell that the file does not set."""
        value = self._values.get(name)
        return name in self._from_shell and isinstance(value, str) and "$" in value

    def switched_on(self, words: Collection[str], *, without: Collection[str] = ()) -> str:
        """A key with one of `words` in its name that is on; empty where none is.

        Those in `without` do not count.

        Switches decide where there are some: numbers beside one that is off ask for nothing.
        """
        named = [
            name
            for name in self._values
            if name not in without and not set(re.split(r"[_.]", name)).isdisjoint(words)
        ]
        texts = {name: str(self._values[name]).lower() for name in named}
        switches = [name for name in named if texts[name] in ("true", "yes", "false", "no")]
        return next((name for name in switches or named if _is_on(texts[name])), "")

    def show_images(self, environment: Collection[str], model: str) -> bool:
        """Whether a key, a variable, the model or the class that loads it is of images."""
        off = ("false", "no", "none", "[]")
        named = [name for name, value in self._values.items() if str(value).lower() not in off]
        made_for = (model, str(self._values.get(_LOADS)))
        return any(map(_OF_IMAGES.search, (*named, *environment))) or any(
            map(_FOR_IMAGES.search, made_for)
        )

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        switch = _SWITCHES.get(str(value).lower())
        if switch is None:
            raise self.fault(name, "is neither true nor false")
        return switch

    def count(self, name: str, default: int) -> int:
        value = self.raw(name)
        if value is None:
            return default
        try:
            return int(value) if isinstance(value, str) else _whole(value)
        except ValueError:
            raise self.fault(name, "is not a whole number") from None

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.fault(name, "is not a number")
        return number

    def option(self, option: Option) -> OptionValue:
        """The value of a trainer's option, where the file has its key.

        Raises:
            ConfigError: a value of another type.
        """
        default = option.default
        kind = type(default) if default is not None else option.kind
        if kind is bool:
            return self.flag(option.name, bool(default))
        if kind is str:
            words = self.names(option.name)
            if len(words) == 1 or default is None:
                return words[0]
            text = f"are several; assumed: {default}, which holds the same tensors"
            self.assume(option.name, text)
            return default
        if kind is float:
            return self.number(option.name, 0.0)
        return self.count(option.name, 1)

    def word(self, name: str, default: str = "") -> str:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fault(name, "is not text")
        return value

    def model(self, *names: str) -> str:
        """The model that the user or the first of `names` gives; empty: it has to be asked for.

        A path that this host lacks means the model whose name it ends in.
        """
        if self.asked_model:
            self.used.update(dict.fromkeys(names))
            return self.asked_model
        name = next((each for each in names if each in self), names[0])
        if self.is_unread(name):
            self.refuse_several("model", name)
            return ""
        in_shell = self._has_variable(name)
        path = str(self._values[name]) if in_shell else self.word(name)
        if not in_shell and (os.path.exists(os.path.expanduser(path)) or not _PATH.search(path)):
            return path
        model_name = named_by_path(path)
        if model_name:
            self.assume(name, f"{path} is not on this host; taken as {model_name} by its name")
        elif find_copy(path.rstrip("/")) is not None:
            return path.rstrip("/")
        else:
            near = near_matches(path.rstrip("/"), limit=1)
            why = _OF_SHELL if in_shell else "is not on this host"
            example = f" (MODEL such as {near[0]})" if near else ""
            self.refuse("model", name, f"{path[:80]} {why}{example}")
        return model_name

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names, or one text that is split at commas."""
        value = self.raw(name)
        if value is None:
            return ()
        listed = value.split(",") if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise self.fault(name, "is not a list of names")
        return tuple(each.strip() for each in listed if each.strip())

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A mapping, or JSON of one, as a command line has it."""
        value = self.raw(name)
        if value is None:
            return {}
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, Mapping):
            raise self.fault(name, "is not a mapping")
        return {str(key): each for key, each in value.items()}

    def of_run(self, table: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
        """The fields of `RunConfig` that `table` names by key, as an exporter writes them."""
        settings: dict[str, Any] = {}
        for key, setting in table.items():
            self.says(setting, key)
            default = defaults.get(setting, getattr(_PLAIN, setting))
            if self.refuse_unread(setting, key):
                settings[setting] = default
            elif isinstance(default, bool):
                settings[setting] = self.flag(key, default)
            elif isinstance(default, int):
                settings[setting] = self.count(key, default)
            elif isinstance(default, float):
                settings[setting] = self.number(key, default)
            else:
                settings[setting] = self.word(key, default)
        return settings

    def like(
        self, written: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> str | None:
        """The value that an exporter writes with the keys of this file; None where none is.

        Args:
            written: value → its keys.
            defaults: of the tool, of every key that `written` has.
        """
        stated = {
            key: self.flag(key, default)
            if isinstance(default, bool)
            else self.count(key, default)
            if isinstance(default, int)
            else self.word(key, default)
            for key, default in defaults.items()
        }
        for value, keys in written.items():
            if {**defaults, **keys} == stated:
                return value
        return None

    def assume(self, name: str, text: str) -> None:
        """Note what is predicted in place of what `name` asks for."""
        self.used[name] = None
        self.assumed.append(f"{name}: {text}")

    def note_unknown(self, names: Iterable[str]) -> None:
        """Name keys of another file, such as accelerate's, that nothing reads."""
        self.unknown.update(dict.fromkeys(names))

    def refuse(self, setting: str, name: str, text: str) -> None:
        """Say that `name` can't be predicted, unless the user gives `setting`."""
        self.used[name] = None
        flag = f"--{setting.replace('_', '-')}"
        instead = f"pass {flag} to predict another"
        if setting == "model":  # which has no flag
            instead = "name the model before the file: whichlora estimate MODEL --from FILE"
        self.refused[setting] = f"{self.where(name)}: {text}; {instead}"

    def says(self, setting: str, name: str, values: Mapping[Any, Any] | None = None) -> None:
        """Note that `name` alone says `setting`: in the same values, or those of `values`."""
        names = self._names_in_file
        in_file = name if names is None else names.get(name)
        if in_file is not None:
            self.saying[setting] = FileKey(in_file, values or {})

    def refuse_several(self, setting: str, name: str) -> None:
        """Refuse a value that a script computes; the message has those that its name is set to."""
        value = self._values.get(name)
        values = [each for each in getattr(value, "values", ()) if isinstance(each, str)]
        shown = ", ".join(repr(each[:60]) for each in values[:4])
        self.refuse(
            setting, name, f"{value!r} is set to {shown}" if shown else f"{value!r} {_COMPUTED}"
        )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Who reads the files of one tool.

    Args:
        models: keys that name the model, one of which each of its files has.
        marks: keys that its files have, and those of others mostly lack.
        programs: scripts, modules, and commands with their subcommands that start it.
        read: keys → settings. What it reads of them counts as used.
        without_effect: keys that change neither bytes nor time of a step; a name that ends in "*"
            means every key that starts so.
        unmodelled: keys that do, and what is predicted where they are on.
        reads_files: whether it takes a file of its keys; else a command line alone.
        reads_commands: whether a program of another name may take its keys as arguments.
        reads_code: whether it takes calls of a Python script, and nothing else.
        commands_have: keys of which such a program has one; empty: none is needed.
        parses_whole: options of its own parser, beside which a script says nothing more.
        launch_configs: accelerate's files that come with it, by name, "deepspeed_" in front or not.
        deepspeed_configs: `zero_optimization` of DeepSpeed's files that come with it, by the name
            of the file without its suffix.
        fsdp_configs: `fsdp_config` by the word of the key `fsdp` that stands for it.
        epochs: the key of passes over the data, and what the tool takes without it.
        steps: the key of a number of steps.
        sections: keys that hold others, which are called "section.key".
        component: the key of a section that a text in its place means; empty: none.
        positional: the key of what stands before all options; empty: nothing does.
        configs: the keys of a configuration that comes with it, by the name that `--config` has;
            sections are in front of them. None where none come with it.
        configs_release: of the tool, whose configurations these are.
        images: of containers that start its program, without their tag.
    """

    name: str
    summary: str
    models: frozenset[str]
    marks: frozenset[str]
    programs: frozenset[str]
    read: Callable[[Keys, Launch], Mapping[str, Any]]
    without_effect: Collection[str] = ()
    unmodelled: Mapping[str, str] = field(default_factory=dict)
    reads_files: bool = True
    reads_commands: bool = True
    reads_code: bool = False
    commands_have: frozenset[str] = frozenset()
    parses_whole: frozenset[str] = frozenset()
    launch_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    deepspeed_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fsdp_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    epochs: tuple[str, float] = ("num_train_epochs", 3.0)
    steps: str = "max_steps"
    sections: frozenset[str] = frozenset()
    component: str = ""
    positional: str = ""
    configs: Callable[[str], Mapping[str, Any] | None] | None = None
    configs_release: str = ""
    images: tuple[str, ...] = ()

    def flat(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values` with the keys of its sections moved to the top level."""
        flat: dict[str, Any] = {}
        for name, value in values.items():
            if name in self.sections and isinstance(value, Mapping):
                flat |= {f"{name}.{key}": each for key, each in value.items()}
            elif name in self.sections and isinstance(value, str) and self.component:
                flat[f"{name}.{self.component}"] = value
            else:
                flat[name] = value
        return flat

    def imported(self, path: str, keys: Keys, launch: Launch, names: Collection[str]) -> Imported:
        """The run that `keys`, called `names`, describe.

        Raises:
            ConfigError: a value of another type than its key takes.
        """
        settings = self.read(keys, launch)
        name, default = self.epochs
        epochs = default if keys.is_unread(name) else keys.number(name, default)
        counts_steps = keys.is_unread(self.steps) or keys.count(self.steps, 0) > 0
        for name, assumed in self.unmodelled.items():
            if name in names and name not in keys.used:
                if _is_on(keys.raw(name)):
                    keys.assume(name, f"is not predicted; assumed: {assumed}")
                else:
                    keys.used.pop(name, None)
        unused = [name for name in names if name not in keys.used]
        idle = [name for name in unused if self.has_no_effect(name)]
        unknown = tuple(sorted({*unused, *keys.unknown} - set(idle)))
        return Imported(
            path=path,
            tool=self.name,
            settings=settings,
            unknown=unknown,
            meant={name: near for name in unknown if (near := self._meant(name, keys.used))},
            without_effect=tuple(sorted(idle)),
            assumed=tuple(keys.assumed),
            refused=keys.refused,
            epochs=None if counts_steps or epochs <= 0 else epochs,
            eval_batch_size=keys.eval_batch_size,
            shows_images=keys.show_images(launch.environment, settings["model"]),
            is_lower_bound=keys.is_lower_bound,
            keys=keys.saying,
            oldest=keys.oldest,
        )

    def _meant(self, name: str, read: Collection[str]) -> str:
        """The key that an unknown one is spelled like, such as micro_batch_sise; else empty.

        Args:
            read: keys that the importer asked for, whether they are there or not.
        """
        known = {*read, *self.unmodelled, *self.without_effect} - {name}
        return meant(name, [each for each in known if len(each) > _SHORT])

    def has_no_effect(self, name: str) -> bool:
        """Whether a key changes neither bytes nor time of a step, as far as it is known."""
        stems = tuple(key[:-1] for key in self.without_effect if key.endswith("*"))
        return name in self.without_effect or name in self.unmodelled or name.startswith(stems)


def _is_on(value: Any) -> bool:
    return str(value).lower() not in ("none", "false", "no", "0", "0.0", "", "[]", "{}")


def adapter_method(quant: str, *, use_dora: bool) -> str:
    """The method with this `peft.LoraConfig` and this storage of the base."""
    four_bit = quant in FOUR_BIT_BNB
    return next(
        method.name
        for method in list_methods().values()
        if method.peft_class == "peft.LoraConfig"
        and bool(method.peft_config(_PLAIN).get("use_dora")) == use_dora
        and (method.base_quant in FOUR_BIT_BNB) == four_bit
    )


def full_method() -> str:
    """The method that trains every weight."""
    return next(method.name for method in list_methods().values() if method.trains_base)


def method_settings(
    quant: str, *, adapts: bool, use_dora: bool, targets: tuple[str, ...]
) -> dict[str, Any]:
    """The method, the storage of the base where the method has another, and the targets."""
    name = adapter_method(quant, use_dora=use_dora) if adapts else full_method()
    settings: dict[str, Any] = {"method": name}
    if quant != list_methods()[name].base_quant:
        settings["quant"] = quant
    if adapts:
        settings["target_modules"] = targets
    return settings


def targets(keys: Keys, name: str, *, default: tuple[str, ...]) -> tuple[str, ...]:
    """The names of adapted layers.

    Args:
        default: what PEFT takes where there are none.
    """
    names = names_or_pattern(keys, name)
    if not names:
        keys.assume(name, f"is missing; assumed: {', '.join(default)}, as PEFT has it")
        return default
    return (ALL_LINEAR,) if names == ("all_linear",) else names


def names_or_pattern(keys: Keys, name: str) -> tuple[str, ...]:
    """A list of names, or one text: a name, or a pattern as PEFT takes it."""
    text = keys.raw(name)
    if isinstance(text, str) and not _NAMES.fullmatch(text):
        return (PATTERN + text,)
    names = keys.names(name)
    if any(not _NAMES.fullmatch(each) for each in names):
        keys.refuse("target_modules", name, "a list of patterns: PEFT takes one text of them")
    return names


def optimizer(keys: Keys, name: str, libraries: Libraries) -> str:
    """The optimizer that `name` states, or the default of the Trainer's release."""
    optim = keys.word(name, usual_optimizer(libraries))
    if optim not in OPTIMIZER_NAMES:
        predicted = ", ".join(OPTIMIZER_NAMES)
        keys.refuse("optimizer", name, f"{optim!r} is not predicted; {predicted} are")
    return OPTIMIZER_NAMES.get(optim, _PLAIN.optimizer)
