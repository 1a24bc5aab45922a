"""A row of columns → what is trained on: a template, a text column or chat messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whichlora.dataset.base import Example, Row
from whichlora.errors import ConfigError
from whichlora.plan import DatasetConfig


def rendering(config: DatasetConfig, columns: Sequence[str]) -> Callable[[Row], Example]:
    """What makes an example of a row with `columns`."""
    if config.template is not None:
        template, names = config.template, config.template_columns
        return lambda row: {"text": _fill(template, names, row)}
    text_column, messages_column = config.text_column, config.messages_column
    if text_column is None and messages_column is None:
        text_column = "text" if "text" in columns else None
        messages_column = "messages" if text_column is None and "messages" in columns else None
    if text_column is not None:
        return lambda row: {"text": _cell(row, text_column, str, "text")}
    if messages_column is not None:
        return lambda row: {"messages": messages_of(row, messages_column)}
    example = " ".join(f"{{{column}}}" for column in columns[:2])
    raise ConfigError(
        f"dataset: has columns {', '.join(columns)}, and none is named text or messages; "
        f"give dataset.template, such as {example!r}, text_column or messages_column"
    )


def _cell(row: Row, column: str, kind: type, kind_name: str) -> Any:
    if column not in row:
        raise ConfigError(f"column {column!r} is missing; there are {', '.join(map(str, row))}")
    value = row[column]
    if value is None or not isinstance(value, kind):
        got = "nothing" if value is None else type(value).__name__
        raise ConfigError(f"column {column!r} must hold {kind_name}, got {got}")
    return value


def _fill(template: str, columns: Sequence[str], row: Row) -> str:
    values = {column: _cell(row, column, object, "a value") for column in columns}
    try:
        return template.format_map(values)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"dataset.template: can't be filled: {error}") from None


def messages_of(row: Row, column: str) -> list[dict[str, str]]:
    """Role and content of each message; content in parts is joined from its text parts."""
    messages = []
    for message in _cell(row, column, list, "a list of messages"):
        if not (isinstance(message, Mapping) and {"role", "content"} <= set(message)):
            raise ConfigError(f"column {column!r}: a message must have role and content")
        content = message["content"]
        if isinstance(content, list):
            content = "".join(str(part.get("text") or "") for part in content)
        messages.append({"role": str(message["role"]), "content": str(content or "")})
    return messages
