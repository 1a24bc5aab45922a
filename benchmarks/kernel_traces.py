"""Trace drawn runs with the kernels of Liger and of Unsloth, and compare them with the ledger.

`python benchmarks/kernel_traces.py` prints the errors of the peak, for docs/memory.md.
`--draw 60 --kinds liger` traces as many runs anew. Liger's own functions run in the Trainer
(`pip install liger-kernel==0.8.5 triton`), Unsloth's functions of LoRA in its trainer
(`pip install --no-deps unsloth==2026.10.9`), those of experts too
(`pip install --no-deps unsloth_zoo==2026.10.9`), without their Triton kernels, which make no
tensor. What else is Unsloth's is written in `whichlora.tracer.like_unsloth`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import trainer_traces
from trace_records import traced_peaks

from whichlora.spec.run import RunConfig

RECORDS = Path(__file__).parent / "traces"
LIGER_MODELS = (
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen3-0.6B",
    "mistralai/Mistral-7B-v0.3",
    "google/gemma-2b",
    "google/gemma-2-2b",
    "google/gemma-3-1b-pt",
    "microsoft/Phi-3-mini-4k-instruct",
    "HuggingFaceTB/SmolLM3-3B",
    "allenai/OLMo-2-0425-1B",
    "zai-org/GLM-4-9B-0414",
)
UNSLOTH_MODELS = (
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B",
    "mistralai/Mistral-7B-v0.3",
)
UNSLOTH_MIXTURES = ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1")
_CONFIGS = ("{}", '{"rope": false}', '{"rms_norm": false}')
_ALONE = '{"swiglu": false, "geglu": false, "fused_linear_cross_entropy": false}'


def draw_liger(seed: int) -> dict[str, Any]:
    rng = random.Random(f"liger {seed}")
    method = rng.choice(("full", "lora", "lora", "dora", "qlora", "qdora"))
    wide = method == "full" and rng.random() < 0.3
    run = RunConfig(
        model=rng.choice(LIGER_MODELS),
        method=method,
        r=rng.choice((8, 16, 64)),
        lora_dropout=rng.choice((0.0, 0.0, 0.05)),
        batch_size=rng.choice((1, 2, 4)),
        seq_len=rng.choice((256, 512, 1024)),
        precision="bf16" if wide else rng.choice(("bf16", "bf16-pure")),
        base_dtype="float32" if wide else "auto",
        gradient_checkpointing=rng.random() < 0.6,
        gradient_accumulation_steps=rng.choice((1, 1, 2)),
        trainer_options=(
            ("liger_kernel_config", rng.choice((*2 * (rng.choice(_CONFIGS),), _ALONE))),
            ("use_liger_kernel", True),
        ),
    )
    return {"layers": rng.choice((2, 3, 4)), "run": run.to_dict()}


def draw_unsloth(seed: int) -> dict[str, Any]:
    rng = random.Random(f"unsloth {seed}")
    run = RunConfig(
        model=rng.choice(UNSLOTH_MODELS),
        trainer="unsloth",
        method=rng.choice(("lora", "qlora")),
        r=rng.choice((8, 16, 64)),
        lora_dropout=rng.choice((0.0, 0.0, 0.05)),
        batch_size=rng.choice((1, 2, 4)),
        seq_len=rng.choice((256, 1024, 2048, 4096)),
        gradient_checkpointing=rng.random() < 0.7,
        gradient_accumulation_steps=rng.choice((1, 1, 2)),
        trainer_options=(
            ("use_gradient_checkpointing", rng.choice(("unsloth", "unsloth", "true"))),
        ),
    )
    return {"layers": rng.choice((2, 3, 4)), "run": run.to_dict()}


def draw_unsloth_experts(seed: int) -> dict[str, Any]:
    rng = random.Random(f"unsloth experts {seed}")
    drawn = draw_unsloth(seed)
    run = replace(
        RunConfig.from_dict(drawn["run"]),
        model=rng.choice(UNSLOTH_MIXTURES),
        quant=None,
        method=rng.choice(("lora", "qlora", "qlora")),
        lora_dropout=0.0,  # which PEFT refuses on experts
        target_modules=rng.choice((("all-linear",), ("all-linear",), ("attention",))),
    )
    return {"layers": drawn["layers"], "run": run.to_dict()}


DRAWS = {
    "liger": draw_liger,
    "unsloth": draw_unsloth,
    "unsloth-experts": draw_unsloth_experts,
}


def traced(line: dict[str, Any]) -> dict[str, int]:
    """In a process of its own: Liger changes the modules of transformers for good."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_traced, (line,))


def _traced(line: dict[str, Any]) -> dict[str, int]:
    return traced_peaks(trainer_traces.job_of(line), trainer_traces.config_of(line))


def records(kind: str) -> Iterator[dict[str, Any]]:
    for text in (RECORDS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(text)


def errors(kind: str) -> list[float]:
    """Relative errors of the ledger, over all kept records of a kind."""
    return [abs(trainer_traces.predicted(line) / line["traced"] - 1) for line in records(kind)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, metavar="N", help="trace N runs and keep them")
    parser.add_argument("--kinds", default=",".join(DRAWS))
    arguments = parser.parse_args()
    for kind in arguments.kinds.split(","):
        if arguments.draw:
            lines = [DRAWS[kind](seed) for seed in range(arguments.draw)]
            with (RECORDS / f"{kind}.jsonl").open("w", encoding="utf-8") as file:
                for line in lines:
                    print(json.dumps(line | traced(line)), file=file, flush=True)
        sizes = errors(kind)
        p90, p95 = (quantiles(sizes, n=20, method="inclusive")[place] for place in (17, 18))
        shown = (f"{100 * size:.3f} %" for size in (median(sizes), p90, p95, max(sizes)))
        print(f"| {kind} | {len(sizes)} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
