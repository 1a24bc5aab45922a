"""Compare FSDP's formulas with published readings of several A100s, and print the table.

`published/several_gpus/fms_fsdp.csv` holds torch's counters and the driver's (nvidia-smi, the mean
over GPUs) of foundation-model-stack's fms-acceleration (`scripts/benchmarks/refs`, Apache-2.0):
FSDP version 1, two and four A100s. The lowest errors, -50 %, are PowerLM-3b, of which one commit
reads twice the bytes of another.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

from published.cells import Line, Observation
from published.sources import fms

from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import FOUR_BIT_BNB, RunConfig
from whichlora.store.gpus import find_gpu

READINGS = Path(__file__).parent / "published" / "several_gpus" / "fms_fsdp.csv"
GPU = find_gpu("a100-sxm-80gb")
OPTIONS = (("backward_prefetch", "BACKWARD_PRE"), ("fsdp_version", "1"))
KERNELS = "fast cross entropy"  # the loss of every configuration with foak kernels
COUNTERS = {
    "peak_allocated": "peak allocated",
    "allocated_between_steps": "between steps",
    "device_used": "used on the device, by nvidia-smi",
}


def observations() -> Iterator[Observation]:
    """Every reading as a run of ours on its GPUs; GPTQ, which the tool shards itself, left out."""
    with READINGS.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            row |= {
                "loss_kernel": KERNELS if "foak" in row["notes"] else "",
                "mem_unit": "GiB",
                "flags": "",
                "time_value": "",
                "padding": "packed",
                "gpu": "A100-SXM4-80GB",
            }
            parallel = ParallelConfig(strategy="fsdp", gpus=int(row["n_gpus"]), options=OPTIONS)
            for found in fms(Line("fms_acceleration_bench", number, row)):
                if isinstance(found, Observation) and found.run.quant in ("none", *FOUR_BIT_BNB):
                    # TRL's `is_sharded_qlora`: no fp32 norms, which FSDP would refuse
                    run = replace(found.run, parallel=parallel, prepare_kbit=False)
                    yield replace(found, run=run)


@cache
def _moments(run: RunConfig, observation: Observation) -> dict[str, int]:
    counted = ledger(resolve(observation.model, run, GPU))
    return {name: int(counted.moment_bytes(name)) for name in counted.moments}


def predicted(observation: Observation) -> int:
    """Bytes of its counter; those of torch the Trainer resets after loading."""
    if observation.quantity == "device_used":
        found = predict(observation.model, observation.run, GPU, prior_calibration(GPU))
        return found.memory.device_used_bytes
    moments = _moments(observation.run, observation)
    if observation.quantity == "allocated_between_steps":
        return moments["between_steps"]
    return max(num_bytes for name, num_bytes in moments.items() if name != "loading")


def errors(*, of_torch: bool = True) -> dict[tuple[str, str], list[float]]:
    """Relative errors by method and counter; all methods together as "all".

    Args:
        of_torch: of torch's counters; else of the driver's.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for observation in observations():
        if of_torch is (observation.quantity == "device_used"):
            continue
        error = predicted(observation) / observation.value - 1
        for method in (observation.run.method, "all"):
            found[method, COUNTERS[observation.quantity]].append(error)
    return found


def main() -> None:
    print("| method | counter | readings | median | 90 % | lowest | highest |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    found = errors() | errors(of_torch=False)
    for (method, counter), each in sorted(found.items(), key=lambda item: item[0][::-1]):
        sizes = sorted(map(abs, each))
        cells = (median(sizes), sizes[int(0.9 * (len(sizes) - 1))], min(each), max(each))
        row = " | ".join(f"{100 * cell:.2f} %" for cell in cells)
        print(f"| {method} | {counter} | {len(each)} | {row} |")


if __name__ == "__main__":
    main()
