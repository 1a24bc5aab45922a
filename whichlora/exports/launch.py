"""How a script is started on several GPUs: accelerate's config, DeepSpeed's, and the commands."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError
from whichlora.exports.train_script.lines import DEEPSPEED_FILE, divides_while_loading
from whichlora.exports.yaml import yaml_text
from whichlora.parallel.base import ON_HOST
from whichlora.parallel.host_update import OMP_NUM_THREADS
from whichlora.parallel.layout import Layout
from whichlora.predict.resolve import layout_of
from whichlora.spec.run import RunConfig, autocast_precision

ACCELERATE_FILE = "accelerate.yaml"


def launch_files(run: RunConfig) -> dict[str, str]:
    """What is written beside the script of `run`; nothing for one process.

    Raises:
        ConfigError: a setting of the strategy that no file has a key for.
    """
    layout = layout_of(run)
    if layout is None or layout.launcher == "python":
        return {}
    accelerate = yaml_text(_accelerate(layout, run), head=_HEAD)
    return {ACCELERATE_FILE: accelerate, **Spreading(training=layout.training_arguments(run)).files}


_HEAD = """For scripts that leave the strategy to accelerate:
  accelerate launch --config_file accelerate.yaml SCRIPT
train.py states it itself. Written by WhichLoRA; edit it as you like."""


def _accelerate(layout: Layout, run: RunConfig) -> Mapping[str, Any]:
    """The content of accelerate's config file, as `accelerate config` writes it."""
    config = layout.config
    precision = run.precision
    own = layout.accelerate(run)
    if "deepspeed" in layout.training_arguments(run):
        precision = autocast_precision(run.precision)  # as in DeepSpeed's own file
        own = {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_config_file": DEEPSPEED_FILE,
                "zero3_init_flag": divides_while_loading(run),
            },
        }
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        **own,
        "mixed_precision": precision if precision in ("bf16", "fp16") else "no",
        "num_machines": config.nodes,
        "num_processes": config.gpus,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static" if config.nodes == 1 else "c10d",
        "same_network": True,
        "use_cpu": False,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreading:
    """What spreads a run over its GPUs, in the keys of Transformers; empty on one GPU.

    Args:
        training: of `TrainingArguments`; "deepspeed" is the content of its JSON file.
        model: of `from_pretrained`.
        files: DeepSpeed's, if it has one.
        notes: what a user must know of the tool.
        loads_on_gpu: each process loads all weights on its GPU, before they are sharded.
    """

    training: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    loads_on_gpu: bool = False

    @property
    def files(self) -> dict[str, str]:
        deepspeed = self.training.get("deepspeed")
        return {} if deepspeed is None else {DEEPSPEED_FILE: json.dumps(deepspeed, indent=2) + "\n"}

    @property
    def training_keys(self) -> dict[str, Any]:
        """`training` for a file beside that of DeepSpeed."""
        return {**self.training, **({"deepspeed": DEEPSPEED_FILE} if self.files else {})}


def spreading(
    run: RunConfig,
    tool: str,
    *,
    keys: Collection[str],
    implied: Mapping[str, object] | None = None,
    loads_on_gpu: bool = False,
) -> Spreading:
    """What spreads `run` over its GPUs, where `tool` can write it.

    Args:
        keys: that it can write, such as "deepspeed", "fsdp_config.version", "device_map".
        implied: keys of `from_pretrained` that it sets itself, and to what.
        loads_on_gpu: it loads quantised weights on the GPU of each process, whatever is sharded.

    Raises:
        ConfigError: a setting that it can't write.
    """
    layout = layout_of(run)
    if layout is None:
        return Spreading()
    training, model = layout.training_arguments(run), layout.model_arguments(run)
    for name, value in (implied or {}).items():
        if model.get(name) == value:
            del model[name]
    notes: tuple[str, ...] = ()
    loads_on_gpu = loads_on_gpu and model.get("device_map") == ON_HOST
    if loads_on_gpu:
        del model["device_map"]
        notes = (f"--to {tool}: it loads all weights on each GPU before they are sharded",)
    for name in (*training, *model):
        inner = training[name] if name == "fsdp_config" else {}
        for key in [f"{name}.{part}" for part in inner] or [name]:
            if key not in keys:
                raise ConfigError(
                    f"--to {tool}: parallel {layout.config.strategy} sets {key}, which {tool} "
                    "can't write; use --to transformers"
                )
    return Spreading(training=training, model=model, notes=notes, loads_on_gpu=loads_on_gpu)


