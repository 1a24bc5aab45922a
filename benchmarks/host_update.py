"""Seconds of an optimizer's update on the host: torch's on this CPU, and published ones.

    python benchmarks/host_update.py

torch's AdamW, fused and not, and the norm and scaling of gradients are run in one process per
thread count; bytes are those of `memory.optimizer.update_bytes`. Rates of single threads, and of
all processes of a node, are what `timing.links` has its defaults from. Published rows are in
`host_update.csv`; 42 bytes are those of DeepSpeed's update (`parallel.deepspeed.host_update`).
"""

from __future__ import annotations

import csv
import os
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch
from markdown_tables import markdown_table

from whichlora.memory.gradients import Trained
from whichlora.memory.optimizer import Update, update_bytes
from whichlora.spec.links import LinkSpec
from whichlora.timing.links import host_update_s

ROWS = Path(__file__).with_suffix(".csv")
TENSORS, WIDTH = 16, 2**24  # 1 GiB in fp32, which no cache holds
REPEATS = 5
UNMEASURED = LinkSpec(key="unmeasured", name="", relative_deviation=0.1)


def measured(optimizer: str, threads: int, *, clips: bool) -> tuple[int, float]:
    """Bytes of one update, and its seconds."""
    torch.set_num_threads(threads)
    parameters = [torch.nn.Parameter(torch.randn(WIDTH)) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    fused = optimizer == "adamw_torch_fused"
    adam = torch.optim.AdamW(parameters, weight_decay=0.0, fused=fused)
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        seconds.append(time.perf_counter() - start)
    update = Update(
        tensors=(Trained(rows=1, width=WIDTH, param_bytes=4, count=TENSORS),),
        optimizer=optimizer,
        device_kind="cpu",
        clips=clips,
        unscales=False,
        num_micro_batches=1,
    )
    return int(update_bytes(update)), median(seconds[1:])


def here() -> str:
    rows = []
    for optimizer in ("adamw_torch_fused", "adamw_torch"):
        for clips in (False, True):
            for threads in sorted({1, os.cpu_count() or 1}):
                num_bytes, seconds = measured(optimizer, threads, clips=clips)
                predicted, _ = host_update_s(UNMEASURED, num_bytes, threads=threads, processes=1)
                rows.append(
                    [
                        optimizer,
                        "yes" if clips else "no",
                        str(threads),
                        f"{seconds:.2f}",
                        f"{num_bytes / seconds / 1e9:.1f}",
                        f"{predicted:.2f}",
                    ]
                )
    return markdown_table(["update", "clips", "threads", "s", "GB/s", "by default, s"], rows)


def published() -> str:
    table = []
    with ROWS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            seconds = float(row["seconds"])
            num_bytes = float(row["parameters_per_process"]) * float(row["bytes_per_parameter"])
            processes = int(row["processes_per_node"])
            slow, fast = (
                host_update_s(UNMEASURED, num_bytes, threads=threads, processes=processes)[0]
                for threads in (1, 64)
            )
            table.append(
                [
                    row["what"],
                    f"{seconds:.2f}",
                    f"{num_bytes / seconds / 1e9:.1f}",
                    f"{processes * num_bytes / seconds / 1e9:.1f}",
                    f"{slow:.2f}",
                    f"{fast:.2f}",
                ]
            )
    header = ["published", "s", "GB/s", "of a node", "by default: 1 thread, s", "all threads, s"]
    return markdown_table(header, table)


if __name__ == "__main__":
    print(published())
    print()
    print(here())
