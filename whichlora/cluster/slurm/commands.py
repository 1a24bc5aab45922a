"""The commands of Slurm: what they are asked, and what they answer.

Their text formats, not their JSON: `-o` reads the same in releases ten years apart, while the
JSON carries a plugin version in its schema and is missing from some commands of older releases.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from whichlora.cluster.slurm.discovery import SINFO_FORMAT, GpuNode, parse_nodes
from whichlora.cluster.slurm.scripts import OFFSET
from whichlora.cluster.slurm.states import TaskState, parse_sacct, parse_scontrol, parse_squeue
from whichlora.errors import ConfigError, MeasurementError

_TIMEOUT_S = 60.0  # a controller under load takes tens of seconds
_UNREACHABLE = "is this a login node of the cluster? without one, use --engine local"
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled|slurmdbd", re.IGNORECASE)
_MAX_ARRAY = re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE)


def find_nodes(clusters: Sequence[str]) -> list[GpuNode]:
    """The GPU nodes of `clusters`, or of the one that the commands use.

    Raises:
        ConfigError: no Slurm here.
        MeasurementError: its controller does not answer.
    """
    nodes = []
    for cluster in clusters or [""]:
        command = ["sinfo", *_of(cluster), "-h", "-N", "-o", SINFO_FORMAT]
        nodes += parse_nodes(_run(command), cluster=cluster)
    return nodes


def max_array_size(cluster: str) -> int:
    """Tasks that one array may have.

    Raises:
        MeasurementError: the controller does not answer.
    """
    match = _MAX_ARRAY.search(_run(["scontrol", *_of(cluster), "show", "config"]))
    return max(1, int(match[1]) - 1) if match else 1000  # the largest index is one below


def submit_array(script: Path, indices: Sequence[int], *, offset: int, cluster: str) -> str:
    """The id of the array that runs tasks `indices`, each `offset` below its number in the list.

    Raises:
        MeasurementError: sbatch refuses.
    """
    text = _ranges(index - offset for index in indices)
    parallel = re.search(r"^#SBATCH --array=\S*(%\d+)", script.read_text("utf-8"), re.MULTILINE)
    extra = [f"--array={text}{parallel[1] if parallel else ''}"]
    extra += [f"--export=ALL,{OFFSET}={offset}"] if offset else []
    return _sbatch(script, extra, cluster)


def submit_after(script: Path, jobs: Sequence[str], *, cluster: str) -> str:
    """The id of a job that starts when `jobs` have ended, however they did.

    Raises:
        MeasurementError: sbatch refuses.
    """
    return _sbatch(script, [f"--dependency=afterany:{':'.join(jobs)}"], cluster)


def dry_run(script: Path, *, cluster: str) -> str:
    """What `sbatch --test-only` says; nothing is submitted.

    Raises:
        MeasurementError: the cluster would refuse the script.
    """
    command = ["sbatch", *_of(cluster), "--test-only", str(script)]
    return _run(command, with_stderr=True).strip()


def task_states(jobs: Sequence[str], *, cluster: str) -> dict[tuple[str, int], TaskState]:
    """State of the array tasks of `jobs`, by job and index: one call for all of them.

    What has left the queue is asked of the accounting, and where there is none of the controller,
    which remembers a job for minutes. A task that nobody remembers is absent.

    Raises:
        MeasurementError: the controller does not answer.
    """
    if not jobs:
        return {}
    ids = ",".join(jobs)
    queue = ["squeue", *_of(cluster), "-h", "-r", "-j", ids, "-t", "all", "-o", "%F|%K|%T|%r"]
    queued = parse_squeue(_run(queue, may_fail=r"Invalid job id"))
    history = ["sacct", *_of(cluster), "-X", "-n", "-P", "-j", ids, "-o", "JobID,State,ExitCode"]
    try:
        past = parse_sacct(_run(history))
    except MeasurementError as error:
        if not _NO_ACCOUNTING.search(str(error)):
            raise
        past = {}
    # Accounting lags and may be off: how a task ended, the queue does not say, the controller does.
    for job in jobs:
        ended = [key for key, state in queued.items() if key[0] == job and state.is_final]
        recorded = {key for key in ended if key in past and past[key].is_final}
        if len(recorded) < len(ended) or not any(key[0] == job for key in (*queued, *past)):
            show = ["scontrol", *_of(cluster), "show", "job", "-o", job]
            told = parse_scontrol(_run(show, may_fail=r"Invalid job id"))
            past |= {key: state for key, state in told.items() if key not in recorded}
    waiting = {key: state for key, state in queued.items() if not state.is_final}
    return queued | past | waiting


def _ranges(indices: Iterable[int]) -> str:
    """0,1,2,5 → 0-2,5: an array of a thousand must fit on a command line."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][-1] == index - 1:
            parts[-1][1:] = [index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)


def _sbatch(script: Path, extra: Sequence[str], cluster: str) -> str:
    command = ["sbatch", *_of(cluster), "--parsable", *extra, str(script)]
    return _run(command).strip().splitlines()[-1].partition(";")[0]


def _of(cluster: str) -> list[str]:
    return ["-M", cluster] if cluster else []


def _run(command: Sequence[str], *, may_fail: str = "", with_stderr: bool = False) -> str:
    # SBATCH_… and friends of the shell that we were started from would change what we ask
    environment = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("SBATCH_", "SQUEUE_", "SINFO_", "SACCT_"))
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]}: not found, so there is no Slurm here; run this on a login node of the "
            "cluster, or use --engine local"
        ) from None
    except subprocess.TimeoutExpired:
        raise MeasurementError(
            f"{command[0]}: no answer within {_TIMEOUT_S:g} s; is the controller up? try again"
        ) from None
    if done.returncode and not (may_fail and re.search(may_fail, done.stderr)):
        fault = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        hint = f"; {_UNREACHABLE}" if re.search(r"config|DNS|connect", fault) else ""
        raise MeasurementError(f"{' '.join(command)}: {fault}{hint}")
    text = done.stdout + done.stderr if with_stderr else done.stdout
    # asked of a named cluster, the commands begin with a line that names it
    return re.sub(r"^CLUSTER: .*\n", "", text, flags=re.MULTILINE)
