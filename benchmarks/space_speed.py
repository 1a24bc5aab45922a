"""How many candidates a second are generated and judged, on one core: `space_speed.py`.

Two spaces: a million configurations of one model, and ten million over models, methods, stacks
and devices. Loading the models is not counted; the peak of the process is.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported

import platform
import resource
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from whichlora.predict.coefficients import prior_calibration
from whichlora.search.grid import ParetoFront, blocks, judge_blocks
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import GiB, format_bytes

MODELS = (
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B",
    "google/gemma-3-4b-pt",
    "meta-llama/Llama-3.1-8B",
    "microsoft/phi-4",
)
GPUS = ("a100-sxm-80gb", "h100-sxm-80gb", "rtx-4090-24gb")
SPACES: dict[str, tuple[dict[str, Sequence[Any]], Sequence[str]]] = {
    "one model, one GPU": (
        {
            "model": ("meta-llama/Llama-3.1-8B",),
            "method": ("lora", "qlora"),
            "gradient_checkpointing": (True, False),
            "batch_size": range(1, 129),
            "seq_len": range(64, 64 * 129, 64),
            "r": tuple(2**i for i in range(16)),
        },
        GPUS[:1],
    ),
    "5 models, 4 methods, 12 stacks, 3 GPUs": (
        {
            "model": MODELS,
            "method": ("lora", "qlora", "dora", "qdora"),
            "gradient_checkpointing": (True, False),
            "attn": ("sdpa", "eager", "flash_attention_2"),
            "optimizer": ("adamw_torch_fused", "adamw_8bit"),
            "batch_size": range(1, 65),
            "seq_len": range(128, 128 * 29, 128),
            "r": (4, 8, 16, 32, 64, 128, 256, 512),
        },
        GPUS,
    ),
}


def main() -> None:
    find_model = cache(load_model)
    print(f"Python {platform.python_version()}, {platform.machine()}, one thread\n")
    print("| space | runs | possible | on the front | wall | processor | runs a processor second |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, (settings, gpus) in SPACES.items():
        for model in settings["model"]:
            find_model(model)
        chosen = [find_gpu(key) for key in gpus]
        row = measure(settings, chosen, find_model)
        print(f"| {name} | {row}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\npeak resident memory of the process: {format_bytes(peak)}")


def measure(settings: Mapping[str, Sequence[Any]], gpus: Sequence[GpuSpec], find_model: Any) -> str:
    calibrations = {gpu.key: prior_calibration(gpu) for gpu in gpus}
    base = RunConfig(model=settings["model"][0])
    front = ParetoFront()
    num_runs = num_possible = 0
    start = time.perf_counter(), time.process_time()
    found = blocks(base, settings, gpus, find_model)
    for judged in judge_blocks(found, lambda gpu: calibrations[gpu.key], limit_bytes=60 * GiB):
        num_runs += judged.size
        num_possible += len(judged.possible)
        front.add(judged)
    wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
    return (
        f"{num_runs:,} | {num_possible:,} | {len(front.runs)} | {wall:.2f} s | {processor:.2f} s "
        f"| {num_runs / processor / 1e6:.2f} M |"
    )


if __name__ == "__main__":
    main()
