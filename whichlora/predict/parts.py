"""Bytes by part at a moment of a ledger, with what the device adds to live tensors."""

from __future__ import annotations

from whichlora.memory.training import PARTS, RETURNED, Ledger
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.numeric import Count


def part_bytes(job: ResolvedRun, counted: Ledger, moment: str) -> dict[str, Count]:
    """Bytes of every part at `moment`, before any calibration; they add up to the card's use.

    `RETURNED` stands beside the parts.
    """
    parts: dict[str, Count] = dict.fromkeys(PARTS, 0)
    for entry in counted.moments[moment]:
        parts[entry.part] = parts[entry.part] + entry.num_bytes
    parts["temporary"] = parts["temporary"] + counted.workspace_in(moment)
    parts["allocator"] = counted.idle_bytes
    parts[RETURNED] = counted.returned_bytes
    parts["context"] = job.context_bytes
    if job.layout is not None:
        parts["context"] = parts["context"] + job.layout.communicator_bytes(job.gpu)
    return parts
