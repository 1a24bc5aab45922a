"""Trace one rank of drawn tensor-parallel runs, keep the records, and compare them with the ledger.

`python benchmarks/tp_traces.py` prints errors by moment; docs/parallel.md has those of the peak.
`--draw 36` traces anew.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from markdown_tables import sizes_by_strategy

from whichlora import families
from whichlora.memory.allocator import REMAINDERS
from whichlora.parallel.division import COLUMNS
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.numeric import added
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

RECORDS = Path(__file__).parent / "traces" / "tp.jsonl"
GPU = find_gpu("a100-sxm-80gb")
MODELS = {  # with the sizes that all of its heads can be divided into
    "meta-llama/Llama-3.2-1B": (2, 4, 8),
    "Qwen/Qwen3-0.6B": (2, 4, 8),
    "Qwen/Qwen2.5-1.5B": (2,),
    "google/gemma-2-2b": (2, 4),
    "HuggingFaceTB/SmolLM3-3B": (2, 4),
    "microsoft/phi-2": (2, 4, 8),
    "EleutherAI/pythia-1.4b": (2, 4, 8),
    "bigcode/starcoder2-3b": (2,),
    "mistralai/Mistral-7B-v0.3": (2, 4, 8),
    "meta-llama/Llama-3.1-8B": (2, 4, 8),
}


def shallow(name: str, layers: int) -> dict[str, Any]:
    """The config of a model with fewer layers."""
    config = dict(load_model(name).config) | {"num_hidden_layers": layers}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    return config


def job_of(line: dict[str, Any]) -> ResolvedRun:
    """The run of a record on `tp_size` GPUs."""
    size = line["tp_size"]
    model = families.build(shallow(line["run"]["model"], line["layers"]), name="drawn")
    parallel = ParallelConfig(strategy="tp", gpus=size, options=(("tp_size", size),))
    return resolve(model, replace(RunConfig.from_dict(line["run"]), parallel=parallel), GPU)


def predicted(line: dict[str, Any]) -> dict[str, float]:
    """Bytes at rest and at the peaks of backward, update and step, as the ledger has them."""
    job = job_of(line)
    assert job.layout is not None
    step = training_step(job)
    job.layout.check(step)
    (kind,) = job.layout.rank_kinds(step)
    moments = job.layout.ledger(kind).moments
    # remainders of blocks are the allocator's: no storage of a trace has them
    sizes = {
        name: float(added(entry.num_bytes for entry in entries if entry.fact is not REMAINDERS))
        for name, entries in moments.items()
    }
    stored = [entry for entry in kind.step.static if entry.part in ("weights", "adapters")]
    return {
        "at_rest": float(added(entry.num_bytes for entry in stored)),
        "backward": max(size for name, size in sizes.items() if name.endswith("backward")),
        "optimizer": sizes["optimizer_step"],
        "peak": max(sizes.values()),
    }


def traced(line: dict[str, Any]) -> dict[str, float]:
    """The same of the real code on fake tensors."""
    from traced_ranks.tensor_parallel import trace_rank

    job = job_of(line)
    events, at_rest = trace_rank(
        replace(job.run, parallel=ONE_GPU),
        shallow(line["run"]["model"], line["layers"]),
        tp_size=line["tp_size"],
        target_modules=job.targets,
    )
    live, sizes, peaks = 0, {}, {"at_rest": float(at_rest)}
    for event in events:
        if event.num_bytes is None:
            live -= sizes.pop(event.storage)
        else:
            sizes[event.storage] = event.num_bytes
            live += event.num_bytes
        for name in (event.moment, "peak"):
            peaks[name] = max(float(live), peaks.get(name, 0.0))
    return {name: peaks[name] for name in ("at_rest", "backward", "optimizer", "peak")}


def draw(seed: int) -> dict[str, Any]:
    """A run that transformers can divide."""
    rng = random.Random(seed)
    name = rng.choice(list(MODELS))
    layers = rng.choice((2, 3, 4))
    method = rng.choice(("lora", "lora", "full"))
    model = families.build(shallow(name, layers), name="drawn")
    leaves = {linear.name for layer, _ in model.layers() for linear in layer.linears}
    leaves &= COLUMNS
    chosen = sorted(rng.sample(sorted(leaves), rng.randint(1, len(leaves))))
    run = RunConfig(
        model=name,
        method=method,
        trainer="loop-function",
        target_modules=tuple(chosen),
        r=rng.choice((8, 16, 64)),
        batch_size=rng.choice((1, 2, 4)),
        seq_len=rng.choice((256, 512, 1024, 2048)),
        precision=rng.choice(("bf16", "bf16-pure")),
        gradient_checkpointing=rng.random() < 0.6,
        gradient_accumulation_steps=rng.choice((1, 1, 2)),
    )
    return {"tp_size": rng.choice(MODELS[name]), "layers": layers, "run": run.to_dict()}


def records() -> Iterator[dict[str, Any]]:
    for text in RECORDS.read_text(encoding="utf-8").splitlines():
        yield json.loads(text)


def errors() -> dict[str, list[float]]:
    """Relative errors of the ledger by quantity, over all kept records."""
    by_name: dict[str, list[float]] = {}
    for line in records():
        of_ledger = predicted(line)
        for name, num_bytes in line["traced"].items():
            by_name.setdefault(name, []).append(abs(of_ledger[name] / num_bytes - 1))
    return by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, metavar="N", help="trace N runs and keep them")
    arguments = parser.parse_args()
    if arguments.draw:
        with RECORDS.open("w", encoding="utf-8") as file:
            for seed in range(arguments.draw):
                line = draw(seed)
                line["traced"] = traced(line)
                print(json.dumps(line), file=file, flush=True)
    print(sizes_by_strategy({f"tp, {name}": sizes for name, sizes in errors().items()}))


if __name__ == "__main__":
    main()
