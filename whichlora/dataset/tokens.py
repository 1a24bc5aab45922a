"""Examples → numbers of tokens, by the model's tokenizer where it is available."""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from whichlora.dataset.base import (
    BaseDataset,
    Example,
    Split,
    checked_splits,
    data_format,
    examples,
    texts_of,
    trained,
)
from whichlora.dataset.lengths import TokenLengths
from whichlora.dataset.sources import CountedDataset
from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.data_format import ALPACA_CHAT_TEMPLATE, DataFormat
from whichlora.spec.numeric import ceil_div
from whichlora.store.jsonfiles import read_object
from whichlora.store.online import why_offline

Count = Callable[[Sequence[Example]], list[int]]  # examples to their numbers of tokens
Messages = Sequence[dict[str, Any]]
Render = Callable[..., str]  # messages, and options of `apply_chat_template`, to text

BYTE_LEVEL = "bytes"
"""Stands for the tokenizer of a job with random weights: one token per UTF-8 byte."""

_BYTES_PER_TOKEN = 4.0  # of text under today's vocabularies; said wherever it is used
MOST_BYTES_PER_TOKEN, FEWEST_BYTES_PER_TOKEN = 5.0, 2.96
"""Bounds of 90 % of data sets under public tokenizers; the median is 4.4.

Kind: measured. Source: `benchmarks/bytes_per_token.py`: 15 public instruction data sets (English,
Chinese, mathematics, code, tool calls) under the tokenizers of Llama 3 and 4, Qwen, DeepSeek,
Mistral 7B and Nemo: 2.58 (Chinese, Mistral 7B) to 5.18.
"""
LONGEST_BYTES_PER_TOKEN = 2.81
"""Bytes of the longest row over the most tokens of a row: 95 % of data sets have more.

Kind: measured. Source: as above. Chinese under Mistral 7B has 2.7, and a row full of digits 1.07
where each of them is a token (Qwen, Mistral).
"""
_ESTIMATE = (
    f"estimated: 1 token per {_BYTES_PER_TOKEN:g} UTF-8 bytes, which may be "
    f"{FEWEST_BYTES_PER_TOKEN:g} to {MOST_BYTES_PER_TOKEN:g}"
)
_MOST_ALTERNATIVE = 20_000  # sequences of an alternative estimate of the lengths
_CHUNK = 1024  # examples handed to the tokenizer at once

MESSAGE_TOKENS = 5
"""Tokens that a chat template adds to a message: around its role, before and after its content.

Kind: exact for Llama 3 (`<|start_header_id|>` role `<|end_header_id|>` "\\n\\n" `<|eot_id|>`),
ChatML, as Qwen and SmolLM2 have it (`<|im_start|>` role "\\n" `<|im_end|>` "\\n"), and Gemma
(`<start_of_turn>` role "\\n" `<end_of_turn>` "\\n"); Phi-3 adds 4, Mistral 1 to 2. A system
prompt that a template adds by itself (Llama 3.1, Qwen2.5) is not counted.
Source: the chat_template of these models' tokenizer_config.json.
"""


class Encode(Protocol):
    """Counts the tokens of texts."""

    def __call__(self, texts: list[str], *, rendered: bool) -> list[int]:
        """Numbers of tokens of `texts`.

        Args:
            rendered: a chat template has written every special token; otherwise the special tokens
                of the tokenizer and the end of the text count too.
        """


def count_tokens(
    dataset: BaseDataset,
    *,
    tokenizer: str | None,
    offline: bool,
    max_length: int,
    completions_only: bool = False,
) -> TokenLengths:
    """Lengths of all sequences, as `tokenizer` cuts them.

    The tokenizer comes from a local folder, the Hugging Face cache, or the hub when online. Without
    it the lengths are estimated from bytes: `method` says why, and `alternatives` hold more and
    fewer tokens.

    Args:
        dataset: rows to count.
        tokenizer: a name or folder, `BYTE_LEVEL`, or None to estimate.
        offline: never ask the hub.
        max_length: longer sequences are cut to this.
        completions_only: leave out rows in which nothing is learned, since their prompt fills
            `max_length` or no turn is the assistant's; so does the job.

    Raises:
        ConfigError: nothing to train on or to learn, or an example can't be made of a row.
    """
    if isinstance(dataset, CountedDataset):
        return dataset.lengths(max_length)
    expected = data_format(dataset)
    encode, method = _encoder(tokenizer, offline=offline)
    render = None
    if expected.conversational:
        render = _renderer(tokenizer, offline=offline)
        if render is None:
            method += (
                f"; for a chat template, which is not available, {MESSAGE_TOKENS} tokens a message "
                "and 1 a conversation"
            )
    whole, num_empty = _whole_examples(dataset, expected)

    def counts_of(encode: Encode, rows: Sequence[Example]) -> list[int]:
        count = _counter(encode, expected, render)
        return [
            number
            for start in range(0, len(rows), _CHUNK)
            for number in count(rows[start : start + _CHUNK])
        ]

    counts = {split: counts_of(encode, rows) for split, rows in whole.items()}
    num_unlearned = 0
    if completions_only:
        start_of = _start_counter(encode, render)
        num_unlearned = _drop_unlearned(whole, counts, max_length, start_of)

    def lengths_of(counts: Mapping[Split, Sequence[int]]) -> TokenLengths:
        return TokenLengths(
            lengths={
                split: tuple(min(number, max_length) for number in numbers)
                for split, numbers in counts.items()
            },
            max_length=max_length,
            num_truncated=sum(n > max_length for numbers in counts.values() for n in numbers),
            num_empty=num_empty,
            num_unlearned=num_unlearned,
            method=method,
        )

    lengths = lengths_of(counts)
    if not isinstance(encode, _Estimate):
        return lengths
    step = ceil_div(len(whole["train"]), _MOST_ALTERNATIVE)
    some = whole["train"][::step]
    most = counts_of(_Estimate(LONGEST_BYTES_PER_TOKEN), _longest(whole["train"]))
    return replace(
        lengths,
        longest_possible=lengths_of({"train": most}).longest(),
        alternatives=tuple(
            lengths_of({"train": counts_of(_Estimate(bytes_per_token), some)})
            for bytes_per_token in (MOST_BYTES_PER_TOKEN, FEWEST_BYTES_PER_TOKEN)
        ),
    )


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


