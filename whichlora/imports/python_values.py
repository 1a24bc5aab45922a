"""Names of a Python script → what they stand for, without running any of it.

Read are literals, names that are set to one value, what the script's own functions are given,
defaults of `add_argument` and of fields of a dataclass, and whether a GPU has bf16, which is taken
as yes. Everything else is `Unread`.
"""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

TRAINING = "TrainingArguments"
_HAS_BF16 = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available")
_ALL_LINEAR = "all_linear"
_COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_PATHS = ("str", "Path")
_MOST_WORDS = 8  # that a name may stand for
_MOST_CHARACTERS = 40  # of an expression, in a message
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_MOST_FACTOR = 10**9


@dataclass(frozen=True, slots=True)
class Unread:
    """An expression that is no literal.

    Args:
        values: of a name that is set to several.
    """

    text: str
    values: tuple[Any, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= _MOST_CHARACTERS else f"{self.text[:37]}..."
        return f"`{shown}`"


@dataclass(slots=True)
class Values:
    """What names of a script stand for."""

    names: dict[str, list[ast.expr]] = field(default_factory=dict)  # all that they are set to
    arguments: dict[str, Any] = field(default_factory=dict)  # of the script's own parser
    attributes: dict[str, ast.expr] = field(default_factory=dict)  # that are set, of any object
    own: set[str] = field(default_factory=set)  # of them, those that the script itself declares
    modules: set[str] = field(default_factory=set)  # that are imported, by their first names
    training: dict[str, Any] = field(default_factory=dict)  # defaults of its training arguments
    environment: dict[str, ast.expr] = field(default_factory=dict)  # variables that it sets
    _reading: set[str] = field(default_factory=set)  # names that are being read

    def note(self, name: str, node: ast.expr) -> None:
        """Note that `name` is set to `node`, which is read where it is used."""
        self.names.setdefault(name, []).append(node)

    def named(self, name: str) -> list[Any]:
        """The values that a name is set to; to its own is no news."""
        if name in self._reading:
            return [Unread(name)]
        self._reading.add(name)
        values: list[Any] = []
        for node in self.names.get(name, []):
            value = self.read(node)
            if value not in values and value != Unread(name):
                values.append(value)
        self._reading.discard(name)
        return values

    def read(self, node: ast.expr) -> Any:
        """The value of an expression, or `Unread`."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Name, ast.JoinedStr)):
            values = self._alternatives(node)
            if len(values) == 1:
                return values[0]
            return Unread(ast.unparse(node), tuple(values))
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.read(each) for each in node.elts]
        if isinstance(node, ast.Dict):
            return self._mapping(node)
        if _is_dict_call(node):
            return {str(each.arg): self.read(each.value) for each in node.keywords}
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call) and last_name(node.func) in _HAS_BF16:
            return True
        return self._computed(node)

    def _alternatives(self, node: ast.expr) -> list[Any]:
        """All values that a name is set to, or that a text of such names may be."""
        if isinstance(node, ast.Name):
            return self.named(node.id)
        if not isinstance(node, ast.JoinedStr):
            return [self.read(node)]
        texts = [""]
        for part in node.values:
            value = part.value if isinstance(part, ast.FormattedValue) else part
            words = self._alternatives(value)
            if not all(isinstance(word, str) for word in words) or len(words) > _MOST_WORDS:
                return []
            texts = [text + word for text in texts for word in words][:_MOST_WORDS]
        return texts

    def _mapping(self, node: ast.Dict) -> Any:
        """A dictionary; a key that is one of several names, by release, counts as all of them."""
        read: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            names = [] if key is None else self._alternatives(key)
            if not names or not all(isinstance(name, str) for name in names):
                return Unread(ast.unparse(node))
            read.update((name, self.read(value)) for name in names)
        return read

    def _attribute(self, node: ast.Attribute) -> Any:
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id == "torch":
            return node.attr
        if isinstance(owner, ast.Name) and node.attr in self.arguments:
            return self.arguments[node.attr]
        return Unread(ast.unparse(node))

    def _computed(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp):
            value = self.read(node.operand)
            if isinstance(node.op, ast.Not) and isinstance(value, bool):
                return not value
            if isinstance(node.op, ast.USub) and isinstance(value, (int, float)):
                return -value
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self.read(node.left), self.read(node.right)
            if type(left) is type(right) is int and max(abs(left), abs(right)) < _MOST_FACTOR:
                with contextlib.suppress(ZeroDivisionError):
                    return _OPERATORS[type(node.op)](left, right)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            right = self.read(node.right)
            if isinstance(right, str):  # of a folder: the file beside the script
                return right
        elif isinstance(node, ast.Call) and last_name(node.func) in _PATHS and node.args:
            return self.read(node.args[0])
        elif isinstance(node, ast.Call) and _ALL_LINEAR in last_name(node.func):
            return "all-linear"  # a function that many scripts have
        elif isinstance(node, ast.Call) and last_name(node.func) == "getattr" and node.args[1:]:
            owner, name = node.args[0], self.read(node.args[1])
            if isinstance(owner, ast.Name) and owner.id == "torch":
                return name
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            sides = self.read(node.left), self.read(node.comparators[0])
            compare = _COMPARISONS.get(type(node.ops[0]))
            if compare is not None and not any(isinstance(side, Unread) for side in sides):
                return compare(*sides)
        elif isinstance(node, ast.IfExp):
            holds = self.read(node.test)
            if isinstance(holds, bool):
                return self.read(node.body if holds else node.orelse)
        return Unread(ast.unparse(node))


def values_of(tree: ast.Module, options: Mapping[str, Any]) -> Values:
    """What the names of a script stand for, which is given `options`."""
    arguments = {name: _of_option(value) for name, value in options.items()}
    values = Values(arguments=dict(arguments))
    _note_names(tree, values)
    _note_parameters(tree, values, arguments)
    return values


def _note_names(tree: ast.Module, values: Values) -> None:
    """What names are set to, and defaults of the script's own arguments."""
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            values.modules.update(each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            values.modules.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.ClassDef):
            _note_fields(node, values)
        elif isinstance(node, ast.Call) and last_name(node.func) == "add_argument":
            _note_argument(node, values)
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    values.note(target.id, node.value)
                elif isinstance(target, ast.Attribute):
                    values.attributes.setdefault(target.attr, node.value)
                elif variable := _variable(target):
                    values.environment.setdefault(variable, node.value)


def _variable(target: ast.expr) -> str:
    """Of the environment, the one that `os.environ["NAME"]` is; empty of anything else."""
    if not isinstance(target, ast.Subscript) or last_name(target.value) != "environ":
        return ""
    return str(target.slice.value) if isinstance(target.slice, ast.Constant) else ""


def _of_option(value: Any) -> Any:
    """An option's text as the whole number, or the switch, that it may be."""
    if not isinstance(value, str):
        return value
    return {"true": True, "false": False}.get(
        value.lower(), int(value) if value.isdecimal() else value
    )


def _note_parameters(tree: ast.Module, values: Values, options: Mapping[str, Any]) -> None:
    """What the script's own functions are given: by a call, the command (fire), or as a default."""
    functions = {
        each.name: each.args for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            parameters = functions.get(node.func.id)
            if parameters is None:
                continue
            names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
            passed = [*zip(names, node.args, strict=False)]
            passed += [(each.arg, each.value) for each in node.keywords if each.arg is not None]
            for name, value in passed:
                values.note(name, value)
    for parameters in functions.values():
        optional = parameters.args[len(parameters.args) - len(parameters.defaults) :]
        for parameter, default in zip(optional, parameters.defaults, strict=True):
            if parameter.arg in options:
                values.names[parameter.arg] = [ast.Constant(options[parameter.arg])]
            elif parameter.arg not in values.names:
                values.note(parameter.arg, default)


def unreached(tree: ast.Module, values: Values) -> set[ast.AST]:
    """What stands in branches whose condition is known, and says otherwise."""
    nodes: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp)):
            holds = values.read(node.test)
            if isinstance(holds, bool):
                branch = node.orelse if holds else node.body
                for each in branch if isinstance(branch, list) else [branch]:
                    nodes.update(ast.walk(each))
    return nodes