def train_command(path: Path, run: RunConfig, *, python: str = sys.executable) -> list[str]:
    """The command that performs `run` with the script at `path`, on this machine's GPUs.

    Raises:
        ConfigError: a run over several nodes, whose processes a batch script starts.
    """
    layout = layout_of(run)
    if layout is None or layout.launcher == "python":
        return [python, str(path)]
    if layout.config.nodes > 1:
        raise ConfigError(
            f"nodes: {layout.config.nodes} can't be started from one of them; submit the batch "
            "script of 'whichlora export --to slurm'"
        )
    return [*torchrun(python, run), str(path)]


def thread_setting(run: RunConfig) -> list[str]:
    """What the environment of its processes says of threads, where that is not torchrun's 1."""
    threads = dict(run.parallel.options).get(OMP_NUM_THREADS.name, 1)
    return [] if threads == 1 else [f"OMP_NUM_THREADS={threads}"]


def torchrun(python: str, run: RunConfig) -> list[str]:
    """The command that starts a script in a process for each GPU of this node."""
    processes = run.parallel.gpus_per_node
    threads = thread_setting(run)
    return [
        *(["env"] if threads else []),
        *threads,
        python,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={processes}",
    ]


def launch_line(
    run: RunConfig, script: str, *, module: bool = False, python: str = "python"
) -> str:
    """The command that starts `script`, on each node where there are several.

    Args:
        module: `script` is a module with its arguments.
    """
    layout = layout_of(run)
    command = f"-m {script}" if module else shlex.quote(script)
    if layout is None or layout.launcher == "python":
        return f"{shlex.quote(python)} {command}"
    environment = " ".join(thread_setting(run))
    torchrun_module = [shlex.quote(python), "-m", "torch.distributed.run"]
    return f"{environment} {' '.join([*torchrun_module, *launcher_options(run), command])}".lstrip()


def launcher_options(run: RunConfig) -> list[str]:
    """Options of torchrun on each node; the shell fills in the address of the first."""
    options = [f"--nproc-per-node={run.parallel.gpus_per_node}"]
    if run.parallel.nodes > 1:
        options += _meeting(run, "--rdzv-endpoint=$MASTER_ADDR:29500")
    return options


def _meeting(run: RunConfig, *where: str) -> list[str]:
    return [f"--nnodes={run.parallel.nodes}", "--rdzv-backend=c10d", *where]


def slurm_lines(run: RunConfig, script: str, *, python: str) -> list[str]:
    """The lines of a batch script that start `script` on all nodes of the job.

    A step gets the processors of its job only where it asks for them. Source: Slurm 22.05, NEWS:
    srun no longer reads SLURM_CPUS_PER_TASK.
    """
    if run.parallel.nodes == 1:
        return [f"exec {shlex.join(train_command(Path(script), run, python=python))}"]
    start = shlex.join(torchrun(python, run))
    meeting = _meeting(run, '--rdzv-id="$SLURM_JOB_ID"', '--rdzv-endpoint="$meeting"')
    each = " ".join([start, *meeting, shlex.quote(script)])
    return [
        "# This script runs on the first node, where the launchers of all nodes meet.",
        'meeting="$(hostname):$((20000 + SLURM_JOB_ID % 10000))"  # jobs may share the node',
        'exec srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" '
        "--kill-on-bad-exit=1 \\",
        f"    {each}",
    ]


def skypilot_lines(run: RunConfig, script: str) -> list[str]:
    """The commands of a SkyPilot task, which runs them on each of its nodes."""
    if run.parallel.nodes == 1:
        return [launch_line(run, script)]
    return [
        'export MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
        launch_line(run, script),
    ]
