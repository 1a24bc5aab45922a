"""Trace ranks that share sequences under FSDP on fake tensors, and compare them with the formulas.

torch's own ring runs, around a stand-in for the flash kernel; the first and the last rank are
traced, and the larger one is kept. `--draw SEED COUNT` appends to `traces/parallel/cp.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsdp_traces
from markdown_tables import sizes_by_strategy

from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig

RECORDS = Path(__file__).parent / "traces" / "parallel" / "cp.jsonl"
FEWEST = 20  # traces that are kept
KINDS = ("llama", "qwen2", "qwen3", "granite", "cohere", "olmo2", "stablelm", "smollm3", "gemma")


def drawn(chance: random.Random) -> tuple[dict[str, Any], RunConfig]:
    """A model whose layers attend to all earlier tokens, and a run that divides its sequences."""
    config = fsdp_traces.draw_config(chance)
    while config["model_type"] not in KINDS:
        config = fsdp_traces.draw_config(chance)
    size = chance.choice((2, 4, 8))
    quantised = {"quant": chance.choice(("nf4", "nf4-dq")), "prepare_kbit": False}
    method = chance.choice(("full", "full", "lora", "lora", "qlora"))
    run = RunConfig(
        model="drawn",
        method=method,
        batch_size=chance.choice((1, 2)),
        seq_len=2 * size * chance.choice((32, 128, 512, 1024)),
        gradient_checkpointing=chance.random() < 0.6,
        gradient_accumulation_steps=chance.choice((1, 1, 2)),
        precision=chance.choice(("bf16", "bf16", "bf16-pure")),
        optimizer=chance.choice(("adamw_torch", "adamw_torch_fused")),
        expandable_segments=True,
        parallel=ParallelConfig(
            strategy="cp+fsdp",
            gpus=size * chance.choice((1, 2, 8)),
            options=(("cp_size", size),),
        ),
        **(quantised if method == "qlora" else {"quant": "none"}),
    )
    return config, run


def traced(config: Mapping[str, Any], run: RunConfig) -> dict[str, int]:
    """Bytes of each phase on the rank that needs most."""
    from traced_ranks import fsdp
    from traced_ranks.ranks import fake_group, trace_rank
    from traced_ranks.ring import ring_attention

    gpus, size = run.parallel.gpus, int(dict(run.parallel.options)["cp_size"])  # type: ignore[arg-type]
    mixed = run.precision if run.precision == "bf16" else "no"
    peaks: dict[str, int] = {}
    for rank in (0, gpus - 1):
        shape = (gpus // size, size)
        with fake_group(gpus, shape, ("dp_shard", "cp"), rank=rank) as mesh:
            joined = mesh._flatten("dp_shard_cp")
            with ring_attention(mesh["cp"].get_group()):
                trace = trace_rank(
                    replace(run, seq_len=run.seq_len // size),
                    config,
                    partial(fsdp.fully_sharded, mixed_precision=mixed),
                    mesh=joined,
                    target_modules="all-linear",
                    quant_storage="bfloat16",
                )
        for phase, num_bytes in trace.peak_bytes.items():
            peaks[phase] = max(num_bytes, peaks.get(phase, 0))
    return peaks


def draw(seed: int, count: int) -> None:
    warnings.simplefilter("ignore")
    for number in range(count):
        config, run = drawn(random.Random(1000 * seed + number))
        record: dict[str, Any] = {"config": config, "run": fsdp_traces.run_dict(run)}
        fsdp_traces.layout_of(record)
        record["moments"] = traced(config, run)
        with RECORDS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(number, config["model_type"], error(record), file=sys.stderr, flush=True)


def records() -> Iterator[dict[str, Any]]:
    with RECORDS.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def error(record: Mapping[str, Any]) -> float:
    """Relative error of the peak."""
    formula = fsdp_traces.predicted(record)
    return max(formula.values()) / max(record["moments"].values()) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", nargs=2, type=int, metavar=("SEED", "COUNT"))
    arguments = parser.parse_args()
    if arguments.draw:
        draw(*arguments.draw)
    print(sizes_by_strategy({"cp+fsdp": [error(record) for record in records()]}))


if __name__ == "__main__":
    main()
