"""Two round devices: what a test says of them does not change with a datasheet."""

from __future__ import annotations

from whichlora.spec.gpu import GpuSpec

CPU = GpuSpec(
    key="cpu",
    name="CPU",
    kind="cpu",
    memory_bytes=16 * 2**30,
    bandwidth_bytes_per_s=2e10,
    peak_flops_per_s={"fp32": 1e11},
)
A100 = GpuSpec(
    key="a100",
    name="A100",
    kind="cuda",
    memory_bytes=80 * 2**30,
    bandwidth_bytes_per_s=2e12,
    peak_flops_per_s={"bf16": 3.12e14, "fp32": 1.95e13},
    compute_capability="8.0",
)
