"""Examples → numbers of tokens, by the model's tokenizer where it is at hand."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

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
from whichlora.store.jsonfiles import read_object
from whichlora.store.online import why_offline

Count = Callable[[Sequence[Example]], list[int]]  # examples to their numbers of tokens
Messages = Sequence[dict[str, Any]]

BYTE_LEVEL = "bytes"
"""Stands for the tokenizer of a job with random weights: one token per UTF-8 byte."""

_BYTES_PER_TOKEN = 4  # of English text under today's vocabularies; said wherever it is used
_ESTIMATE = f"estimated: 1 token per {_BYTES_PER_TOKEN} UTF-8 bytes"
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
    """What counts the tokens of texts."""

    def __call__(self, texts: list[str], *, rendered: bool) -> list[int]:
        """Numbers of tokens of `texts`.

        Args:
            rendered: they are from a chat template, which has written every special token;
                otherwise those that the tokenizer adds count, and the end of the text.
        """


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
        return (
            lambda chunk: encode(["".join(_all_texts(row)) for row in chunk], rendered=False),
            method,
        )
    render = (
        _byte_renderer() if tokenizer == BYTE_LEVEL else _chat_renderer(tokenizer, offline=offline)
    )
    if render is not None:
        return lambda chunk: encode(
            [render(_messages(row)) for row in chunk], rendered=True
        ), method

    def count(chunk: Sequence[Example]) -> list[int]:
        return [
            1 + sum(MESSAGE_TOKENS + number for number in encode(_all_texts(row), rendered=True))
            for row in chunk
        ]

    return count, (
        f"{method}; for a chat template, which is not at hand, {MESSAGE_TOKENS} tokens a message "
        "and 1 a conversation"
    )


def _messages(example: Example) -> Messages:
    """All messages of a conversation that is trained on, the prompt first."""
    return [*example.get("prompt", ()), *trained(example)]


def _all_texts(example: Example) -> list[str]:
    return [*texts_of(example.get("prompt", ())), *texts_of(trained(example))]


def _encoder(tokenizer: str | None, *, offline: bool) -> tuple[Encode, str]:
    """What counts the tokens of texts, and its name."""
    if tokenizer == BYTE_LEVEL:
        return _count_bytes, BYTE_LEVEL
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


def _estimate(texts: list[str], *, rendered: bool) -> list[int]:
    """One token per `_BYTES_PER_TOKEN`, and one that ends the text."""
    return [-(-len(text.encode()) // _BYTES_PER_TOKEN) + (not rendered) for text in texts]


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

    def render(messages: Messages) -> str:
        try:
            text: str = loaded.apply_chat_template(messages, chat_template=template, tokenize=False)
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


def _byte_renderer() -> Callable[[Messages], str] | None:
    """The template that a job with random weights takes, None where jinja2 is not installed."""
    try:
        jinja2 = importlib.import_module("jinja2")
    except ImportError:
        return None
    template = jinja2.Template(ALPACA_CHAT_TEMPLATE)
    end = "\0"  # one token
    return lambda messages: str(template.render(messages=messages, eos_token=end))
