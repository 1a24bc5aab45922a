r"""Regular expressions that strangers write, matched in a time that their length bounds.

`re` never ends with some, such as twenty times `.*`. A pattern here passes sets of places in a name
instead. It may have characters, sets and classes of them, groups, `|`, `*`, `+`, `?`, `{2,5}`,
`^`, `$`, `\b`, and what goes before or comes after: `(?=`, `(?!`, `(?<=`, `(?<!`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, reduce

Places = frozenset[int]
Matcher = Callable[[str, Places], Places]  # the places of a name where a match that starts may end

_ATOM = re.compile(r"\[\^?(?:\\.|[^\\\[\]])+\]|\\[^a-zA-Z0-9]|\\[dDsSwW]|[^\\\[\](){}*+?|^$]")
_TIMES = re.compile(r"\{(\d{1,3})(,(\d{1,3})?)?\}")
_NAMED_GROUP = re.compile(r"\?P<\w+>")
_MOST_DEPTH, _MOST_CHARACTERS = 16, 2000


def search(pattern: str) -> Callable[[str], bool]:
    """Whether a name has a match of `pattern` somewhere.

    Kind: exact. Source: Python's `re`; ECMA-262's regular expressions, which C++ has.

    Raises:
        ValueError: where it has other parts.
    """
    matcher = _matcher(pattern)
    return lambda name: bool(matcher(name, _everywhere(name)))


@lru_cache(maxsize=16)  # a search asks again for each candidate
def whole(pattern: str) -> Callable[[str], bool]:
    """Whether a name matches `pattern` from its beginning to its end.

    Kind: exact. Source: Python's `re`.

    Raises:
        ValueError: where it has other parts.
    """
    matcher = _matcher(pattern)

    @lru_cache(maxsize=4096)
    def is_match(name: str) -> bool:
        return len(name) in matcher(name, frozenset({0}))

    return is_match


def _matcher(pattern: str) -> Matcher:
    if len(pattern) > _MOST_CHARACTERS:
        raise ValueError(f"more than {_MOST_CHARACTERS} characters")
    reader = _Reader(pattern)
    matcher = reader.either()
    if reader.rest:
        raise ValueError(f"{reader.rest!r} is not understood")
    return matcher


class _Reader:
    """Reads a pattern from its beginning to its end."""

    def __init__(self, rest: str) -> None:
        self.rest = rest
        self.depth = 0

    def took(self, text: str) -> bool:
        """Whether `text` was next, which is passed then."""
        is_next = self.rest.startswith(text)
        self.rest = self.rest[len(text) :] if is_next else self.rest
        return is_next

    def took_match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What was next, which is passed then."""
        found = pattern.match(self.rest)
        self.rest = self.rest[found.end() :] if found else self.rest
        return found

    def either(self) -> Matcher:
        ways = [self.row()]
        while self.took("|"):
            ways.append(self.row())
        return lambda name, starts: frozenset().union(*(way(name, starts) for way in ways))

    def row(self) -> Matcher:
        steps: list[Matcher] = []
        while self.rest and self.rest[0] not in "|)":
            steps.append(self.repeated())
        return lambda name, starts: reduce(lambda places, step: step(name, places), steps, starts)

    def repeated(self) -> Matcher:
        once = self.once()
        if self.took("?"):
            least, most = 0, 1
        elif self.took("*"):
            least, most = 0, None
        elif self.took("+"):
            least, most = 1, None
        elif times := self.took_match(_TIMES):
            least = int(times[1])
            most = int(times[3]) if times[3] else None if times[2] else least
        else:
            return once
        self.took("?")  # as few as will do: the same names match
        if most is not None and most < least:
            raise ValueError(f"at least {least} times and at most {most}")
        return lambda name, starts: _often(once, name, starts, least, most)

    def once(self) -> Matcher:
        if self.took("("):
            return self.group()
        if self.took("^"):
            return lambda name, starts: starts & {0}
        if self.took("$"):
            return lambda name, starts: starts & {len(name)}
        if self.took(r"\b"):
            return lambda name, starts: starts & _edges(name)
        atom = self.took_match(_ATOM)
        if atom is None:
            raise ValueError(f"{self.rest!r} is not understood")
        try:
            character = re.compile(atom.group())
        except re.error as error:  # [9-0]
            raise ValueError(f"{atom.group()!r}: {error}") from None
        return lambda name, starts: frozenset(
            place + 1 for place in starts if place < len(name) and character.fullmatch(name[place])
        )

    def group(self) -> Matcher:
        """What follows a parenthesis, up to its end."""
        around = next((each for each in _AROUND if self.took(each)), None)
        if around is None and not self.took("?:"):
            self.took_match(_NAMED_GROUP)
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise ValueError(f"more than {_MOST_DEPTH} groups in each other")
        inner = self.either()
        self.depth -= 1
        if not self.took(")"):
            raise ValueError("a group has no end")
        return _AROUND[around](inner) if around else inner


def _often(once: Matcher, name: str, starts: Places, least: int, most: int | None) -> Places:
    """Where `least` to `most` matches after each other may end; any number of them if None."""
    for _ in range(least):
        before, starts = starts, once(name, starts)
        if starts in (before, frozenset()):
            break  # no further match changes that
    ends = new = starts
    for _ in range(len(name) + 1 if most is None else most - least):
        new = once(name, new) - ends
        if not new:
            break
        ends |= new
    return ends


def _everywhere(name: str) -> Places:
    return frozenset(range(len(name) + 1))


def _edges(name: str) -> Places:
    r"""Where `\b` is: between a letter of a word and none."""
    return frozenset(edge.start() for edge in re.finditer(r"\b", name))


def _followed(is_so: bool) -> Callable[[Matcher], Matcher]:
    """Places from which a match starts (`is_so`), or none does."""

    def around(inner: Matcher) -> Matcher:
        @lru_cache(maxsize=1024)  # in groups within each other a place is asked for once
        def starts_at(name: str, place: int) -> bool:
            return bool(inner(name, frozenset({place})))

        return lambda name, starts: frozenset(
            place for place in starts if starts_at(name, place) is is_so
        )

    return around


def _preceded(is_so: bool) -> Callable[[Matcher], Matcher]:
    """Places at which a match ends (`is_so`), or none does."""

    def around(inner: Matcher) -> Matcher:
        @lru_cache(maxsize=1)
        def ends(name: str) -> Places:
            return inner(name, _everywhere(name))

        return lambda name, starts: starts & ends(name) if is_so else starts - ends(name)

    return around


_AROUND = {
    "?=": _followed(True),
    "?!": _followed(False),
    "?<=": _preceded(True),
    "?<!": _preceded(False),
}
