"""`whichlora calibrate --links`: measure the links of this machine, and keep them as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whichlora.calibration.load import calibration_roots
from whichlora.errors import ConfigError
from whichlora.profiler.installed import installed_versions
from whichlora.profiler.links import measure_links
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.links import LinkSpec
from whichlora.store.gpus import find_gpu, gpus_here
from whichlora.store.links import LinkFiles, read_links, write_links
from whichlora.store.paths import data_folder

OWN = "this-machine-"  # before the key of its GPU: the name of the file
CPU_RANKS = 2  # processes that stand in for GPUs on a CPU
_CONTENTION = 0.05  # where no machine with the GPU is known. Kind: estimate, as of PCIe.
_HOW = {
    "all_gather": "torch.distributed, times of the slowest rank",
    "host": "all ranks copy pinned memory at once, the slower direction",
    "update": "torch's fused AdamW in fp32: one thread alone; all ranks with all cores",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLinks:
    """The links of this machine as they were measured, and their file."""

    path: Path
    links: LinkSpec


def measure_own_links(gpus: Sequence[str] = (), calibration_dir: Path | None = None) -> OwnLinks:
    """Measure the links between this machine's devices; predictions use them from then on.

    Args:
        gpus: name of the device, one at most; without it, that of this machine.

    Raises:
        ConfigError: not one type, or fewer than two of it here.
        MeasurementError: the ranks failed.
    """
    if len(gpus) > 1:
        raise ConfigError(f"--links measures one type of GPU, got {', '.join(gpus)}; give one")
    spec = find_gpu(*gpus) if gpus else find_gpu("auto")
    count = _count_here(spec)
    if "torch" not in installed_versions():
        raise ConfigError("--links needs torch, which is not installed: pip install torch")
    roots = calibration_roots(calibration_dir)
    told = measure_links("cpu" if spec.is_cpu else "cuda", count)
    path = write_links(roots[0], f"{OWN}{spec.key}", _values(spec, count, told))
    return OwnLinks(path=path, links=read_links(path))


def _count_here(spec: GpuSpec) -> int:
    if spec.is_cpu:
        return CPU_RANKS
    count = sum(here.key == spec.key for _, here in gpus_here())
    if count < 2:
        raise ConfigError(
            f"--links: this machine shows {count} {spec.key}, and links are between two or more; "
            "look at CUDA_VISIBLE_DEVICES, or state --interconnect, such as 25GB/s"
        )
    return count


def _values(spec: GpuSpec, count: int, told: dict[str, Any]) -> dict[str, Any]:
    """The fields of the file. What can't be measured so is that of the GPU's usual machine."""
    environment = told.pop("environment")
    shipped = LinkFiles((data_folder("calibration"),)).values()
    usual = next((links for links in shipped if spec.key in links.gpus), None)
    date = datetime.now(UTC).date().isoformat()
    versions = ", ".join(f"{name} {version}" for name, version in environment["libraries"].items())
    by = f"measured on {environment['host']}, {date}: {versions}"
    return told | {
        "name": f"{count} {spec.key} of {environment['host']}, measured {date}",
        "gpus": [spec.key],
        "gpus_per_node": count,
        "like": None,
        "bandwidth_bytes_per_s": None,
        "host_memory_bytes": None,
        "contention": usual.contention if usual else _CONTENTION,
        "network": None,
        "sources": {
            "microseconds": f"{_HOW['all_gather']}; {by}",
            "latency_s": "the smallest all-reduce between two",
            "host_bytes_per_s": _HOW["host"],
            "host_thread_bytes_per_s": _HOW["update"],
            "host_update_bytes_per_s": _HOW["update"],
            "relative_deviation": "between repeated loops, 0.05 at least",
            "contention": f"as of {usual.key}" if usual else "estimate, as of PCIe",
        },
    }
