"""How a script is started on several GPUs: accelerate's config, DeepSpeed's, and the command."""

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
    config = run.parallel
    layout = layout_of(run)
    if layout is None or config.nodes == 1:
        return shlex.join(train_command(Path(script), run, python="python"))
    nodes = [
        f"--nnodes={config.nodes}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=$MASTER_ADDR:29500",
    ]
    started = [*torchrun("python", config.gpus_per_node), *nodes, script]
    return " ".join(started)  # the shell fills in the address
