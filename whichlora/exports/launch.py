"""How a script is started on several GPUs: accelerate's config, DeepSpeed's, and the commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whichlora.exports.train_script import torchrun, train_command
from whichlora.exports.train_script.lines import DEEPSPEED_FILE, divides_while_loading
from whichlora.exports.yaml import yaml_text
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
    files = {ACCELERATE_FILE: yaml_text(_accelerate(layout, run), head=_HEAD)}
    deepspeed = layout.training_arguments(run).get("deepspeed")
    if deepspeed is not None:
        files[DEEPSPEED_FILE] = json.dumps(deepspeed, indent=2) + "\n"
    return files


_HEAD = """For scripts that leave the strategy to accelerate:
  accelerate launch --config_file accelerate.yaml SCRIPT
train.py states it itself. Written by WhichLoRA; edit it as you like."""


def _accelerate(layout: Layout, run: RunConfig) -> Mapping[str, Any]:
    """The content of accelerate's config file, as `accelerate config` writes it."""
    config = layout.config
    precision = autocast_precision(run.precision)
    own = layout.accelerate(run)
    if "deepspeed" in layout.training_arguments(run):
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


def launch_line(run: RunConfig, script: str) -> str:
    """The command that starts `script`, on each node where there are several."""
    if run.parallel.nodes == 1:
        return shlex.join(train_command(Path(script), run, python="python"))
    return _on_nodes(run, script, "python", "--rdzv-endpoint=$MASTER_ADDR:29500")


def _on_nodes(run: RunConfig, script: str, python: str, *meeting: str) -> str:
    """The command of each node; the shell fills in where they meet."""
    config = run.parallel
    nodes = [f"--nnodes={config.nodes}", "--rdzv-backend=c10d", *meeting]
    start = shlex.join(torchrun(python, config.gpus_per_node))
    return " ".join([start, *nodes, shlex.quote(script)])


def slurm_lines(run: RunConfig, script: str, *, python: str) -> list[str]:
    """The lines of a batch script that start `script` on all nodes of the job.

    A step gets the processors of its job only where it asks for them. Source: Slurm 22.05, NEWS:
    srun no longer reads SLURM_CPUS_PER_TASK.
    """
    if run.parallel.nodes == 1:
        return [f"exec {shlex.join(train_command(Path(script), run, python=python))}"]
    each = _on_nodes(run, script, python, '--rdzv-id="$SLURM_JOB_ID"', '--rdzv-endpoint="$meeting"')
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
