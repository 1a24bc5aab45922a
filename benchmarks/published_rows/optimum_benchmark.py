"""optimum-benchmark: forwards, generations and a few training rows of 7B models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from published_rows.cells import (
    A100,
    QUANT,
    Found,
    LeftOut,
    Line,
    Quantity,
    Row,
    libraries_of,
    whole,
)
from published_rows.models import model_of
from whichlora.specs import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.units import GiB


def optimum(line: Line) -> Iterator[Found]:
    row = line.row
    gpu = "rtx-4090-24gb" if row["gpu"] == "RTX4090" else A100
    if row["phase"] == "finetune":
        yield from _optimum_training(line, gpu)
        return
    if row["mem_counter"].startswith("peak_memory"):
        counter: Quantity | None = None
    else:
        counter = {
            "max_memory_allocated": "peak_allocated",
            "max_memory_reserved": "peak_reserved",
            "nvml used memory, polled peak": "device_used",
        }[row["mem_counter"]]  # type: ignore[assignment]
    attn = {"flash_attention_2": "flash_attention_2", "bettertransformer sdpa": "sdpa"}
    found = line.generation(attn=attn.get(row["attn_impl"], "eager"))
    if isinstance(found, LeftOut):
        yield found
        return
    spec, run = found
    if counter is None:
        yield line.left_out("memory", "one peak of an unnamed counter (allocator or driver)")
    elif counter == "device_used" and run.max_new_tokens > 1:
        reason = "polled in another pass: 26 GB used where the allocator reserved 84 GB"
        yield line.left_out("memory", reason)
    else:
        # NVML's first counter has what the driver keeps of the board, which CUDA never offers
        reserve = 80 * GiB - find_gpu(gpu).memory_bytes if counter == "device_used" else 0
        for one in line.memory(spec, run, gpu, counter, stack=_experiment(row)):
            yield replace(one, value=one.value - reserve)
    if row["time_value"]:
        forward = row["time_unit"].startswith("s per forward")
        yield line.observed(
            spec,
            run,
            gpu,
            "prefill_s" if forward else "generate_s",
            float(row["time_value"]),
            stack=_experiment(row),
        )


def _experiment(row: Row) -> str:
    found = re.search(r"experiment ([^;(]*)", row["notes"])
    return re.sub(r"-batch_size$", "", found[1].strip()) if found else ""


def _optimum_training(line: Line, gpu: str) -> Iterator[Found]:
    row = line.row
    quant = QUANT.get(row["quant"])
    spec = model_of(row["model_id"])
    assert spec is not None
    run = RunConfig(
        model=spec.name,
        method="lora" if quant == "none" else "qlora",
        r=8,
        target_modules=("q_proj", "v_proj"),
        batch_size=whole(row["batch_size"]),
        seq_len=256,
        precision="fp16",
        quant=quant,  # type: ignore[arg-type]
        gradient_checkpointing=False,
        optimizer="adamw_torch",
        attn="eager",
        prepare_kbit=False,
        libraries=libraries_of(row["versions"]),
    )
    seconds = run.batch_size / float(row["time_value"])
    yield line.observed(spec, run, gpu, "step_s", seconds, stack=_experiment(row))
