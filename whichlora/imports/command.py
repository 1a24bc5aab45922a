"""A shell script → the command that trains or serves: its program, its arguments, and its launcher.

Nothing is run and nothing is expanded but variables that the script itself sets, and whole numbers
in `$(( ))` and `$(expr )`.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports.shell_lines import CUT, logical_lines

_ENDS = ";&|<>()"
_MOST_JOINED_LINES = 200  # of one quoted text
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"([A-Za-z_][\w.]*)\+?=(.*)", re.DOTALL)
_OF_ONE = frozenset({"config"})  # options that take one value, whatever stands behind it
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\]|:?-([^{}$]*))?\})")
_ARRAY = re.compile(r"^([ \t]*(?:\w+ )?\w+)(\+?)=\(([^()]*)\)", re.MULTILINE)
_WHOLE_ARRAY = re.compile(r"\$\{\w+\[[@*]\]\}")
_ARGUMENTS = ("$@", "$*")  # of the script itself
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)|[\"']?\$\(expr ([^()]*)\)[\"']?")
_MARKED = re.compile("\x00([^\x00]*)\x00")  # which the lexer leaves whole
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_MOST_FACTOR = 10**9  # keeps a product of a hostile script small
_DRIVE = re.compile(r"\b[A-Za-z]:(?:\\[^\s\"'\\]+)+")  # of Windows, whose shell keeps backslashes
_FLAG = re.compile(r"--?[A-Za-z]")
# Variables that every program hears, and those that a tool's own command does.
_HEARD = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_HEARD_BY_TOOLS = ("NPROC_PER_NODE", "NNODES", "MAX_PIXELS")
_SCRIPT = ".py"
_CONTAINERS = frozenset({"docker", "podman"})
_BEFORE = frozenset({"exec", "nohup", "time", "srun", "sudo", "env"})
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_PYTHON = re.compile(r"python[\d.]*")
_WITH_FLAGS = re.compile(r"^[^#:'\"\n]+\s--[A-Za-z]", re.MULTILINE)  # no line of YAML has that
_MERGES = re.compile(r"\b(?:(?:llamafactory-cli|swift)\s+export|axolotl\s+merge-lora)\b")
_COMMAND = (
    r"^\s*(?:\w+=\S*\s+)*(?:(?:exec|nohup|time|srun)\s+)*"
    r"(?:(?:[\w./~-]*/)?(?:accelerate|{})(?:\.exe)?\s+[-\w$\"']|torchrun\s+\S|"
    r"deepspeed\s+[^:\s]|(?:docker|podman)\s+(?:container\s+)?run\s|"
    r"python[\d.]*\s+[-\w./$])"
)
Subcommands = Mapping[str, Collection[str]]
"""Commands of tools by their first word, with the second words that train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command that trains, or starts a serving engine.

    Args:
        program: stem of the script, module, or command and subcommand: "sft", "trl sft".
        script: path of a program in Python, as it is written; else empty.
        launcher: what starts its processes: "accelerate", "torchrun", "deepspeed"; or empty.
        launcher_options, options: by name, without dashes in front and with "_" within.
        files: words that are no option's value, such as the configuration.
        environment: variables that are set for it or exported.
        unseen: variables that it would hear and does not, as they are set and not exported.
        lost: options behind a comment that ends it, which do not reach it.
        cut_at: line of the comment that ends it, or the variables before it; 0: there is none.
        tag: of the container's image that it runs in; empty where there is none.
        repeated: values of each option that has one more than once.
    """

    program: str
    script: str = ""
    launcher: str = ""
    launcher_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    cut_at: int = 0
    tag: str = ""
    repeated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def is_script(text: str, tools: Subcommands) -> bool:
    """Whether `text` is a shell script, or one command line, whoever it starts."""
    names = "|".join(map(re.escape, tools))
    starts = re.compile(_COMMAND.replace("{}", names), re.MULTILINE)
    return text.startswith("#!") or any(find.search(text) for find in (starts, _WITH_FLAGS))


def only_command(path: Path, text: str, tools: Subcommands) -> Command:
    """The only command in `text` that trains, or starts a serving engine.

    Raises:
        ConfigError: there is none, or there are several.
    """
    commands = _commands(path, text, tools)
    if not commands and _MERGES.search(text):
        raise ConfigError(
            f"{path}: merges or exports a model, and trains nothing; what a merge takes is in "
            "whichlora explain MODEL --method lora --gpu GPU --life"
        )
    if not commands:
        raise ConfigError(
            f"{path}: has no command that trains or serves; accepted are accelerate launch, "
            f"torchrun, deepspeed, python and {', '.join(sorted(tools))} with their arguments"
        )
    if len(commands) > 1:
        programs = ", ".join(command.program for command in commands)
        raise ConfigError(f"{path}: has {len(commands)} commands to predict ({programs}); keep one")
    return commands[0]


def _commands(path: Path, text: str, tools: Subcommands) -> list[Command]:
    commands: list[Command] = []
    variables: dict[str, str] = {}
    exported: set[str] = set()
    cuts: dict[str, int] = {}  # variable → line of the comment that ends what sets it
    cut_at = 0
    for words in _lines_of_words(path, text):
        before, cut_at = cut_at, 0
        if words[-1].startswith(CUT):
            cut_at, words = int(words[-1][1:]), words[:-1]
        words = list(_expanded(words, variables))
        if before and commands and words and _FLAG.match(words[0]):
            lost = (*commands[-1].lost, *_options(words)[0])
            commands[-1] = replace(commands[-1], lost=lost, cut_at=commands[-1].cut_at or before)
            cut_at = cut_at or before
            continue
        words = _without_prefixes(words, tools)
        exports = words[:1] == ["export"]
        assigned, remaining = _assigned(words[exports:], variables)
        if exports or not remaining:
            variables |= assigned
            cuts |= dict.fromkeys(assigned, cut_at)
            exported |= {*assigned, *remaining} if exports else set()
            continue
        environment = {name: variables[name] for name in variables if name in exported}
        command = _command(remaining, environment | assigned, tools)
        if command is not None:
            heard = (*_HEARD, *([] if command.launcher or command.script else _HEARD_BY_TOOLS))
            hidden = variables.keys() - exported - assigned.keys()
            unseen = tuple(name for name in heard if name in hidden)
            line = max((cuts[name] for name in unseen), default=0)
            commands.append(replace(command, unseen=unseen, cut_at=line))
    return commands


def _without_prefixes(words: list[str], tools: Subcommands) -> list[str]:
    """`words` behind programs that start another one, such as nohup and srun with its options."""
    while words and words[0] in _BEFORE:
        words = words[1:]
        if words and words[0].startswith("-"):
            starts = (place for place, word in enumerate(words) if _starts(word, tools))
            words = words[next(starts, len(words)) :]
    return words


def _assigned(
    words: Sequence[str], variables: Mapping[str, str]
) -> tuple[dict[str, str], Sequence[str]]:
    """The variables that `words` set, and the words behind them."""
    assigned: dict[str, str] = {}
    while words and (match := _ASSIGNED.fullmatch(words[0])):
        earlier = {**variables, **assigned}.get(match[1], "") if match[2] else ""
        assigned[match[1]] = f"{earlier}{match[3]}"
        words = words[1:]
    return assigned, words


def _starts(word: str, tools: Subcommands) -> bool:
    name = _program(word, tools)
    return name in ("accelerate", "torchrun", "deepspeed", *tools) or bool(_PYTHON.fullmatch(name))


def _lines_of_words(path: Path, text: str) -> Iterator[list[str]]:
    """The words of each simple command; a quoted text may go over several lines."""
    pending: list[str] = []
    text = "\n".join(logical_lines(text.replace("\x00", "")))
    text = _DRIVE.sub(lambda match: match[0].replace("\\", "/"), text)
    text = _ARRAY.sub(_array_as_text, text)
    text = _ARITHMETIC.sub(_arithmetic, text)
    for line in text.splitlines():
        pending.append(line)
        lexer = shlex.shlex("\n".join(pending), posix=True, punctuation_chars=_ENDS)
        lexer.whitespace_split = True
        lexer.commenters = ""  # of which there are none left
        try:
            words = list(lexer)
        except ValueError:
            if len(pending) > _MOST_JOINED_LINES:
                break
            continue
        pending = []
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set(_ENDS):
                if command:
                    yield command
                command = []
            else:
                command.append(word)
    if pending:
        raise ConfigError(f"{path}: has a quote that is not closed: {pending[0].strip()[:60]!r}")


def _arithmetic(match: re.Match[str]) -> str:
    """A sum of the shell as one word, which the lexer leaves whole."""
    words = (match[1] or match[2]).replace("\\", "").split()  # expr has "*" escaped
    return f"\x00{''.join(words)}\x00"


def _array_as_text(match: re.Match[str]) -> str:
    """An array as one quoted text, whose words are those of the array."""
    words = re.sub(r"[\"']", "", match[3]).split()
    return f'{match[1]}{match[2]}=" {" ".join(words)}"'


def _expanded(words: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    """`words` with what the script sets; other variables stay as they are.

    A variable that holds options becomes several words, as the shell splits it. The arguments of
    the script itself are none.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name, match[3] if match[3] is not None else match[0])

    for word in words:
        computed = _MARKED.sub(lambda match: _computed(match[1], variables), word)
        expanded = _VARIABLE.sub(value, computed)
        has_options = _VARIABLE.fullmatch(word) and _FLAG.match(expanded.lstrip())
        if has_options or (_WHOLE_ARRAY.fullmatch(word) and expanded != word):
            yield from expanded.split()
        elif word not in _ARGUMENTS:
            yield expanded


