"""Words of messages: a word that is not known, alternatives, and a release."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX = "max"  # of a size: the largest that fits
# Names of our values in other tools.
SYNONYMS = {
    "adam": "adamw_torch_fused",
    "adamw": "adamw_torch_fused",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "flash": "flash_attention_2",
    "4bit": "nf4-dq",
    "8bit": "int8",
    "deepspeed": "zero3",
    "embedding": "sentence-transformers",
    "gptq": "gptq-int4",
    "pagedadamw": "paged_adamw_32bit",  # the class of bitsandbytes
    "pagedlion": "paged_lion_32bit",
}
_NEAR = 0.87  # of 1: a letter too many among nine, and no other word of as many


def unknown(setting: str, value: object, accepted: Iterable[str]) -> str:
    """The line that refuses `value`, with the accepted word that it is nearest to, if any is."""
    words = list(accepted)
    near = meant(str(value), words)
    hint = f"did you mean {near}; " if near else ""
    return f"{setting}: {value!r} is not known; {hint}accepted are {', '.join(words)}"


def alternatives(words: Iterable[object]) -> str:
    """One or more words as a sentence has them: 2, 4 or 8."""
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}" if first else last


def release_of(engine: str, version: str) -> str:
    """An engine with its version, where it has one: vllm 0.33.0."""
    return f"{engine} {version}".rstrip()


def meant(value: str, accepted: Iterable[str]) -> str:
    """The word that differs in case, in what joins its parts, or in a letter; else empty.

    Two letters that changed places are one fault, too: "qlroa" is "qlora".

    The beginning of one word alone counts, too: "prefix" of "prefix-tuning".
    """
    import difflib  # which a run without a fault does not need

    words = {plain(word): word for word in accepted}
    wanted = plain(value)
    begun = [word for text, word in words.items() if wanted and text.startswith(wanted)]
    if wanted in words:
        return words[wanted]
    if SYNONYMS.get(wanted) in words.values():
        return SYNONYMS[wanted]
    if len(begun) == 1:
        return begun[0]
    swapped = [word for text, word in words.items() if _is_swapped(wanted, text)]
    if len(swapped) == 1:
        return swapped[0]
    near = difflib.get_close_matches(wanted, words, n=1, cutoff=_NEAR)
    return words[near[0]] if near else ""


def _is_swapped(wanted: str, text: str) -> bool:
    pairs = range(len(wanted) - 1)
    return text in (wanted[:i] + wanted[i + 1] + wanted[i] + wanted[i + 2 :] for i in pairs)


def plain(word: str) -> str:
    """Without case and what joins the parts: LLaMA-Factory is llamafactory."""
    return re.sub(r"[\W_]", "", word.lower())
