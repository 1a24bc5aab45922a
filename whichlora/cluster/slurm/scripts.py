"""What a job must do → the text of its sbatch script, made to be read and edited."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from whichlora.cluster.slurm.discovery import GpuGroup
from whichlora.exports.launch import slurm_lines
from whichlora.exports.slurm import all_gpus, batch_script, node_options
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import SlurmConfig
from whichlora.spec.run import RunConfig

ONE_GPU = ParallelConfig()
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
    return batch_script(lines, options, [*_preparation(config), run])


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
    return batch_script(lines, options, [*_preparation(config), run])


def training_script(
    group: GpuGroup,
    config: SlurmConfig,
    *,
    job: Path,
    run: RunConfig,
    limit_s: float,
    python: str,
) -> str:
    """The winning fine-tuning `run`, ready to submit."""
    lines = [
        f"# The winning fine-tuning on {all_gpus(run, group.gpu)}.",
        "# Written by WhichLoRA; edit it as you like.",
    ]
    options = [
        "--job-name=whichlora-train",
        *_gpu_options(group, config, run.parallel),
        f"--time={_minutes(limit_s, config)}",
        f"--output={job.parent}/train-%j.log",
        *config.options,
    ]
    body = [*_preparation(config), *slurm_lines(run, str(job), python=python)]
    return batch_script(lines, options, body)


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


def _gpu_options(
    group: GpuGroup, config: SlurmConfig, parallel: ParallelConfig = ONE_GPU
) -> Iterator[str]:
    """What a job asks for; processors and memory of `config` are those of one GPU."""
    if group.cluster:
        yield f"--clusters={group.cluster}"
    if config.account:
        yield f"--account={config.account}"
    if group.partitions:
        yield f"--partition={','.join(group.partitions)}"
    if config.qos:
        yield f"--qos={config.qos}"
    gpus = parallel.gpus_per_node
    yield from node_options(parallel.nodes)
    yield f"--gres={group.gres(gpus)}"
    if group.constraint:
        yield f"--constraint={group.constraint}"
    yield f"--cpus-per-task={gpus * config.cpus_per_task}"
    if config.memory_bytes:
        yield f"--mem={gpus * config.memory_bytes // 2**20}M"


def _preparation(config: SlurmConfig) -> list[str]:
    return [
        *(f"module load {shlex.quote(module)}" for module in config.modules),
        *(f"export {name}={shlex.quote(text)}" for name, text in config.environment.items()),
        *config.setup,
    ]
