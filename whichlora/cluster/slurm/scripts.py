"""What a job must do → the text of its sbatch script, made to be read and edited."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from whichlora.cluster.slurm.discovery import GpuGroup
from whichlora.spec.plan import SlurmConfig
from whichlora.text import require_printable

OFFSET = "WHICHLORA_TASK_OFFSET"  # of the tasks that lie beyond the cluster's MaxArraySize


def array_script(
    group: GpuGroup,
    config: SlurmConfig,
    *,
    tasks: Path,
    num_tasks: int,
    max_array_size: int,
    limit_s: float,
    logs: Path,
    command: str,
) -> str:
    """Profile `num_tasks` candidates of the list `tasks` on the GPUs of `group`, one per task."""
    size = min(num_tasks, max_array_size)
    parallel = f"%{config.max_parallel}" if config.max_parallel else ""
    purpose = f"Profile {num_tasks} candidates on {group.gpu}: one array task each, listed in"
    lines = [f"# {purpose}", f"# {tasks.name}. Written by WhichLoRA; edit it as you like."]
    if num_tasks > max_array_size:
        lines += [
            f"# The cluster takes {max_array_size} tasks an array, so this is submitted as",
            *(
                f"#   sbatch --array=0-{min(size, num_tasks - start) - 1}{parallel} "
                f"--export=ALL,{OFFSET}={start} THIS_FILE"
                for start in range(0, num_tasks, max_array_size)
            ),
        ]
    options = [
        f"--job-name=whichlora-{group.name}",
        *_gpu_options(group, config),
        f"--time={_minutes(limit_s, config)}",
        f"--array=0-{size - 1}{parallel}",
        "--requeue",
        "--open-mode=append",
        f"--output={logs}/{group.name}-%A_%a.log",
        *config.options,
    ]
    index = f'"$((SLURM_ARRAY_TASK_ID + ${{{OFFSET}:-0}}))"'
    run = f"exec {command} profile-task {shlex.quote(str(tasks))} {index}"
    return _script(lines, options, [*_preparation(config), run])


def merge_script(
    config: SlurmConfig, *, run_dir: Path, cluster: str, limit_s: float, logs: Path, command: str
) -> str:
    """Join what the arrays measured into the recommendation."""
    lines = [
        "# Join what the array tasks measured into the recommendation. Written by WhichLoRA.",
        "# Submit it with --dependency=afterany:JOB:JOB… of the arrays; it needs no GPU.",
    ]
    options = [
        "--job-name=whichlora-merge",
        *([f"--clusters={cluster}"] if cluster else []),
        *([f"--account={config.account}"] if config.account else []),
        *([f"--partition={config.merge_partition}"] if config.merge_partition else []),
        *([f"--qos={config.qos}"] if config.qos else []),
        "--cpus-per-task=1",
        f"--time={_minutes(limit_s, config)}",
        f"--output={logs}/merge-%j.log",
        *config.options,
    ]
    run = f"exec {command} slurm merge {shlex.quote(str(run_dir))}"
    return _script(lines, options, [*_preparation(config), run])


def training_script(
    group: GpuGroup,
    config: SlurmConfig,
    *,
    job: Path,
    limit_s: float,
    python: str,
) -> str:
    """The winning fine-tuning job, ready to submit."""
    lines = [
        f"# The winning fine-tuning on {group.gpu}.",
        "# Written by WhichLoRA; edit it as you like.",
    ]
    options = [
        "--job-name=whichlora-train",
        *_gpu_options(group, config),
        f"--time={_minutes(limit_s, config)}",
        f"--output={job.parent}/train-%j.log",
        *config.options,
    ]
    run = f"exec {shlex.quote(python)} {shlex.quote(str(job))}"
    return _script(lines, options, [*_preparation(config), run])


def format_limit(seconds: float) -> str:
    """Whole minutes, rounded up, as `--time` reads them: 1-02:30:00, 0:05:00."""
    minutes = max(1, math.ceil(seconds / 60))
    days, minutes_of_day = divmod(minutes, 24 * 60)
    text = (
        f"{minutes_of_day // 60:02d}:{minutes_of_day % 60:02d}:00"
        if days
        else f"{minutes_of_day // 60}:{minutes_of_day % 60:02d}:00"
    )
    return f"{days}-{text}" if days else text


def _minutes(limit_s: float, config: SlurmConfig) -> str:
    return format_limit(limit_s if config.time_limit_s is None else config.time_limit_s)


def _gpu_options(group: GpuGroup, config: SlurmConfig) -> Iterator[str]:
    if group.cluster:
        yield f"--clusters={group.cluster}"
    if config.account:
        yield f"--account={config.account}"
    if group.partitions:
        yield f"--partition={','.join(group.partitions)}"
    if config.qos:
        yield f"--qos={config.qos}"
    yield "--nodes=1"
    yield f"--gres={group.gres}"
    if group.constraint:
        yield f"--constraint={group.constraint}"
    yield f"--cpus-per-task={config.cpus_per_task}"
    if config.memory_bytes:
        yield f"--mem={config.memory_bytes // 2**20}M"


def _preparation(config: SlurmConfig) -> list[str]:
    return [
        *(f"module load {shlex.quote(module)}" for module in config.modules),
        *(f"export {name}={shlex.quote(text)}" for name, text in config.environment.items()),
        *config.setup,
    ]


def _script(comments: Sequence[str], options: Sequence[str], body: Sequence[str]) -> str:
    """The whole script.

    Raises:
        ConfigError: a comment or an option would go on in a next line, which bash would run.
    """
    head = [*comments, *(f"#SBATCH {_quoted(option)}" for option in options)]
    for line in head:
        require_printable("batch script", line)
    # modules and activations of a site are not written for -u
    return "\n".join(["#!/bin/bash", *head, "", "set -eo pipefail", *body, ""])


def _quoted(option: str) -> str:
    """sbatch splits its lines at blanks like a shell, except inside quotes."""
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else option
