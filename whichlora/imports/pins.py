"""Install commands and headers of a script → the exact versions that it runs with.

Read are `pip install` of a shell script or of a notebook's cells, with the files that its `-r`
names, and a header of PEP 723. Of them "==" counts alone. A line under a condition counts where no
other one says something else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from whichlora.config.document import read_text
from whichlora.errors import ConfigError
from whichlora.imports.notebook import code_cells
from whichlora.imports.shell_lines import logical_lines
from whichlora.spec.versions import Libraries, is_version

_INSTALLS = re.compile(r"(?:^|[\s;&|!%(])pip[\d.]*\s+install\s+(?P<words>.*)", re.DOTALL)
_EXACT = re.compile(
    r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?\s*==\s*(?P<version>[^\s,;]+)\s*(?:;.*)?", re.DOTALL
)
_NAME = re.compile(r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?")
_HEADER = re.compile(r"^# /// script$(?P<lines>(?:\n#(?: .*)?$)+?)\n# ///$", re.MULTILINE)
_QUOTED = re.compile(r"\"([^\"\n]*)\"|'([^'\n]*)'")
_ENDS = frozenset(";&|")
_SHELL_CELL = re.compile(r"\s*%%(?:bash|sh|shell|script\s+(?:ba)?sh)\b.*\n")
_FILE = ("-r", "--requirement")
_UPGRADES = ("-U", "--upgrade")
_KNOWN = frozenset(each.name for each in fields(Libraries))  # whose versions formulas ask for


@dataclass(slots=True)
class _Pins:
    """What each library may be pinned to, as far as the lines are read."""

    versions: dict[str, set[str]] = field(default_factory=dict)

    def add(self, requirement: str, *, is_certain: bool) -> None:
        match = _EXACT.fullmatch(requirement.strip())
        name = _library(match["name"]) if match else ""
        if match is None or name not in _KNOWN or not is_version(match["version"]):
            return
        if is_certain:
            self.versions[name] = set()
        self.versions.setdefault(name, set()).add(match["version"])

    def upgrade(self, requirement: str) -> None:
        match = _NAME.fullmatch(requirement.strip())
        if match:
            self.versions.pop(_library(match["name"]), None)

    def exact(self) -> dict[str, str]:
        return {name: version for name, (version, *others) in self._sorted() if not others}

    def _sorted(self) -> list[tuple[str, list[str]]]:
        return [(name, sorted(each)) for name, each in sorted(self.versions.items())]


def pins_of(path: Path, text: str) -> Mapping[str, str]:
    """Library → version that the script at `path` pins, of those that a formula asks for."""
    pins = _Pins()
    if path.suffix == ".py":
        for header in _HEADER.finditer(text):
            for double, single in _QUOTED.findall(header["lines"]):
                pins.add(double or single, is_certain=True)
    else:
        for line in _shell_lines(text) if path.suffix == ".ipynb" else logical_lines(text):
            _read_line(line, path.parent, pins)
    return pins.exact()


def _shell_lines(text: str) -> Iterator[str]:
    """Lines of a notebook that the shell has, with what stands before "!" and "%"."""
    for source in code_cells(text) or ():  # the reader of its code refuses what is no notebook
        cell = _SHELL_CELL.match(source)
        if cell:
            yield from logical_lines(source[cell.end() :])
            continue
        for line in source.replace("\\\n", " ").splitlines():
            if line.lstrip()[:1] in ("!", "%"):
                yield line


def _read_line(line: str, folder: Path, pins: _Pins) -> None:
    install = _INSTALLS.search(line)
    words = _words(install["words"]) if install else []
    is_certain = not line[:1].isspace()
    names_file = False
    for word in words:
        option, _, value = word.partition("=")
        if names_file or (option in _FILE and value):
            _read_requirements(folder / (word if names_file else value), pins, is_certain)
        elif not word.startswith("-"):
            pins.add(word, is_certain=is_certain)
            if not set(_UPGRADES).isdisjoint(words):
                pins.upgrade(word)
        names_file = word in _FILE


def _words(text: str) -> list[str]:
    """The words of a command up to its end; none where the shell would not read them."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="".join(_ENDS))
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in lexer:
            if _ENDS.issuperset(word):
                return words
            words.append(word)
    except ValueError:
        return []
    return words


def _read_requirements(path: Path, pins: _Pins, is_certain: bool) -> None:
    """The lines of a file beside the script; nothing where it is not here."""
    if not path.is_file():
        return
    try:
        lines = read_text(path).splitlines()
    except ConfigError:
        return
    for line in lines:
        pins.add(line.partition(" #")[0], is_certain=is_certain)


def _library(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