def _computed(text: str, variables: Mapping[str, str]) -> str:
    """What the shell makes of `$((text))`; the same words where it is no sum of whole numbers."""
    known = _NAME.sub(lambda match: variables.get(match[1], match[0]), text)
    try:
        return str(_number(ast.parse(known, mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return f"$(({text}))"


def _number(node: ast.expr) -> int:
    """The value of sums and products. Raises: ValueError: it is something else, or too large."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        number = _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value
    else:
        raise ValueError
    if abs(number) > _MOST_FACTOR:
        raise ValueError
    return int(number)


def _command(
    words: Sequence[str], environment: Mapping[str, str], tools: Subcommands
) -> Command | None:
    """What `words` start of the programs that are known; None where that is something else."""
    first, words = _program(words[0], tools), words[1:]
    if first in _CONTAINERS:
        return _in_container(words, environment, tools)
    launcher, script, options = "", "", list[str]()
    if first in tools and not tools[first]:
        program, arguments = first, words
    elif first in tools:
        if not words or words[0] not in tools[first]:
            return None
        program, arguments = f"{first} {words[0]}", words[1:]
    else:
        if _PYTHON.fullmatch(first) and words[:1] == ["-m"] and words[1:2]:
            if words[1] in _TORCHRUN:
                first, words = "torchrun", words[2:]
            elif words[1] == "accelerate.commands.launch":
                first, words = "accelerate", ["launch", *words[2:]]
        if first == "accelerate":
            if words[:1] != ["launch"]:
                return None
            words = words[1:]
        elif first not in ("torchrun", "deepspeed") and not _PYTHON.fullmatch(first):
            return None
        launcher = "" if _PYTHON.fullmatch(first) else first
        split = _split_at_program(words)
        if split is None:
            return None
        options, script, arguments = split
        program = PurePosixPath(script).stem if script.endswith(_SCRIPT) else script
    arguments_here, _, passed_on = _divided(arguments)
    flags, files = _options(arguments_here)
    launched, _ = _options([*options, *passed_on])
    return Command(
        program=program,
        script=script if script.endswith(_SCRIPT) else "",
        launcher=launcher
        or str(flags.pop("launcher", "") if program.startswith("axolotl") else ""),
        launcher_options=launched,
        options=flags,
        files=tuple(files),
        environment=environment,
        repeated=_repeated(arguments_here),
    )


def _in_container(
    words: Sequence[str], environment: Mapping[str, str], tools: Subcommands
) -> Command | None:
    """What a container starts: the program of a known image, or the command behind the image.

    Variables that it sets with -e are the program's. The tag of an image of one's own says nothing.
    """
    for place, word in enumerate(words):
        image, _, tag = word.partition("@")[0].partition(":")
        name = next((each for each in tools if "/" in each and image.endswith(each)), "")
        arguments = list(words[place + 1 :])
        has_command = bool(arguments) and _starts(arguments[0], tools)
        if not name and not (has_command and not _FLAG.match(word) and place):
            continue
        sets = [words[i + 1] for i, flag in enumerate(words[:place]) if flag in ("-e", "--env")]
        inside = dict(environment) | dict(each.split("=", 1) for each in sets if "=" in each)
        command = _command(arguments if has_command else [name, *arguments], inside, tools)
        return None if command is None else replace(command, tag=tag if name else "")
    return None


def _program(word: str, tools: Subcommands) -> str:
    """The name of a program, whatever folder it is in."""
    return word if word in tools else PurePosixPath(word).name.removesuffix(".exe")


def _divided(words: Sequence[str]) -> tuple[Sequence[str], str, Sequence[str]]:
    """`words` before and behind "--"."""
    if "--" not in words:
        return words, "", ()
    place = words.index("--")
    return words[:place], "--", words[place + 1 :]


def _split_at_program(words: Sequence[str]) -> tuple[list[str], str, Sequence[str]] | None:
    """A launcher's options, the script or module that it starts, and the arguments of that."""
    for index, word in enumerate(words):
        if word in ("-m", "--module") and index + 1 < len(words):
            return list(words[:index]), words[index + 1], words[index + 2 :]
        if word.endswith(_SCRIPT):
            return list(words[:index]), word, words[index + 1 :]
    return None


def _options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Values by option, and the words before the first option.

    An option without a value is on; several words behind one are a list. `name=value` is an
    option, too, as LLaMA-Factory takes it, and torchtune behind its one `--config`.
    """
    options: dict[str, Any] = {}
    files: list[str] = []
    name = ""
    for word in words:
        if _FLAG.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            options[name] = value if equals else True
            if equals:
                name = ""
        elif name and not (name in _OF_ONE and options[name] is not True):
            earlier = options[name]
            if earlier is True:
                options[name] = word
            else:
                options[name] = [*(earlier if isinstance(earlier, list) else [earlier]), word]
        elif match := _OVERRIDE.fullmatch(word):
            options[match[1]] = match[2]
        else:
            files.append(word)
    return options, files


def _repeated(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values of options that stand there more than once with one, in order."""
    starts = [place for place, word in enumerate(words) if _FLAG.match(word)]
    values: dict[str, tuple[str, ...]] = {}
    for start, end in pairwise([*starts, len(words)]):
        for name, value in _options(words[start:end])[0].items():
            if isinstance(value, str):
                values[name] = (*values.get(name, ()), value)
    return {name: each for name, each in values.items() if len(each) > 1}
