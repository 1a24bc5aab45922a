"""Trace ranks under FSDP on fake tensors, keep what they hold, and compare it with the formulas.

`--draw SEED COUNT` appends traced runs to `traces/parallel/fsdp.jsonl`, with `--offload` such
with everything in host memory; without arguments the kept ones are compared and the table is
printed. `--images` is so of runs with images, in `traces/parallel/fsdp-images.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import image_traces
from markdown_tables import sizes_by_strategy
from memory_samples import as_traced

from whichlora.families import build
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import Ledger
from whichlora.memory.weights import CODE_TABLE_BYTES
from whichlora.parallel.fsdp_units import quant_storage
from whichlora.parallel.layout import Layout
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import FOUR_BIT_BNB, RunConfig
from whichlora.store.gpus import find_gpu

RECORDS = Path(__file__).parent / "traces" / "parallel" / "fsdp.jsonl"
IMAGES = RECORDS.with_name("fsdp-images.jsonl")
FEWEST = 170  # traces that are kept
GPU = find_gpu("a100-sxm-80gb")
PHASES = {
    "layer_forward": "forward",
    "layer_gather": "forward",
    "first_layer_gather": "forward",
    "head_gather": "forward",
    "loss_forward": "loss",
    "loss_backward": "loss_backward",
    "head_backward": "loss_backward",
    "optimizer_step": "optimizer",
    "between_steps": "rest",
}

_LLAMA_LIKE = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "stablelm",
    "starcoder2", "phi3", "cohere", "glm", "granite", "smollm3",
]  # fmt: skip


def draw_config(chance: random.Random) -> dict[str, Any]:
    """A model of random sizes, as many of them odd as its class allows."""
    kind = chance.choice([*_LLAMA_LIKE, *_LLAMA_LIKE, "gpt2", "opt", "gpt_neox", "mixtral", "phi"])
    head_dim = chance.choice([64, 128])
    heads = chance.choice([4, 8, 12])
    layers, vocab = chance.randint(2, 4), chance.choice([8000, 20000, 32000, 50257, 100_000])
    width = heads * head_dim
    if kind == "gpt2":
        return {
            "model_type": kind, "vocab_size": vocab, "n_embd": width, "n_layer": layers,
            "n_head": heads, "n_positions": 2048, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
    config: dict[str, Any] = {
        "model_type": kind, "vocab_size": vocab, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "opt":
        return config | {"ffn_dim": 4 * width, "word_embed_proj_dim": width}
    config["intermediate_size"] = chance.choice([2, 3, 4]) * width + 128
    if kind in _LLAMA_LIKE or kind == "mixtral":
        config["num_key_value_heads"] = chance.choice([heads, heads // 4])
        tied = kind in ("gemma", "gemma2", "gemma3_text", "cohere")
        config["tie_word_embeddings"] = tied or chance.random() < 0.3
    if kind.startswith("gemma") or kind in ("qwen3", "glm"):
        config["head_dim"] = head_dim
    if kind == "mixtral":
        config |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    return config


def draw_run(chance: random.Random, *, offloads: bool = False) -> RunConfig:
    method = chance.choice(["full", "full", "lora", "lora", "dora", "qlora", "qlora", "qdora"])
    version = "2" if method in ("dora", "qdora") else chance.choice(["1", "2"])
    options: dict[str, Any] = {}
    if offloads:
        options["offload"] = ("optimizer", "params")
    if version == "1":
        options["fsdp_version"] = "1"
        if chance.random() < 0.5:
            options["backward_prefetch"] = "BACKWARD_PRE"
    if chance.random() < 0.25:
        options["reshard_after_forward"] = False
    steps = chance.choice([1, 1, 2, 3])
    if steps > 1 and chance.random() < 0.3:
        options["sync_each_batch"] = True
    sizes = [2, 4, 8, 64]
    adapters: dict[str, Any] = {"r": chance.choice([4, 8, 16, 64])} if method != "full" else {}
    precision = chance.choice(["bf16", "bf16", "bf16-pure", "fp32"])
    if method.startswith("q"):
        adapters["quant"] = chance.choice(["nf4", "nf4", "nf4-dq", "fp4"])
        adapters["prepare_kbit"] = chance.random() < 0.4
        storage = chance.choice([None, None, None, "uint8", "float32"])
        options |= {"bnb_4bit_quant_storage": storage} if storage else {}
    else:
        adapters["quant"] = "none"
    return RunConfig(
        model="drawn",
        method=method,
        batch_size=chance.choice([1, 2, 4]),
        seq_len=chance.choice([64, 256, 777, 2048]),
        gradient_checkpointing=chance.random() < 0.6,
        gradient_accumulation_steps=steps,
        precision=precision,
        optimizer=chance.choice(["adamw_torch", "adamw_torch_fused", "sgd"]),
        expandable_segments=True,
        parallel=ParallelConfig(
            strategy="fsdp", gpus=chance.choice(sizes), options=tuple(sorted(options.items()))
        ),
        **adapters,
    )


_SEEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "mistral3", "mllama")


def draw_seeing(chance: random.Random) -> tuple[dict[str, Any], RunConfig]:
    """A model of published widths and few layers, and a run with an image in each row."""
    kind = chance.choice(_SEEN)
    config = image_traces.config_of({"type": kind, "layers": 5, "blocks": 6, "vocab": 4096})
    method, version = chance.choice(["full", "lora", "lora"]), chance.choice(["1", "2"])
    options: dict[str, Any] = {"fsdp_version": "1"} if version == "1" else {}
    if chance.random() < 0.2:
        options["reshard_after_forward"] = False
    freezes = chance.random() < 0.25
    run = RunConfig(
        model="drawn",
        method=method,
        quant="none",
        target_modules=("all-linear",),
        batch_size=chance.choice([1, 2]),
        seq_len=chance.choice([1024, 2048]),
        images=1,
        image_size=chance.choice([(640, 480), (448, 448), (1024, 768)]),
        freeze_vision_tower=freezes and method == "lora",
        gradient_checkpointing=chance.random() < 0.7,
        use_reentrant=False,
        gradient_accumulation_steps=chance.choice([1, 1, 3]),
        precision="bf16",
        optimizer="adamw_torch",
        expandable_segments=True,
        parallel=ParallelConfig(
            strategy="fsdp", gpus=chance.choice([2, 4, 8]), options=tuple(sorted(options.items()))
        ),
    )
    return config, run


def layout_of(record: Mapping[str, Any]) -> tuple[Layout, TrainingStep]:
    model = build(dict(record["config"]), name="drawn")
    run = RunConfig.from_dict({"model": "drawn", **record["run"]})
    job = as_traced(resolve(model, run, GPU))
    assert job.layout is not None
    step = training_step(job)
    job.layout.check(step)
    return job.layout, step


def rounded_tables(step: TrainingStep) -> int:
    """Bytes by which the allocator's blocks are larger than the tables of 4-bit matrices."""
    if step.dtypes.quant not in FOUR_BIT_BNB:
        return 0
    matrices = sum(
        group.count * linear.count
        for group in step.model.groups
        for linear in group.layer.linears
        if is_quantised(linear, step.dtypes)
    )
    nested = 4 * 256 + 4 if step.dtypes.quant.endswith("-dq") else 0
    return matrices * (CODE_TABLE_BYTES - 4 * 16 - nested)


