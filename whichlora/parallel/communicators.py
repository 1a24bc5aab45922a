"""What NCCL takes of a device beside the framework's allocator."""

from __future__ import annotations

from whichlora.spec.gpu import GpuSpec
from whichlora.units import MiB

# Buffers of the channels: over PCIe few, whatever the ranks; over NVLink with each of them. Kind:
# estimate, the medians of published logs: what is free before weights are loaded, on 4 A10G, 4 and
# 8 L4, 2 L40S, RTX 3090, RTX 4090 and A100 PCIe; on 8 A100, H20, H100 and H800 (docs/accuracy).
OF_PCIE_BYTES = 250 * MiB
OF_NVLINK_RANK_BYTES = 210 * MiB
MOST_LINKED = 8  # ranks of one machine; further ones are behind a network
# Boards that NVLink joins, by how their keys begin.
JOINED_BOARDS = (
    *("a100-sxm", "a800-sxm", "v100-sxm", "p100-sxm", "h100-sxm", "h800-sxm", "h200-sxm", "h20-"),
    *("b200", "b300", "gb200", "gb300", "gh200"),
)


def is_joined(gpu: GpuSpec) -> bool:
    """Whether NVLink joins boards of this kind."""
    return gpu.key.startswith(JOINED_BOARDS)


def communicator_bytes(size: int, gpu: GpuSpec) -> int:
    """Device memory of one communicator among `size` ranks: its channels' buffers.

    Kind: estimate. Source: `OF_PCIE_BYTES`.
    """
    if size < 2:
        return 0
    return OF_NVLINK_RANK_BYTES * min(size, MOST_LINKED) if is_joined(gpu) else OF_PCIE_BYTES
