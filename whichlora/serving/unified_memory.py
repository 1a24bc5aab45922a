"""Memory that the processor shares with the GPU."""

from __future__ import annotations

from whichlora.spec.gpu import GpuSpec

# Compute capabilities of Jetson Orin and Thor and of GB10. Source: `shared_sysmem_device_mem_sms`,
# vLLM 0.13.0 utils/mem_utils.py:86, 0.19.0 :105; since 0.20.0 `is_integrated_gpu` asks CUDA.
UNIFIED = ("8.7", "11.0", "12.1")
# AMD's processors with the GPU in them: Strix Halo. Source: AMD's list of GPUs and their targets.
UNIFIED_TARGETS = ("gfx1151",)


def is_unified(gpu: GpuSpec) -> bool:
    """Whether the processor shares the memory of `gpu`.

    Kind: exact. Source: `UNIFIED`, `UNIFIED_TARGETS`; `spec.backends` of Macs.
    """
    if gpu.backend.shares_host_memory and not gpu.is_cpu:
        return True
    return gpu.compute_capability in UNIFIED + UNIFIED_TARGETS
