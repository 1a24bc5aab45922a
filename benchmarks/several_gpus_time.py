"""Published times of runs on several GPUs beside ours: step time and scaling efficiency.

    python benchmarks/several_gpus_time.py --write

The rows are in `several_gpus_time.csv`, with their sources. The calibration is the shipped one of
the A100, which no row on several GPUs is in. `--write` stores the tables in
`docs/accuracy/several_gpus.md`.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np
from markdown_tables import markdown_table
from numpy.typing import NDArray
from published import gpu_of, read
from published.cells import Line, Observation
from published.models import model_of
from published.sources import fms

from whichlora.calibration.intervals import scales_of_groups
from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.predict import predict
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.parallel import OptionValue, ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.links import LinkFiles

ROWS = Path(__file__).with_suffix(".csv")
PAGE = ROOT / "docs" / "accuracy" / "several_gpus.md"
QLORA_GPUS = {
    "A100-40GB SXM": "a100-sxm-40gb",
    "A5000": "rtx-a5000-24gb",
    "A6000 Ada": "rtx-6000-ada-48gb",
    "H100 SXM": "h100-sxm-80gb",
    "RTX 3090": "rtx-3090-24gb",
    "RTX 4090": "rtx-4090-24gb",
}
EPOCH = 1024  # samples of fsdp_qlora's runs
Options = tuple[tuple[str, OptionValue], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A run on several GPUs, of equal ones the median.

    Args:
        alone_s: the step of the same run on one GPU, as published; NaN without one.
    """

    source: str
    stack: str
    model: ModelSpec
    run: RunConfig
    gpu: str
    gpus: int
    strategy: str = "fsdp"
    options: Options
    step_s: float
    alone_s: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A published run beside ours."""

    published: Published
    step_s: float
    alone_s: float
    interval_s: tuple[float, float]
    interconnect: str

    @property
    def error(self) -> float:
        return self.step_s / self.published.step_s - 1

    @property
    def is_inside(self) -> bool:
        low, high = self.interval_s
        return low <= self.published.step_s <= high

    @property
    def efficiency_points(self) -> float:
        """Predicted less published scaling efficiency; NaN without a run on one GPU."""
        run = self.published
        return 100 * (self.alone_s / self.step_s - run.alone_s / run.step_s)


def rows() -> list[dict[str, str]]:
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _configuration(notes: str) -> str:
    found = re.search(r"framework_config ([^;]*)", notes)
    return found[1].strip() if found else ""


def _fms(row: dict[str, str]) -> Iterator[tuple[Published, tuple[object, ...]]]:
    """The run, and what names the same one on one GPU."""
    if not row["seq_len"]:
        return
    kernels = _configuration(row["notes"])
    head = "liger" if "liger" in kernels else "fast cross entropy" if "foak" in kernels else ""
    line = row | {
        "batch_size": row["micro_batch"],
        "loss_kernel": head,
        "padding": "packed",
        "mem_value": "",
        "flags": "",
    }
    for observed in fms(Line("several_gpus", 0, line)):
        if not isinstance(observed, Observation):
            continue
        # GPTQ weights are left out: transformers does not shard them, the plugin's own code does
        if observed.run.quant.startswith("gptq"):
            continue
        options: Options = (("fsdp_version", "1"),)
        yield (
            Published(
                source=row["source"],
                stack=observed.stack,
                model=observed.model,
                run=observed.run,
                gpu="a100-sxm-80gb",
                gpus=int(row["n_gpus"]),
                options=options,
                step_s=observed.value,
            ),
            (observed.label, observed.stack, observed.run),
        )


def _qlora(row: dict[str, str]) -> Iterator[Published]:
    model = model_of(row["model_id"])
    if model is None:
        print(f"left out: {row['model_id']} is not known")
        return
    # SDPA of transformers 4.3x is handed no window (modeling_mistral.py `MistralModel.forward`)
    model = build({**model.config, "sliding_window": None}, name=model.name)
    replicates = row["strategy"].startswith("DDP")
    offload: Options = (("offload", ("optimizer", "params")),) if row["offload"] else ()
    batch, gpus = int(row["micro_batch"]), int(row["n_gpus"])
    run = RunConfig(
        model=model.name,
        method=row["method"],
        quant=row["quant"] or "none",
        r=64,
        target_modules=("q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "gate_proj"),
        precision="bf16-no-autocast",
        adapter_dtype="bfloat16",
        batch_size=batch,
        seq_len=int(row["seq_len"]),
        gradient_checkpointing=True,
        use_reentrant=True,
    )
    yield Published(
        source=row["source"],
        stack="fsdp_qlora",
        model=model,
        run=run,
        gpu=QLORA_GPUS[row["gpu"]],
        gpus=gpus,
        strategy="ddp" if replicates else "fsdp",
        options=() if replicates else (("fsdp_version", "1"), *offload),
        step_s=float(row["time_value"]) / (EPOCH / batch / gpus),
    )


def published() -> list[Published]:
    """Every run that we can predict, equal ones together."""
    alone: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for found in read("fms_acceleration_bench"):
        if isinstance(found, Observation) and found.quantity == "step_s":
            alone[found.label, found.stack, found.run].append(found.value)
    groups: dict[Published, list[float]] = defaultdict(list)
    single: dict[Published, float] = {}
    for row in rows():
        if row["source"] == "fms_acceleration_bench":
            for run, key in _fms(row):
                same = replace(run, step_s=0.0)
                groups[same].append(run.step_s)
                single[same] = median(alone[key]) if alone[key] else math.nan
            continue
        for run in _qlora(row):
            groups[replace(run, step_s=0.0)].append(run.step_s)
    return [
        replace(run, step_s=median(values), alone_s=single.get(run, math.nan))
        for run, values in groups.items()
    ]


def compared(runs: Sequence[Published]) -> list[Compared]:
    found = []
    for run in runs:
        gpu = gpu_of(run.gpu)
        calibration = load_calibration(gpu)
        parallel = ParallelConfig(strategy=run.strategy, gpus=run.gpus, options=run.options)
        try:
            # TRL's `is_sharded_qlora`: nothing is prepared, whose fp32 norms FSDP would refuse
            sharded = replace(run.run, parallel=parallel, prepare_kbit=False)
            several = predict(run.model, sharded, gpu, calibration)
            alone = predict(run.model, run.run, gpu, calibration)
        except ConfigError as error:
            print(f"left out: {run.model.name} {run.run.method} on {run.gpu}: {error}")
            continue
        assert several.time.step_s is not None
        assert alone.time.step_s is not None
        pcie = any("pcie" in note for note in several.notes)
        found.append(
            Compared(
                published=run,
                step_s=several.time.step_s,
                alone_s=alone.time.step_s,
                interval_s=several.time.interval_s,
                interconnect="PCIe" if pcie else "NVLink",
            )
        )
    return found


def _score(run: Compared, scale: float) -> float:
    """Size of the log error in deviations as they are stated before `scale`."""
    deviation = math.log(run.interval_s[1] / run.step_s) / TWO_SIDED_Z[TIME_CONFIDENCE] / scale
    return abs(math.log1p(run.error)) / deviation


def pcie_intervals(found: Sequence[Compared]) -> str:
    """The scale of intervals over PCIe, and what it holds of types of GPU that it has not seen."""
    stated = LinkFiles((ROOT / "calibration",))["pcie-4-peer"].interval_scale
    runs = [run for run in found if run.interconnect == "PCIe"]
    scores = np.array([_score(run, stated) for run in runs])
    gpus = np.array([run.published.gpu for run in runs])

    def scale(chosen: NDArray[np.bool_]) -> float:
        groups = gpus[chosen].tolist()
        return scales_of_groups(scores[chosen], groups, groups, TIME_CONFIDENCE)[0]

    reach = TWO_SIDED_Z[TIME_CONFIDENCE]
    held = sum(
        int((scores[gpus == gpu] <= reach * scale(gpus != gpu)).sum()) for gpu in np.unique(gpus)
    )
    plain = int((scores <= reach).sum())
    return (
        f"Intervals over PCIe, where nobody measured GPU and machine: as stated they hold {plain} "
        f"of {len(runs)} ({plain / len(runs):.0%}). Each type of GPU counting as one draw "
        f"(`calibration/intervals.py`), the scale is {scale(gpus != ''):.2f}; each type by the "
        f"scale of the others: {held} ({held / len(runs):.0%}). The table has the intervals with "
        f"the scale of all, {stated:g} in `calibration/links/pcie-*.json`."
    )


def _row(title: Sequence[str], runs: Sequence[Compared]) -> list[str]:
    errors = sorted(abs(run.error) for run in runs)
    points = sorted(
        abs(run.efficiency_points) for run in runs if not math.isnan(run.efficiency_points)
    )
    inside = sum(run.is_inside for run in runs)
    return [
        *title,
        str(len(runs)),
        f"{median(errors):.1%}",
        f"{errors[round(0.9 * (len(errors) - 1))]:.1%}",
        f"{errors[-1]:.1%}",
        f"{inside / len(runs):.0%}",
        f"{len(points)}",
        f"{median(points):.1f}" if points else "-",
        f"{points[round(0.9 * (len(points) - 1))]:.1f}" if points else "-",
        f"{points[-1]:.1f}" if points else "-",
    ]


HEADER = [
    "source", "links", "GPU", "model", "method", "runs", "median", "p90", "worst",
    "in 90 % interval", "pairs", "efficiency: median, points", "p90", "worst",
]  # fmt: skip


def document() -> str:
    found = compared(published())
    groups: dict[tuple[str, ...], list[Compared]] = defaultdict(list)
    for run in found:
        source = run.published
        name = source.model.name.rpartition("/")[2]
        gpu = source.gpu.rpartition("-")[0]
        groups[source.source, run.interconnect, gpu, name, source.run.method].append(run)
    table = [_row(title, runs) for title, runs in sorted(groups.items())]
    for gpu in sorted({run.published.gpu for run in found if run.interconnect == "PCIe"}):
        of_gpu = [run for run in found if run.published.gpu == gpu]
        table.append(_row(("all", "PCIe", gpu.rpartition("-")[0], "", ""), of_gpu))
    for links in ("NVLink", "PCIe"):
        of_links = [run for run in found if run.interconnect == links]
        if of_links:
            table.append(_row(("all", links, "", "", ""), of_links))
    return "\n".join(
        (
            "# Published times on several GPUs",
            "",
            "Step time of FSDP1 (full shard) on 2 to 8 GPUs of one node, and the scaling",
            "efficiency where the same run on one GPU is published. Times on A100 80 GB are by",
            "its shipped calibration, which has seen runs on one GPU alone; others by datasheet",
            "and priors. The contention of NVLink machines is fitted to the full fine-tuning rows",
            "of fms; the other rows test it. GPTQ is left out, which a plugin shards by code of",
            "its own, and so are llm-foundry's MPT rows: transformers' MPT has no FlashAttention.",
            "",
            "PCIe: two RTX 4090 have stated full lanes. Two RTX 3090 have an older motherboard",
            "with slow lanes, whose number is not stated: small batches of LoRA wait for them.",
            "Of 1, 2, 2.5, 3, 4 and 6 GB/s as `--interconnect`, 2.5 has the least worst error of",
            "these 13 rows, 31 %, with a median of 12 %. It is chosen by the rows that it is",
            "compared with, so it says what lanes would explain them, not that they have them.",
            "",
            "Rows of A5000 and RTX 6000 Ada take longer than predicted, and the cause is not",
            "settled. For slow computing: seconds per sequence hardly change with the GPUs or",
            "offload (18.9, 18.9 and 20.4 on 2, 4 and 8 A5000, 11.5 and 11.3 on 2 and 4 Ada).",
            "Against it: the step of 4 Ada with batch 3 is 1.5 times that of 2 with batch 2. That",
            "fits 3/2 sequences, but also what a ring sends per GPU, 0.75 to 0.5 of the weights.",
            "Neither clocks nor lanes of these rented machines are stated.",
            "",
            *textwrap.wrap(pcie_intervals(found), 88),
            "",
            "Made by `benchmarks/several_gpus_time.py --write`.",
            "",
            markdown_table(HEADER, table),
            "",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = document()
    print(text)
    if parser.parse_args().write:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
