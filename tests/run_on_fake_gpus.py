"""`whichlora` on a machine with three pretended GPUs, whose profiler answers from the formulas.

A run that $WHICHLORA_TEST_KILL names, as finetune-4 with its phase and batch size, dies of SIGKILL;
one that $WHICHLORA_TEST_SLEEP names waits until the file $WHICHLORA_TEST_AWAKE is there.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import fake_profiler

import whichlora.profiler.profile
import whichlora.store.gpus
from whichlora.cli import main
from whichlora.spec.run import RunConfig
from whichlora.store.detect import DetectedDevice

H100 = ("NVIDIA H100 80GB HBM3", 85_520_809_984)
L40S = ("NVIDIA L40S", 48_305_799_168)
BOARDS = {"GPU-aa": H100, "GPU-bb": L40S, "GPU-cc": H100}
COMMAND = shlex.join([sys.executable, str(Path(__file__).resolve())])


def wait_a_little(_: float) -> None:
    """In place of `time.sleep`, where nobody is being waited for but children."""
    time.sleep(0.05)


def detect_gpus() -> tuple[DetectedDevice, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(
        DetectedDevice(name=name, kind="cuda", memory_bytes=memory_bytes, uuid=uuid)
        for uuid, (name, memory_bytes) in BOARDS.items()
        if visible in (None, uuid)
    )


class Profiler(fake_profiler.FakeProfiler):
    def measure(self, run: RunConfig, **settings: Any) -> Any:
        name = f"{run.phase}-{run.batch_size}"
        if os.environ.get("WHICHLORA_TEST_KILL") == name:
            os.kill(os.getpid(), signal.SIGKILL)
        awake = Path(os.environ.get("WHICHLORA_TEST_AWAKE", "."))
        while os.environ.get("WHICHLORA_TEST_SLEEP") == name and not awake.exists():
            time.sleep(0.05)
        return super().measure(run, **settings)


if __name__ == "__main__":
    whichlora.store.gpus.detect_gpus = detect_gpus
    whichlora.profiler.profile.Profiler = Profiler  # type: ignore[misc,assignment]
    main()
