"""What a row of training data looks like, in the types and formats of TRL's data sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from whichlora.errors import ConfigError
from whichlora.spec.numeric import is_number

DataKind = Literal[
    "text",
    "messages",
    "prompt-completion",
    "preference",
    "labelled",
    "prompts",
    "classified",
    "tagged",
    "spans",
    "scored",
    "anchors",
    "transcripts",
]
# what a trainer or a task learns from
Rows = Literal[
    "texts",
    "pairs",
    "labelled",
    "prompts",
    "classified",
    "tagged",
    "spans",
    "scored",
    "anchors",
]

COLUMNS: Mapping[DataKind, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),  # prompt may be left out
    "labelled": ("prompt", "completion", "label"),  # true or false: wanted or not
    "prompts": ("prompt",),
    "classified": ("text", "label"),  # a name or a number
    "tagged": ("tokens", "tags"),  # words, and a name or a number of each
    "spans": ("question", "context", "answers"),  # as SQuAD has them: text and answer_start
    "scored": ("query", "document", "score"),  # from 0 to 1
    "anchors": ("anchor", "positive"),  # and negative, or negative_1, negative_2, ...
    "transcripts": ("audio", "text"),  # the path of a clip, or its samples and their rate
}
"""Columns of each kind of row, as `train.jsonl` has them.

Source: TRL 1.16, dataset formats; transformers 5.23 examples/pytorch: text-classification,
token-classification and question-answering; sentence-transformers 6.2, dataset overview.
"""
LABELLED_KINDS: tuple[DataKind, ...] = ("classified", "tagged", "spans", "scored", "anchors")
IMAGES = "images"
"""Column of the paths of a row's images, in the order of their places in its messages.

Source: TRL 1.16, dataset formats, vision datasets.
"""
AUDIO = "audio"
"""Column of a clip of sound, and the keys of one whose samples stand in the row.

Source: datasets 5.2 `Audio`.
"""
AUDIOS = "audios"
"""Column of a row's clips, in the order of their places in its messages.

Source: LLaMA-Factory 0.9.5, `data/README.md`, multimodal audio datasets.
"""
ARRAY, RATE = "array", "sampling_rate"
MEDIA_KINDS: tuple[DataKind, ...] = ("messages", "prompt-completion")
_NEGATIVE = re.compile(r"negative(_(?P<number>\d+))?")

PARTS = frozenset(
    column for kind in COLUMNS if kind not in LABELLED_KINDS for column in COLUMNS[kind]
)

KINDS: Mapping[Rows, tuple[DataKind, ...]] = {
    "texts": ("text", "messages", "prompt-completion", "preference", "transcripts"),
    "pairs": ("preference",),
    "labelled": ("labelled",),
    "prompts": ("prompts",),
    "classified": ("classified",),
    "tagged": ("tagged",),
    "spans": ("spans",),
    "scored": ("scored",),
    "anchors": ("anchors",),
}
"""Kinds of rows that a trainer can take; of a preference a trainer on texts learns the chosen."""

ALPACA_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% if messages[0]['role'] != 'system' %}"
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
    "{% elif message['role'] == 'assistant' %}"
    "### Response:\n{{ message['content'] }}{{ eos_token }}\n\n"
    "{% else %}### Instruction:\n{{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
"""For a tokenizer without a chat template, as those of most base models are.

Source: the prompt of Stanford Alpaca, with turns as in LLaMA-Factory 0.9.5, `data/template.py`,
template "alpaca". Tokenize what it renders without adding special tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFormat:
    """The columns of every row, and whether they hold text or messages.

    Args:
        kind: which columns there are, see `COLUMNS`.
        conversational: the columns hold messages of role and content, which the tokenizer's
            chat template renders where the model is trained.
        images: rows have a column of images, and messages are made of parts.
        audios: the same of clips of sound.

    Raises:
        ConfigError: text as messages, messages as text, or images or clips of other rows than
            messages.
    """

    kind: DataKind = "text"
    conversational: bool = False
    images: bool = False
    audios: bool = False

    def __post_init__(self) -> None:
        if self.kind not in COLUMNS:
            raise ConfigError(
                f"data format: kind is {self.kind!r}; accepted are {', '.join(COLUMNS)}"
            )
        fixed = {"text": False, "messages": True}
        if self.conversational is not fixed.get(self.kind, bool(self.conversational)):
            raise ConfigError(
                f"data format: {self.kind} can't have conversational {self.conversational!r}; "
                f"accepted is {fixed.get(self.kind, 'true or false')}"
            )
        if self.media and not (self.conversational and self.kind in MEDIA_KINDS):
            raise ConfigError(
                f"data format: {self.kind} can't have {self.media}; accepted are messages, or "
                "prompt and completion as messages"
            )
        if self.images and self.audios:
            raise ConfigError("data format: rows have images and audios; give one of them")

    @property
    def media(self) -> str:
        """The column of images or clips beside messages; "" without one."""
        return IMAGES if self.images else AUDIOS if self.audios else ""

    @property
    def has_processor(self) -> bool:
        """Whether a processor of the model reads its rows, not a tokenizer alone."""
        return bool(self.media) or self.kind == "transcripts"

    def describe(self) -> str:
        """In words, for a message."""
        columns = ", ".join(COLUMNS[self.kind])
        words = f"{columns} as {'messages' if self.conversational else 'text'}"
        return f"{words} with {self.media}" if self.media else words

    def require(self, rows: Rows) -> None:
        """Refuse a format that a trainer on `rows` can't take.

        Raises:
            ConfigError: it is another kind of rows.
        """
        if self.kind not in KINDS[rows]:
            accepted = " or ".join(", ".join(COLUMNS[kind]) for kind in KINDS[rows])
            learner = "task" if rows in LABELLED_KINDS else "trainer"
            raise ConfigError(
                f"dataset: has {self.describe()}, and the {learner} takes {rows}: {accepted}; give "
                f"such rows, or another {learner}"
            )

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """The format of `row`, as it stands in `train.jsonl`.

        Raises:
            ConfigError: columns of no format, or text and messages mixed.
        """
        if not isinstance(row, Mapping):
            raise ConfigError(f"a row must be a mapping of columns, got {type(row).__name__}")
        for kind, columns in COLUMNS.items():
            optional = {"prompt"} if kind == "preference" else set()
            further = set(row) - set(columns)
            if kind in MEDIA_KINDS:
                further -= {IMAGES, AUDIOS}
            if kind == "prompts":  # columns of others go to the rewards
                further &= PARTS
            if kind == "anchors":
                further -= set(negatives_of(row))
            if set(columns) - optional <= set(row) and not further:
                if kind in _CHECKS:
                    _CHECKS[kind](row)
                    return cls(kind=kind)
                if "label" in columns and not isinstance(row["label"], bool):
                    raise ConfigError(f"label must be true or false, got {row['label']!r}")
                texts = [column for column in columns if column in row and column != "label"]
                types = {type(row[column]) for column in texts}
                media = {name: True for name in (IMAGES, AUDIOS) if name in row}
                if types == {str}:
                    return cls(kind=kind, **media)
                if types == {list}:
                    return cls(kind=kind, conversational=True, **media)
                raise ConfigError(
                    f"a row of {', '.join(row)} must hold text in each, or a list of messages in "
                    f"each, got {', '.join(sorted(kind.__name__ for kind in types))}"
                )
        accepted = "; ".join(", ".join(columns) for columns in COLUMNS.values())
        raise ConfigError(
            f"a row has the columns {', '.join(map(str, row))}; accepted are {accepted}"
        )


