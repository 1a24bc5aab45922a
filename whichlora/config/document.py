"""YAML text → data, with the line and column of every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError
from whichlora.store.written import write_files
from whichlora.units import MiB

MAX_BYTES = 2**20  # a config is a page of text; a data file given by mistake is not

_NULL = "tag:yaml.org,2002:null"
_TEXT = "tag:yaml.org,2002:str"

Loc = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A fault of the file, and the path of keys and indexes to it.

    Args:
        fault: the end of a sentence that starts with the key.
        accepted: what may stand there.
        hint: what the user may have meant.
        show_value: whether the value in the file says something about the fault.
        place: line and column, where `loc` is not enough to find them.
    """

    loc: Loc
    fault: str
    accepted: str = ""
    hint: str = ""
    show_value: bool = True
    place: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One YAML mapping, twice: as plain `data` and as the nodes that know their places.

    Args:
        is_file: whether faults are told with their line and column in `path`.
    """

    path: Path
    root: Any
    data: dict[Any, Any]
    is_file: bool = True

    def render(self, problem: Problem) -> str:
        """`problem` as one line: place, key, fault, value, what was meant, what is accepted."""
        located, name, node = self._locate(problem.loc)
        line, column = problem.place or located
        place = f"{self.path}:{line}:{column}: " if self.is_file else ""
        text = f"{place}{name or 'the file'}: {problem.fault}"
        if problem.show_value:
            text += f" (got {_describe(node)})"
        if problem.hint:  # first: what is accepted may be a long list
            text += f"; did you mean {problem.hint}"
        if problem.accepted:
            text += f"; accepted: {problem.accepted}"
        return text

    def error(self, problems: list[Problem]) -> ConfigError:
        """All `problems`, one line each, in the order of the file."""
        ordered = sorted(problems, key=lambda p: p.place or self._locate(p.loc)[0])
        return ConfigError("\n".join(dict.fromkeys(self.render(problem) for problem in ordered)))

    def place(self, key: str) -> str:
        """Path, line and column of `key`."""
        (line, column), *_ = self._locate((key,))
        return f"{self.path}:{line}:{column}"

    def structure_problems(self, *, empty: bool = True) -> Iterator[Problem]:
        """Keys that are lists or mappings, keys written twice, and keys without a value.

        Args:
            empty: whether a key without a value is a fault.
        """
        sections: list[tuple[Loc, Any]] = [((), self.root)]
        sections += [((key.value,), node) for key, node in self.root.value if node.id == "mapping"]
        for loc, mapping in sections:
            first_lines: dict[str, int] = {}
            for key, value in mapping.value:
                name, place = str(key.value), _place(key)
                if key.id != "scalar":
                    yield Problem(
                        loc=loc,
                        fault=f"has {_describe(key)} for a key",
                        accepted="plain text",
                        show_value=False,
                        place=place,
                    )
                    continue
                if name in first_lines:
                    yield Problem(
                        loc=(*loc, name),
                        fault=f"is given twice, first in line {first_lines[name]}",
                        accepted="each key once",
                        show_value=False,
                        place=place,
                    )
                elif empty and str(value.tag) == _NULL:
                    yield Problem(
                        loc=(*loc, name),
                        fault="is empty",
                        accepted="a value, or no such line",
                        show_value=False,
                        place=place,
                    )
                first_lines.setdefault(name, place[0])

    def _locate(self, loc: Loc) -> tuple[tuple[int, int], str, Any]:
        """Place, name and node of the deepest part of `loc` that the file has.

        A part that is no key or index of the file is skipped, such as the index of a lone value
        that a list setting also takes. A missing key ends the search.
        """
        node, place, names = self.root, _place(self.root), list[str]()
        for part in loc:
            if node.id == "mapping" and (pair := _find(node, part)):
                place, node = _place(pair[0]), pair[1]
                names.append(str(part))
            elif node.id == "mapping" and isinstance(part, str) and part.isidentifier():
                names.append(part)
                break
            elif node.id == "sequence" and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                place = _place(node)
                names.append(str(part))
        return place, ".".join(names), node


def _find(mapping: Any, part: str | int) -> tuple[Any, Any] | None:
    for key, value in mapping.value:
        if key.value == str(part):
            return key, value
    return None


def _place(node: Any) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _describe(node: Any) -> str:
    """The value as the user wrote it, on one line; text in quotes, so that '4' is not 4."""
    if node.id == "mapping":
        return "a mapping"
    if node.id == "sequence":
        return f"a list of {len(node.value)}"
    text = repr(node.value) if str(node.tag) == _TEXT else str(node.value)
    text = text or "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_document(path: Path) -> Document:
    """The YAML 1.2 mapping in `path`.

    Raises:
        ConfigError: no readable file, not UTF-8, not YAML, or not one mapping of text keys.
    """
    return parse_document(path, read_text(path), example="dataset: data.jsonl")


def parse_document(path: Path, text: str, *, example: str) -> Document:
    """The YAML 1.2 mapping that is `text`, read from `path`; raises as `read_document`.

    Args:
        example: a line that such a file has.
    """
    # Lazy: ruamel.yaml costs 30 ms, which `whichlora --help` need not pay.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.reader import ReaderError

    yaml = YAML(typ="safe", pure=True)
    yaml.allow_duplicate_keys = True  # `structure_problems` reports them
    try:
        root = yaml.compose(text)
        data: Any = None if root is None else yaml.constructor.construct_document(root)
    except ReaderError as error:
        line, column = _position(text[: error.position])
        raise ConfigError(
            f"{path}:{line}:{column}: character U+{error.character:04X} is not allowed in YAML; "
            "remove it"
        ) from None
    except YAMLError as error:
        raise ConfigError(_yaml_fault(path, error)) from None
    except RecursionError:
        raise ConfigError(
            f"{path}: lists or mappings are nested too deeply; no setting has five levels"
        ) from None
    except ValueError:  # a whole number of more digits than Python converts
        raise ConfigError(f"{path}: holds a number of thousands of digits; shorten it") from None
    if root is None:
        raise ConfigError(f"{path}: is empty; it needs at least the key {example.split(':')[0]}")
    if root.id != "mapping":
        line, column = _place(root)
        raise ConfigError(
            f"{path}:{line}:{column}: is not a mapping (got {_describe(root)}); "
            f"accepted: lines of the form 'key: value', such as '{example}'"
        )
    return Document(path=path, root=root, data=data)


def write_document(path: Path, data: Mapping[str, Any], *, comment: str) -> None:
    """Write `data` as YAML below the line `comment`.

    Raises:
        DataFileError: the file can't be written, or is one that WhichLoRA did not write.
    """
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)
    text = StringIO()
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(dict(data), text)
    content = f"# {comment}\n{text.getvalue()}".encode()
    write_files({path: content}, instead="name another file")


def read_text(path: Path, *, most_bytes: int = MAX_BYTES) -> str:
    """The text of a configuration. Raises: ConfigError: it can't be read."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}); give the path of a YAML file"
        ) from None
    if len(content) > most_bytes:
        raise ConfigError(
            f"{path}: is larger than {most_bytes // MiB} MiB; give the configuration, and the "
            "data as dataset.path"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _position(content[: error.start].decode("utf-8", "replace"))
        raise ConfigError(
            f"{path}:{line}:{column}: is not UTF-8 text (byte 0x{content[error.start]:02x}); "
            "save the file as UTF-8"
        ) from None


def _position(before: str) -> tuple[int, int]:
    """Line and column, from 1, of the character after the text `before`."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _yaml_fault(path: Path, error: Any) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
    fault = " ".join(str(getattr(error, "problem", None) or error).split())
    if "'\\t'" in fault:
        return f"{place}: a tab is not allowed here; indent with spaces"
    if "another document" in fault:
        return f"{place}: a second document starts here; keep one, without '---' lines between"
    if "constructor for the tag" in fault:
        tag = fault.rpartition("tag ")[2]
        return f"{place}: the tag {tag} is not accepted; write plain values"
    return f"{place}: is not YAML: {fault}; check quotes, brackets and colons near this place"
