"""How a task stands, from what squeue, sacct and scontrol print, and what that means for us."""

from __future__ import annotations

import re
from dataclasses import dataclass

from whichlora.spec.results import Outcome

_WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_ACTIVE = {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING",
           "STAGE_OUT"}  # fmt: skip
# The cluster took the task away: that says nothing about the candidate.
_TAKEN = {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED"}


@dataclass(frozen=True, slots=True)
class TaskState:
    """One array task as Slurm tells it.

    Args:
        name: RUNNING, OUT_OF_MEMORY, …
        signal: what killed its shell, 0 if nothing did.
    """

    name: str
    exit_code: int = 0
    signal: int = 0

    @property
    def is_final(self) -> bool:
        return self.name not in _WAITING | _ACTIVE

    @property
    def is_taken(self) -> bool:
        """It ended for a reason of the cluster's own, so it should run again."""
        return self.name in _TAKEN

    @property
    def outcome(self) -> Outcome | None:
        """What a task that ended without a record says about its candidate; None: nothing."""
        if not self.is_final or self.is_taken or self.name == "CANCELLED":
            return None
        if self.name in ("TIMEOUT", "DEADLINE"):
            return "timeout"
        if self.name == "OUT_OF_MEMORY" or self.signal == 9 or self.exit_code == 137:
            return "killed"
        return "crashed"

    @property
    def words(self) -> str:
        """OUT_OF_MEMORY, signal 9."""
        ended = [f"signal {self.signal}"] if self.signal else []
        ended += [f"exit code {self.exit_code}"] if self.exit_code and not self.signal else []
        return ", ".join([self.name, *ended])


Key = tuple[str, int]


def parse_squeue(text: str) -> dict[Key, TaskState]:
    """`squeue -h -r -o '%F|%K|%T|%r'`: array job, index, state, reason."""
    states = {}
    for line in text.splitlines():
        job, index, state, *_ = f"{line.strip()}|||".split("|")
        if index.isdigit():
            states[job, int(index)] = TaskState(state)
    return states


def parse_sacct(text: str) -> dict[Key, TaskState]:
    """`sacct -X -n -P -o JobID,State,ExitCode`; waiting tasks stand there as 12_[3-5]: not read."""
    states = {}
    for line in text.splitlines():
        match = re.match(r"(\d+)_(\d+)\|(\w+)[^|]*\|(\d+):(\d+)", line.strip())
        if match:
            state = TaskState(match[3], int(match[4]), int(match[5]))
            states[match[1], int(match[2])] = state
    return states


def parse_scontrol(text: str) -> dict[Key, TaskState]:
    """`scontrol show job -o`: a line of NAME=VALUE per task."""
    states = {}
    for line in text.splitlines():
        values = dict(word.split("=", 1) for word in line.split() if "=" in word)
        index, job = values.get("ArrayTaskId", ""), values.get("ArrayJobId", "")
        if index.isdigit() and job:
            code, _, signal = values.get("ExitCode", "0:0").partition(":")
            states[job, int(index)] = TaskState(values.get("JobState", ""), int(code), int(signal))
    return states
