"""How widely the lengths of public instruction data are spread, from the data itself.

    python benchmarks/public_lengths.py FOLDER

FOLDER holds a clone of each repository under OWNER+NAME (a bare one will do). Prints a row per
data set: samples, mean bytes, standard deviation over the mean, skewness of the logarithm. The
third is what `whichlora/dataset/assumed.py` keeps. Then each data set is planned from its samples
and mean alone, with the spreads of the others: padded tokens of batches of 2, 8 and 16, cut at 512
and 2048 tokens, against those of its real lengths (one token per 4 bytes).
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whichlora.dataset import TokenLengths, Workload, assumed, workload
from whichlora.dataset.base import texts_of, trained
from whichlora.dataset.rendering import rendering
from whichlora.dataset.sources import CountedDataset
from whichlora.errors import ConfigError
from whichlora.spec.plan import DatasetConfig

PUBLISHED = 1.246  # of the data set that is published as figures only
DATA_SETS = (  # repository, file
    ("openai/grade-school-math", "grade_school_math/data/train.jsonl"),
    ("teknium1/GPTeacher", "Codegen/codegen-instruct.json"),
    ("teknium1/GPTeacher", "Roleplay/roleplay-simple-deduped-roleplay-instruct.json"),
    ("teknium1/GPTeacher", "Toolformer/toolformer-dedupe-only-dataset.json"),
    ("hiyouga/LLaMA-Factory", "data/alpaca_en_demo.json"),
    ("hiyouga/LLaMA-Factory", "data/alpaca_zh_demo.json"),
    ("hiyouga/LLaMA-Factory", "data/glaive_toolcall_en_demo.json"),
    ("hiyouga/LLaMA-Factory", "data/v1_sft_demo.jsonl"),
    ("hiyouga/LLaMA-Factory", "data/dpo_en_demo.json"),
    ("hiyouga/LLaMA-Factory", "data/dpo_zh_demo.json"),
    ("hiyouga/LLaMA-Factory", "data/kto_en_demo.json"),
    ("anthropics/hh-rlhf", "harmless-base/test.jsonl.gz"),
    ("bigcode-project/octopack", "dataset/oasst/oasstcommitpackftmanual.jsonl"),
    ("yizhongw/self-instruct", "human_eval/user_oriented_instructions.jsonl"),
    ("yizhongw/self-instruct", "data/seed_tasks.jsonl"),
)


def read_rows(folder: Path, repository: str, file: str) -> list[dict[str, Any]]:
    """The rows of a file of a clone's newest commit."""
    clone = folder / repository.replace("/", "+")
    bare = clone / "repo" if (clone / "repo").is_dir() else clone
    command = ["git", "-C", str(bare), "show", f"HEAD:{file}"]
    content = subprocess.run(command, capture_output=True, check=True).stdout
    text = (gzip.decompress(content) if file.endswith(".gz") else content).decode()
    if text.lstrip().startswith("["):
        rows: list[dict[str, Any]] = json.loads(text)
        return rows
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def with_plain_columns(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with text where two of the data sets nest it."""
    if "instances" in row:  # self-instruct
        return {"instruction": row["instruction"], **row["instances"][0]}
    if isinstance(row.get("chosen"), dict):  # LLaMA-Factory's preferences: a turn, not a list
        chosen = row["chosen"]
        return {"conversations": [*row["conversations"], chosen]}
    return row


def lengths_in_bytes(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Bytes of all that is trained on or stands before it, of each row that has any."""
    lengths = []
    render = None
    for row in map(with_plain_columns, rows):
        if render is None:
            render, _ = rendering(DatasetConfig(path="any.jsonl"), row)
        try:
            example = render(row)
        except ConfigError:  # a turn without text, such as one of pictures
            continue
        parts = [*texts_of(example.get("prompt", ())), *texts_of(trained(example))]
        lengths.append(sum(len(part.encode()) for part in parts))
    return [length for length in lengths if length]


def tokens_of(lengths: Sequence[int], batch_size: int, cut: int) -> int:
    """Padded tokens of an epoch over `lengths`."""
    known = TokenLengths(lengths={"train": tuple(lengths)}, max_length=cut, method="known")
    return workload(known, batch_size=batch_size, seq_len=cut).padded_tokens


def planned(lengths: Sequence[int], others: Sequence[float], batch_size: int, cut: int) -> Workload:
    """What is planned where only the number and the mean of `lengths` are given.

    Args:
        others: standard deviation over the mean of the data sets to assume.
    """
    typical, narrow, wide = assumed.spreads(others)
    counted = CountedDataset(
        num_samples=len(lengths),
        mean_tokens=statistics.fmean(lengths),
        typical=typical,
        between=(narrow, wide),
    )
    return workload(counted.lengths(cut), batch_size=batch_size)


def main(folder: Path) -> None:
    print("data set | samples | mean bytes | deviation / mean | skewness of the log")
    ratios, by_name = {}, {}
    for repository, file in DATA_SETS:
        name = f"{repository}, {Path(file).name}"
        lengths = by_name[name] = lengths_in_bytes(read_rows(folder, repository, file))
        mean, logs = statistics.fmean(lengths), [math.log(length) for length in lengths]
        center, deviation = statistics.fmean(logs), statistics.pstdev(logs)
        skewness = statistics.fmean(((log - center) / deviation) ** 3 for log in logs)
        ratios[name] = statistics.pstdev(lengths) / mean
        print(f"{name} | {len(lengths)} | {mean:.0f} | {ratios[name]:.3f} | {skewness:+.2f}")
    errors, equal, inside = [], [], 0
    for name, lengths in by_name.items():
        others = [*(ratio for key, ratio in ratios.items() if key != name), PUBLISHED]
        tokens = [-(-length // 4) for length in lengths]
        for batch_size, cut in itertools.product((2, 8, 16), (512, 2048)):
            real = tokens_of(tokens, batch_size, cut)
            load = planned(tokens, others, batch_size, cut)
            errors.append(math.log(load.padded_tokens / real))
            inside += abs(errors[-1]) <= 1.645 * load.deviation
            mean = statistics.fmean(tokens)
            equal.append(math.log(len(tokens) * min(cut, mean) / real))
    for words, logs in (("spread as the others", errors), ("all of the mean length", equal)):
        relative = sorted((math.expm1(log) for log in logs), key=abs)
        median = statistics.median(map(abs, relative))
        print(f"{words}: median error {median:.1%}, worst {relative[-1]:+.1%}")
    print(f"within the stated 90 % interval: {inside} of {len(errors)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
