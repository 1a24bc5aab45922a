"""Sum the kernels of some runs by name: which of them a wrong time is of.

    python benchmarks/gpu/kernel_times.py

Writes OUT/<gpu>.jsonl, one line per run: its settings, seconds and number of each kernel in one
step or generation, and the seconds of the step itself, measured before without the profiler.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from designs import model_of, train

from whichlora.predict.resolve import resolve
from whichlora.profiler.installed import installed_versions
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu

LLAMA, MISTRAL = "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1"
NUM_PROFILED = 2
LONGEST_NAME = 200


def runs() -> Iterator[RunConfig]:
    """What each feature of the time model is judged by, runs of one build beside each other."""
    yield train(LLAMA, batch_size=1, seq_len=256)
    yield train(LLAMA, batch_size=4, seq_len=2048)
    yield train(LLAMA, batch_size=4, seq_len=1024, gradient_checkpointing=False)
    yield train(LLAMA, batch_size=4, seq_len=1024, attn="eager")
    yield train(LLAMA, batch_size=4, seq_len=1024, lora_dropout=0.1)
    yield train(LLAMA, method="dora", batch_size=2, seq_len=1024)
    for optimizer in ("adamw_torch_fused", "adamw_torch", "adamw_8bit"):
        yield train(LLAMA, method="full", optimizer=optimizer, batch_size=2, seq_len=1024)
    yield train(MISTRAL, batch_size=1, seq_len=256)
    yield train(MISTRAL, batch_size=2, seq_len=2048)
    for quant in ("nf4", "int8"):
        for batch_size, seq_len in ((1, 256), (2, 2048)):
            yield train(
                MISTRAL, method="qlora", quant=quant, batch_size=batch_size, seq_len=seq_len
            )
    for quant in ("none", "nf4", "int8"):
        for batch_size, prompt_len, max_new_tokens in ((1, 512, 1), (8, 512, 1), (1, 512, 9)):
            yield RunConfig(
                model=MISTRAL,
                phase="inference",
                quant=quant,
                batch_size=batch_size,
                prompt_len=prompt_len,
                max_new_tokens=max_new_tokens,
            )
    for model in ("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3-VL-2B-Instruct"):
        yield train(model, batch_size=2, seq_len=2048, images=1, image_size=(1024, 768))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "kernel_times")
    parser.add_argument("--minutes", type=float, default=3.0, help="no run starts later")
    parser.add_argument("--phase", choices=("finetune", "inference"), help="runs of this one alone")
    options = parser.parse_args()

    from whichlora.profiler.kept_model import KeptModel

    start_s = time.monotonic()
    gpu = find_gpu("auto")
    options.out.mkdir(parents=True, exist_ok=True)
    kept = KeptModel()
    with (options.out / f"{gpu.key}.jsonl").open("w", encoding="utf-8") as file:
        for run in runs():
            if options.phase not in (None, run.phase):
                continue
            if time.monotonic() - start_s > 60 * options.minutes:
                print("no time is left for the others")
                break
            record = profiled(run, gpu, kept)
            print(json.dumps(record), file=file, flush=True)
            print(summary(record), flush=True)


def profiled(run: RunConfig, gpu: GpuSpec, kept: Any) -> dict[str, Any]:
    """Seconds and number of each kernel in one step of `run`; or what the libraries raised."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from whichlora.profiler.worker import answer

    resolved = resolve(model_of(run), run, gpu)
    targets = resolved.peft_targets
    request: dict[str, Any] = {
        "run": resolved.run.to_dict(),
        "model_config": dict(model_of(run).config),
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "seq_lens": [run.seq_len] * NUM_PROFILED,
        "num_batches": NUM_PROFILED,
        "decisive_s": [],
        "predicted_s": [],
        "extra_until_s": 60.0,
        "memory_limit_bytes": None,
    }
    device = "cpu" if gpu.kind == "cpu" else "cuda"
    plain = answer(device, kept, request, lambda _: None)
    record = {"run": resolved.run.to_dict(), "libraries": installed_versions(), "plain": plain}
    if plain["outcome"] != "ok":
        return record
    activity = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiler:
        answer(device, kept, request, lambda _: None)
        if device != "cpu":
            torch.cuda.synchronize()
    passes = 1 + NUM_PROFILED
    kernels = [
        [
            event.key[:LONGEST_NAME],
            event.count / passes,
            event.self_device_time_total / passes / 1e6,
        ]
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    return record | {"kernels": sorted(kernels, key=lambda each: -each[2])}


def summary(record: dict[str, Any]) -> str:
    run, plain = record["run"], record["plain"]
    name = f"{run['model']} {run.get('method')} {run.get('quant')} {run.get('batch_size')}"
    if plain["outcome"] != "ok":
        return f"{name}: {plain['outcome']} {plain.get('detail', '')[:200]}"
    times = plain.get("step_s") or plain.get("generate_s")
    kernels = record["kernels"]
    busy_s = sum(seconds for _, _, seconds in kernels)
    number = sum(count for _, count, _ in kernels)
    return f"{name}: {1e3 * min(times):.1f} ms, kernels {1e3 * busy_s:.1f} ms, {number:.0f} of them"


if __name__ == "__main__":
    main()
