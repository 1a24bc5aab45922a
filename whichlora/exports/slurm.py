"""`sbatch train.sbatch`: a batch script for Slurm, on one node or several."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from whichlora.exports import transformers
from whichlora.exports.launch import slurm_lines
from whichlora.exports.recipe import Export, Recipe
from whichlora.exports.requirements import packages
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.text import require_printable

FILE = "train.sbatch"
CPUS_PER_GPU = 4  # as `slurm.cpus_per_task` of a config, which is of one GPU


def export(recipe: Recipe) -> Export:
    """The script of `--to transformers` and the job that runs it.

    Raises:
        ConfigError: what the script can't do.
    """
    script = transformers.export(recipe)
    command = f"sbatch {FILE}"
    *others, last = packages(recipe.run)
    comments = [
        f"# Fine-tuning on {all_gpus(recipe.run, recipe.gpu)}. Written by WhichLoRA.",
        f"# Its Python environment needs {', '.join(others)} and {last}.",
        "# Start it here, with the partition of these GPUs:",
        f"#   sbatch --partition=NAME --time=HH:MM:SS {FILE}",
    ]
    config = recipe.run.parallel
    gpus = [] if find_gpu(recipe.gpu).is_cpu else [f"--gpus-per-node={config.gpus_per_node}"]
    options = [
        "--job-name=whichlora-train",
        *node_options(config.nodes),
        *gpus,
        f"--cpus-per-task={CPUS_PER_GPU * config.gpus_per_node}",
        "--output=train-%j.log",
    ]
    body = slurm_lines(recipe.run, transformers.FILE, python="python")
    return Export(
        files={FILE: batch_script(comments, options, body), **script.files},
        command=command,
        run=script.run,
        notes=script.notes,
    )


def all_gpus(run: RunConfig, gpu: str) -> str:
    """The GPUs of `run` in words, of the type `gpu`."""
    return f"{run.parallel.gpus} x {gpu}" if run.parallel.gpus > 1 else gpu


def node_options(nodes: int) -> Iterator[str]:
    """How many nodes a job has, and one task on each, which starts the processes of its GPUs."""
    yield f"--nodes={nodes}"
    if nodes > 1:
        yield "--ntasks-per-node=1"


def batch_script(comments: Sequence[str], options: Sequence[str], body: Sequence[str]) -> str:
    """A batch script for sbatch.

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
