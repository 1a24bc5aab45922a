"""Compare the speeds of llama.cpp on Macs and AMD's GPUs that others published with our steps.

    python benchmarks/llama_cpp_backends.py --write    docs/accuracy/llama_cpp_backends.md

`--fit` prints the constants of `serving.llama_cpp_rates` for them: of Macs from the group "Metal
scoreboard", of AMD's architectures from both scoreboards and AMD's branch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llama_cpp_gpus import (
    READS,
    Speed,
    files_of,
    kernel_seconds,
    product_share,
    speeds,
    with_constants,
)
from markdown_tables import markdown_table, summary, write_page

from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.serving.llama_cpp_rates import BLOCK_READS
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.store.gpus import find_target
from whichlora.timing.model import product_rate, sustained_factor

RECORDS = Path(__file__).with_name("llama_cpp_backend_speeds.csv")
METAL = "Metal scoreboard"
AMD = ("ROCm scoreboard", "Vulkan scoreboard", "ROCm, AMD's branch")
OLD = ("Metal, May 2024", "ROCm, May 2025")  # of releases that no longer are


def kind_of(case: Speed) -> str:
    return find_target(case.gpu).kind


def constants(cases: Sequence[Speed], reads: float) -> tuple[float, float, dict[str, float]]:
    """The least squares of decoding with `reads`, a kernel's seconds, and shares of products."""
    decoding = [case for case in cases if case.kind == "decode"]
    kernel_s = float(np.mean(kernel_seconds(decoding, reads)))
    squares = 0.0
    for case in decoding:
        timer = with_constants(case.timer(), kernel_s=kernel_s, reads=reads)
        squares += (case.predicted_s(timer) / case.seconds - 1) ** 2
    shares: dict[str, list[float]] = {}
    for case in cases:
        if case.kind == "prompt":
            share = product_share(case, kernel_s, reads)
            shares.setdefault(files_of(case), []).append(math.log(share))
    return squares, kernel_s, {of: math.exp(np.mean(logs)) for of, logs in shares.items()}


def fitted_metal(cases: Sequence[Speed]) -> tuple[float, float, dict[str, float]]:
    """The share of the bandwidth, a kernel's seconds and shares of the fp32 peak, of all Macs."""
    best = min(READS, key=lambda reads: constants(cases, float(reads))[0])
    return (float(best), *constants(cases, float(best))[1:])


def fitted_amd(cases: Sequence[Speed]) -> dict[str, tuple[float, float]]:
    """A kernel's seconds and the share of the fp32 peak, by architecture.

    One share of the bandwidth is that of CUDA's kernels, whose source is the same.
    """
    by_architecture: dict[str, list[Speed]] = {}
    for case in cases:
        by_architecture.setdefault(str(find_target(case.gpu).compute_capability), []).append(case)
    found = {}
    for architecture, those in sorted(by_architecture.items()):
        _, kernel_s, shares = constants(those, BLOCK_READS)
        found[architecture] = kernel_s, shares["in blocks"]
    return found


def fitting() -> tuple[list[Speed], list[Speed]]:
    """The rows of Macs, and of AMD's GPUs, that give the constants."""
    cases = speeds(RECORDS)
    amd = [case for case in cases if case.group in AMD and kind_of(case) == "rocm"]
    return [case for case in cases if case.group == METAL], amd


def left_out() -> list[tuple[Speed, float]]:
    """Errors of Macs with the constants of all other chips."""
    cases, _ = fitting()
    found = []
    for name in sorted({case.gpu for case in cases}):
        reads, kernel_s, shares = fitted_metal([case for case in cases if case.gpu != name])
        gpu = find_target(name)
        for case in cases:
            if case.gpu == name:
                peak = sustained_factor(gpu, "bf16") * product_rate(gpu, "fp32")
                rate = shares[files_of(case)] * peak
                timer = with_constants(case.timer(), kernel_s=kernel_s, reads=reads, rate=rate)
                found.append((case, case.seconds / case.predicted_s(timer) - 1))
    return found


def compared() -> list[tuple[Speed, float, bool]]:
    """Relative errors of speeds, and whether they lie inside the interval."""
    found = []
    for case in speeds(RECORDS):
        if kind_of(case) == "xpu":  # no times are said of them
            continue
        timer = case.timer()
        log = math.log(case.seconds / case.predicted_s(timer))
        inside = abs(log) <= TWO_SIDED_Z[TIME_CONFIDENCE] * timer.deviation
        found.append((case, math.exp(log) - 1, inside))
    return found


def document() -> str:
    rows: dict[tuple[str, str, str], list[tuple[str, float, str]]] = {}
    for case, error, inside in compared():
        key = case.group, case.kind, files_of(case)
        rows.setdefault(key, []).append((case.gpu, error, "x" * inside))
    for case, error in left_out():
        key = f"{METAL}, this chip left out", case.kind, files_of(case)
        rows.setdefault(key, []).append((case.gpu, error, "?"))
    table = []
    for key, each in sorted(rows.items()):
        inside = "" if each[0][2] == "?" else str(sum(bool(x) for *_, x in each))
        cards = len({gpu for gpu, *_ in each})
        table.append((*key, cards, *summary([error for _, error, _ in each]).cells(), inside))
    return "\n\n".join(
        (
            "Speeds that `llama-bench` printed on Macs (Metal) and on AMD's GPUs (ROCm, Vulkan), "
            "with the source of each in `benchmarks/llama_cpp_backend_speeds.csv`. Most were read "
            "from transcriptions of llama.cpp's discussions. Of Macs one share of the bandwidth, "
            "one time of a kernel and two shares of the fp32 peak are fitted to the scoreboard of "
            "20 chips (Llama 2 7B, a release of November 2023); all other rows of Macs are not "
            "fitted. Of AMD's GPUs each architecture has a time of a kernel and a share of the "
            "peak, fitted to both scoreboards and, of Strix Halo, to AMD's branch. Inside: of the "
            "interval of the answer (90 %).",
            "Misses. Releases of May 2024 attended without a fused kernel, and read K types "
            "slowly on M1: answers of 8B in Q4_K_M on an M1 Max took up to 1.9 times as long as "
            "we say (1.2 times in March 2026). On an M2 Ultra a release of 2026 writes 21 % to "
            "47 % more tokens of small models than we say. On Strix Halo prompts of Qwen3 30B "
            "A3B and of releases before summer 2025 took 3 to 4 times as long. On an RX 7900 XT "
            "answers of gpt-oss-20b take 1.7 times as long; a W7900 is slower than its datasheet "
            "says. AMD's two builds differ: on an RX 7900 XTX Vulkan writes 9 % more tokens of "
            "this model than ROCm. Of gfx90a and gfx942 one card each is known, of others none.",
            "Intel's GPUs have no times. On an A770 and a B580 one model wrote 97 and 127 tokens "
            "a second under Windows, 39 and 42 under Ubuntu (llama.cpp's pull request 14001).",
            markdown_table(
                (
                    *("published in", "step", "weights", "cards"),
                    *("n", "median", "p90", "worst", "inside"),
                ),
                table,
                first_figure=3,
            ),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--fit", action="store_true")
    asked = parser.parse_args()
    if asked.fit:
        macs, amd = fitting()
        print(fitted_metal(macs))
        print(fitted_amd(amd))
        return
    text = document()
    print(text)
    if asked.write:
        write_page("llama_cpp_backends", "Speed of llama.cpp on Macs and AMD's GPUs", text)


if __name__ == "__main__":
    main()
