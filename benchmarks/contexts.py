"""Compare what a process takes outside of torch's allocator with what others read.

    python benchmarks/contexts.py --write    docs/accuracy/contexts.md

`contexts.csv` has one row per reading, in MiB: of a context alone (`bare`), once kernels have run
(`kernels`; beside other ranks with NCCL's buffers), of trainings (`steps`), and with all kernels
loaded (`all`), as torch before 1.13 has it. Readings under Windows and with other processes are
left out.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from markdown_tables import markdown_table, write_page

from whichlora.memory.allocator import idle_context_bytes
from whichlora.parallel.communicators import (
    OF_NVLINK_RANK_BYTES,
    OF_PCIE_BYTES,
    communicator_bytes,
)
from whichlora.spec.backends.cuda import (
    FIRST_KERNELS_BYTES,
    THREAD_BYTES,
    resident_threads,
    step_kernels_bytes,
    uncalled_kernels_bytes,
)
from whichlora.store.gpus import find_gpu
from whichlora.units import MiB

READINGS = Path(__file__).parent / "contexts.csv"
STATES = {
    "bare": "a context alone",
    "kernels": "once kernels have run",
    "ranks": "the same, beside other ranks",
    "steps": "trainings",
    "all": "all kernels loaded, before torch 1.13",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading beside ours, in bytes.

    Args:
        thread_bytes: of a bare context, for each thread that the card holds.
    """

    row: Mapping[str, str]
    state: str
    measured: float
    predicted: float
    thread_bytes: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def readings() -> Iterator[Reading]:
    """All rows of `contexts.csv`."""
    with READINGS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gpu, ranks = find_gpu(row["gpu"]), int(row["ranks"])
            assert gpu.num_multiprocessors is not None
            assert gpu.compute_capability is not None
            predicted = idle_context_bytes(gpu) + communicator_bytes(ranks, gpu)
            if row["state"] == "bare":
                predicted -= FIRST_KERNELS_BYTES
            if row["state"] == "steps":
                predicted += step_kernels_bytes(gpu.compute_capability)
            if row["state"] == "all":
                predicted += uncalled_kernels_bytes(gpu.compute_capability)
            threads = gpu.num_multiprocessors * resident_threads(gpu.compute_capability)
            measured = float(row["mib"]) * MiB
            yield Reading(
                row=row,
                state=row["state"] if ranks == 1 else "ranks",
                measured=measured,
                predicted=predicted,
                thread_bytes=measured / threads,
            )


def left_out_error(bare: Sequence[Reading]) -> float:
    """The median error of each card by the median of the others."""
    by_gpu: dict[str, list[Reading]] = defaultdict(list)
    for reading in bare:
        by_gpu[reading.row["gpu"]].append(reading)
    errors = []
    for gpu, own in by_gpu.items():
        others = median(one.thread_bytes for one in bare if one.row["gpu"] != gpu)
        errors += [abs(others / one.thread_bytes - 1) for one in own]
    return median(errors)


def document(found: Sequence[Reading]) -> str:
    bare = [reading for reading in found if reading.state == "bare"]
    summary = []
    for state, name in STATES.items():
        of_state = [reading for reading in found if reading.state == state]
        worst = max(of_state, key=lambda one: abs(one.error))
        summary.append(
            (
                name,
                str(len(of_state)),
                f"{100 * median(abs(one.error) for one in of_state):.1f} %",
                f"{median(one.predicted - one.measured for one in of_state) / MiB:+.0f} MiB",
                f"{100 * worst.error:+.0f} % ({worst.row['gpu']})",
            )
        )
    rows = [
        (
            reading.row["gpu"],
            reading.row["ranks"],
            STATES[reading.row["state"]],
            f"{reading.measured / MiB:.0f}",
            f"{reading.predicted / MiB:.0f}",
            f"{100 * reading.error:+.0f} %",
            f"[{reading.row['software'] or 'source'}]({reading.row['source']})"
            if reading.row["source"].startswith("http")
            else reading.row["software"],
            reading.row["note"],
        )
        for reading in found
    ]
    gpus = len({reading.row["gpu"] for reading in found})
    return "\n\n".join(
        (
            f"A context grows with the threads that a card holds: {THREAD_BYTES} bytes for each, "
            "1,024 of them the default stack. Their number is the multiprocessors times what the "
            "CUDA C++ programming guide states of a compute capability. The median of the "
            f"{len(bare)} bare readings is {median(one.thread_bytes for one in bare):.0f} bytes; "
            f"with each card left out the error is {100 * left_out_error(bare):.1f} % in the "
            f"median. First kernels add {FIRST_KERNELS_BYTES // MiB} MiB, those of a step on "
            f"compute capability 9 and later {step_kernels_bytes('9.0') // MiB} MiB more. "
            "torch before 1.13 loads all kernels: "
            f"{uncalled_kernels_bytes('7.0') // MiB} MiB more, and "
            f"{uncalled_kernels_bytes('8.0') // MiB} from compute capability 8 on, one reading "
            "each, of the V100 and of the newer RTX 3090; earlier releases have less. NCCL's "
            f"buffers are {OF_PCIE_BYTES // MiB} MiB over PCIe and {OF_NVLINK_RANK_BYTES // MiB} "
            "MiB for each rank that NVLink joins. Before, every card that nobody had "
            "measured was given 500 MiB, and several ranks 340 or 690 MiB.",
            f"{len(found)} readings of {gpus} cards:",
            markdown_table(("of", "n", "median error", "median", "worst"), summary),
            "Where SGLang states what is free, the card's usual total is taken: the A800's was "
            "another, since it leaves less than any context takes.",
            markdown_table(
                ("GPU", "ranks", "of", "MiB read", "ours", "error", "software", "note"), rows
            ),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = document(list(readings()))
    print(text)
    if parser.parse_args().write:
        write_page("contexts", "What a process takes outside of the allocator", text)


if __name__ == "__main__":
    main()
