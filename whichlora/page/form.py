"""The questions of the page: its fields, what they mean as settings, and as a command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from whichlora.errors import ConfigError
from whichlora.methods import list_methods
from whichlora.parallel import list_strategies
from whichlora.serving import list_engines
from whichlora.spec import run as specs
from whichlora.spec.parallel import AUTO
from whichlora.store.gpus import one_number
from whichlora.trainers import list_trainers
from whichlora.workflow import combinations
from whichlora.workflow.whole_training import NO_FILES, Data, FromFiles

Kind = Literal["text", "count", "number", "choice", "switch", "file"]
Question = Mapping[str, str]  # values by name of a field; one that is left out has its default

_RUN = specs.RunConfig(model="any")
_SWITCH = ("", "yes", "no")
_NOT_HERE = ("auto", "cpu")  # what a command finds out about its own machine
_EVERY = ("", "all")
DATA = ("data", "samples", "epochs")  # what is learned
_BESIDE_A_RUN = ("gpu", "from", *DATA)
NEXT_FILE = "/"  # between the names of files, which hold none


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One setting that the page asks for.

    Args:
        name: of the setting, as `RunConfig` or `ParallelConfig` calls it.
        default: as text; empty leaves the setting to the run.
        choices: accepted values, each with what it is; none where any text is.
        phase: that reads it; empty for both.
        rare: folded away until it is asked for.
        hint: what the label leaves open.
        accept: endings of file names; several are taken where `several` says so.
    """

    name: str
    label: str
    kind: Kind = "text"
    default: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    phase: str = ""
    rare: bool = False
    hint: str = ""
    accept: tuple[str, ...] = ()
    several: bool = False

    def value(self, text: str) -> Any:
        """`text` as the setting takes it; what is no number stays, and is refused by its name."""
        if self.kind == "count":
            return int(text) if text.isascii() and text.isdecimal() else text
        if self.kind == "number":
            return _number(text)
        return text == "yes" if self.kind == "switch" else text

    def flag(self, text: str) -> list[str]:
        """`text` as the words of a command line."""
        word = self.name.replace("_", "-")
        if self.kind == "switch":
            return [f"--{word}" if text == "yes" else f"--no-{word}"]
        if self.kind == "file":
            return [each for name in text.split(NEXT_FILE) for each in (f"--{word}", name)]
        return [f"--{word}", text]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


class _Described(Protocol):
    @property
    def summary(self) -> str: ...


def _members(members: Mapping[str, _Described]) -> tuple[tuple[str, str], ...]:
    return tuple((name, member.summary) for name, member in members.items())


def _words(choice: object) -> tuple[tuple[str, str], ...]:
    return tuple((word, "") for word in get_args(choice))


@cache
def fields() -> tuple[Field, ...]:
    """Every field, in the order of the page and of the command line."""
    default = {name: str(getattr(_RUN, name)) for name in specs.RunConfig.__slots__}
    unset = (("", "as the run has it"),)
    training: dict[str, Any] = {"phase": "finetune"}
    serving: dict[str, Any] = {"phase": "inference"}

    def count(name: str, label: str, **of_field: Any) -> Field:
        return Field(name=name, label=label, kind="count", default=default[name], **of_field)

    def choice(name: str, label: str, choices: Iterable[tuple[str, str]], **of_field: Any) -> Field:
        of_field = {"default": default.get(name, "")} | of_field
        return Field(name=name, label=label, kind="choice", choices=tuple(choices), **of_field)

    switches = tuple(zip(_SWITCH, ("as usual", "", ""), strict=True))
    strategies = ((AUTO, "the fastest that fits"), *_members(list_strategies()))
    return (
        Field(name="gpu", label="Card", hint="None: every card. Several: 2x3090, a6000."),
        Field(name="gpus", label="How many", kind="count", default="1"),
        Field(name="model", label="Model"),
        choice("phase", "What runs", (("finetune", "fine-tuning"), ("inference", "serving"))),
        Field(
            name="from",
            label="Script, notebook or file of a training",
            kind="file",
            hint="Read here, sent nowhere. What you fill in counts more.",
            accept=(".yaml", ".yml", ".json", ".sh", ".py", ".ipynb"),
            several=True,
        ),
        choice("method", "Method", _members(list_methods()), **training),
        count("seq_len", "Tokens per sequence", **training),
        Field(
            name="target_len",
            label="Tokens of the target",
            kind="count",
            hint="Of encoder-decoders, such as T5; empty: as many.",
            rare=True,
            **training,
        ),
        count("batch_size", "Batch per card", **training),
        count("r", "Rank", **training),
        choice("trainer", "Trainer", _members(list_trainers()), **training),
        Field(
            name="gradient_checkpointing",
            label="Checkpointing",
            kind="switch",
            choices=switches,
            **training,
        ),
        Field(
            name="data",
            label="Training data",
            kind="file",
            hint="JSONL, JSON, CSV or text: read here, sent nowhere.",
            accept=(".jsonl", ".json", ".csv", ".tsv", ".txt"),
            **training,
        ),
        Field(name="samples", label="or rows of full length", kind="count", **training),
        Field(name="epochs", label="Epochs", kind="number", default="1", **training),
        choice("serving", "Engine", _members(list_engines()), **serving),
        count("prompt_len", "Tokens of the prompt", **serving),
        count("max_new_tokens", "New tokens", **serving),
        Field(name="concurrency", label="Sequences at once", kind="count", **serving),
        Field(name="context", label="Longest context", kind="count", rare=True, **serving),
        choice("kv_cache", "Key-value cache", _words(specs.KvCache), rare=True, **serving),
        choice("parallel", "Strategy of several cards", strategies, default=AUTO, rare=True),
        Field(name="nodes", label="Machines", kind="count", default="1", rare=True),
        choice("quant", "Stored weights", (*unset, *_words(specs.Quant)), default="", rare=True),
        choice("precision", "Precision", _words(specs.Precision), default="auto", rare=True),
        choice("attn", "Attention kernel", _words(specs.AttentionKernel), rare=True),
        choice("optimizer", "Optimizer", _words(specs.Optimizer), rare=True, **training),
        choice("loss_head", "Loss", _words(specs.LossHead), rare=True, **training),
        count("gradient_accumulation_steps", "Micro-steps", rare=True, **training),
    )


