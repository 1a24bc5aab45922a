"""Datasheet facts of one accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from whichlora.spec.backends import Backend, backend_of
from whichlora.spec.backends.cuda import ASSUMED_CAPABILITY


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Datasheet facts of one accelerator; a CPU is a device like any other.

    Args:
        key: folder name under `calibration/`.
        kind: its backend, a key of `spec.backends`: "cuda", "rocm", "xpu", "hpu", "mps" or "cpu".
        memory_bytes: total that the driver reports to the framework.
        bandwidth_bytes_per_s: peak memory bandwidth.
        power_w: what the board may draw, memory included; None where not known.
        power_limit_w: what its driver is set to, where that is known (`nvidia-smi --power-limit`).
        peak_flops_per_s: dense peak per dtype ("bf16", "fp16", "tf32", "fp32", "int8");
            a dtype without hardware support is absent.
        measured_flops_per_s: what large matrix products reach in a run that lasts, per dtype;
            empty where nobody measured it.
        context_bytes: memory a process takes outside the framework's allocator, None where
            nobody measured it.
        names: device names that NVML, `nvidia-smi` or the framework print for it.
        sources: where each fact comes from.
        unverified: names of the fields that no source confirms.
        notes: what must be said of a name that does not mean it exactly.
        beside: all cards of one run in their order, this one among them, where they are unequal and
            an engine gives each a part of its own.
    """

    key: str
    name: str
    kind: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    measured_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    power_w: float | None = None
    power_limit_w: float | None = None
    num_multiprocessors: int | None = None
    l2_bytes: int | None = None
    compute_capability: str | None = None
    context_bytes: int | None = None
    aliases: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    beside: tuple[GpuSpec, ...] = ()

    @property
    def backend(self) -> Backend:
        """What torch, and the libraries on it, have for devices of its kind."""
        return backend_of(self.kind)

    @property
    def is_cpu(self) -> bool:
        """Whether the host itself computes, in whose memory all of a run lies."""
        return self.kind == "cpu"

    @property
    def has_bf16(self) -> bool:
        """Whether it multiplies in bf16: all do but NVIDIA's before compute capability 8.0."""
        since = self.backend.has_bf16_since
        return since is None or float(self.compute_capability or ASSUMED_CAPABILITY) >= since

    @property
    def called(self) -> str:
        """Its key with the limit of its power: the name that means it as it is set."""
        return self.key if self.power_limit_w is None else f"{self.key}@{self.power_limit_w:g}W"

    @property
    def most_w(self) -> float | None:
        """What it may draw as it is set: no more than the board is made for."""
        stated = [watts for watts in (self.power_w, self.power_limit_w) if watts is not None]
        return min(stated, default=None)

    @property
    def is_timed(self) -> bool:
        """Whether rates are known; an amount of memory, "any card of 24 GB", has none."""
        return bool(self.peak_flops_per_s)
