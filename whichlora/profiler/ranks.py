"""The child process of `profile.Profiler` for runs on several GPUs: it starts a rank for each.

The launcher is torchrun's. Each rank measures itself; the record has the largest of them. This
process touches no GPU, so that all of their memory is the ranks'.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from whichlora.profiler import worker

REQUEST = "request.json"
_FACTS = ("environment",)  # of rank 0, which speaks for all
_PARENT_POLL_S = 1.0


def main() -> None:
    """`ranks DEVICE` serves the profiler; `ranks DEVICE FOLDER` is one rank."""
    device, *folder = sys.argv[1:]
    if folder:
        _rank(device, Path(folder[0]))
    else:
        worker.serve(dict, partial(_answer, device))


def _answer(device: str, request: Mapping[str, Any], tell: worker.Tell) -> dict[str, Any]:
    """What the ranks measured, or how one of them failed."""
    count = request["run"]["parallel"]["gpus"]
    missing = _missing_devices(device, count)
    if missing:
        return {"outcome": "error", "detail": missing, "clean": True}
    tell(f"running {count} ranks")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        failures = launch(__spec__.name, device, folder, count)
        told = {
            rank: json.loads(path.read_text(encoding="utf-8"))
            for rank in range(count)
            if (path := _file(folder, rank)).is_file()
        }
    return merged([told.get(rank) for rank in range(count)], failures) | {"clean": True}


def _missing_devices(device: str, count: int) -> str:
    """Why there can't be so many ranks; asked of the driver, which takes no memory."""
    import torch

    visible = torch.cuda.device_count() if device == "cuda" else count
    return f"gpus: {count} are needed, {visible} visible" if visible < count else ""


def launch(module: str, device: str, folder: Path, count: int) -> dict[int, int]:
    """Run `module` as ranks to their end; exit codes of those that failed by themselves."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="whichlora",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, device, str(folder))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _rank(device: str, folder: Path) -> None:
    """Measure in this rank, write what came out, and fail where it did."""
    import torch

    from whichlora.profiler.kept_model import KeptModel

    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    number = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(number)
        device = f"cuda:{number}"
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    facts = {"environment": worker.environment(device)} if number == 0 else {}
    start_s = time.perf_counter()
    payload = facts | worker.answer(device, KeptModel(), request, lambda phase: None)
    payload["device_s"] = time.perf_counter() - start_s  # without the imports of this process
    path = _file(folder, number)
    path.with_suffix(".tmp").write_text(json.dumps(payload), encoding="utf-8")
    path.with_suffix(".tmp").rename(path)
    # without the interpreter's own end, which may wait for ranks that are gone
    os._exit(0 if payload["outcome"] == "ok" else 1)


def end_with(parent: int) -> None:
    """A killed launcher leaves its ranks, which have sessions of their own."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def merged(told: Sequence[Mapping[str, Any] | None], failures: Mapping[int, int]) -> dict[str, Any]:
    """The record of a run: the largest figure of its ranks, or the first reason of a failure.

    Args:
        told: by each rank; None where it wrote nothing.
        failures: exit codes of ranks that ended by themselves, negative for signals.
    """
    count = len(told)
    facts = {name: (told[0] or {})[name] for name in _FACTS if name in (told[0] or {})}
    failed = [(rank, each) for rank, each in enumerate(told) if each and each["outcome"] != "ok"]
    # the others fail because it did
    for rank, each in sorted(failed, key=lambda pair: pair[1]["outcome"] != "oom"):
        detail = f"rank {rank} of {count}: {each['detail']}"
        return facts | {"outcome": each["outcome"], "detail": detail}
    silent = [rank for rank, each in enumerate(told) if each is None]
    if silent:
        rank = next((rank for rank in silent if failures.get(rank) == -signal.SIGKILL), silent[0])
        code = failures.get(rank)
        if code == -signal.SIGKILL:
            detail = "killed by SIGKILL, usually by the kernel's out-of-memory killer"
            return facts | {"outcome": "killed", "detail": f"rank {rank} of {count}: {detail}"}
        ended = "wrote nothing" if code is None else f"ended with exit code {code}"
        return facts | {"outcome": "crashed", "detail": f"rank {rank} of {count} {ended}"}
    return _largest([dict(each) for each in told if each is not None])


def _largest(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Field by field; a step lasts until its slowest rank has ended."""
    record = dict(told[0])
    for name, value in record.items():
        if name in ("outcome", "clean", "batch_seq_len", *_FACTS) or value is None:
            continue
        values = [each[name] for each in told]
        if isinstance(value, list):
            record[name] = [max(column) for column in zip(*values, strict=True)]
        elif isinstance(value, int | float):
            record[name] = max(values)
    return record


if __name__ == "__main__":
    main()
