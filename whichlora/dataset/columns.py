"""Recognise the columns of public data sets: which are the prompt and the answer."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whichlora.dataset.base import Row
from whichlora.errors import ConfigError
from whichlora.spec.data_format import COLUMNS, KINDS, DataKind, Rows, negatives_of

# Names in lower case with "_" for spaces and hyphens, the likeliest first. Source: the columns of
# the public data sets that tests/dataset/test_columns.py lists.
PREFERENCES = (
    *(("chosen", "rejected"), ("chosen_response", "rejected_response")),
    ("response_j", "response_k"),
)
# Words of names that only a suggestion takes for a better and a worse answer.
OPPOSITES = (
    *(("chosen", "rejected"), ("good", "bad"), ("better", "worse"), ("best", "worst")),
    *(("winner", "loser"), ("win", "lose"), ("preferred", "dispreferred"), ("right", "wrong")),
    *(("accepted", "rejected"), ("correct", "incorrect"), ("positive", "negative")),
)
CONVERSATIONS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "data")
PROMPTS = (
    *("instruction", "instructions", "definition", "question", "questions", "query", "prompt"),
    *("problem", "inputs", "input", "user", "human"),
)
ANSWERS = (
    *("output", "response", "completion", "solution", "generated_solution", "answer", "answers"),
    *("best_answer", "target", "targets", "assistant", "bot", "gpt", "reply"),
)
PAIRS = (
    *(("document", "summary"), ("article", "highlights"), ("article", "summary")),
    *(("dialogue", "summary"), ("text", "summary"), ("source", "target"), ("src", "tgt")),
    *(("input_text", "target_text"), ("input_text", "output_text"), ("q", "a")),
    *(("text", "code"), ("text", "output"), ("text", "response"), ("text", "answer")),
    *(("text", "label"), ("sentence", "label")),
)
CONTEXTS = ("input", "inputs", "context", "passage", "document")  # beside a prompt
SYSTEMS = ("system", "system_prompt", "system_message")
HISTORIES = ("history",)  # earlier turns, as pairs
TEXTS = ("text", "content", "code")
AUDIO_COLUMNS = ("audio", "audio_path", "audio_file", "audio_filepath", "wav", "wav_path")
TRANSCRIPT_COLUMNS = (
    *("text", "sentence", "transcription", "transcript", "normalized_text", "raw_text"),
    *("raw_transcription", "target_text"),
)  # beside a clip
IMAGE_COLUMNS = ("images", "image")  # beside messages, or a prompt and its answer
LABELS = ("label", "kto_tag", "desirable", "is_desirable", "thumbs_up")  # of an answer: wanted
CLASSIFIED_TEXTS = ("text", "sentence", "content", "review", "tweet", "question", "title")
CLASSES = ("label", "labels", "class", "category", "sentiment", "intent", "coarse_label")
DOCUMENTS, SCORES = ("document", "passage", "answer", "text"), ("score", "label", "relevance")
ANCHORS = ("anchor", "query", "question", "sentence1")
POSITIVES = ("positive", "document", "passage", "answer", "sentence2")
TOKENS, TAGS = ("tokens", "words"), ("tags", "ner_tags", "labels", "pos_tags")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The role of each column of a data set.

    Args:
        kind: of the examples that they make.
        chat: texts are turns of a conversation, which the model's chat template renders.
        trained: what the model learns to write: the text, the conversation or the answer.
        prompt, rejected, label, system, history: columns, or None.
        contexts: columns that follow the prompt, after a blank line; of an anchor, the negatives.
        images: column of the paths of images, where it is not in the messages.
        audio: column of the clip whose transcript is learned, or of clips beside messages.
        unused: all others.
    """

    kind: DataKind
    chat: bool
    trained: str
    prompt: str | None = None
    rejected: str | None = None
    label: str | None = None
    system: str | None = None
    history: str | None = None
    contexts: tuple[str, ...] = ()
    images: str | None = None
    audio: str | None = None
    unused: tuple[str, ...] = ()

    def roles(self) -> dict[str, str]:
        """The columns that an example is made of, one by one, by their role."""
        names = ("trained", "prompt", "rejected", "label", "system", "history")
        return {name: column for name in names if (column := getattr(self, name)) is not None}

    def describe(self) -> str:
        """Which columns make an example, and which are left out."""
        first = ", ".join(
            filter(None, (self.audio, self.system, self.history, self.prompt, *self.contexts))
        )
        words = f"{first} -> {self.trained}" if first else self.trained
        words += f" (rejected: {self.rejected})" if self.rejected else ""
        words += f" (label: {self.label})" if self.label else ""
        words += f" as {'messages' if self.chat else 'text'}"
        words += f" (images: {self.images})" if self.images else ""
        use = "for the rewards" if self.kind == "prompts" else "not used"
        return words + (f" ({use}: {', '.join(self.unused)})" if self.unused else "")


