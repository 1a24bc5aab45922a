"""What a sweep asks of whoever runs its tasks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Protocol

from whichlora.cluster.slurm.discovery import GpuGroup
from whichlora.cluster.slurm.states import TaskState
from whichlora.cluster.state import Array, Sweep
from whichlora.spec.plan import Plan

Place = tuple[str, int, int]  # group, round, number of the task


class Engine(Protocol):
    """What a sweep asks of whoever runs its tasks."""

    def find_groups(self, plan: Plan) -> tuple[list[GpuGroup], list[str]]:
        """The GPU types there are, and a line about each kind that is not known."""

    def write(self, plan: Plan, sweep: Sweep, array: Array, *, limit_s: float) -> Array:
        """Write the script of `array`; its limits filled in."""

    def submit(self, sweep: Sweep, array: Array, indices: Sequence[int]) -> Array:
        """Start tasks `indices`; the jobs added."""

    def submit_merge(self, sweep: Sweep) -> list[str]:
        """Let the results be joined when all that was submitted has ended; the jobs."""

    def states(self, sweep: Sweep) -> dict[Place, TaskState]:
        """How every submitted task stands, as far as anybody remembers."""


def program(plan: Plan) -> str:
    """How a node calls this program: the interpreter that runs now, unless the config says."""
    return plan.slurm.command or f"{shlex.quote(sys.executable)} -m whichlora"
