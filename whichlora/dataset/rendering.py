"""A row of columns → the example that is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from whichlora.dataset.audio import clip_of
from whichlora.dataset.base import Example, Row
from whichlora.dataset.columns import Columns, as_list, recognised, transcript_column
from whichlora.dataset.media import MEDIA, Medium
from whichlora.errors import ConfigError
from whichlora.spec.data_format import AUDIO, LABELLED_KINDS, MEDIA_KINDS, PARTS, Rows
from whichlora.spec.plan import DatasetConfig
from whichlora.spec.words import meant

Message = dict[str, Any]

# Names of speakers → roles of chat templates. Source: FastChat's ShareGPT files; LLaMA-Factory
# 0.9.5, `data/parser.py`, the tags of its ShareGPT format; OpenAssistant's "prompter".
_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
    **dict.fromkeys(("system",), "system"),
}
_OF_ANSWERS = tuple(name for name, role in _ROLES.items() if role == "assistant")
_SPEAKERS = (("role", "content"), ("from", "value"))  # keys of a message
_TURNS = (("input", "output"), ("user", "assistant"), ("human", "assistant"))  # two in one object
_FURTHER_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")  # that templates render


def rendering(
    config: DatasetConfig, row: Row, rows: Rows = "texts"
) -> tuple[Callable[[Row], Example], str]:
    """The function from row to example for the columns of `row`, and its description.

    Args:
        rows: what the trainer takes.

    Raises:
        ConfigError: no column is recognised, or a named column is missing.
    """
    if config.template is not None and rows == "texts":
        template, names = config.template, config.template_columns
        return (
            lambda row: {"text": _fill(template, names, row)}
        ), f"template of {', '.join(names)}"
    named = _named(config, row, rows)
    columns = named or recognised(row, rows)
    seen = _with_media(config, row, columns, is_named=named is not None, rows=rows)
    if seen is not None:
        medium, columns = seen
    words = columns.describe()
    if columns.kind == "preference" and rows == "texts":
        words += "; rejected answers are kept, and not trained on by this supervised job"
    render = _pair if rows == "pairs" else _example
    if seen is not None:
        return (
            lambda row: medium.in_parts(
                _example(_with_one(row, columns, medium), columns), medium.of(row, columns)
            )
        ), words
    return (lambda row: render(_without_media(row, columns), columns)), words


def _with_media(
    config: DatasetConfig, row: Row, columns: Columns, *, is_named: bool, rows: Rows
) -> tuple[Medium, Columns] | None:
    """What stands beside the messages of the rows, and `columns` with its own; None without any.

    Columns that a config names are alone, unless it names that of the images or clips, too.

    Raises:
        ConfigError: the config names a column of them that is missing, or beside plain texts.
    """
    takes = columns.kind in MEDIA_KINDS and rows == "texts"
    for medium in MEDIA:
        column = getattr(config, medium.setting)
        if column is not None and column != columns.audio:
            _cell(row, column)
            if not takes:
                raise ConfigError(
                    f"dataset.{medium.setting}: {column!r} goes with messages, or a prompt and its "
                    f"completion, got {columns.kind}; name their columns, too"
                )
        elif takes and not is_named:
            column = medium.column_of(row)
        unused = tuple(name for name in columns.unused if name != column)
        seen = replace(columns, unused=unused, chat=True, **{medium.role: column})
        if takes and medium.is_in(row, seen):
            return medium, seen
    return None


def _with_one(row: Row, columns: Columns, medium: Medium) -> Row:
    """`row`, which has no other medium than this one.

    Raises:
        ConfigError: its messages name another.
    """
    others = [each.name for each in MEDIA if each != medium and each.is_in(row, columns)]
    if others:
        raise ConfigError(
            f"has {others[0]} beside {medium.name}, and a model is trained on one of both here; "
            "remove the row, or its other parts"
        )
    return row


def _without_media(row: Row, columns: Columns) -> Row:
    """`row`, whose messages name no image and no clip.

    Raises:
        ConfigError: they do.
    """
    for medium in MEDIA:
        if columns.chat and medium.is_in(row, columns):
            raise ConfigError(
                f"has {medium.name} in its messages, and only text is trained on here; give each "
                f"row a list {medium.name}, which may be empty, or remove the row"
            )
    return row


def _named(config: DatasetConfig, row: Row, rows: Rows) -> Columns | None:
    """The columns that the config names."""
    if rows != "texts":
        return _named_parts(config, row, rows)
    chats = config.messages_column is not None or config.completion_column is not None
    if config.audio_column is not None and not chats:
        text = config.text_column or transcript_column(row)
        if text is None:
            raise ConfigError(
                f"dataset.audio_column: {config.audio_column!r} goes with its transcript, and "
                f"there are {', '.join(map(str, row))}; name it with dataset.text_column"
            )
        return Columns(kind="transcripts", chat=False, trained=text, audio=config.audio_column)
    if config.text_column is not None:
        return Columns(kind="text", chat=False, trained=config.text_column)
    if config.messages_column is not None:
        return Columns(kind="messages", chat=True, trained=config.messages_column)
    if config.completion_column is None:
        return None
    return Columns(
        kind="prompt-completion",
        chat=True,
        trained=config.completion_column,
        prompt=config.prompt_column,
    )


def _named_parts(config: DatasetConfig, row: Row, rows: Rows) -> Columns | None:
    """The columns of pairs, labelled answers or prompts that the config names."""
    names = {
        "pairs": {"chosen": config.chosen_column, "rejected": config.rejected_column},
        "labelled": {"completion": config.completion_column, "label": config.label_column},
        "prompts": {},
        "classified": {"text": config.text_column, "label": config.label_column},
        "tagged": {},
        "spans": {},
        "scored": {},
        "anchors": {},
    }[rows] | {"prompt": config.prompt_column}
    if not any(names.values()):
        return None
    # as if they had the usual names: the values decide what is a conversation
    usual = {name: column for name, column in names.items() if column is not None}
    for column in usual.values():
        _cell(row, column)
    spelled = {name: row[column] for name, column in usual.items()}
    more = {column: value for column, value in row.items() if column not in usual.values()}
    columns = recognised({**more, **spelled}, rows)
    back: dict[str, Any] = {part: usual.get(name, name) for part, name in columns.roles().items()}
    is_question = usual.get("prompt", "prompt") != "prompt"  # as where its name is recognised
    return replace(columns, **{**back, "chat": columns.chat or is_question})


def _example(row: Row, columns: Columns) -> Example:
    if columns.kind == "text":
        return {"text": _text(row, columns.trained)}
    if columns.kind == "transcripts":
        assert columns.audio is not None, "a transcript is of a clip"
        return {AUDIO: clip_of(_cell(row, columns.audio)), "text": _text(row, columns.trained)}
    if columns.kind == "messages":
        messages = _messages(row, columns.trained)
        return {"messages": [*_system(row, columns, messages), *messages]}
    if columns.kind in LABELLED_KINDS:
        return _labelled(row, columns)
    if columns.kind == "preference":
        return _preference(row, columns)
    if columns.kind == "prompts":
        further = [name for name in columns.unused if name in row and name not in PARTS]
        return {"prompt": _prompts(row, columns), **{name: row[name] for name in further}}
    label = {} if columns.label is None else {"label": _label(row, columns.label)}
    assert columns.prompt is not None, "an answer is to a prompt"
    if not columns.chat:
        texts = _text(row, columns.prompt), _text(row, columns.trained)
        return dict(zip(("prompt", "completion"), texts, strict=True)) | label
    answer = _turn(row, columns.trained, "assistant")
    return {"prompt": _prompt(row, columns), "completion": answer, **label}


def _prompts(row: Row, columns: Columns) -> str | list[Message]:
    if not columns.chat:
        return _text(row, columns.trained)
    turns = _turn(row, columns.trained, "user")
    return [*_system(row, columns, turns), *turns]


def _labelled(row: Row, columns: Columns) -> Example:
    """A text with its class, words with their tags, or a text with the place of an answer."""
    if columns.kind == "anchors":
        return _anchor(row, columns)
    assert columns.label is not None
    label = _cell(row, columns.label)
    if columns.kind == "classified":
        return {"text": _text(row, columns.trained), "label": label}
    if columns.kind == "tagged":
        return {"tokens": as_list(_cell(row, columns.trained)), "tags": as_list(label)}
    assert columns.prompt is not None
    if columns.kind == "scored":
        texts = {"query": _text(row, columns.prompt), "document": _text(row, columns.trained)}
        return {**texts, "score": label}
    texts = {"question": _text(row, columns.prompt), "context": _text(row, columns.trained)}
    return {**texts, "answers": label}


def _anchor(row: Row, columns: Columns) -> Example:
    """An anchor, the text that belongs to it, and those that do not."""
    assert columns.prompt is not None
    texts = {"anchor": _text(row, columns.prompt), "positive": _text(row, columns.trained)}
    named = ["negative"]
    if len(columns.contexts) > 1:
        named = [f"negative_{number}" for number in range(1, len(columns.contexts) + 1)]
    negatives = zip(named, columns.contexts, strict=False)
    return {**texts, **{name: _text(row, column) for name, column in negatives}}


def _label(row: Row, column: str) -> bool:
    """Whether an answer is wanted, whichever way the file spells it."""
    value = _cell(row, column)
    spelled = str(value).strip().lower()
    if spelled in ("true", "1", "1.0"):
        return True
    if spelled in ("false", "0", "0.0"):
        return False
    got = "nothing" if value is None else repr(value)
    raise ConfigError(
        f"column {column!r} must hold true or false (or 1 or 0), got {got}; correct or remove the "
        "row"
    )


def _pair(row: Row, columns: Columns) -> Example:
    """Two answers, to one prompt where they are messages."""
    example = _preference(row, columns)
    if columns.chat and "prompt" not in example:
        raise ConfigError(
            f"columns {columns.trained!r} and {columns.rejected!r} begin with no common message, "
            "and there is no prompt; add a prompt column, or correct or remove the row"
        )
    return example


def _preference(row: Row, columns: Columns) -> Example:
    chosen, rejected = columns.trained, columns.rejected
    assert rejected is not None, "a preference is between two answers"
    if not columns.chat:
        prompt = {"prompt": _text(row, columns.prompt)} if columns.prompt else {}
        return prompt | {"chosen": _text(row, chosen), "rejected": _text(row, rejected)}
    answers = _turn(row, chosen, "assistant"), _turn(row, rejected, "assistant")
    num_shared = 0
    while num_shared < min(map(len, answers)) - 1 and (
        answers[0][num_shared] == answers[1][num_shared]
    ):
        num_shared += 1
    prompt_turns = answers[0][:num_shared] or (_prompt(row, columns) if columns.prompt else [])
    return {
        **({"prompt": prompt_turns} if prompt_turns else {}),
        "chosen": answers[0][num_shared:],
        "rejected": answers[1][num_shared:],
    }


def _prompt(row: Row, columns: Columns) -> list[Message]:
    """The turns before the answer."""
    assert columns.prompt is not None, "asked for only where there is one"
    prompt = _turn(row, columns.prompt, "user")
    further = [_text(row, context, optional=True) for context in columns.contexts]
    if any(further):
        prompt[-1]["content"] = "\n\n".join(filter(None, (prompt[-1]["content"], *further)))
    turns = [*_history(row, columns.history), *prompt]
    return [*_system(row, columns, turns), *turns]


def _turn(row: Row, column: str, role: str) -> list[Message]:
    """The messages of a column, or its text as one message of `role`."""
    if as_list(row.get(column)) is not None:
        messages = _messages(row, column)
        if not messages:
            raise ConfigError(
                f"column {column!r} must hold a message, got an empty list; correct or remove the "
                "row"
            )
        return messages
    return [{"role": role, "content": _text(row, column)}]


def _system(row: Row, columns: Columns, messages: Sequence[Message]) -> list[Message]:
    """The message of the column of system prompts, where `messages` do not have one."""
    text = _text(row, columns.system, optional=True) if columns.system is not None else ""
    starts = bool(messages) and messages[0]["role"] == "system"
    return [{"role": "system", "content": text}] if text and not starts else []


def _history(row: Row, column: str | None) -> list[Message]:
    """Earlier turns, as LLaMA-Factory has them: pairs of instruction and answer."""
    if column is None or row.get(column) in (None, "", []):
        return []
    pairs = as_list(row[column]) or [row[column]]
    if not all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in pairs):
        raise ConfigError(f"column {column!r} must hold pairs of texts, [[user, assistant], …]")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(roles, pair, strict=True)
    ]


def _cell(row: Row, column: str) -> Any:
    if column not in row:
        raise ConfigError(f"column {column!r} is missing; there are {', '.join(map(str, row))}")
    return row[column]


def _text(row: Row, column: str, *, optional: bool = False) -> str:
    value = _cell(row, column)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        got = "nothing" if value is None else type(value).__name__
        raise ConfigError(
            f"column {column!r} must hold text, got {got}; correct or remove the row, or name "
            "other columns under dataset"
        )
    return value


def _fill(template: str, columns: Sequence[str], row: Row) -> str:
    values = {column: _cell(row, column) for column in columns}
    missing = [column for column, value in values.items() if value is None]
    if missing:
        raise ConfigError(
            f"column {missing[0]!r} must hold a value, got nothing; correct or remove the row"
        )
    try:
        return template.format_map(values)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"dataset.template: can't be filled: {error}") from None


def _messages(row: Row, column: str) -> list[Message]:
    """Role and content of each message, whichever way the file spells them."""
    value = _cell(row, column)
    turns = as_list(value)
    if turns is None:
        got = "nothing" if value is None else type(value).__name__
        raise ConfigError(
            f"column {column!r} must hold a list of messages, got {got}; correct or remove the row"
        )
    if turns and all(isinstance(turn, str) for turn in turns):  # in turn, the user first
        speakers = ("user", "assistant")
        return [{"role": speakers[i % 2], "content": turn} for i, turn in enumerate(turns)]
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        try:
            messages += _spoken(turn)
        except ConfigError as error:
            raise ConfigError(
                f"column {column!r}: message {number} {error}; correct or remove the row"
            ) from None
    return messages


def _spoken(turn: Any) -> list[Message]:
    """The message, or the two of a question with its answer, that one object spells."""
    if isinstance(turn, Mapping):
        for speaker, content in _SPEAKERS:
            if {speaker, content} <= set(turn):
                role = str(turn[speaker])
                standard_role = _ROLES.get(role.strip().lower())
                if standard_role is None:
                    _check_speaker(role, is_open=speaker == "role")
                further = {key: turn[key] for key in _FURTHER_KEYS if turn.get(key) is not None}
                return [
                    {"role": standard_role or role, "content": _joined(turn[content]), **further}
                ]
        for names in _TURNS:
            if set(names) <= set(turn):
                roles = ("user", "assistant")
                return [
                    {"role": role, "content": _joined(turn[name])}
                    for role, name in zip(roles, names, strict=True)
                ]
    raise ConfigError("must have role and content, or from and value")


def _check_speaker(role: str, *, is_open: bool) -> None:
    """Refuse a name of a speaker that is none of those known.

    Args:
        is_open: templates may have roles of their own; only what looks like the assistant's is
            refused, since nothing of it would be learned.

    Raises:
        ConfigError: with the name that was probably meant.
    """
    near = meant(role, _OF_ANSWERS if is_open else _ROLES)
    if is_open and near:
        raise ConfigError(f"has the role {role!r}; did you mean {near}")
    if not is_open:
        hint = f"did you mean {near}; " if near else ""
        raise ConfigError(f"is from {role!r}; {hint}accepted are {', '.join(_ROLES)}")


def _joined(content: Any) -> str:
    """Content as one text, whose parts are joined."""
    if content is None:  # beside a call of a tool
        return ""
    if isinstance(content, list):
        texts = [_part(part) if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError("has a part without text, and only text is trained on")
        return "".join(texts)
    if not isinstance(content, str):
        raise ConfigError(f"must hold text, got {type(content).__name__}")
    return content


def _part(part: Mapping[str, Any]) -> Any:
    """The text of one part, or the place of what it is; LLaMA-Factory 0.9.5 calls it value."""
    kind = part.get("type", "text")
    place = next((medium.place for medium in MEDIA if kind in medium.types), None)
    return place or (part.get("text", part.get("value")) if kind == "text" else None)
