"""Settings that a member of an axis declares for itself: a parallel strategy, a trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from whichlora.errors import ConfigError
from whichlora.spec.numeric import is_number
from whichlora.spec.words import meant

_WITH_SUFFIX = re.compile(r"(?P<whole>\d{1,15})(?P<decimals>\.\d+)?(?P<suffix>[kKmMgGtT])")
MOST_NUMBER = 10**12  # keeps later arithmetic finite
OptionValue = bool | int | float | str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A setting of one member; flags and plan keys are built from it.

    Args:
        name: as the member's own library spells it.
        default: its type is the type of the setting; None: the member decides.
        kind: the type of the setting where `default` is None; a whole number where nobody says.
        choices: accepted values of a text; several may be given where `default` is a tuple.
        least: of a whole number; has_suffixes: whether 8k and 8K mean one, too: 8000 and 8192.
        is_share: a number above 0, at most 1.
        since: the first release of the member's library that has it; empty where all do.
        choices_since: the same of a value.
        other_names: by which another tool that runs the library calls it.
        explain: why a word is none of `choices`, or a number is none; empty where there is nothing
            to say.
        stands_for: by a value that is none of its type, in lower case, what the library means by
            it; None: what it decides itself.
        joiner: between the values of a flag that stands there again; empty: the last one counts.
    """

    name: str
    summary: str
    default: OptionValue | None
    choices: tuple[str, ...] = ()
    kind: type[bool] | type[str] | type[float] | None = None
    least: int = 1
    has_suffixes: bool = False
    is_share: bool = False
    since: str = ""
    choices_since: Mapping[str, str] = field(default_factory=dict, hash=False)
    other_names: tuple[str, ...] = ()
    explain: Callable[[str], str] | None = None
    stands_for: Mapping[OptionValue, OptionValue | None] = field(default_factory=dict, hash=False)
    joiner: str = ""

    def of(self, stated: Iterable[tuple[str, OptionValue]]) -> OptionValue | None:
        """Its value among (name, value) pairs, or the default."""
        return dict(stated).get(self.name, self.default)

    def whole(self, stated: Iterable[tuple[str, OptionValue]], *, unstated: int = 0) -> int:
        """The same of a whole number; `unstated` where the member decides."""
        value = self.of(stated)
        return unstated if value is None else int(str(value))

    def number(self, stated: Iterable[tuple[str, OptionValue]]) -> float:
        """The same of a number that has a default."""
        return float(str(self.of(stated)))

    def flag(self, stated: Iterable[tuple[str, OptionValue]]) -> bool:
        """The same of true or false."""
        return bool(self.of(stated))

    def text(self, stated: Iterable[tuple[str, OptionValue]]) -> str:
        """The same of a word that has a default."""
        return str(self.of(stated))

    def checked(self, value: OptionValue) -> OptionValue | None:
        """`value` as it is spelled, where it is accepted; None where the member decides.

        Raises:
            ConfigError: it is not.
        """
        spelled = self.spelled(value)
        return spelled if spelled is None else self._of_type(spelled)

    def _of_type(self, value: OptionValue) -> OptionValue:
        if self.choices:
            if isinstance(value, bool):  # a library's true beside its words
                value = str(value).lower()
            if isinstance(value, int):  # a version, such as 1
                value = str(value)
            value = self._as_choice(value)
            of_choices = value if isinstance(self.default, tuple) else (value,)
            words: Iterable[object] = of_choices if isinstance(of_choices, tuple) else ()
            if not isinstance(value, tuple | str) or any(w not in self.choices for w in words):
                if self.explain is not None and (why := self.explain(str(value))):
                    raise ConfigError(f"{self.name}: {_shown(value)} {why}")
                near = meant(str(value), self.choices)
                hint = f"did you mean {near}; " if near else ""
                raise ConfigError(
                    f"{self.name}: {_shown(value)} is not accepted; {hint}accepted are "
                    f"{', '.join(self.choices)}"
                )
            return value
        if isinstance(self.default, bool) or self.kind is bool:
            if not isinstance(value, bool):
                raise ConfigError(
                    f"{self.name}: {value!r} is neither true nor false{self._or_words()}"
                )
            return value
        if self.kind is str:
            if is_number(value):  # one of a list, or GB/s
                value = str(value)
            if not isinstance(value, str):
                raise ConfigError(f"{self.name}: {_shown(value)} is not a text")
            return value
        if isinstance(self.default, float) or self.kind is float:
            if not is_number(value):
                raise ConfigError(f"{self.name}: {value!r} is not a number")
            if not abs(value) <= MOST_NUMBER:  # nor is not-a-number
                raise ConfigError(f"{self.name}: {value!r} is out of range; give a usual number")
            if self.is_share and not 0 < value <= 1:
                fault = f"{value:g} is no share between 0 and 1, such as 0.9"
                raise ConfigError(f"{self.name}: {fault}")
            return float(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < self.least:
            if self.explain is not None and (why := self.explain(str(value))):
                raise ConfigError(f"{self.name}: {value!r} {why}")
            raise ConfigError(
                f"{self.name}: {value!r} is not a whole number from {self.least} on"
                f"{self._or_words()}"
            )
        if value > MOST_NUMBER:
            raise ConfigError(f"{self.name}: is above {MOST_NUMBER:,}; give a usual number")
        return value

    def _or_words(self) -> str:
        words = [str(word) for word in self.stands_for]
        return f", nor one of {', '.join(words)}" if words else ""

    def spelled(self, value: OptionValue) -> OptionValue | None:
        """`value` as the member spells it; None where it says that the member decides."""
        word = value.lower() if isinstance(value, str) else value
        if isinstance(word, str | int) and word in self.stands_for:
            return self.stands_for[word]
        if self.has_suffixes and isinstance(value, str):
            return with_suffix(value)
        return self._as_choice(value)

    def _as_choice(self, value: OptionValue) -> OptionValue:
        """`value` as `choices` spell it, whatever its case: Ollama's tags write q4_K_M."""
        if isinstance(value, tuple):
            return tuple(str(self._as_choice(word)) for word in value)
        if not isinstance(value, str) or value in self.choices:
            return value
        spellings = {choice.lower(): choice for choice in self.choices}
        return spellings.get(value.lower(), value)


def written(text: str) -> OptionValue:
    """The value that a command line writes as `text`: true, false, a number or the text."""
    switches = {"true": True, "false": False}
    if text.lower() in switches:
        return switches[text.lower()]
    for number in (int, float):
        try:
            value: int | float = number(text)
        except ValueError:
            continue
        return value
    return text


def with_suffix(text: str) -> OptionValue:
    """The whole number that 10k (10,000), 10K (10,240) and 25.6k mean; other texts as they are.

    Source: vLLM 0.33.0 utils/argparse_utils.py:30 `human_readable_int`, which cuts off what is
    left of a number, and takes no decimals before a capital letter.
    """
    match = _WITH_SUFFIX.fullmatch(text.strip())
    if match is None or (match["decimals"] and match["suffix"].isupper()):
        return text
    base = 1024 if match["suffix"].isupper() else 1000
    factor: int = base ** ("kmgt".index(match["suffix"].lower()) + 1)
    whole = match["whole"] + (match["decimals"] or "")
    return int(float(whole) * factor) if match["decimals"] else int(whole) * factor


def known(
    options: Sequence[Option], asked: Mapping[str, OptionValue], *, setting: str, owner: str
) -> None:
    """Refuse what `owner` does not declare.

    Raises:
        ConfigError: a name in `asked` is none of `options`.
    """
    names = [option.name for option in options]
    for name in asked:
        if name not in names:
            accepted = f"whose options are {', '.join(names)}" if names else "which has none"
            raise ConfigError(f"{setting}: {name!r} is no option of {owner}, {accepted}")


def by_own_names(
    options: Sequence[Option], stated: Iterable[tuple[str, OptionValue]]
) -> tuple[tuple[str, OptionValue], ...]:
    """`stated` with each option and value as it is spelled; one other name may mean several.

    What says that the member decides is left out.
    """
    pairs: dict[str, OptionValue | None] = {}
    for name, value in stated:
        named = [each for each in options if name == each.name or name in each.other_names]
        pairs |= {option.name: option.spelled(value) for option in named} or {name: value}
    return tuple(sorted((name, value) for name, value in pairs.items() if value is not None))


def filled(
    options: Sequence[Option], asked: Mapping[str, OptionValue]
) -> dict[str, OptionValue | None]:
    """Every option's value: the one asked for, where it is accepted, or the default."""
    return {
        option.name: option.checked(asked[option.name]) if option.name in asked else option.default
        for option in options
    }


def _shown(value: OptionValue) -> str:
    return repr(",".join(value)) if isinstance(value, tuple) else repr(value)
