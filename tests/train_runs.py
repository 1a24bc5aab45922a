"""Runs a written `train.py` in a fork of a server that has imported the libraries once."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "torch",
        "peft",
        "bitsandbytes",
        "transformers.trainer",
        "transformers.data.data_collator",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
    ]
)


def run_script(path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`python path args`, without the seconds that importing the libraries takes."""
    command, log = [str(path), *args], path.with_suffix(".log")
    process = FORK_SERVER.Process(target=_run_main, args=(command, log))
    process.start()
    process.join(timeout=300)
    if process.exitcode is None:
        process.kill()
        raise subprocess.TimeoutExpired(command, 300)
    return subprocess.CompletedProcess(command, process.exitcode, stderr=log.read_text())


def _run_main(command: list[str], log: Path) -> None:
    """The script as `__main__`, with its arguments and its output in `log`."""
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
