"""Time how long a server takes to make tokens of a prompt's text, on this machine's CPU.

    python benchmarks/tokenizing.py

A byte-level tokenizer of 128,000 possible tokens is trained on the Python sources of the
environment, with the library that engines use (`tokenizers`). It then reads texts of those sources,
and tokens drawn at random, as `vllm bench serve` sends them. On 2026-11-29 with tokenizers 0.23.3
on a cloud's EPYC: 1.4 to 1.7 µs for each token of a text, 3.1 to 3.3 µs of random ones
(`whichlora/serving/kernel_rates.py` `TOKENIZED_S`).
"""

from __future__ import annotations

import random
import sysconfig
import time
from pathlib import Path
from statistics import median

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY, FILES, PROMPTS, SEED = 128_000, 4000, 6, 0
LENGTHS = (1024, 8192)


def trained(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def microseconds(tokenizer: Tokenizer, prompts: list[str]) -> float:
    """Of each token, the median of `prompts`."""
    found = []
    for prompt in prompts:
        began = time.perf_counter()
        tokens = len(tokenizer.encode(prompt).ids)
        found.append(1e6 * (time.perf_counter() - began) / tokens)
    return median(found)


def main() -> None:
    files = sorted(map(str, Path(sysconfig.get_paths()["purelib"]).rglob("*.py")))[:FILES]
    texts = [Path(name).read_text(encoding="utf-8", errors="ignore") for name in files]
    tokenizer, sources = trained(texts), "".join(texts)
    draw = random.Random(SEED)
    print(f"tokenizers {tokenizers.__version__}")
    for length in LENGTHS:
        drawn = [
            tokenizer.decode([draw.randrange(tokenizer.get_vocab_size()) for _ in range(length)])
            for _ in range(PROMPTS)
        ]
        step = len(sources) // PROMPTS
        parts = [sources[step * i : step * i + 4 * length] for i in range(PROMPTS)]
        print(
            f"{length} tokens: text {microseconds(tokenizer, parts):.1f} µs each, "
            f"random {microseconds(tokenizer, drawn):.1f} µs"
        )


if __name__ == "__main__":
    main()