def _note_fields(node: ast.ClassDef, values: Values) -> None:
    """Defaults of a class's fields, as a parser of dataclasses has them."""
    is_training = any(last_name(base).endswith(TRAINING) for base in node.bases)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value:
            default: ast.expr | None = line.value
            if isinstance(line.value, ast.Call) and last_name(line.value.func) == "field":
                default = _option(line.value, "default")
                factory = _option(line.value, "default_factory")
                if isinstance(factory, ast.Lambda):
                    default = factory.body
            if default is not None:
                value = values.arguments.setdefault(line.target.id, values.read(default))
                if is_training:
                    values.training[line.target.id] = value
                else:
                    values.own.add(line.target.id)


def _note_argument(node: ast.Call, values: Values) -> None:
    names = [each.value for each in node.args if isinstance(each, ast.Constant)]
    default = _option(node, "default")
    for name in names:
        if isinstance(name, str) and name.startswith("--") and default is not None:
            argument = name[2:].replace("-", "_")
            values.own.add(argument)
            values.arguments.setdefault(argument, values.read(default))


def _option(node: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in node.keywords if each.arg == name), None)


def _is_dict_call(node: ast.expr) -> TypeGuard[ast.Call]:
    """Whether it is `dict(name=value)`, which says as much as a literal."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "dict"
        and not node.args
        and all(each.arg is not None for each in node.keywords)
    )


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
