"""Examples → numbers of tokens, by the model's tokenizer where it is at hand."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whichlora.data_format import ALPACA_CHAT_TEMPLATE, DataFormat
from whichlora.dataset.base import (
    BaseDataset,
    Example,
    checked_splits,
    data_format,
    examples,
    texts_of,
    trained,
)
from whichlora.dataset.lengths import TokenLengths
from whichlora.dataset.sources import CountedDataset
from whichlora.errors import ConfigError, DataFileError
from whichlora.store.online import why_offline

Encode = Callable[[list[str]], list[int]]  # texts to their numbers of tokens
Count = Callable[[Sequence[Example]], list[int]]  # examples to their numbers of tokens
Messages = Sequence[dict[str, Any]]

BYTE_LEVEL = "bytes"
"""Stands for the tokenizer of a job with random weights: one token per UTF-8 byte."""

_BYTES_PER_TOKEN = 4  # of English text under today's vocabularies; said wherever it is used
_ESTIMATE = f"estimated: 1 token per {_BYTES_PER_TOKEN} UTF-8 bytes"
_CHUNK = 1024  # examples handed to the tokenizer at once


def count_tokens(
    dataset: BaseDataset, *, tokenizer: str | None, offline: bool, max_length: int
) -> TokenLengths:
    """Lengths of all sequences, as `tokenizer` cuts them.

    The tokenizer is used if it is at hand: a local folder, the Hugging Face cache, or the hub
    when online. Else the lengths are estimated from bytes, and `method` says so and why.

    Args:
        dataset: what to count.
        tokenizer: a name or folder, `BYTE_LEVEL`, or None to estimate.
        offline: never ask the hub.
        max_length: longer sequences are cut to this.

    Raises:
        ConfigError: nothing to train on, or an example can't be made of a row.
    """
    if isinstance(dataset, CountedDataset):
        return dataset.lengths(max_length)
    expected = data_format(dataset)
    count, method = _counter(tokenizer, expected, offline=offline)
    lengths: dict[str, tuple[int, ...]] = {}
    num_truncated = num_empty = 0
    for split, rows in checked_splits(dataset).items():
        every = list(examples(dataset, split, rows, expected=expected))
        whole = [example for example in every if example is not None]
        num_empty += len(every) - len(whole)
        counts = [
            number
            for start in range(0, len(whole), _CHUNK)
            for number in count(whole[start : start + _CHUNK])
        ]
        num_truncated += sum(number > max_length for number in counts)
        lengths[split] = tuple(min(number, max_length) for number in counts)
    return TokenLengths(
        lengths=lengths,
        max_length=max_length,
        num_truncated=num_truncated,
        num_empty=num_empty,
        method=method,
    )


def _counter(tokenizer: str | None, expected: DataFormat, *, offline: bool) -> tuple[Count, str]:
    """What counts the tokens of examples in the `expected` format, and its name."""
    encode, method = _encoder(tokenizer, offline=offline)
    if not expected.conversational:
        return lambda chunk: encode(["".join(_trained_texts(example)) for example in chunk]), method
    render = _chat_renderer(tokenizer, offline=offline)
    if render is not None:
        return lambda chunk: encode([render(_messages(example)) for example in chunk]), method

    def count(chunk: Sequence[Example]) -> list[int]:
        return [sum(encode(list(_trained_texts(example)))) for example in chunk]

    return count, f"{method}, without the chat template"


def _messages(example: Example) -> Messages:
    """All messages of a conversation that is trained on, the prompt first."""
    return [*example.get("prompt", ()), *trained(example)]


def _trained_texts(example: Example) -> Sequence[str]:
    return [*texts_of(example.get("prompt", "")), *texts_of(trained(example))]


def _encoder(tokenizer: str | None, *, offline: bool) -> tuple[Encode, str]:
    """What counts the tokens of texts, and its name."""
    if tokenizer == BYTE_LEVEL:
        return lambda texts: [len(text.encode()) for text in texts], BYTE_LEVEL
    if tokenizer is None:
        return _estimate, f"{_ESTIMATE}, as no tokenizer is named"
    file = _tokenizer_file(tokenizer, "tokenizer.json", offline=offline)
    if file is None:
        where = "on this machine" if offline else "on this machine or the hub"
        return _estimate, f"{_ESTIMATE}, as tokenizer {tokenizer} is not {where}"
    try:
        fast = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    except ImportError:
        return _estimate, f"{_ESTIMATE}, as the library tokenizers is not installed"
    except Exception as error:  # the library raises plain Exception
        raise DataFileError(f"{file}: is not a tokenizer: {error}; download it again") from None
    fast.no_truncation()
    fast.no_padding()

    def encode(texts: list[str]) -> list[int]:
        return [len(encoding.ids) for encoding in fast.encode_batch(texts)]

    return encode, f"tokenizer {tokenizer}"


def _estimate(texts: list[str]) -> list[int]:
    return [-(-len(text.encode()) // _BYTES_PER_TOKEN) for text in texts]


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
    except Exception:  # whatever the hub answers, it has no such file for us
        return None


def _chat_renderer(tokenizer: str | None, *, offline: bool) -> Callable[[Messages], str] | None:
    """The chat template of `tokenizer`, None where it is not at hand."""
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
    # A first token that tokenizing adds anyway must not stand in the text as well.
    adds_first = loaded.bos_token and loaded("").input_ids[:1] == [loaded.bos_token_id]
    first = loaded.bos_token if adds_first else ""

    def render(messages: Messages) -> str:
        try:
            text: str = loaded.apply_chat_template(messages, chat_template=template, tokenize=False)
        except Exception as error:  # a template raises what it likes
            reason = " ".join(str(error).split())[:200]
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(
                f"dataset: the chat template of {tokenizer} refuses messages of {roles}: {reason}; "
                "correct the rows, or choose another model"
            ) from None
        return text.removeprefix(first)

    return render
