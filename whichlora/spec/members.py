"""The members of an axis by name: the built-in ones, and those that installed packages add."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from whichlora.errors import ConfigError
from whichlora.spec.words import plain, unknown


class Named(Protocol):
    """What a plan, a command line and records know by its name."""

    @property
    def name(self) -> str: ...


Member = TypeVar("Member", bound=Named)


@lru_cache(maxsize=32)  # what is installed does not change while a process runs
def _installed(
    scan: Callable[..., Iterable[EntryPoint]], group: str, path: tuple[str, ...]
) -> tuple[EntryPoint, ...]:
    """The entry points of `group` that `scan` finds in the folders of `path`, `sys.path`."""
    return tuple(scan(group=group))


class Members(Generic[Member]):
    """Methods or trainers, by name.

    A built-in member may say in `also_called` what else people call it, and by that name what a
    user of it must know; of several members with one such name the first is meant.

    Another package adds a member with an entry point in the group `whichlora.<axis>` that loads a
    value of `member_type`.

    Args:
        kind: the word for one of them, as a setting is called.
        axis: its package within `whichlora`.
    """

    def __init__(
        self, kind: str, axis: str, member_type: type[Member], built_in: Iterable[Member]
    ) -> None:
        self.built_in: dict[str, Member] = {member.name: member for member in built_in}
        self.group = f"whichlora.{axis}"
        self._kind = kind
        self._type = member_type
        self._others: dict[str, tuple[Member, str]] = {}
        for member in self.built_in.values():
            for name, note in getattr(member, "also_called", {}).items():
                self._others.setdefault(plain(name), (member, note))

    def all(self) -> dict[str, Member]:
        """The built-in members, then those of installed packages.

        Raises:
            ConfigError: an entry point that does not load a member, or takes a name that exists.
        """
        members = dict(self.built_in)
        for point in _installed(entry_points, self.group, tuple(sys.path)):
            member = point.load()
            if not isinstance(member, self._type):
                raise ConfigError(
                    f"entry point {point.value!r}: is not a {self.group}.{self._type.__name__}; "
                    "uninstall it"
                )
            if member.name in members:
                raise ConfigError(
                    f"entry point {point.value!r}: {self._kind} {member.name!r} exists already; "
                    "rename it"
                )
            members[member.name] = member
        return members

    def get(self, name: str) -> Member:
        """The member called `name`.

        Raises:
            ConfigError: there is none.
        """
        member = self.built_in.get(self.own_name(name))
        if member is None:  # installed packages are asked only now: scanning them takes time
            members = self.all()
            if name not in members:
                raise ConfigError(unknown(self._kind, name, members))
            member = members[name]
        return member

    def own_name(self, name: str) -> str:
        """The name of the member that is also called `name`; `name` where there is none."""
        other = self._others.get(plain(name))
        return other[0].name if other and name not in self.built_in else name

    def other_name_note(self, name: str) -> str:
        """What a user must know who calls a member `name`; empty where that is nothing."""
        own = self.own_name(name)
        note = self._others[plain(name)][1] if own != name else ""
        return f"{name}: taken as {self._kind} {own}; {note}" if note else ""
