"""The child process that measures the links of this machine: a rank for each device.

Each collective is repeated for sizes of the whole tensor and numbers of ranks, as nccl-tests does.
Then every rank copies pinned memory to and from its device, and runs torch's update on the host.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whichlora.errors import MeasurementError
from whichlora.memory.gradients import Trained
from whichlora.memory.optimizer import Update, update_bytes
from whichlora.profiler import ranks
from whichlora.profiler.worker import environment
from whichlora.timing.links import RING_FACTORS

SIZES = tuple(2**exponent for exponent in (12, 15, 18, 20, 22, 24, 26, 28))
SIZES_ON_CPU = SIZES[:6]
COLLECTIVES = (*RING_FACTORS, "send")
_LOOPS = 5
_LOOP_S = 0.01  # of equal messages one after the other
_MOST_IN_LOOP = 50
_COPY_BYTES = 2**27
_UPDATED = 2**25  # parameters of the host's update
_LIMIT_S = 600.0


def measure_links(device: str, count: int) -> dict[str, Any]:
    """What `count` ranks of this machine measured, as the fields of a file of links.

    Args:
        device: "cuda" or "cpu", whose ranks are processes that speak by gloo.

    Raises:
        MeasurementError: the ranks failed; with the last line that they wrote.
    """
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", __name__, device, name, str(count)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise MeasurementError(
                f"links: {count} ranks did not end in {_LIMIT_S:.0f} s; look for processes that "
                "hold the GPUs"
            ) from None
        path = Path(name) / "0.json"
        if done.returncode or not path.is_file():
            words = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            raise MeasurementError(f"links: {count} ranks failed: {words[-1].strip()[:200]}")
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return told


def main() -> None:
    """`links DEVICE FOLDER COUNT` starts the ranks; `links DEVICE FOLDER` is one of them."""
    device, folder, *count = sys.argv[1:]
    if not count:
        _rank(device, Path(folder))
    elif ranks.launch(__spec__.name, device, Path(folder), int(count[0])):
        sys.exit(1)


def _rank(device: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    threading.Thread(target=ranks.end_with, args=(os.getppid(),), daemon=True).start()
    number = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(number)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    told = _Rank(device, number, dist.get_world_size()).measured()
    if number == 0:
        name = "cuda:0" if device == "cuda" else "cpu"
        told["environment"] = environment(name) | {"host": platform.node()}
        (folder / "0.json").write_text(json.dumps(told), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class _Rank:
    """Measures with the other ranks of its process group."""

    def __init__(self, device: str, number: int, count: int) -> None:
        self.device, self.number, self.count = device, number, count
        self.sizes = SIZES if device == "cuda" else SIZES_ON_CPU
        self.spreads: list[float] = []

    def measured(self) -> dict[str, Any]:
        import torch.distributed as dist

        times: dict[str, dict[str, list[float]]] = {name: {} for name in COLLECTIVES}
        for size in _group_sizes(self.count):
            group = dist.new_group(list(range(size)))
            for name in COLLECTIVES:
                if name == "send" and size > 2:
                    continue
                if self.number < size:
                    times[name][str(size)] = [
                        float(f"{1e6 * self._collective_s(name, num_bytes, size, group):.5g}")
                        for num_bytes in self.sizes
                    ]
                dist.barrier()
        copied = self._copied_bytes_per_s()
        thread, node = self._update_bytes_per_s()
        return {
            "sizes_bytes": list(self.sizes),
            "microseconds": times,
            "latency_s": 1e-6 * times["all_reduce"]["2"][0],
            "host_bytes_per_s": copied,
            "host_thread_bytes_per_s": thread,
            "host_update_bytes_per_s": node,
            "relative_deviation": max(0.05, round(statistics.median(self.spreads), 3)),
        }

    # --- collectives ----------------------------------------------------------------------------

    def _collective_s(self, name: str, num_bytes: int, size: int, group: Any) -> float:
        """Seconds of one of them, of the slowest rank."""
        import torch

        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        share = num_bytes // dtype.itemsize // size
        whole = torch.ones(share * size, dtype=dtype, device=self.device)
        send = _calls(name, whole, share, self.number, group)
        once = self._slowest(self._loop(send, 1), group)
        once = min(once, self._slowest(self._loop(send, 1), group))
        number = max(1, min(_MOST_IN_LOOP, int(_LOOP_S / once)))
        seconds = [self._slowest(self._loop(send, number), group) for _ in range(_LOOPS)]
        middle = statistics.median(seconds)
        self.spreads.append(statistics.pstdev(seconds) / middle)
        return middle

    def _loop(self, send: Callable[[], object], number: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(number):
            send()
        self._wait()
        return (time.perf_counter() - start) / number

    def _wait(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def _slowest(self, seconds: float, group: Any) -> float:
        import torch
        import torch.distributed as dist

        longest = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        return float(longest)

    # --- the host -------------------------------------------------------------------------------

    def _copied_bytes_per_s(self) -> float:
        """What each device reaches to and from pinned memory while all of them copy."""
        import torch

        on_host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=self.device == "cuda")
        there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=self.device)
        slowest = 0.0
        for target, source in ((there, on_host), (on_host, there)):
            self._copy(target, source)
            seconds = [self._loop(lambda t=target, s=source: self._copy(t, s), 3) for _ in range(3)]  # type: ignore[misc]
            slowest = max(slowest, self._slowest(statistics.median(seconds), None))
        return _COPY_BYTES / slowest

    @staticmethod
    def _copy(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)

    def _update_bytes_per_s(self) -> tuple[float, float]:
        """One thread alone, and all processes together, each with its share of the cores."""
        import torch
        import torch.distributed as dist

        parameter = torch.nn.Parameter(torch.ones(_UPDATED))
        parameter.grad = torch.ones(_UPDATED)
        update = torch.optim.AdamW([parameter], fused=True).step
        update()
        update_of = Update(
            tensors=(Trained(rows=1, width=_UPDATED, param_bytes=4),),
            optimizer="adamw_torch_fused",
            foreach=False,
            clips=False,
            unscales=False,
            num_micro_batches=1,
        )
        num_bytes = float(update_bytes(update_of))
        alone = 0.0
        dist.barrier()
        if self.number == 0:
            torch.set_num_threads(1)
            alone = statistics.median(self._loop(update, 1) for _ in range(_LOOPS))
        dist.barrier()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.count))
        together = statistics.median(
            self._slowest(self._loop(update, 1), None) for _ in range(_LOOPS)
        )
        return num_bytes / max(alone, 1e-9), self.count * num_bytes / together


def _group_sizes(count: int) -> list[int]:
    """Two, four, eight and so on, and all."""
    powers = [2**exponent for exponent in range(1, count.bit_length()) if 2**exponent < count]
    return [*powers, count]


def _calls(name: str, whole: Any, share: int, number: int, group: Any) -> Callable[[], object]:
    """What a rank calls; of a message from the first to the second, the one or the other."""
    import torch.distributed as dist

    part = whole[:share].clone()
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if number == 0:
        return lambda: dist.send(whole, 1, group=group)
    return lambda: dist.recv(whole, 0, group=group)


if __name__ == "__main__":
    main()
