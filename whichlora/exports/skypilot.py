"""`sky launch`: a task for SkyPilot 0.14, which rents the accelerator or finds it on a cluster."""

from __future__ import annotations

import os
from typing import Any

from whichlora.errors import ConfigError
from whichlora.exports import transformers
from whichlora.exports.installation import Installation, installation
from whichlora.exports.launch import skypilot_lines
from whichlora.exports.recipe import Export, Recipe
from whichlora.exports.requirements import install_commands
from whichlora.exports.yaml import yaml_text
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.models import is_gated

FILE = "sky.yaml"
_TOKEN = "HF_TOKEN"  # which huggingface_hub reads
# Our key → SkyPilot's name (catalogs of 0.14), which several boards may share.
ACCELERATORS = {
    "a10-24gb": "A10",
    "a100-pcie-40gb": "A100",
    "a100-pcie-80gb": "A100-80GB",
    "a100-sxm-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "a10g-24gb": "A10G",
    "a40-48gb": "A40",
    "b200-180gb": "B200",
    "gh200-96gb": "GH200",
    "h100-nvl-94gb": "H100-NVL",
    "h100-pcie-80gb": "H100",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "l4-24gb": "L4",
    "l40-48gb": "L40",
    "l40s-48gb": "L40S",
    "mi300x-192gb": "MI300X",
    "rtx-3090-24gb": "RTX3090",
    "rtx-4090-24gb": "RTX4090",
    "rtx-5090-32gb": "RTX5090",
    "rtx-6000-ada-48gb": "RTX6000-Ada",
    "rtx-a4000-16gb": "RTXA4000",
    "rtx-a5000-24gb": "RTXA5000",
    "rtx-a6000-48gb": "RTXA6000",
    "t4-16gb": "T4",
    "v100-pcie-16gb": "V100",
    "v100-pcie-32gb": "V100-32GB",
    "v100-sxm2-16gb": "V100",
    "v100-sxm2-32gb": "V100-32GB",
}


def export(recipe: Recipe) -> Export:
    """The script of `--to transformers` and the task that runs it.

    Raises:
        ConfigError: an accelerator that SkyPilot has no name for, or what the script can't do.
    """
    if recipe.gpu not in ACCELERATORS:
        raise ConfigError(
            f"--to skypilot: gpu {recipe.gpu} has no name there; known are "
            f"{', '.join(ACCELERATORS)}"
        )
    script = transformers.export(recipe)
    config = recipe.run.parallel
    install = installation("profile")
    uploads = {**install.uploads, **_local_folders(recipe)}
    needs_token = recipe.weights == "pretrained" and is_gated(recipe.run.model)
    task: dict[str, Any] = {
        "name": "whichlora",
        **({"num_nodes": config.nodes} if config.nodes > 1 else {}),
        "resources": {"accelerators": f"{ACCELERATORS[recipe.gpu]}:{config.gpus_per_node}"},
        "workdir": ".",
        **({"file_mounts": uploads} if uploads else {}),
        **({"secrets": {_TOKEN: None}} if needs_token else {}),
        "setup": "".join(f"{line}\n" for line in setup_lines(recipe.run, recipe.gpu, install)),
        "run": "".join(f"{line}\n" for line in skypilot_lines(recipe.run, transformers.FILE)),
    }
    command = f"sky launch {f'--secret {_TOKEN} ' * needs_token}{FILE}"
    gated = (
        f"{recipe.run.model} is gated: accept its terms on the hub, and start with {_TOKEN} in the "
        "environment",
    ) * needs_token
    head = (
        f"Written by WhichLoRA for SkyPilot 0.14. Start it here with: {command}\n"
        "The folder goes along: it needs train.jsonl."
    )
    return Export(
        files={FILE: yaml_text(task, head=head), **script.files},
        command=command,
        run=script.run,
        notes=(*gated, *_files_of_rows(recipe), *script.notes),
    )


def _local_folders(recipe: Recipe) -> dict[str, str]:
    """Model and tokenizer where they are folders of this machine, by their path there.

    Source: SkyPilot `sky/backends/backend_utils.py`, `FileMountHelper`: an absolute path becomes a
    link to the uploaded copy.

    Raises:
        ConfigError: one is not on this machine.
    """
    model = recipe.run.model if recipe.weights == "pretrained" else ""
    folders = [path for path in (model, recipe.tokenizer or "") if os.path.isabs(path)]
    for path in folders:
        if not os.path.isdir(path):
            raise ConfigError(
                f"--to skypilot: {path} is no folder of this machine to upload; export it where "
                "it is, or use --to transformers"
            )
    return {path: path for path in folders}


def _files_of_rows(recipe: Recipe) -> tuple[str, ...]:
    if not recipe.data_format.has_processor:
        return ()
    return (
        "train.jsonl names files of this machine, which don't go along: add their folder to "
        f"file_mounts in {FILE}, under the same path",
    )


def setup_lines(run: RunConfig, gpu: str, install: Installation) -> list[str]:
    """The commands that install what `run` needs on a rented machine.

    Its torch comes first: later commands keep what is there.
    """
    index = find_gpu(gpu).backend.torch_index
    torch = [f"pip install torch torchvision --index-url {index}"] if index else []
    return [*torch, install.command, *install_commands(run)]
