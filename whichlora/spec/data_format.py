"""What a row of training data looks like, in the types and formats of TRL's data sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from whichlora.errors import ConfigError

DataKind = Literal["text", "messages", "prompt-completion", "preference", "labelled", "prompts"]
Rows = Literal["texts", "pairs", "labelled", "prompts"]  # what a trainer trains on

COLUMNS: Mapping[DataKind, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),  # prompt may be left out
    "labelled": ("prompt", "completion", "label"),  # true or false: wanted or not
    "prompts": ("prompt",),
}
"""Columns of each kind of row, as `train.jsonl` has them. Source: TRL 1.16, dataset formats."""

PARTS = frozenset(column for columns in COLUMNS.values() for column in columns)

KINDS: Mapping[Rows, tuple[DataKind, ...]] = {
    "texts": ("text", "messages", "prompt-completion", "preference"),
    "pairs": ("preference",),
    "labelled": ("labelled",),
    "prompts": ("prompts",),
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

    Raises:
        ConfigError: text as messages, or messages as text.
    """

    kind: DataKind = "text"
    conversational: bool = False

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

    def describe(self) -> str:
        """In words, for a message."""
        columns = ", ".join(COLUMNS[self.kind])
        return f"{columns} as {'messages' if self.conversational else 'text'}"

    def require(self, rows: Rows) -> None:
        """Refuse a format that a trainer on `rows` can't take.

        Raises:
            ConfigError: it is another kind of rows.
        """
        if self.kind not in KINDS[rows]:
            accepted = " or ".join(", ".join(COLUMNS[kind]) for kind in KINDS[rows])
            raise ConfigError(
                f"dataset: has {self.describe()}, and the trainer takes {rows}: {accepted}; give "
                "such rows, or another trainer"
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
            if kind == "prompts":  # columns of others go to the rewards
                further &= PARTS
            if set(columns) - optional <= set(row) and not further:
                if "label" in columns and not isinstance(row["label"], bool):
                    raise ConfigError(f"label must be true or false, got {row['label']!r}")
                texts = [column for column in columns if column in row and column != "label"]
                types = {type(row[column]) for column in texts}
                if types == {str}:
                    return cls(kind=kind)
                if types == {list}:
                    return cls(kind=kind, conversational=True)
                raise ConfigError(
                    f"a row of {', '.join(row)} must hold text in each, or a list of messages in "
                    f"each, got {', '.join(sorted(kind.__name__ for kind in types))}"
                )
        accepted = "; ".join(", ".join(columns) for columns in COLUMNS.values())
        raise ConfigError(
            f"a row has the columns {', '.join(map(str, row))}; accepted are {accepted}"
        )


TEXT_ROWS = DataFormat()
TEXT_PAIRS = DataFormat(kind="prompt-completion")
CHAT_PAIRS = DataFormat(kind="prompt-completion", conversational=True)
CHAT_ROWS = DataFormat(kind="messages", conversational=True)
TEXT_PREFERENCES = DataFormat(kind="preference")
CHAT_PREFERENCES = DataFormat(kind="preference", conversational=True)
TEXT_LABELLED = DataFormat(kind="labelled")
CHAT_LABELLED = DataFormat(kind="labelled", conversational=True)
