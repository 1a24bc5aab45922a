"""The life of small runs on this CPU against the formulas: files on disk, and peaks of each stage.

Loads, trains, evaluates, saves, resumes and merges with the real Trainer and PEFT, and keeps what
it measured. Nothing is downloaded; weights are random.

    python benchmarks/life_on_cpu.py                     the table of docs/explain.md
    python benchmarks/life_on_cpu.py --measure 20 --seed 1       20 more readings, 10 s each
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from markdown_tables import markdown_table

KEPT = ROOT / "tests" / "golden" / "life_readings.jsonl"
UNTIED = ("llama", "qwen2", "mistral", "phi3", "gpt_neox")
TIED = ("gemma", "gpt2", "opt", "cohere", "gemma2")
INTRODUCTION = (
    "Predicted against the real Trainer and PEFT on a CPU (`benchmarks/life_on_cpu.py`; small "
    "models, tied and not, LoRA, DoRA, QLoRA and full):"
)
METHODS = ("lora", "dora", "qlora", "full")


def drawn(index: int, draw: random.Random) -> dict[str, Any]:
    """A small run; methods take turns, and so do tied and untied embeddings."""
    method = METHODS[index % len(METHODS)]
    family = draw.choice((UNTIED, TIED)[index // len(METHODS) % 2])
    precision = draw.choice(("fp32", "bf16", "bf16-no-autocast"))
    return {
        "family": family,
        "stored": "float32" if precision == "fp32" or method == "full" else "bfloat16",
        "run": {
            "method": method,
            "precision": precision,
            "batch_size": 2,
            "seq_len": draw.choice((32, 64, 128)),
            "r": draw.choice((4, 8, 16)),
            "optimizer": draw.choice(("adamw_torch", "adamw_torch_fused", "adafactor", "sgd")),
            "gradient_checkpointing": draw.random() < 0.5,
        },
    }


def measure(count: int, seed: int) -> None:
    import life_readings

    draw = random.Random(seed)
    with KEPT.open("a", encoding="utf-8") as file:
        for index in range(count):
            case = drawn(index, draw)
            reading = life_readings.reading(case)
            print(json.dumps({"case": case, "reading": reading}), file=file, flush=True)


def kept() -> Iterator[dict[str, Any]]:
    for line in KEPT.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def errors(records: Iterable[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Signed relative errors of each reading."""
    import life_readings

    by_name: dict[str, list[float]] = {}
    for record in records:
        predicted = life_readings.predicted(record["case"])
        for name, size in record["reading"].items():
            if predicted[name]:  # SGD has no states, and a file of 1.6 kB
                by_name.setdefault(name, []).append(predicted[name] / size - 1)
    return by_name


def table(records: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for name, signed in errors(records).items():
        sizes = [100 * abs(error) for error in signed]
        worst = 100 * max(signed, key=abs)
        rows.append((name, len(signed), f"{statistics.median(sizes):.2f} %", f"{worst:+.2f} %"))
    return markdown_table(("what", "runs", "median", "worst"), rows, first_figure=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=int, default=0, help="readings to add")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.seed)
    page = ROOT / "docs" / "explain.md"
    begin, end = "<!-- life_on_cpu.py -->\n", "<!-- end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    text = f"{before}{begin}{INTRODUCTION}\n\n{table(kept())}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")
    print(table(kept()))


if __name__ == "__main__":
    main()