def recognised(row: Row, rows: Rows = "texts") -> Columns:
    """The roles of the columns of `row`, by their names and values.

    Args:
        rows: what the trainer takes.

    Raises:
        ConfigError: no name is recognised; the message says what to write instead.
    """
    columns = _RECOGNISERS[rows](row)
    if columns is None:
        raise ConfigError(_advice(row) if rows == "texts" else _needed(row, rows))
    return columns


def as_list(value: Any) -> list[Any] | None:
    """`value` if it is a list, or the list that a cell of a CSV file spells as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # no JSON, or lists in lists without end
            return None
    return value if isinstance(value, list) else None


def _preference(row: Row) -> Columns | None:
    by_name = _by_name(row)
    for names in PREFERENCES:
        if not set(names) <= set(by_name):
            continue
        chosen, rejected = (by_name[name] for name in names)
        messages = as_list(row[chosen]) is not None
        system = None if messages else _first_text(row, SYSTEMS)
        prompt = next((by_name[name] for name in PROMPTS if name in by_name), None)
        as_in_trl = prompt is None or (prompt == by_name.get("prompt") and system is None)
        return _columns(
            row,
            kind="preference",
            chat=messages or not as_in_trl,
            trained=chosen,
            rejected=rejected,
            prompt=prompt,
            system=system,
        )
    return None


def _learned_text(row: Row) -> Columns | None:
    return (
        _preference(row)
        or _conversation(row)
        or _transcript(row)
        or _prompt_completion(row)
        or _instruction(row)
        or _plain_text(row)
    )


def _labelled(row: Row) -> Columns | None:
    by_name = _by_name(row)
    label = next((by_name[name] for name in LABELS if name in by_name), None)
    if label is None:
        return None
    answers = {column: value for column, value in row.items() if column != label}
    columns = _prompt_completion(answers) or _instruction(answers)
    return None if columns is None else replace(columns, kind="labelled", label=label)


def _prompt(row: Row) -> Columns | None:
    by_name = _by_name(row)
    prompt = next((by_name[name] for name in ("prompt", *PROMPTS) if name in by_name), None)
    if prompt is None:
        return None
    system = None if as_list(row[prompt]) is not None else _first_text(row, SYSTEMS)
    chat = as_list(row[prompt]) is not None or prompt != by_name.get("prompt") or system is not None
    return _columns(row, kind="prompts", chat=chat, trained=prompt, system=system)


def _conversation(row: Row) -> Columns | None:
    by_name = _by_name(row)
    for name in CONVERSATIONS:
        if name in by_name and as_list(row[by_name[name]]) is not None:
            system = _first_text(row, SYSTEMS)
            return _columns(row, kind="messages", chat=True, trained=by_name[name], system=system)
    return None


def _transcript(row: Row) -> Columns | None:
    audio, text = audio_column(row), transcript_column(row)
    if audio is None or text is None:
        return None
    return _columns(row, kind="transcripts", chat=False, trained=text, audio=audio)


def _prompt_completion(row: Row) -> Columns | None:
    """The two columns of TRL: texts are kept as they are, messages as messages."""
    by_name = _by_name(row)
    if not {"prompt", "completion"} <= set(by_name) or set(SYSTEMS) & set(by_name):
        return None
    prompt, completion = by_name["prompt"], by_name["completion"]
    chat = as_list(row[completion]) is not None
    return _columns(row, kind="prompt-completion", chat=chat, trained=completion, prompt=prompt)


def _instruction(row: Row) -> Columns | None:
    by_name = _by_name(row)
    answer = _first_text(row, ANSWERS)
    prompt = _first_text(row, PROMPTS)
    if answer is None or prompt is None:
        pairs = ([_first_text(row, [name]) for name in names] for names in PAIRS)
        prompt, answer = next((pair for pair in pairs if None not in pair), (None, None))
    if answer is None or prompt is None:
        return None
    return _columns(
        row,
        kind="prompt-completion",
        chat=True,
        trained=answer,
        prompt=prompt,
        system=next((by_name[name] for name in SYSTEMS if name in by_name), None),
        history=next((by_name[name] for name in HISTORIES if name in by_name), None),
        contexts=tuple(
            by_name[name]
            for name in CONTEXTS
            if name in by_name and by_name[name] not in (prompt, answer)
        ),
    )


def _plain_text(row: Row) -> Columns | None:
    by_name = _by_name(row)
    column = next((by_name[name] for name in TEXTS if name in by_name), None)
    if column is None and len(row) == 1 and not set(by_name) & set(CONVERSATIONS):
        column = next((name for name, value in row.items() if isinstance(value, str)), None)
    if column is not None:
        return _columns(row, kind="text", chat=False, trained=column)
    named = next((by_name[name] for name in CONVERSATIONS if name in by_name), None)
    if named is None:
        return None
    return _columns(row, kind="messages", chat=True, trained=named)


def _classified(row: Row) -> Columns | None:
    by_name = _by_name(row)
    label = next((by_name[name] for name in CLASSES if name in by_name), None)
    text = _first_text(row, [name for name in CLASSIFIED_TEXTS if by_name.get(name) != label])
    if label is None or text is None:
        return None
    return _columns(row, kind="classified", chat=False, trained=text, label=label)


def _tagged(row: Row) -> Columns | None:
    by_name = _by_name(row)
    tokens = next((by_name[name] for name in TOKENS if name in by_name), None)
    tags = next((by_name[name] for name in TAGS if name in by_name), None)
    if tokens is None or tags is None:
        return None
    return _columns(row, kind="tagged", chat=False, trained=tokens, label=tags)


def _span(row: Row) -> Columns | None:
    by_name = _by_name(row)
    if not {"question", "context", "answers"} <= set(by_name):
        return None
    question, context, answers = (by_name[name] for name in ("question", "context", "answers"))
    return _columns(row, kind="spans", chat=False, trained=context, prompt=question, label=answers)


def _scored(row: Row) -> Columns | None:
    by_name = _by_name(row)
    query = next((by_name[name] for name in ("query", "question") if name in by_name), None)
    document = next((by_name[name] for name in DOCUMENTS if name in by_name), None)
    score = next((by_name[name] for name in SCORES if name in by_name), None)
    if query is None or document is None or score is None:
        return None
    return _columns(row, kind="scored", chat=False, trained=document, prompt=query, label=score)


def _anchor(row: Row) -> Columns | None:
    by_name = _by_name(row)
    anchor = next((by_name[name] for name in ANCHORS if name in by_name), None)
    positive = next((by_name[name] for name in POSITIVES if name in by_name), None)
    if anchor is None or positive is None:
        return None
    negatives = tuple(by_name[name] for name in negatives_of(by_name))
    return _columns(
        row, kind="anchors", chat=False, trained=positive, prompt=anchor, contexts=negatives
    )


_RECOGNISERS: Mapping[Rows, Callable[[Row], Columns | None]] = {
    "texts": _learned_text,
    "pairs": _preference,
    "labelled": _labelled,
    "prompts": _prompt,
    "classified": _classified,
    "tagged": _tagged,
    "spans": _span,
    "scored": _scored,
    "anchors": _anchor,
}
_NEEDED: Mapping[Rows, str] = {
    "pairs": (
        "a trainer on pairs takes chosen and rejected, and prompt unless both begin with it; name "
        "yours with dataset.chosen_column, dataset.rejected_column and dataset.prompt_column"
    ),
    "labelled": (
        "a trainer on labelled answers takes prompt, completion and label (true or false); name "
        "yours with dataset.prompt_column, dataset.completion_column and dataset.label_column"
    ),
    "prompts": "a trainer on prompts takes prompt; name yours with dataset.prompt_column",
    "classified": (
        "a run that learns classes of texts takes text and label; name yours with "
        "dataset.text_column and dataset.label_column"
    ),
    "tagged": "a run that learns classes of tokens takes tokens and tags, two lists of each row",
    "spans": (
        "a run that learns where answers stand takes question, context and answers (text and "
        "answer_start)"
    ),
    "scored": (
        "a run that learns how well documents answer takes query, document and score (0 to 1)"
    ),
    "anchors": (
        "a run that learns embeddings takes anchor, positive and, where there are any, negative or "
        "negative_1, negative_2, ..."
    ),
}


def _needed(row: Row, rows: Rows) -> str:
    """Which columns there are, and which a trainer on `rows` takes."""
    words = f"has the columns {', '.join(map(str, row))}; {_NEEDED[rows]}"
    if rows == "pairs" and (named := _as_pair(row)):
        return f"{words}, here {named}"
    accepted = COLUMNS[KINDS[rows][0]]
    missing = set(accepted) - set(_by_name(row))
    spellings = [
        f"{column!r} may be {near[0]}"
        for name, column in _by_name(row).items()
        if name not in accepted and (near := difflib.get_close_matches(name, missing, n=1))
    ]
    return f"{words} ({', '.join(spellings)})" if spellings else words


def _opposites(row: Row) -> tuple[str, str] | None:
    """Columns of texts whose names call one answer better and the other worse."""
    by_name = {
        name: column for name, column in _by_name(row).items() if isinstance(row[column], str)
    }
    for name, column in by_name.items():
        words = name.split("_")
        for better, worse in OPPOSITES:
            other = "_".join(worse if word == better else word for word in words)
            if other != name and other in by_name:
                return column, by_name[other]
    return None


def _question(row: Row, answers: Sequence[str]) -> str | None:
    """The column that asks what `answers` answer: one of a usual name, else the only other text."""
    others = [column for column in row if isinstance(row[column], str) and column not in answers]
    named = _first_text({column: row[column] for column in others}, PROMPTS)
    return named or (others[0] if len(others) == 1 else None)


def _as_pair(row: Row) -> str:
    """Which settings name the answers of `row` that look like a pair; empty where none do."""
    if (answers := _opposites(row)) is None:
        return ""
    settings = [f"dataset.chosen_column {answers[0]}", f"dataset.rejected_column {answers[1]}"]
    if question := _question(row, answers):
        settings.insert(0, f"dataset.prompt_column {question}")
    return f"{', '.join(settings[:-1])} and {settings[-1]}"


def audio_column(row: Row) -> str | None:
    """The column of `row` that holds a clip of sound, by its name."""
    by_name = _by_name(row)
    columns = (by_name[name] for name in AUDIO_COLUMNS if name in by_name)
    return next((name for name in columns if isinstance(row[name], str | Mapping)), None)


def clips_column(row: Row) -> str | None:
    """The column of `row` that holds clips beside messages, by its name."""
    by_name = _by_name(row)
    columns = (by_name[name] for name in ("audios", *AUDIO_COLUMNS) if name in by_name)
    kinds = (str, list, Mapping, type(None))
    return next((name for name in columns if isinstance(row[name], kinds)), None)


def transcript_column(row: Row) -> str | None:
    """The column of `row` that holds what is said in its clip, by its name."""
    return _first_text(row, TRANSCRIPT_COLUMNS)


def image_column(row: Row) -> str | None:
    """The column of `row` that names images, by its name."""
    by_name = _by_name(row)
    return next((by_name[name] for name in IMAGE_COLUMNS if name in by_name), None)


def _by_name(row: Row) -> dict[str, str]:
    """Columns by the name that they are compared by; the first of two that differ in case."""
    names: dict[str, str] = {}
    for column in row:
        names.setdefault(re.sub(r"[\s_-]+", "_", column.strip().lower()), column)
    return names


def _first_text(row: Row, names: Sequence[str]) -> str | None:
    """The column of the first of `names` that holds text in `row`, else of the first empty one."""
    by_name = _by_name(row)
    columns = [by_name[name] for name in names if name in by_name]
    texts = (column for column in columns if isinstance(row[column], str))
    return next(texts, next((column for column in columns if row[column] is None), None))


def _columns(row: Row, **parts: Any) -> Columns:
    used = {part for part in parts.values() if isinstance(part, str)} | set(
        parts.get("contexts", ())
    )
    return Columns(unused=tuple(column for column in row if column not in used), **parts)


def _advice(row: Row) -> str:
    """A proposal where no column is recognised: every text, the likeliest answer last."""
    likely = [*(names[1] for names in (*PAIRS, *PREFERENCES)), *reversed(ANSWERS)]
    places = {
        column: likely.index(name) if name in likely else -1
        for name, column in _by_name(row).items()
    }
    texts = [column for column in row if isinstance(row[column], str)]
    scalars = [column for column in row if isinstance(row[column], str | int | float)]
    if texts:  # beside them a number can only be the answer
        scalars = [name for name in scalars if name in texts or places.get(name, -1) >= 0]
    scalars = sorted(scalars, key=lambda column: places.get(column, -1))
    words = f"has the columns {', '.join(row)}, whose names do not tell which to train on"
    if (answers := _opposites(row)) and (question := _question(row, answers)):
        return (
            f"{words}; {answers[0]} and {answers[1]} look like a better and a worse answer: give "
            f"{_as_pair(row)} in a plan with trainer dpo; or, to learn {answers[0]} alone, "
            f"dataset.prompt_column {question} and dataset.completion_column {answers[0]}"
        )
    nested = [column for column in row if isinstance(row[column], dict | list)]
    if nested:
        words += f"; {', '.join(nested)} must be made text or messages first, to be used"
    if not scalars:
        return f"{words}; give rows with text, messages, or prompt and completion"
    template = "\\n".join(f"{{{column}}}" for column in scalars)
    advice = f'dataset.template, such as "{template}"'
    pair = scalars[-2:]
    if scalars and places.get(scalars[-1], -1) < 0:  # no name tells the answer: the longest two
        longest = sorted(texts, key=lambda column: len(row[column]))[-2:]
        pair = [column for column in texts if column in longest]
    if len(pair) == 2 and set(pair) <= set(texts):
        advice = (
            f"dataset.prompt_column and dataset.completion_column, such as {pair[0]} and "
            f"{pair[1]}, or {advice}"
        )
    return f"{words}; give {advice} in a plan, or name the one that is learned text"
