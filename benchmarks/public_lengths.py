"""How widely the lengths of public instruction data are spread, from the data itself.

    python benchmarks/public_lengths.py FOLDER

FOLDER holds a clone of each repository under OWNER+NAME (a bare one will do). Prints a row per
data set: samples, mean bytes, standard deviation over the mean, skewness of the logarithm. The
third is what `whichlora/dataset/assumed.py` keeps.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whichlora.dataset.base import texts_of, trained
from whichlora.dataset.rendering import rendering
from whichlora.errors import ConfigError
from whichlora.plan import DatasetConfig

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


def main(folder: Path) -> None:
    print("data set | samples | mean bytes | deviation / mean | skewness of the log")
    for repository, file in DATA_SETS:
        lengths = lengths_in_bytes(read_rows(folder, repository, file))
        mean, logs = statistics.fmean(lengths), [math.log(length) for length in lengths]
        center, deviation = statistics.fmean(logs), statistics.pstdev(logs)
        skewness = statistics.fmean(((log - center) / deviation) ** 3 for log in logs)
        ratio = statistics.pstdev(lengths) / mean
        name = f"{repository}, {Path(file).name}"
        print(f"{name} | {len(lengths)} | {mean:.0f} | {ratio:.3f} | {skewness:+.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
