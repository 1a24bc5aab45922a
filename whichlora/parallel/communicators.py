"""What NCCL takes of a device beside the framework's allocator."""

from __future__ import annotations

from whichlora.units import MiB

OF_TWO_BYTES = 340 * MiB
OF_MORE_BYTES = 690 * MiB


def communicator_bytes(size: int) -> int:
    """Device memory of one communicator among `size` ranks: its channels' buffers.

    Kind: estimate: it is linear in the channels, which NCCL chooses by the links.
    Source: readings of 340 MiB between two GPUs and of up to 690 MiB among more.
    """
    if size < 2:
        return 0
    return OF_TWO_BYTES if size == 2 else OF_MORE_BYTES
