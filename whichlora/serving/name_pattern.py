"""Regular expressions that strangers write, matched in a time that their length bounds.

`re` takes time that is exponential in some. A pattern here passes sets of places in a name instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce

Places = frozenset[int]
Matcher = Callable[[str, Places], Places]  # the places of a name where a match that starts may end

_ATOM = re.compile(r"\[\^?[\w.-]+\]|\\[.dw_-]|[^\\\[\](){}*+?|^$]")
_MOST_DEPTH, _MOST_CHARACTERS = 16, 500


def search(pattern: str) -> Callable[[str], bool]:
    r"""Whether a name has a match of `pattern` somewhere.

    It may have characters, sets of them, `\d`, `\w`, groups, `|`, `*`, `+`, `?`, `^` and `$`.

    Kind: exact. Source: ECMA-262's regular expressions, which C++ has.

    Raises:
        ValueError: where it has other parts.
    """
    if len(pattern) > _MOST_CHARACTERS:
        raise ValueError(f"more than {_MOST_CHARACTERS} characters")
    reader = _Reader(pattern)
    matcher = reader.either()
    if reader.rest:
        raise ValueError(f"{reader.rest!r} is not understood")
    return lambda name: bool(matcher(name, frozenset(range(len(name) + 1))))


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
            return lambda name, starts: starts | once(name, starts)
        if self.took("*"):
            return lambda name, starts: starts | _often(once, name, starts)
        if self.took("+"):
            return lambda name, starts: _often(once, name, starts)
        return once

    def once(self) -> Matcher:
        if self.took("("):
            self.took("?:")
            self.depth += 1
            if self.depth > _MOST_DEPTH:
                raise ValueError(f"more than {_MOST_DEPTH} groups in each other")
            inner = self.either()
            self.depth -= 1
            if not self.took(")"):
                raise ValueError("a group has no end")
            return inner
        if self.took("^"):
            return lambda name, starts: starts & {0}
        if self.took("$"):
            return lambda name, starts: starts & {len(name)}
        atom = _ATOM.match(self.rest)
        if atom is None:
            raise ValueError(f"{self.rest!r} is not understood")
        self.took(atom.group())
        try:
            one = re.compile(atom.group())
        except re.error as error:  # [9-0]
            raise ValueError(f"{atom.group()!r}: {error}") from None
        return lambda name, starts: frozenset(
            place + 1 for place in starts if place < len(name) and one.fullmatch(name[place])
        )


def _often(once: Matcher, name: str, starts: Places) -> Places:
    """Where one or more matches after each other may end."""
    found = new = once(name, starts)
    while new:
        new = once(name, new) - found
        found |= new
    return found
