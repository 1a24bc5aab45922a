"""Examples → numbers of tokens, by the model's tokenizer where it is available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from whichlora.dataset.anchor_tokens import AnchorTokens
from whichlora.dataset.answer_tokens import AnswerTokens
from whichlora.dataset.base import (
    BaseDataset,
    Example,
    Split,
    checked_splits,
    data_format,
    examples,
    texts_of,
)
from whichlora.dataset.encoders import (
    BYTE_LEVEL,
    FEWEST_BYTES_PER_TOKEN,
    LONGEST_BYTES_PER_TOKEN,
    MOST_BYTES_PER_TOKEN,
    Encode,
    Estimate,
    Render,
    encoder_of,
    renderer_of,
)
from whichlora.dataset.images import Grid, sizes_of
from whichlora.dataset.label_tokens import LabelTokens
from whichlora.dataset.lengths import TokenLengths
from whichlora.dataset.pair_tokens import PairTokens
from whichlora.dataset.sources import CountedDataset
from whichlora.dataset.text_tokens import MESSAGE_TOKENS, TextTokens, all_texts, require_answers
from whichlora.dataset.transcript_tokens import TranscriptTokens
from whichlora.errors import ConfigError
from whichlora.spec.data_format import LABELLED_KINDS, TRANSCRIPTS, DataFormat, Rows
from whichlora.spec.numeric import ceil_div
from whichlora.spec.run import RunConfig
from whichlora.tasks import rows_of
from whichlora.trainers import get_trainer

_MOST_ALTERNATIVE = 20_000  # sequences of an alternative estimate of the lengths
_CHUNK = 1024  # examples handed to the tokenizer at once

Reader: TypeAlias = (
    TextTokens | AnswerTokens | LabelTokens | AnchorTokens | TranscriptTokens | PairTokens
)
Counts: TypeAlias = Sequence[tuple[int, ...]]  # tokens of each sequence of each row


_NO_TEMPLATE = (
    f"; for a chat template, which is not available, {MESSAGE_TOKENS} tokens a message and 1 a "
    "conversation"
)


def count_tokens(
    dataset: BaseDataset,
    *,
    tokenizer: str | None,
    offline: bool,
    max_length: int,
    completions_only: bool = False,
    run: RunConfig | None = None,
    grid: Grid | None = None,
    window_s: float = 0.0,
    target_length: int = 0,
) -> TokenLengths:
    """Lengths of all sequences, as `tokenizer` cuts them.

    It comes from a local folder, the Hugging Face cache, or the hub when online. Without it they
    are estimated from bytes: `method` says why, and `alternatives` hold more and fewer tokens.

    Args:
        tokenizer: a name or folder, `BYTE_LEVEL`, or None to estimate.
        offline: never ask the hub.
        max_length: longer sequences are cut to this.
        completions_only: leave out rows in which nothing is learned, since their prompt fills
            `max_length` or no turn is the assistant's; so does the job.
        run: whose trainer reads the rows; None: they are texts.
        grid: how the model's processor cuts what stands beside messages; None where it reads none.
        window_s: seconds that it keeps of a clip; 0 where it reads no sound.
        target_length: tokens that targets are cut to, where an encoder reads the sources; else 0.

    Raises:
        ConfigError: nothing to train on or to learn, an example can't be made of a row, or rows
            have images or sound that the model does not read.
    """
    rows: Rows = "texts" if run is None else rows_of(run)
    if isinstance(dataset, CountedDataset):
        counted = dataset.lengths(max_length)
        return counted.paired() if rows == "pairs" else counted
    expected = data_format(dataset)
    expected.require(rows)
    _check_media(expected, tokenizer, grid, window_s)
    encode, method = encoder_of(tokenizer, offline=offline)
    render = None
    is_pair = bool(target_length) and rows == "texts" and PairTokens.reads(expected)
    if expected.conversational and not is_pair:
        render = renderer_of(tokenizer, offline=offline, parts=bool(expected.media))
        method += _NO_TEMPLATE * (render is None)
    if is_pair:
        reader: Reader = PairTokens(max_length=max_length, target_length=target_length)
    elif expected == TRANSCRIPTS or (run is not None and rows != "texts"):
        reader = _reader_of(run, expected, window_s, max_length=max_length, render=render)
    else:
        reader = _text_reader(expected, render, max_length, completions_only, grid, window_s)
    whole, num_empty = _whole_examples(dataset, expected)
    if completions_only and isinstance(reader, TextTokens):
        require_answers(whole["train"])

    counts_of = partial(_counts, reader)
    counts = {split: counts_of(encode, rows) for split, rows in whole.items()}
    told: dict[str, Any] = {"num_unlearned": _leave_out(whole, counts, reader, encode)}
    told |= {"num_empty": num_empty, "num_blank": _blank(whole)}

    def lengths_of(counts: Mapping[Split, Counts]) -> TokenLengths:
        return replace(_lengths(reader, counts), method=method, **told)

    lengths = _with_targets(reader, lengths_of(counts), encode, whole)
    if expected.media:
        sizes = {str(split): tuple(map(sizes_of, rows)) for split, rows in whole.items()}
        lengths = replace(lengths, image_sizes=sizes)
    if lengths.is_counted:
        return lengths
    some = whole["train"][:: ceil_div(len(whole["train"]), _MOST_ALTERNATIVE)]
    longest = whole["train"] if expected.media else _longest(whole["train"])
    most = counts_of(Estimate(LONGEST_BYTES_PER_TOKEN), longest)
    return replace(
        lengths,
        longest_possible=lengths_of({"train": most}).longest(),
        alternatives=tuple(
            lengths_of({"train": counts_of(Estimate(bytes_per_token), some)})
            for bytes_per_token in (MOST_BYTES_PER_TOKEN, FEWEST_BYTES_PER_TOKEN)
        ),
    )


def _counts(reader: Reader, encode: Encode, rows: Sequence[Example]) -> Counts:
    return [
        numbers
        for start in range(0, len(rows), _CHUNK)
        for numbers in reader.counts(encode, rows[start : start + _CHUNK])
    ]


def _check_media(
    expected: DataFormat, tokenizer: str | None, grid: Grid | None, window_s: float
) -> None:
    """Refuse rows with images or sound that the model does not read."""
    if expected.media:
        _check_beside(expected.media, tokenizer, grid)
    if expected == TRANSCRIPTS:
        _check_audio(tokenizer, window_s)


_READERS = {"images": "Qwen/Qwen2.5-VL-7B-Instruct", "audios": "Qwen/Qwen2-Audio-7B-Instruct"}


def _check_beside(media: str, tokenizer: str | None, grid: Grid | None) -> None:
    """Raises: ConfigError: nobody knows how many tokens an image or a clip is."""
    if grid is None:
        raise ConfigError(
            f"dataset: rows have {media}, and those of {tokenizer or 'this model'} are not "
            f"predicted; give a model such as {_READERS[media]}, or rows without {media}"
        )
    if tokenizer == BYTE_LEVEL:
        raise ConfigError(
            f"weights: random has no processor for the {media} of the dataset; set weights: "
            f"pretrained, or give rows without {media}"
        )


def _check_audio(tokenizer: str | None, window_s: float) -> None:
    """Raises: ConfigError: the model writes no transcripts, or has no processor."""
    if not window_s:
        raise ConfigError(
            f"dataset: rows have clips with transcripts, which {tokenizer or 'this model'} does "
            "not learn from; give a model such as openai/whisper-small, or name the column of "
            "texts alone with dataset.text_column"
        )
    if tokenizer == BYTE_LEVEL:
        raise ConfigError(
            "weights: random has no processor for the audio of the dataset; set weights: pretrained"
        )


def _text_reader(
    expected: DataFormat,
    render: Render | None,
    max_length: int,
    completions_only: bool,
    grid: Grid | None,
    window_s: float,
) -> TextTokens:
    return TextTokens(
        max_length=max_length,
        render=render,
        conversational=expected.conversational,
        completions_only=completions_only,
        grid=grid if expected.media else None,
        media=expected.media,
        window_s=window_s,
    )


def _reader_of(
    run: RunConfig | None,
    expected: DataFormat,
    window_s: float,
    *,
    max_length: int,
    render: Render | None,
) -> Reader:
    """What counts rows that are no texts to write, or transcripts."""
    if run is None or expected == TRANSCRIPTS:
        return TranscriptTokens(max_length=max_length, window_s=window_s)
    if expected.kind == "anchors":
        return AnchorTokens(max_length=max_length, texts=get_trainer(run.trainer).sequences(run))
    if expected.kind in LABELLED_KINDS:
        return LabelTokens(max_length=max_length)
    return AnswerTokens(run=run, max_length=max_length, render=render)


def _lengths(reader: Reader, counts: Mapping[Split, Counts]) -> TokenLengths:
    """`counts` cut to the length of `reader`."""
    most = reader.max_length
    cut = {
        split: [[min(number, most) for number in numbers] for numbers in rows]
        for split, rows in counts.items()
    }
    others: dict[str, tuple[int, ...]] = {
        split: tuple(sum(numbers) - max(numbers) for numbers in rows) for split, rows in cut.items()
    }
    return TokenLengths(
        lengths={split: tuple(map(max, rows)) for split, rows in cut.items()},
        others=others if any(map(any, others.values())) else {},
        max_length=most,
        num_truncated=sum(max(numbers) > most for rows in counts.values() for numbers in rows),
        unlearned=reader.leaves_out.format(most),
        of_row=reader.of_row,
        method="",
    )


def _with_targets(
    reader: Reader, lengths: TokenLengths, encode: Encode, whole: Mapping[Split, Sequence[Example]]
) -> TokenLengths:
    """`lengths` with that of the longest target, or an upper bound where they are estimated."""
    if not isinstance(reader, PairTokens):
        return lengths
    longest_of = encode if lengths.is_counted else Estimate(LONGEST_BYTES_PER_TOKEN)
    of_splits = (reader.longest_target(longest_of, rows) for rows in whole.values() if rows)
    return replace(lengths, longest_target=max(of_splits))


def _whole_examples(
    dataset: BaseDataset, expected: DataFormat
) -> tuple[dict[Split, list[Example]], int]:
    """The examples of each split, and the number of rows that are empty."""
    num_empty = 0
    whole: dict[Split, list[Example]] = {}
    for split, rows in checked_splits(dataset).items():
        every = list(examples(dataset, split, rows, expected=expected))
        whole[split] = [example for example in every if example is not None]
        num_empty += len(every) - len(whole[split])
    return whole, num_empty


def _blank(whole: Mapping[Split, Sequence[Example]]) -> int:
    """Rows in which a turn of the assistant has neither text nor a call of a tool."""

    def is_blank(message: Mapping[str, Any]) -> bool:
        has_text = any(text.strip() for text in texts_of([message]))
        return message["role"] == "assistant" and not (message.get("tool_calls") or has_text)

    rows = (row for rows in whole.values() for row in rows)
    return sum(any(map(is_blank, row.get("messages", ()))) for row in rows)


def _leave_out(
    whole: dict[Split, list[Example]],
    counts: dict[Split, Counts],
    reader: Reader,
    encode: Encode,
) -> int:
    """Drop the rows that are not trained on; how many there were.

    Raises:
        ConfigError: no row of the training split is left.
    """
    num_left_out = 0
    for split, rows in whole.items():
        remaining = [
            (row, numbers)
            for row, numbers in zip(rows, counts[split], strict=True)
            if reader.is_kept(encode, row, numbers)
        ]
        num_left_out += len(rows) - len(remaining)
        whole[split] = [row for row, _ in remaining]
        counts[split] = [numbers for _, numbers in remaining]
    if num_left_out and not whole["train"]:
        raise ConfigError(f"dataset: {reader.none_left.format(reader.max_length)}")
    return num_left_out


def _longest(rows: Sequence[Example]) -> list[Example]:
    """The row of the most bytes, alone."""
    return [max(rows, key=lambda row: sum(len(text.encode()) for text in all_texts(row)))]
