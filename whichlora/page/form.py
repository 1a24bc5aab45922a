"""The questions of the page: its fields, what they mean as settings, and as a command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, get_args

from whichlora.errors import ConfigError
from whichlora.methods import list_methods
from whichlora.parallel import list_strategies
from whichlora.serving import list_engines
from whichlora.spec import run as specs
from whichlora.spec.parallel import AUTO
from whichlora.trainers import list_trainers
from whichlora.workflow import combinations

Kind = Literal["text", "count", "choice", "switch"]
Question = Mapping[str, str]  # values by name of a field; one that is left out has its default

_RUN = specs.RunConfig(model="any")
_SWITCH = ("", "yes", "no")
_NOT_HERE = ("auto", "cpu", "all")  # what a command finds out about its own machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One setting that the page asks for.

    Args:
        name: of the setting, as `RunConfig` or `ParallelConfig` calls it.
        default: as text; empty leaves the setting to the run.
        choices: accepted values, each with what it is; none where any text is.
        phase: that reads it; empty for both.
        rare: folded away until it is asked for.
    """

    name: str
    label: str
    kind: Kind = "text"
    default: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    phase: str = ""
    rare: bool = False

    def value(self, text: str) -> Any:
        """`text` as the setting takes it; what is no number stays, and is refused by its name."""
        if self.kind == "count":
            return int(text) if text.isascii() and text.isdecimal() else text
        return text == "yes" if self.kind == "switch" else text

    def flag(self, text: str) -> list[str]:
        """`text` as the words of a command line."""
        word = self.name.replace("_", "-")
        if self.kind == "switch":
            return [f"--{word}" if text == "yes" else f"--no-{word}"]
        return [f"--{word}", text]


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
        Field(name="gpu", label="Card"),
        Field(name="gpus", label="How many", kind="count", default="1"),
        Field(name="model", label="Model"),
        choice("phase", "What runs", (("finetune", "fine-tuning"), ("inference", "serving"))),
        choice("method", "Method", _members(list_methods()), **training),
        count("seq_len", "Tokens per sequence", **training),
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
    values = {field: question.get(field.name, "").strip() for field in fields()}
    return {
        field: text
        for field, text in values.items()
        if text and text != field.default and field.phase in ("", phase)
    }


def card(question: Question) -> str:
    """The card of `question`, which a page can't see by itself.

    Raises:
        ConfigError: none, or what only the machine that asks could say.
    """
    name = question.get("gpu", "").strip()
    if not name or name.lower() in _NOT_HERE:
        got = f", got {name!r}" if name else ""
        raise ConfigError(f"gpu: name a card, such as 4090, or memory such as 24GB{got}")
    if "," in name:
        raise ConfigError(f"gpu: {name}: one card at a time; the table below has all")
    return name


def settings(question: Question) -> dict[str, list[Any]]:
    """`question` as `combinations` takes it.

    Raises:
        ConfigError: no such field, or settings that exclude each other.
    """
    values = {field.name: [field.value(text)] for field, text in stated(question).items()}
    values.pop("gpu", None)
    return combinations.with_concurrency(
        {**combinations.UNSTATED, **values}, states_batch_size="batch_size" in values
    )


def command(question: Question, name: str = "estimate") -> str:
    """The command line that answers `question`, or `where` it fits."""
    values = stated(question)
    words = ["whichlora", name]
    for field, text in values.items():
        if field.name == "model":
            words.insert(2, shlex.quote(text))
        elif field.name != "gpu" or name != "where":
            words += [shlex.quote(word) for word in field.flag(text)]
    return " ".join(words)