def _drop_unlearned(
    whole: dict[Split, list[Example]],
    counts: dict[Split, list[int]],
    max_length: int,
    start_of: Callable[[str | Messages], int],
) -> int:
    """Drop the rows in which nothing is learned within `max_length` tokens; how many there were.

    Raises:
        ConfigError: no row of the training split is left.
    """
    num_unlearned = 0
    for split, rows in whole.items():
        learned = [
            (row, number)
            for row, number in zip(rows, counts[split], strict=True)
            if _is_learned(row, number, max_length, start_of)
        ]
        num_unlearned += len(rows) - len(learned)
        whole[split] = [row for row, _ in learned]
        counts[split] = [number for _, number in learned]
    if num_unlearned and not whole["train"]:
        raise ConfigError(
            f"dataset: nothing is learned within {max_length} tokens of any row: prompts fill "
            "them, or no turn is the assistant's; raise sequence_length, or set train_on: all"
        )
    return num_unlearned


def _longest(rows: Sequence[Example]) -> list[Example]:
    """The row of the most bytes, alone."""
    return [max(rows, key=lambda row: sum(len(text.encode()) for text in _all_texts(row)))]


def _counter(encode: Encode, expected: DataFormat, render: Render | None) -> Count:
    """The function that counts the tokens of examples in the `expected` format.

    Args:
        render: the chat template; None where it is not available.
    """
    if not expected.conversational:
        return lambda chunk: encode(["".join(_all_texts(row)) for row in chunk], rendered=False)
    if render is not None:
        return lambda chunk: encode([render(_messages(row)) for row in chunk], rendered=True)
    return lambda chunk: [
        1 + sum(MESSAGE_TOKENS + number for number in encode(_all_texts(row), rendered=True))
        for row in chunk
    ]


def _is_learned(
    row: Example, number: int, max_length: int, start_of: Callable[[str | Messages], int]
) -> bool:
    """Whether the first `max_length` of the row's `number` tokens hold some that are learned."""
    if "text" in row:
        return True
    before = _before_answer(row)
    if number <= max_length:
        return "messages" not in row or len(before) < len(row["messages"])
    return start_of(before) < max_length


def _before_answer(row: Example) -> str | Messages:
    """The prompt or messages before the first learned token, with train_on completions."""
    if "messages" in row:
        return list(itertools.takewhile(lambda m: m["role"] != "assistant", row["messages"]))
    chosen: str | Messages = row.get("chosen", "")
    prompt: str | Messages = row.get("prompt", "" if isinstance(chosen, str) else chosen[:-1])
    return prompt


def _start_counter(encode: Encode, render: Render | None) -> Callable[[str | Messages], int]:
    """The function that counts the tokens before an answer, as the job cuts the prompt."""

    def start_of(prompt: str | Messages) -> int:
        if isinstance(prompt, str):
            (begin,) = encode([""], rendered=False)  # the token that begins a text, and its end
            return max(0, begin - 1) + encode([prompt], rendered=True)[0]
        if render is not None:
            return encode([render(prompt, add_generation_prompt=True)], rendered=True)[0]
        before_answer = MESSAGE_TOKENS - 1  # template tokens before an answer
        texts = encode(list(texts_of(prompt)), rendered=True)
        return 1 + sum(MESSAGE_TOKENS + number for number in texts) + before_answer

    return start_of


def _renderer(tokenizer: str | None, *, offline: bool) -> Render | None:
    """The chat template of the job, None where it is not available."""
    if tokenizer == BYTE_LEVEL:
        return _byte_renderer()
    return _chat_renderer(tokenizer, offline=offline)


