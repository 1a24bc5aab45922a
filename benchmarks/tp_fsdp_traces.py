"""Trace ranks under tensor parallelism and FSDP together, and compare them with the formulas.

`--draw SEED COUNT` appends traced runs to `traces/parallel/tp_fsdp.jsonl`; without arguments the
kept ones are compared and the table is printed. Gradients are not clipped: torch refuses the norm
of both meshes. Precision is 16 bit or fp32 throughout, or that of `--precision bf16`: with it LoRA
runs, and torch refuses full fine-tuning, whose units have shards of two dtypes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from markdown_tables import sizes_by_strategy
from memory_samples import as_traced

from whichlora.families import build
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.parallel import ONE_GPU, ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu

RECORDS = Path(__file__).parent / "traces" / "parallel" / "tp_fsdp.jsonl"
GPU = find_gpu("a100-sxm-80gb")
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def draw_config(chance: random.Random) -> dict[str, Any]:
    heads, head_dim = chance.choice([4, 8, 16]), chance.choice([32, 64])
    width = heads * head_dim
    return {
        "model_type": chance.choice(["llama", "mistral", "qwen2", "qwen3"]),
        "vocab_size": chance.choice([8000, 32000, 50264]),
        "hidden_size": width,
        "head_dim": head_dim,
        "num_hidden_layers": chance.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": chance.choice([heads, 4]),
        "intermediate_size": chance.choice([2, 3, 4]) * width,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": chance.random() < 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def draw_run(chance: random.Random) -> RunConfig:
    method = chance.choice(["full", "lora"])
    tp_size, dp_size = chance.choice([2, 4]), chance.choice([2, 4])
    targets = tuple(sorted(chance.sample(COLUMNS, chance.randint(1, len(COLUMNS)))))
    return RunConfig(
        model="drawn",
        method=method,
        quant="none",
        r=chance.choice([8, 16, 64]),
        target_modules=targets,
        batch_size=chance.choice([1, 2, 4]),
        seq_len=chance.choice([256, 512, 2048]),
        precision=chance.choice(["bf16-pure", "bf16-pure", "fp32"]),
        optimizer=chance.choice(["adamw_torch_fused", "sgd"]),
        gradient_checkpointing=chance.random() < 0.6,
        expandable_segments=True,
        parallel=ParallelConfig(
            strategy="tp+fsdp", gpus=tp_size * dp_size, options=(("tp_size", tp_size),)
        ),
    )


def job_of(record: Mapping[str, Any]) -> ResolvedRun:
    model = build(dict(record["config"]), name="drawn")
    return as_traced(resolve(model, RunConfig.from_dict(dict(record["run"])), GPU))


def predicted(record: Mapping[str, Any]) -> int:
    """Bytes of the peak by formula."""
    job = job_of(record)
    assert job.layout is not None
    step = training_step(job)
    job.layout.check(step)
    (kind,) = job.layout.rank_kinds(step)
    moments = job.layout.ledger(kind).moments
    return max(sum(int(entry.num_bytes) for entry in entries) for entries in moments.values())


def traced(record: Mapping[str, Any]) -> int:
    """The same of the real code on fake tensors."""
    from traced_ranks.tensor_parallel import trace_sharded_rank

    job = job_of(record)
    tp_size = int(dict(job.run.parallel.options)["tp_size"])  # type: ignore[call-overload]
    trace = trace_sharded_rank(
        RunConfig.from_dict({**record["run"], "parallel": ONE_GPU.to_dict()}),
        record["config"],
        tp_size=tp_size,
        dp_size=job.run.parallel.gpus // tp_size,
        target_modules=job.peft_targets,
    )
    return max(trace.peak_bytes.values())


def draw(seed: int, count: int, precision: str | None) -> None:
    warnings.simplefilter("ignore")
    for number in range(count):
        chance = random.Random(1000 * seed + number)
        config, run = draw_config(chance), draw_run(chance)
        if precision is not None:
            run = replace(run, precision=precision, seq_len=min(run.seq_len, 512))  # type: ignore[arg-type]
        record: dict[str, Any] = {"config": config, "run": run.to_dict()}
        try:
            predicted(record)
            record["peak_bytes"] = traced(record)
        except Exception as error:
            record["refused"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        with RECORDS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(number, config["model_type"], record.get("refused", ""), file=sys.stderr, flush=True)


def records() -> Iterator[dict[str, Any]]:
    for text in RECORDS.read_text(encoding="utf-8").splitlines():
        record = json.loads(text)
        if "peak_bytes" in record:
            yield record


def errors() -> list[float]:
    """Relative errors of the peak, of all kept records."""
    return [predicted(record) / record["peak_bytes"] - 1 for record in records()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", nargs=2, type=int, metavar=("SEED", "COUNT"))
    parser.add_argument("--precision", help="of all that is drawn")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(*arguments.draw, arguments.precision)
    print(sizes_by_strategy({"tp+fsdp": errors()}))


if __name__ == "__main__":
    main()
