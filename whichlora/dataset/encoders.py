"""Texts → numbers of tokens, by a tokenizer, by bytes, or estimated; and messages → texts."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol

from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.data_format import ALPACA_CHAT_TEMPLATE
from whichlora.store.jsonfiles import read_object
from whichlora.store.online import why_offline

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


Frame = Literal["none", "tokenizer", "ended", "eos", "bos and eos"]
"""Special tokens of a text: none, as of one that a chat template has rendered; the tokenizer's;
these and an end unless they end it, as `train.py` puts it; EOS behind the text, and then the
tokenizer's; or none of the tokenizer's, but BOS and EOS unless they are there.
"""


class Encode(Protocol):
    """Counts the tokens of texts."""

    def __call__(self, texts: list[str], frame: Frame) -> list[int]:
        """Numbers of tokens of `texts`, with their special tokens."""

    def shared(self, prompt: str, whole: str, frame: Frame) -> int:
        """Tokens of `prompt` with which `whole` begins, too."""


def renderer_of(tokenizer: str | None, *, offline: bool, parts: bool = False) -> Render | None:
    """The chat template of the job, None where it is not available.

    Args:
        parts: messages are made of parts, which only a template of the model itself renders.
    """
    if tokenizer == BYTE_LEVEL:
        return _byte_renderer()
    return _chat_renderer(tokenizer, offline=offline, parts=parts)


def encoder_of(tokenizer: str | None, *, offline: bool) -> tuple[Encode, str]:
    """The function that counts the tokens of texts, and its name."""
    if tokenizer == BYTE_LEVEL:
        return Estimate(bytes_per_token=1), BYTE_LEVEL
    if tokenizer is None:
        return Estimate(), f"{_ESTIMATE}, as there is no tokenizer"
    file = _tokenizer_file(tokenizer, "tokenizer.json", offline=offline)
    if file is None:
        return Estimate(), _not_there(tokenizer, offline=offline)
    try:
        fast = importlib.import_module("tokenizers").Tokenizer.from_file(str(file))
    except ImportError:
        return Estimate(), f"{_ESTIMATE}, as the library tokenizers is not installed"
    except Exception as error:  # the library raises plain Exception
        raise DataFileError(f"{file}: is not a tokenizer: {error}; download it again") from None
    fast.no_truncation()
    fast.no_padding()

    config = file.with_name("tokenizer_config.json")
    ends = [_special(config, key) for key in ("bos_token", "eos_token")]
    return _ByTokenizer(fast, *ends), f"tokenizer {tokenizer}"


def why_estimated(tokenizer: str, *, offline: bool) -> str:
    """Why the lengths are estimated, where no file of `tokenizer` is at hand; else "".

    Then they are the same for every such tokenizer.
    """
    names = ("tokenizer.json", "tokenizer_config.json")
    if tokenizer == BYTE_LEVEL or any(
        _tokenizer_file(tokenizer, name, offline=offline) for name in names
    ):
        return ""
    return _not_there(tokenizer, offline=offline)


def _not_there(tokenizer: str, *, offline: bool) -> str:
    where = "on this machine" if offline else "on this machine or the hub"
    return f"{_ESTIMATE}, as tokenizer {tokenizer} is not {where}"


def _special(config: Path, key: str) -> str | None:
    """The text of a special token, None where there is none."""
    if not config.is_file():
        return None
    token = read_object(config).get(key)
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


@dataclass(frozen=True, slots=True)
class _ByTokenizer:
    """Counts as a tokenizer of the library `tokenizers` does.

    Args:
        begin, end: its BOS and EOS tokens; None where there is none.
    """

    fast: Any
    begin: str | None
    end: str | None

    def __call__(self, texts: list[str], frame: Frame) -> list[int]:
        is_begun, is_ended = frame == "bos and eos", frame in ("ended", "bos and eos")
        begin, end = self._number(self.begin), self._number(self.end)
        return [
            len(ids)
            + (is_begun and begin is not None and ids[:1] != [begin])
            + (is_ended and end is not None and ids[-1:] != [end])
            for ids in self._ids(texts, frame)
        ]

    def shared(self, prompt: str, whole: str, frame: Frame) -> int:
        (start,) = self._ids([prompt], "tokenizer" if frame == "eos" else frame)
        (ids,) = self._ids([whole], frame)
        if frame != "bos and eos":
            same = takewhile(lambda pair: pair[0] == pair[1], zip(start, ids, strict=False))
            return sum(1 for _ in same)
        merged = start != ids[: len(start)]  # its last token, as `build_tokenized_answer` takes it
        begin = self._number(self.begin)
        return len(start) - merged + (begin is not None and ids[:1] != [begin])

    def _ids(self, texts: list[str], frame: Frame) -> list[list[int]]:
        if frame == "eos" and self.end is not None:
            texts = [text if text.endswith(self.end) else text + self.end for text in texts]
        has_special = frame in ("tokenizer", "ended", "eos")
        return [row.ids for row in self.fast.encode_batch(texts, add_special_tokens=has_special)]

    def _number(self, token: str | None) -> int | None:
        number: int | None = None if token is None else self.fast.token_to_id(token)
        return number


@dataclass(frozen=True, slots=True)
class Estimate:
    """One token per so many bytes, and one that ends the text."""

    bytes_per_token: float = _BYTES_PER_TOKEN

    def __call__(self, texts: list[str], frame: Frame) -> list[int]:
        is_ended = frame in ("ended", "eos", "bos and eos")
        return [math.ceil(len(text.encode()) / self.bytes_per_token) + is_ended for text in texts]

    def shared(self, prompt: str, whole: str, frame: Frame) -> int:
        return self([prompt], "none")[0]


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


def _processor_template(tokenizer: str, *, offline: bool) -> str | None:
    """The template that a processor has in a file of its own, as older checkpoints do."""
    file = _tokenizer_file(tokenizer, "chat_template.json", offline=offline)
    template = None if file is None else read_object(file).get("chat_template")
    return template if isinstance(template, str) else None


def _chat_renderer(tokenizer: str | None, *, offline: bool, parts: bool) -> Render | None:
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
    if parts and template is not None:
        template = _processor_template(tokenizer, offline=offline)
        if template is None:
            return None

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