def predicted(record: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of each traced phase by formula."""
    layout, step = layout_of(record)
    ledger: Ledger = layout.ledger(layout.rank_kinds(step)[0])
    phases: dict[str, int] = {}
    for moment, entries in ledger.moments.items():
        phase = PHASES.get(moment, "layers_backward")
        num_bytes = sum(int(entry.num_bytes) for entry in entries) - rounded_tables(step)
        phases[phase] = max(phases.get(phase, 0), num_bytes)
    return phases


def sent(record: Mapping[str, Any]) -> dict[str, list[int]]:
    """Messages of one optimizer step by formula, and bytes of the whole tensors, by collective."""
    layout, step = layout_of(record)
    sums: dict[str, list[int]] = {}
    for message in layout.messages(layout.rank_kinds(step)[0]):
        of_kind = sums.setdefault(message.collective, [0, 0])
        of_kind[0] += int(message.count)
        of_kind[1] += int(message.count * message.num_bytes)
    return sums


def traced(config: Mapping[str, Any], run: RunConfig) -> dict[str, Any]:
    """Bytes by phase, and messages of the step."""
    import torch
    from traced_ranks import fsdp
    from traced_ranks.ranks import fake_group, trace_rank

    options = dict(run.parallel.options)
    mixed = run.precision if run.precision in ("bf16", "fp16") else "no"
    job = resolve(build(dict(config), name="drawn"), run, GPU)
    assert job.layout is not None
    (_, spread), *_ = job.layout.strategies
    storage = quant_storage(job.run, spread)
    is_stored = job.run.quant in FOUR_BIT_BNB and storage != "uint8"
    reshards = bool(options.get("reshard_after_forward", True))
    wrap: Any = partial(
        fsdp.fully_sharded,
        mixed_precision=mixed,
        reshard_after_forward=reshards,
        cpu_offload=bool(options.get("offload")),
    )
    if options.get("fsdp_version") == "1":
        wrap = partial(
            fsdp.flat_sharded,
            mixed_precision=mixed,
            reshard_after_forward=reshards,
            backward_prefetch=options.get("backward_prefetch") == "BACKWARD_PRE",
            quant_storage=getattr(torch, storage) if is_stored else None,
            cpu_offload=bool(options.get("offload")),
        )
    with fake_group(run.parallel.gpus) as mesh:
        trace = trace_rank(
            run,
            config,
            wrap,
            mesh=mesh,
            target_modules="all-linear",
            sync_each_batch=bool(options.get("sync_each_batch")),
            quant_storage=storage,
        )
    return {"moments": trace.peak_bytes, "sent": trace.sent}


def run_dict(run: RunConfig) -> dict[str, Any]:
    """Settings that are not the defaults."""
    default = RunConfig(model=run.model).to_dict()
    return {
        name: value
        for name, value in run.to_dict().items()
        if name != "model" and (name not in default or default[name] != value)
    }


def draw(seed: int, count: int, *, offloads: bool, images: bool) -> None:
    warnings.simplefilter("ignore")
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        chance = random.Random(1000 * seed + number)
        if images:
            config, run = draw_seeing(chance)
        else:
            config, run = draw_config(chance), draw_run(chance, offloads=offloads)
        record: dict[str, Any] = {"config": config, "run": run_dict(run)}
        try:
            layout_of(record)
            record |= traced(config, run)
        except Exception as error:
            record["refused"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        with (IMAGES if images else RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(number, config["model_type"], record.get("refused", ""), file=sys.stderr, flush=True)


def records(path: Path = RECORDS) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            if "moments" in record:
                yield record


def errors(record: Mapping[str, Any]) -> dict[str, float]:
    """Relative errors of the peak and of the bytes between steps."""
    formula, moments = predicted(record), record["moments"]
    run = RunConfig.from_dict({"model": "drawn", **record["run"]})
    batch = 3 * 8 * run.batch_size * run.seq_len  # which the traced loop still names
    found = {"peak": max(formula.values()) / max(moments.values()) - 1}
    # offloaded, next to nothing is left; pixels that the traced loop names are no part of the batch
    if not (dict(run.parallel.options).get("offload") or run.images):
        found["between steps"] = formula["rest"] / (moments["rest"] - batch) - 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", nargs=2, type=int, metavar=("SEED", "COUNT"))
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--worst", type=int, default=0, help="print this many of the worst")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(*arguments.draw, offloads=arguments.offload, images=arguments.images)
        return
    rows: dict[str, list[float]] = {}
    every: list[tuple[float, str]] = []
    for record in records(IMAGES if arguments.images else RECORDS):
        options = dict(record["run"]["parallel"])
        version = options.get("fsdp_version", "2") + ", offload" * ("offload" in options)
        version += ", images" * arguments.images
        found = errors(record)
        every.append((found["peak"], json.dumps(record)))
        for counter, error in found.items():
            rows.setdefault(f"fsdp {version}, {counter}", []).append(error)
    print(sizes_by_strategy(dict(sorted(rows.items()))))
    for error, text in sorted(every, key=lambda row: -abs(row[0]))[: arguments.worst]:
        print(f"{100 * error:.2f} %", text)


if __name__ == "__main__":
    main()