def stated(question: Question) -> dict[Field, str]:
    """The fields of `question` that differ from their defaults and that its phase reads.

    Raises:
        ConfigError: no such field.
    """
    by_name = {field.name: field for field in fields()}
    if unknown := [name for name in question if name not in by_name]:
        raise ConfigError(f"{unknown[0]}: is not a setting; accepted are {', '.join(by_name)}")
    phase = question.get("phase") or by_name["phase"].default
    asked = dict(question)
    if asked.get("data"):  # has its own rows
        asked.pop("samples", None)
    elif not asked.get("samples"):  # epochs of nothing
        asked.pop("epochs", None)
    values = {field: asked.get(field.name, "").strip() for field in fields()}
    return {
        field: text
        for field, text in values.items()
        if text and text != field.default and field.phase in ("", phase)
    }


def cards(question: Question) -> list[str]:
    """The cards of `question`; none are all of the catalog.

    Raises:
        ConfigError: what only the machine that asks could say.
    """
    text = question.get("gpu", "").strip()
    if text.lower() in _EVERY:
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name.lower() in _NOT_HERE]:
        raise ConfigError(
            f"gpu: name a card, such as 4090, or memory such as 24GB, got {unknown[0]!r}"
        )
    return names


def with_number(question: Question) -> dict[str, str]:
    """`question`, whose only card has its number as a field of its own: "2x3090".

    Raises:
        ConfigError: another number stands there.
    """
    names = cards(question)
    if len(names) != 1:
        return {**question, "gpu": ",".join(names)}
    number, (name,) = one_number(names, stated=question.get("gpus", "1") not in ("1", ""))
    if number is None:
        return dict(question)
    return {**question, "gpu": name, "gpus": str(number)}


def chosen_files(question: Question) -> list[Path]:
    """The files of another tool."""
    text = question.get("from", "")
    return [Path(name) for name in text.split(NEXT_FILE)] if text else []


def data(question: Question, said: FromFiles = NO_FILES) -> Data | None:
    """What is learned; None where the question does not say.

    Args:
        said: by files of another tool.

    Raises:
        ConfigError: a number out of range, or none.
    """
    values = {field.name: field.value(text) for field, text in stated(question).items()}
    for name, kind in (("samples", int), ("epochs", float)):
        if name in values and not isinstance(values[name], kind):
            raise ConfigError(f"{name}: {values[name]!r} is not a number")
    path, samples, epochs = (values.get(name) for name in ("data", "samples", "epochs"))
    return Data.asked(path, samples, epochs, said, offline=True)


def settings(question: Question) -> dict[str, list[Any]]:
    """`question` as `combinations` takes it.

    Raises:
        ConfigError: no such field, or settings that exclude each other.
    """
    values = {field.name: [field.value(text)] for field, text in stated(question).items()}
    for name in _BESIDE_A_RUN:
        values.pop(name, None)
    return combinations.with_concurrency(
        {**combinations.UNSTATED, **values},
        stated=values,
        beside_files=bool(chosen_files(question)),
    )


def command(question: Question, name: str = "estimate") -> str:
    """The command line that answers `question`, or `where` it fits."""
    values = {
        field: text
        for field, text in stated(question).items()
        if name != "where" or field.name not in ("gpu", *DATA)
    }
    words = ["whichlora", name]
    for field, text in values.items():
        if field.name == "model":
            words.insert(2, shlex.quote(text))
        else:
            words += [shlex.quote(word) for word in field.flag(text)]
    return " ".join(words)
