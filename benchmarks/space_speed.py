"""How many candidates a second are generated and judged, on one core: `space_speed.py`.

Two spaces: a million configurations of one model, and ten million over models, methods, stacks
and devices. Loading the models is not counted; the peak of the process is.

`space_speed.py decisions` times the decisions of a search over a plan of a hundred thousand
candidates instead, in seconds of processor time. `space_speed.py gpus` times the whole answer,
without profiles, of a plan over 8 numbers of GPUs, all strategies and 20 models.

`space_speed.py serving` counts combinations of model, engine, length and concurrency: in a grid,
where a steady state is timed, and one by one with the waits of every request.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported

import itertools
import json
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from space_blocks import ParetoFront, blocks, judge_blocks

from whichlora.config import DEFAULT_MODELS, load_plan
from whichlora.predict import parallel_choice
from whichlora.predict.alike import Predictor
from whichlora.predict.coefficients import prior_calibration
from whichlora.serving import list_engines
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.terminal.progress import Progress
from whichlora.units import GiB, format_bytes
from whichlora.workflow.run import search
from whichlora.workflow.session import Session

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

PLAN = f"""
stage1_profile:
  model_names: [{", ".join(MODELS)}, Qwen/Qwen2.5-7B, Qwen/Qwen2.5-0.5B,
    mistralai/Mistral-7B-v0.3, HuggingFaceTB/SmolLM2-135M, EleutherAI/pythia-160m]
  batch_size: [1, 4, 16]
  prefill_length: 256
  tokens_to_generate: 64
  time_per_token: 100ms
stage2_profile:
  batch_size: {list(range(1, 32))}
  total_time: 2h
methods: [lora, qlora, dora, qdora]
ranks: [4, 8, 16, 32, 64, 128, 256]
attn: [sdpa, eager, flash_attention_2]
optimizer: [adamw_torch_fused, adamw_8bit]
gradient_checkpointing: [true, false]
dataset: {{path: data.jsonl, text_column: text}}
sequence_length: 1024
gpu: a100-sxm-80gb
weights: random
profile: none
output_dir: out
calibration_dir: calibration
"""


# Of five models; one by one every 40th of them.
SERVED: dict[str, Sequence[Any]] = {
    "model": MODELS,
    "batch_size": (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    "prompt_len": range(256, 2817, 256),
    "max_new_tokens": range(100, 1600, 100),
}
EVERY = 40


SPREAD_PLAN = f"""
models: [{", ".join(DEFAULT_MODELS)}]
dataset: {{samples: 2000, mean_tokens: 300, p95_tokens: 800}}
gpu: a100-sxm-80gb
gpus: [1, 2, 3, 4, 5, 6, 7, 8]
parallel: auto
sequence_length: 1024
weights: random
profile: none
output_dir: out
calibration_dir: calibration
"""


def main() -> None:
    if sys.argv[1:] == ["decisions"]:
        time_decisions()
    elif sys.argv[1:] == ["gpus"]:
        time_gpus()
    elif sys.argv[1:] == ["serving"]:
        time_serving()
    else:
        time_spaces()


def time_decisions() -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = (json.dumps({"text": "x" * rng.randint(50, 4000)}) for _ in range(2000))
        (folder / "data.jsonl").write_text("\n".join(rows))
        (folder / "config.yaml").write_text(PLAN)
        plan = load_plan(folder / "config.yaml")
        session = Session(plan, find_gpu(GPUS[0]), Progress(), fresh=True)
        serving, training = session.space.number()
        starts = [time.process_time()]
        for _ in range(2):
            runs = session.runs()
            starts.append(time.process_time())
        search_loop = session.search_loop(runs)
        starts.append(time.process_time())
        search_loop.decide()
        starts.append(time.process_time())
    seconds = [f"{end - start:.2f} s" for start, end in itertools.pairwise(starts)]
    print(f"{serving:,} inferences, {training:,} fine-tunings\n")
    print("| first list | list made again | counting those listed | one decision | listed |")
    print("| --- | --- | --- | --- | --- |")
    print(f"| {' | '.join(seconds)} | {len(runs)} |")


def time_gpus() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(SPREAD_PLAN)
        plan = load_plan(folder / "config.yaml")
        asked = parallel_choice.every(ParallelConfig(strategy="auto", gpus=8))
        starts = [time.process_time()]
        session = Session(plan, find_gpu(GPUS[0]), Progress(quiet=True), fresh=True)
        starts.append(time.process_time())
        answer = search(session)
        starts.append(time.process_time())
    models, answered = (end - start for start, end in itertools.pairwise(starts))
    winner = answer.winner.run.model if answer.winner else "none"
    print(
        f"{len(plan.models)} models, {len(plan.spreads)} numbers of GPUs, {len(asked)} strategies"
    )
    print("\n| loading models | answer | candidates listed | winner |\n| --- | --- | --- | --- |")
    print(f"| {models:.2f} s | {answered:.2f} s | {len(answer.finetune)} | {winner} |")


def time_serving() -> None:
    gpu, find_model = find_gpu(GPUS[0]), cache(load_model)
    calibration = prior_calibration(gpu)
    for model in MODELS:
        find_model(model)
    print("| engine | combinations | start | in a grid, a second | one by one, a second |")
    print("| --- | --- | --- | --- | --- |")
    for name, engine in list_engines().items():
        if engine.start is None:
            continue
        base = RunConfig(model=MODELS[0], phase="inference", serving=name)
        starts = [time.process_time()]
        number = num_started = 0
        for judged in judge_blocks(blocks(base, SERVED, [gpu], find_model), lambda _: calibration):
            number, num_started = number + judged.size, num_started + len(judged.possible)
        starts.append(time.process_time())
        values = list(itertools.product(*SERVED.values()))[::EVERY]
        predictor = Predictor()
        for chosen in values:
            run = replace(base, **dict(zip(SERVED, chosen, strict=True)))
            predictor.predict(find_model(run.model), run, gpu, calibration)
        starts.append(time.process_time())
        in_grid, alone = (end - start for start, end in itertools.pairwise(starts))
        print(
            f"| {name} | {number:,} | {num_started:,} | {number / in_grid:,.0f} "
            f"| {len(values) / alone:,.0f} |"
        )


def time_spaces() -> None:
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
