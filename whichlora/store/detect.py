"""Which accelerators and which CPU this process may use, asked without torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from whichlora.errors import MeasurementError
from whichlora.spec.numeric import ceil_div
from whichlora.units import GiB

CPU_FLAGS = frozenset(
    {
        "avx2",
        "fma",
        "avx512f",
        "avx512_bf16",
        "avx512_fp16",
        "avx512_vnni",
        "avx_vnni",
        "amx_bf16",
        "amx_int8",
    }
)
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedDevice:
    """One device as its driver or the kernel describes it.

    Args:
        name: raw, as the driver prints it.
        memory_bytes: CUDA: NVML's total, which includes the driver's reserve and so is 1 or 2 %
            above the total that CUDA reports; CPU: the most that this process may use.
        uuid: CUDA only: its name in `CUDA_VISIBLE_DEVICES`, whatever its number.
        power_limit_w: CUDA only: what its driver is set to; None where it does not say.
        num_cores: CPU only: physical cores that this process may run on.
        flags: CPU only: its flags among `CPU_FLAGS`.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    uuid: str | None = None
    driver: str | None = None
    compute_capability: str | None = None
    power_limit_w: float | None = None
    num_cores: int | None = None
    flags: frozenset[str] = frozenset()


def detect_gpus() -> tuple[DetectedDevice, ...]:
    """NVIDIA devices that a CUDA program started here would see; none without driver or NVML.

    A GPU in MIG mode stands for its instances. `CUDA_VISIBLE_DEVICES` is obeyed, its numbers
    read in PCI order: `CUDA_DEVICE_ORDER` matters only where the GPUs differ.

    Raises:
        MeasurementError: a driver is there, but does not answer.
    """
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value in (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        ):
            return ()
        raise _unanswered(error) from error
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        devices = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
            handles = _mig_instances(pynvml, gpu) or [gpu]
            devices += [(str(index), _describe(pynvml, handle, gpu, driver)) for handle in handles]
    except pynvml.NVMLError as error:
        raise _unanswered(error) from error
    finally:
        pynvml.nvmlShutdown()
    return _visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _unanswered(error: Exception) -> MeasurementError:
    return MeasurementError(
        f"NVML: the NVIDIA driver does not answer ({error}); "
        "run nvidia-smi, or name the device with --gpu"
    )


def _mig_instances(pynvml: Any, gpu: Any) -> list[Any]:
    """Handles of the MIG instances of `gpu`; none where MIG is off or unknown to it."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(gpu)
    except pynvml.NVMLError:  # not supported: every board before the A100, every GeForce
        return []
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    handles = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            handles.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except pynvml.NVMLError:  # a free slot
            continue
    return handles


def _describe(pynvml: Any, handle: Any, gpu: Any, driver: str) -> DetectedDevice:
    name = pynvml.nvmlDeviceGetName(handle)
    try:
        memory_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        memory_bytes = _installed_memory_bytes(_PROC)  # GB10: processor and GPU share it
    if handle is not gpu and " MIG " not in name:
        # Some drivers print the whole GPU's name; the profile is "<slices>g.<GB, rounded up>gb".
        slices = pynvml.nvmlDeviceGetAttributes(handle).gpuInstanceSliceCount
        name = f"{name} MIG {slices}g.{ceil_div(memory_bytes, GiB)}gb"
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(gpu)
    return DetectedDevice(
        name=name,
        kind="cuda",
        memory_bytes=memory_bytes,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        driver=driver,
        compute_capability=f"{major}.{minor}",
        # a MIG instance has a part of the board, and no limit of its own
        power_limit_w=_power_limit_w(pynvml, gpu) if handle is gpu else None,
    )


def _power_limit_w(pynvml: Any, gpu: Any) -> float | None:
    try:
        return float(pynvml.nvmlDeviceGetPowerManagementLimit(gpu)) / 1e3
    except pynvml.NVMLError:  # not supported: laptops, GB10
        return None


def _visible(
    devices: Collection[tuple[str, DetectedDevice]], wanted: str | None
) -> tuple[DetectedDevice, ...]:
    """The devices that `CUDA_VISIBLE_DEVICES` lists, in its order; all where it is not set.

    Source: CUDA C++ Programming Guide, "CUDA environment variables": numbers or (the beginning of)
    UUIDs, and the first entry that names no device ends the list.
    """
    if wanted is None:
        return tuple(device for _, device in devices)
    chosen: list[DetectedDevice] = []
    for entry in (entry.strip() for entry in wanted.split(",")):
        match = next(
            (
                device
                for index, device in devices
                if entry == index
                or (entry.startswith(("GPU-", "MIG-")) and str(device.uuid).startswith(entry))
            ),
            None,
        )
        if match is None:
            break
        chosen.append(match)
    return tuple(chosen)


def detect_cpu(
    *, proc: Path = _PROC, cgroup: Path = _CGROUP, cpus: Collection[int] | None = None
) -> DetectedDevice:
    """The CPU of this host, with the cores and memory that this process may use.

    Args:
        proc: where the kernel describes this process and host.
        cgroup: where control groups are mounted.
        cpus: numbers of the usable logical CPUs; None asks the scheduler.
    """
    if cpus is None:
        cpus = os.sched_getaffinity(0)
    text = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    blocks = [_fields(block) for block in text.split("\n\n") if block.strip()]
    usable = [block for block in blocks if block.get("processor", "").isdecimal()]
    usable = [block for block in usable if int(block["processor"]) in cpus]
    first = usable[0] if usable else {}
    # Two hyperthreads share their core's arithmetic units, so they count once.
    cores = {
        (block["physical id"], block["core id"])
        for block in usable
        if "physical id" in block and "core id" in block
    }
    return DetectedDevice(
        name=first.get("model name") or platform.machine(),  # Arm kernels print no model name
        kind="cpu",
        memory_bytes=_usable_memory_bytes(proc, cgroup),
        num_cores=len(cores) or len(cpus),
        flags=CPU_FLAGS.intersection(first.get("flags", "").split()),
    )


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _usable_memory_bytes(proc: Path, cgroup: Path) -> int:
    """Installed memory, or the tightest control-group limit on this process if that is less."""
    limits = [_installed_memory_bytes(proc)]
    try:
        groups = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        groups = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, file = cgroup, "memory.max"  # version 2: one tree
        elif "memory" in controllers.split(","):
            root, file = cgroup / "memory", "memory.limit_in_bytes"  # version 1: a tree per kind
        else:
            continue
        # A limit binds everything below it. Inside a container the path may name folders that
        # only the host sees, while the mount's own root is the container's group.
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root):
                limits.extend(_limit_bytes(folder / file))
    return min(limits)


def _installed_memory_bytes(proc: Path) -> int:
    meminfo = _fields((proc / "meminfo").read_text(encoding="ascii"))
    return int(meminfo["MemTotal"].removesuffix("kB")) * 1024


def _limit_bytes(file: Path) -> list[int]:
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []  # "max": no limit
