"""Runs a script with the real libraries in a fork of a server that has imported them once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
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
        "trl.trainer.sft_trainer",  # where it is installed
    ]
)
# What torchrun tells each process, and libraries read.
RANK_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
)


def run_script(
    path: Path, *args: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`python path args`, without the seconds that importing the libraries takes.

    Args:
        folder: where it runs; None for that of this process.
    """
    return _run(str(path), *args, log=path.with_suffix(".log"), folder=folder or Path.cwd())


def run_module(name: str, *args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """So `python -m name args` in a folder."""
    return _run(name, *args, log=folder / f"{name}.log", folder=folder)


def _run(program: str, *args: str, log: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [program, *args]
    process = FORK_SERVER.Process(target=_run_main, args=(command, log, dict(os.environ), folder))
    process.start()
    wait_for(process, timeout_s=300)
    return subprocess.CompletedProcess(command, process.exitcode or 0, stderr=log.read_text())


def run_ranks(
    path: Path, *args: str, world_size: int, logs_folder: Path, timeout_s: float = 300
) -> list[str]:
    """What each rank of `torchrun path args` has written, its errors included.

    Raises:
        RuntimeError: a rank has failed.
    """
    logs = [logs_folder / f"rank{rank}.log" for rank in range(world_size)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank, log in enumerate(logs):
        values = ("127.0.0.1", port, world_size, world_size, rank, rank)
        variables = dict(zip(RANK_VARIABLES, map(str, values), strict=True))
        ranks.append(start_script(path, *args, log=log, environment=alone | variables))
    try:
        for process in ranks:
            wait_for(process, timeout_s=timeout_s)
    finally:
        for process in ranks:
            process.kill()
    for process, log in zip(ranks, logs, strict=True):
        if process.exitcode:
            raise RuntimeError(log.read_text()[-4000:])
    return [log.read_text() for log in logs]


def start_script(
    path: Path, *args: str, log: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """The process of `python path args`, which writes to `log`.

    Args:
        environment: variables beside those of this process.
    """
    variables = {**os.environ, **(environment or {})}
    process = FORK_SERVER.Process(
        target=_run_main, args=([str(path), *args], log, variables, Path.cwd())
    )
    process.start()
    return process


def wait_for(process: BaseProcess, *, timeout_s: float) -> None:
    process.join(timeout=timeout_s)
    if process.exitcode is None:
        process.kill()
        raise subprocess.TimeoutExpired(process.name, timeout_s)


def _run_main(command: list[str], log: Path, variables: dict[str, str], folder: Path) -> None:
    """The script or the module as `__main__`, with its arguments and its output in `log`."""
    gc.freeze()  # what the server imported
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = command
    program = Path(command[0])
    sys.path.insert(0, str(program.resolve().parent if program.suffix == ".py" else folder))
    if program.suffix == ".py":
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
