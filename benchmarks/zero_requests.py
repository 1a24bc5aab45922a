"""What DeepSpeed's ZeRO asks of the allocator, against the requests that the formulas write.

Two steps of small models on two gloo processes of this CPU: the births and deaths of one rank's
tensors, replayed through torch's rules behind what the engine has made before. DeepSpeed is no
dependency: install deepspeed 0.19.8 (`DS_BUILD_OPS=0`) to measure again.

    python benchmarks/zero_requests.py              the table, from the kept readings
    python benchmarks/zero_requests.py --measure    all readings again, in minutes
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from devices import CPU
from markdown_tables import sizes_by_strategy
from train_runs import run_ranks

from whichlora.families import build
from whichlora.memory.allocator_simulator import LargeReplay, Requests
from whichlora.memory.step_events import StepEvents
from whichlora.parallel import zero3
from whichlora.parallel.deepspeed import Partitioned
from whichlora.parallel.flat_events import FlatEvents
from whichlora.predict.quantities import rank_kinds
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig

WORKER = ROOT / "tests" / "request_worker.py"
KEPT = ROOT / "benchmarks" / "traces" / "zero-requests.jsonl"
RANKS = 2
# tensors above 1 MiB, which have a pool of their own
CONFIG = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RUN = {
    "model": "llama",
    "precision": "bf16",
    "method": "full",
    "batch_size": 1,
    "seq_len": 768,
    "gradient_checkpointing": True,
    "optimizer": "adamw_torch",
}
LARGE = {"zero_bucket_size": 20_000_000}
OVERLAP = {"overlap_comm": True}
NEAR = {"stage3_max_reuse_distance": 3_000_000}
FEW = NEAR | {"stage3_max_live_parameters": 20_000_000}
LORA = {"method": "lora", "r": 64}
TWICE = {"gradient_accumulation_steps": 2}
WHOLE = {"gradient_checkpointing": False}
CASES: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("zero1", {}, {}),
    ("zero1", {}, TWICE),
    ("zero1", OVERLAP, {}),
    ("zero1", OVERLAP | LARGE, {}),
    ("zero1", OVERLAP | LARGE, TWICE),
    ("zero1", {}, LORA),
    ("zero2", {}, {}),
    ("zero2", {}, TWICE),
    ("zero2", LARGE, WHOLE),
    ("zero2", OVERLAP, {}),
    ("zero2", OVERLAP | LARGE, TWICE),
    ("zero2", {}, LORA),
    ("zero3", {}, {}),
    ("zero3", NEAR, {}),
    ("zero3", FEW, {}),
    ("zero3", NEAR, TWICE),
    ("zero3", NEAR, WHOLE),
    ("zero3", FEW | LARGE | {"sub_group_size": 10_000_000}, {}),
    ("zero3", NEAR, LORA),
    ("zero3", {}, LORA | WHOLE),
)


def fields_of(
    strategy: str, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What a `RunConfig` is made of."""
    spread = {"strategy": strategy, "gpus": RANKS, **options}
    return {**RUN, **settings, "parallel": spread}


def run_of(strategy: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> RunConfig:
    return RunConfig.from_dict(fields_of(strategy, options, settings))


def written(run: RunConfig) -> StepEvents:
    """What writes the requests of the rank that needs most."""
    job = resolve(build(CONFIG, name="llama"), run, CPU)
    assert job.layout is not None
    (kind,) = rank_kinds(job)
    ((strategy, spread),) = job.layout.strategies
    if strategy.name == "zero3":
        return zero3.gather_events(kind.step, spread)
    part = Partitioned(kind.step, spread)
    return FlatEvents(part, partitions_gradients=strategy.name == "zero2")


def reserved_behind_loading(run: RunConfig, requests: Requests) -> dict[str, int]:
    """Peaks of `requests` of the steps, behind those of loading that the formulas write."""
    events = written(run)
    events.load()
    replayed = LargeReplay(expandable_segments=False)
    replayed.play(events.list.plays)
    first = events.list.numbers(1)
    replayed.play([(requests, first)])
    return {
        "allocated_bytes": replayed.peak_allocated_bytes,
        "reserved_bytes": replayed.reserved_bytes,
    }


def predicted(run: RunConfig) -> dict[str, int]:
    replayed = LargeReplay(expandable_segments=False)
    replayed.play(written(run).whole_run().plays)
    return {
        "allocated_bytes": replayed.peak_allocated_bytes,
        "reserved_bytes": replayed.reserved_bytes,
    }


def compared() -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """The strategy of each kept reading, what was read, and what is predicted."""
    for line in KEPT.read_text(encoding="utf-8").splitlines():
        kept = json.loads(line)
        yield kept["case"][0], kept["reading"], predicted(run_of(*kept["case"]))


def measure() -> None:
    runs = [fields_of(*case) for case in CASES]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "cases.json").write_text(json.dumps({"config": CONFIG, "runs": runs}))
        run_ranks(WORKER, str(root), world_size=RANKS, logs_folder=root, timeout_s=1800)
        by_rank = [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    with KEPT.open("w", encoding="utf-8") as file:
        for number, case in enumerate(CASES):
            run = run_of(*case)
            rank = getattr(written(run), "rank", 0)
            requests = [(tensor, size) for tensor, size in by_rank[rank][number]]
            reading = reserved_behind_loading(run, requests)
            print(json.dumps({"case": case, "reading": reading}), file=file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="read the real library again")
    if parser.parse_args().measure:
        measure()
    errors: dict[str, list[float]] = {}
    for strategy, reading, expected in compared():
        error = expected["reserved_bytes"] / reading["reserved_bytes"] - 1
        errors.setdefault(strategy, []).append(error)
    print(sizes_by_strategy(errors))


if __name__ == "__main__":
    main()
