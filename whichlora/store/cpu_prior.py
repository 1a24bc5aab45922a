"""A prior for a CPU without measurements, from its cores and instruction set."""

from __future__ import annotations

import re

from whichlora.spec.gpu import GpuSpec
from whichlora.store.detect import DetectedDevice

_NOISE = re.compile(r"\((r|tm)\)|\b(cpu|processor|\d+-core)\b|@.*")  # "Xeon(R) CPU @ 2.20GHz"

# Operations per core and cycle, two per multiply-add; the last row whose flags the CPU has counts.
_FLOPS_PER_CYCLE: tuple[tuple[str, frozenset[str], int], ...] = (
    ("fp32", frozenset(), 16),  # two units of 128 bits: SSE, NEON
    ("fp32", frozenset({"avx2", "fma"}), 32),
    ("fp32", frozenset({"avx512f"}), 64),
    ("bf16", frozenset({"avx512_bf16"}), 128),
    ("bf16", frozenset({"amx_bf16"}), 1024),
    ("fp16", frozenset({"avx512_fp16"}), 128),
    ("int8", frozenset({"avx_vnni"}), 128),
    ("int8", frozenset({"avx512_vnni"}), 256),
    ("int8", frozenset({"amx_int8"}), 2048),
)


def cpu_spec(device: DetectedDevice) -> GpuSpec:
    """A prior for a CPU without measurements: memory is detected, every rate is a stated guess.

    Kind: fitted to nothing; the right order of magnitude, and all in `unverified`.
    Source: arithmetic per core and cycle is what the instruction set gives (Intel 64 optimization
    manual: two fused multiply-add units of 512 or 256 bits; one AMX tile product of 16 x 16 x 32
    bf16 in 16 cycles); the clock under such load, 2.5 GHz, and memory bandwidth, 12 GB/s per core
    up to 200 GB/s per socket, are round numbers.
    """
    num_cores = device.num_cores or 1
    cycles_per_s = num_cores * 2.5e9
    flops_per_cycle = {
        dtype: flops for dtype, flags, flops in _FLOPS_PER_CYCLE if flags <= device.flags
    }
    model = re.sub(r"[^a-z0-9]+", "-", _NOISE.sub(" ", device.name.lower())).strip("-")
    return GpuSpec(
        key=f"cpu-{model}-{num_cores}c" if model else f"cpu-{num_cores}c",
        name=device.name,
        kind="cpu",
        memory_bytes=device.memory_bytes,
        bandwidth_bytes_per_s=min(num_cores * 12e9, 200e9),
        peak_flops_per_s={dtype: flops * cycles_per_s for dtype, flops in flops_per_cycle.items()},
        names=(device.name,),
        sources={
            "memory_bytes": "detected: installed memory or the control group's limit",
            "bandwidth_bytes_per_s": "prior: 12 GB/s per core, at most 200 GB/s",
            "peak_flops_per_s": "prior: instruction set, number of cores, 2.5 GHz",
        },
        unverified=("bandwidth_bytes_per_s", "peak_flops_per_s"),
    )