def _check_texts(row: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(row[name], str):
            raise ConfigError(f"{name} must be text, got {type(row[name]).__name__}")


def _check_class(row: Mapping[str, Any]) -> None:
    _check_texts(row, "text")
    if not is_class(row["label"]):
        raise ConfigError(f"label must be a name or a whole number from 0, got {row['label']!r}")


def _check_tags(row: Mapping[str, Any]) -> None:
    tokens, tags = row["tokens"], row["tags"]
    if not (isinstance(tokens, list) and all(isinstance(token, str) for token in tokens)):
        raise ConfigError("tokens must be a list of words")
    if not (isinstance(tags, list) and all(is_class(tag) for tag in tags)):
        raise ConfigError("tags must be a list of names or of whole numbers from 0")
    if len(tokens) != len(tags):
        raise ConfigError(f"has {len(tokens)} tokens and {len(tags)} tags; give one for each")


def _check_span(row: Mapping[str, Any]) -> None:
    _check_texts(row, "question", "context")
    answers = row["answers"]
    keys = ("text", "answer_start")
    if not isinstance(answers, Mapping) or not all(isinstance(answers.get(k), list) for k in keys):
        raise ConfigError("answers must hold the lists text and answer_start, as in SQuAD")
    for text, start in zip(*(answers[key] for key in keys), strict=False):
        if not isinstance(text, str) or row["context"][start : start + len(text)] != text:
            raise ConfigError(f"the context does not have {text!r} at character {start!r}")


def _check_score(row: Mapping[str, Any]) -> None:
    _check_texts(row, "query", "document")
    score = row["score"]
    if not is_number(score) or not 0 <= score <= 1:
        raise ConfigError(f"score must be a number from 0 to 1, got {score!r}")


def _check_anchor(row: Mapping[str, Any]) -> None:
    _check_texts(row, *row)


def _check_transcript(row: Mapping[str, Any]) -> None:
    _check_texts(row, "text")
    clip = row[AUDIO]
    if not (isinstance(clip, str) or (isinstance(clip, Mapping) and {ARRAY, RATE} <= set(clip))):
        raise ConfigError(
            f"audio must be the path of a file, or {ARRAY} and {RATE}, got {type(clip).__name__}"
        )


def negatives_of(names: Iterable[str]) -> list[str]:
    """Those of `names` that are of texts which do not belong to an anchor, by their number."""
    matches = {name: match for name in names if (match := _NEGATIVE.fullmatch(name))}
    return sorted(matches, key=lambda name: int(matches[name]["number"] or 0))


def is_class(value: Any) -> bool:
    """Whether `value` names a class, or is its number."""
    if isinstance(value, bool):
        return False
    return (isinstance(value, int) and value >= 0) or (isinstance(value, str) and value != "")


_CHECKS: Mapping[DataKind, Callable[[Mapping[str, Any]], None]] = {
    "classified": _check_class,
    "tagged": _check_tags,
    "spans": _check_span,
    "scored": _check_score,
    "anchors": _check_anchor,
    "transcripts": _check_transcript,
}

TEXT_ROWS = DataFormat()
TEXT_PAIRS = DataFormat(kind="prompt-completion")
CHAT_PAIRS = DataFormat(kind="prompt-completion", conversational=True)
CHAT_ROWS = DataFormat(kind="messages", conversational=True)
TEXT_PREFERENCES = DataFormat(kind="preference")
CHAT_PREFERENCES = DataFormat(kind="preference", conversational=True)
IMAGE_ROWS = DataFormat(kind="messages", conversational=True, images=True)
AUDIO_ROWS = DataFormat(kind="messages", conversational=True, audios=True)
TEXT_LABELLED = DataFormat(kind="labelled")
TRANSCRIPTS = DataFormat(kind="transcripts")
CHAT_LABELLED = DataFormat(kind="labelled", conversational=True)