def _messages(example: Example) -> Messages:
    """All messages of a conversation that is trained on, the prompt first."""
    return [*example.get("prompt", ()), *trained(example)]


def _all_texts(example: Example) -> list[str]:
    return [*texts_of(example.get("prompt", ())), *texts_of(trained(example))]


def _encoder(tokenizer: str | None, *, offline: bool) -> tuple[Encode, str]:
    """The function that counts the tokens of texts, and its name."""
    if tokenizer == BYTE_LEVEL:
        return _count_bytes, BYTE_LEVEL
    if tokenizer is None:
        return _Estimate(), f"{_ESTIMATE}, as no tokenizer is named"
    file = _tokenizer_file(tokenizer, "tokenizer.json", offline=offline)
    if file is None:
        where = "on this machine" if offline else "on this machine or the hub"
        return _Estimate(), f"{_ESTIMATE}, as tokenizer {tokenizer} is not {where}"
    try:
        fast = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    except ImportError:
        return _Estimate(), f"{_ESTIMATE}, as the library tokenizers is not installed"
    except Exception as error:  # the library raises plain Exception
        raise DataFileError(f"{file}: is not a tokenizer: {error}; download it again") from None
    fast.no_truncation()
    fast.no_padding()

    end = _end_of_text(file.with_name("tokenizer_config.json"), fast)

    def encode(texts: list[str], *, rendered: bool) -> list[int]:
        encodings = fast.encode_batch(texts, add_special_tokens=not rendered)
        if rendered or end is None:
            return [len(encoding.ids) for encoding in encodings]
        # the job ends each text, unless the tokenizer does
        return [len(encoding.ids) + (encoding.ids[-1:] != [end]) for encoding in encodings]

    return encode, f"tokenizer {tokenizer}"


def _end_of_text(config: Path, fast: Any) -> int | None:
    """The token that ends a text, None where there is none."""
    if not config.is_file():
        return None
    token = read_object(config).get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    return fast.token_to_id(name) if isinstance(name, str) else None


def _count_bytes(texts: list[str], *, rendered: bool) -> list[int]:
    return [len(text.encode()) + (not rendered) for text in texts]


@dataclass(frozen=True, slots=True)
class _Estimate:
    """One token per so many bytes, and one that ends the text."""

    bytes_per_token: float = _BYTES_PER_TOKEN

    def __call__(self, texts: list[str], *, rendered: bool) -> list[int]:
        return [
            math.ceil(len(text.encode()) / self.bytes_per_token) + (not rendered) for text in texts
        ]


def _tokenizer_file(tokenizer: str, name: str, *, offline: bool) -> Path | None:
    """A file of `tokenizer`: from its folder, the Hugging Face cache, or the hub when online."""
    local = Path(os.path.expanduser(tokenizer))
    if os.path.exists(local):
        file = (local if local.is_dir() else local.parent) / name
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(tokenizer, name)
        if isinstance(cached, str):
            return Path(cached)
        if offline or why_offline() is not None:
            return None
        return Path(hf_hub_download(tokenizer, name))
    except Exception:  # any error of the hub means that the file is not available
        return None


def _chat_renderer(tokenizer: str | None, *, offline: bool) -> Render | None:
    """The chat template of `tokenizer`, None where it is not available."""
    if tokenizer is None or tokenizer == BYTE_LEVEL:
        return None
    file = _tokenizer_file(tokenizer, "tokenizer_config.json", offline=offline)
    if file is None:
        return None
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        return None
    # By its name when online: a template in a file of its own may not be in the cache yet.
    source, local_only = (file.parent, True) if offline else (tokenizer, False)
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(source, local_files_only=local_only)
    except Exception as error:  # the library raises whatever lies below it
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"tokenizers: {tokenizer} can't be loaded: {reason}; check its files"
        ) from error
    template = None if loaded.chat_template else ALPACA_CHAT_TEMPLATE

    def render(messages: Messages, **options: bool) -> str:
        try:
            text: str = loaded.apply_chat_template(
                messages, chat_template=template, tokenize=False, **options
            )
        except Exception as error:  # a template raises what it likes
            reason = " ".join(str(error).split())[:200]
            roles = ", ".join(str(message["role"]) for message in messages)
            begin = messages[0]["content"][:60] if messages else ""
            raise ConfigError(
                f"dataset: the chat template of {tokenizer} refuses the messages of {roles} that "
                f"begin with {begin!r}: {reason}; correct the row, or choose another model"
            ) from None
        return text

    return render


def _byte_renderer() -> Render | None:
    """The template of a job with random weights, None where jinja2 is not installed."""
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError:
        return None
    template = jinja2.Template(ALPACA_CHAT_TEMPLATE)
    end = "\0"  # one token
    return lambda messages, **options: str(
        template.render(messages=messages, eos_token=end, **options)
    )
