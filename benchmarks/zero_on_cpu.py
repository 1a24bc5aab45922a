"""DistributedDataParallel and DeepSpeed's ZeRO on gloo processes of this CPU, against the formulas.

Draws small models and runs, measures live tensor bytes of each rank, and keeps them. DeepSpeed is
no dependency: install deepspeed 0.19.8 (`DS_BUILD_OPS=0`) to measure again.

    python benchmarks/zero_on_cpu.py                       the table, from the kept readings
    python benchmarks/zero_on_cpu.py --measure 40 --ranks 2 --seed 1     40 more readings
    python benchmarks/zero_on_cpu.py --measure 40 --images               of models that see
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import gloo_ranks
from markdown_tables import sizes_by_strategy
from oracle_memory import IMAGE_CONFIGS, image_case

from whichlora.parallel import get_strategy

KEPT = ROOT / "tests" / "golden" / "gloo_readings.jsonl"
SEEN_IN_STAGE_3 = KEPT.with_name("gloo_zero3_image_readings.jsonl")  # looser bounds hold there
FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "phi3", "gpt2", "opt", "mistral")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def drawn(strategy: str, ranks: int, draw: random.Random) -> dict[str, Any]:
    """One small model, and a run of it whose batch is small enough for the states to matter."""
    family = draw.choice(FAMILIES)
    depth = "n_layer" if family == "gpt2" else "num_hidden_layers"
    run: dict[str, Any] = {
        "precision": "bf16",
        "method": draw.choice(("full", "full", "lora", "qlora")),
        "r": draw.choice((4, 8, 32)),
        "batch_size": draw.choice((1, 2)),
        "seq_len": draw.choice((8, 16, 48)),
        "gradient_accumulation_steps": draw.choice((1, 1, 2, 3)),
        "gradient_checkpointing": draw.random() < 0.4,
        "optimizer": draw.choice(("adamw_torch", "adamw_torch_fused", "sgd")),
    }
    options: dict[str, Any] = {}
    if strategy == "ddp":
        run["optimizer"] = draw.choice(("adamw_torch_fused", "sgd"))
        options["gradient_as_bucket_view"] = draw.random() < 0.3
    else:
        if draw.random() < 0.4:
            options["zero_bucket_size"] = draw.choice((1000, 60_000, 500_000))
        options["overlap_comm"] = draw.random() < 0.3
        if draw.random() < 0.25:
            run["optimizer"] = "adamw_torch"
            both = strategy == "zero3" and draw.random() < 0.5
            options["offload"] = ["optimizer", "params"] if both else ["optimizer"]
    if strategy == "zero3":
        if draw.random() < 0.7:
            options["stage3_max_reuse_distance"] = draw.choice((1, 100_000, 300_000, 1_000_000))
        if draw.random() < 0.3:
            options["stage3_max_live_parameters"] = draw.choice((1, 200_000, 600_000))
        if draw.random() < 0.3:
            options["stage3_prefetch_bucket_size"] = draw.choice((1, 100_000, 400_000))
    run["parallel"] = {"strategy": strategy, "gpus": ranks} | options
    return {"family": family, "config": {depth: draw.choice((2, 3, 5))}, "run": run}


def drawn_with_images(strategy: str, ranks: int, draw: random.Random) -> dict[str, Any]:
    """A small model that sees, and a run of it with two images in a row."""
    idle = "llava" if strategy == "zero3" else "none"  # whose last block stage 3 refuses
    family = draw.choice([name for name in sorted(IMAGE_CONFIGS) if not name.startswith(idle)])
    method = draw.choice(("full", "lora", "lora", "qlora"))
    if family == "qwen2_vl" and method == "qlora":
        method = "lora"  # a CPU's LayerNorm keeps its tower in 16 bit, a GPU's autocast does not
    run = image_case(family).run
    frozen, checkpoints = draw.random() < 0.3, draw.random() < 0.4
    if family.startswith("llava") and method == "full" and strategy == "ddp":
        checkpoints = checkpoints and frozen  # else the reducer waits for the idle block
    return {
        "family": family,
        "config": {},
        "run": {
            "precision": "bf16" if method == "qlora" else draw.choice(("bf16", "fp32")),
            "method": method,
            "r": draw.choice((4, 8, 32)),
            "batch_size": draw.choice((1, 1, 2)),
            "seq_len": run.seq_len,
            "images": run.images,
            "image_size": list(run.image_size),
            "gradient_accumulation_steps": draw.choice((1, 1, 2)),
            "gradient_checkpointing": checkpoints,
            "freeze_vision_tower": frozen,
            "optimizer": draw.choice(("adamw_torch_fused", "sgd")),
            "parallel": {"strategy": strategy, "gpus": ranks},
        },
    }


def measure(
    count: int, ranks: int, seed: int, strategies: Iterable[str], *, images: bool = False
) -> None:
    draw = random.Random(f"{seed} {ranks}")
    names = sorted(strategies)
    drawing = drawn_with_images if images else drawn
    cases = [drawing(names[index * len(names) // count], ranks, draw) for index in range(count)]
    readings = gloo_ranks.readings(cases, world_size=ranks)
    for case, reading in zip(cases, readings, strict=True):
        in_stage_3 = images and case["run"]["parallel"]["strategy"] == "zero3"
        with (SEEN_IN_STAGE_3 if in_stage_3 else KEPT).open("a", encoding="utf-8") as file:
            print(json.dumps({"case": case, "reading": reading}), file=file)


def kept(path: Path = KEPT) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def compared(record: Mapping[str, Any]) -> tuple[int, int]:
    """Measured and predicted peak of the rank that needs most."""
    predicted = gloo_ranks.predicted_peaks(record["case"])
    both = predicted.keys() & record["reading"].keys()
    measured = max(record["reading"][name] for name in both)
    return measured, max(predicted[name] for name in both)


def table(records: Iterable[Mapping[str, Any]]) -> str:
    errors: dict[str, list[float]] = {}
    for record in records:
        if "error" in record["reading"]:
            continue
        measured, predicted = compared(record)
        of_run = record["case"]["run"]
        name = of_run["parallel"]["strategy"] + ", images" * bool(of_run.get("images"))
        errors.setdefault(name, []).append(predicted / measured - 1)
    return sizes_by_strategy(dict(sorted(errors.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=int, default=0, help="readings to add")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--images", action="store_true", help="of models that see")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    options = parser.parse_args()
    if options.measure:
        names = options.strategies.split(",")
        if options.images:
            names = [name for name in names if get_strategy(name).takes_images]
        measure(options.measure, options.ranks, options.seed, names, images=options.images)
    print(table((*kept(), *kept(SEEN_IN_STAGE_3))))


if __name__ == "__main__":
    main()
