"""Images or clips of a row beside its messages: what names them, and where they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whichlora.dataset.audio import clip_of
from whichlora.dataset.base import Example, Row
from whichlora.dataset.columns import Columns, as_list, clips_column, image_column
from whichlora.dataset.images import image_of
from whichlora.errors import ConfigError
from whichlora.spec.data_format import AUDIOS, IMAGES
from whichlora.spec.tower import Tower


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """What a row has beside its messages.

    Args:
        name: the column of an example, and what they are called.
        role: the field of `Columns` that names theirs.
        setting: the key of a config that does so.
        column_of: a column of a row, known by its name.
        place: stands in a text where one of them does.
        types: of a part of a message that is one, or its place.
        keys: of a part, with what it says of it.
        checked: the path that a value is.
    """

    name: str
    role: str
    setting: str
    column_of: Callable[[Row], str | None]
    place: str
    types: tuple[str, ...]
    keys: tuple[str, ...]
    checked: Callable[[Any], Any]

    def is_in(self, row: Row, columns: Columns) -> bool:
        """Whether `row` names some: in a column of its own, or in its messages."""
        named = getattr(columns, self.role) is not None
        return named or any(True for _ in self._parts(row, columns))

    def of(self, row: Row, columns: Columns) -> list[Any]:
        """Those of `row`, in their order.

        Raises:
            ConfigError: something else than a path.
        """
        parts = map(self._named_by, self._parts(row, columns))
        named = [part for part in parts if part is not None]
        column = getattr(columns, self.role)
        if column is None or row.get(column) is None:
            return [self.checked(each) for each in named]
        if named:
            raise ConfigError(
                f"has {self.name} in the column {column!r} and in its messages; name them in one "
                "of both"
            )
        held = row[column]
        listed = as_list(held)
        return [self.checked(each) for each in ([held] if listed is None else listed) if each != ""]

    def in_parts(self, example: Example, items: Sequence[Any]) -> Example:
        """`example` with messages of parts, and its `items` beside them.

        Items without a place stand before the first text of the user.
        Source: TRL 1.16 `prepare_multimodal_messages`.

        Raises:
            ConfigError: another number of places than of items.
        """
        columns = [name for name, value in example.items() if isinstance(value, list)]
        messages = [message for name in columns for message in example[name]]
        places = sum(message["content"].count(self.place) for message in messages)
        first = next((message for message in messages if message["role"] == "user"), None)
        if not places and first is not None:
            first["content"] = self.place * len(items) + first["content"]
            places = len(items)
        if places != len(items):
            raise ConfigError(
                f"has {len(items)} {self.name}, and its messages have {places} places for them "
                f"(parts of type {self.types[0]}, or {self.place} in a text); give as many of both"
            )
        for message in messages:
            message["content"] = self._split(message["content"])
        return {**example, self.name: list(items)}

    def _parts(self, row: Row, columns: Columns) -> Iterator[Mapping[str, Any]]:
        """Those among the parts of the messages of `row`, in their order."""
        for column in (columns.prompt, columns.trained):
            messages = as_list(row.get(column)) if column is not None else None
            for message in messages or ():
                content = message.get("content") if isinstance(message, Mapping) else None
                for part in content if isinstance(content, list) else ():
                    if isinstance(part, Mapping) and part.get("type") in self.types:
                        yield part

    def _named_by(self, part: Mapping[str, Any]) -> Any:
        """What a part says; None where a column says it."""
        value = next((part[key] for key in self.keys if part.get(key) is not None), None)
        return value.get("url") if isinstance(value, Mapping) and "url" in value else value

    def _split(self, text: str) -> list[dict[str, str]]:
        """`text` as parts, with one of them at each place."""
        parts: list[dict[str, str]] = []
        for number, piece in enumerate(text.split(self.place)):
            parts += [{"type": self.types[0]}] * bool(number)
            parts += [{"type": "text", "text": piece}] * bool(piece)
        return parts


MEDIA = (
    Medium(
        name=IMAGES,
        role="images",
        setting="images_column",
        column_of=image_column,
        place="<image>",
        types=("image", "image_url"),
        keys=("image", "path", "url", "image_url", "base64"),
        checked=image_of,
    ),
    Medium(
        name=AUDIOS,
        role="audio",
        setting="audio_column",
        column_of=clips_column,
        place="<audio>",
        types=("audio", "audio_url"),
        keys=("audio", "path", "url", "audio_url"),
        checked=clip_of,
    ),
)
"""Places and parts: those of LLaVA's and LLaMA-Factory's data sets, and of Qwen2-Audio's."""


def read_by(tower: Tower | None) -> str:
    """The medium beside messages that a model with `tower` reads; "" where it reads none."""
    if tower is None or tower.transcribes:
        return ""
    return AUDIOS if tower.hears else IMAGES
