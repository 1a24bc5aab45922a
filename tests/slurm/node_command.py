"""`whichlora` on a pretended node: a driver that names a GPU, a profiler that answers at once.

The file that $WHICHLORA_TEST_NODES names says which board each node has (`boards`), and which task
of which group comes to grief (`mischief`): "kill" dies of SIGKILL, "memory" takes more of the host
than its job may, "crash" cannot even start, "sleep" waits until the file `awake` lies beside it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import fake_profiler

import whichlora.profiler.profile
import whichlora.store.gpus
from whichlora.cli import main
from whichlora.store.detect import DetectedDevice

PLAN = Path(os.environ["WHICHLORA_TEST_NODES"])
told = json.loads(PLAN.read_text())


def detect_gpus() -> tuple[DetectedDevice, ...]:
    name, memory_bytes = told["boards"][os.environ["SLURMD_NODENAME"]]
    return (DetectedDevice(name=name, kind="cuda", memory_bytes=memory_bytes),)


def come_to_grief(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        taken = [bytes([1]) * (64 << 20) for _ in range(40)]
        time.sleep(60)  # until Slurm has looked
        del taken
    while kind == "sleep" and not PLAN.with_name("awake").exists():
        time.sleep(0.1)


class Profiler(fake_profiler.FakeProfiler):
    def measure(self, *args: Any, **settings: Any) -> Any:
        come_to_grief(mischief)
        return super().measure(*args, **settings)


mischief = ""
if sys.argv[1] == "profile-task":
    group = Path(sys.argv[2]).parent.name
    mischief = told["mischief"].get(group, {}).get(sys.argv[3], "")
    if mischief == "crash":
        sys.exit("module: no such module")
    whichlora.store.gpus.detect_gpus = detect_gpus
whichlora.profiler.profile.Profiler = Profiler  # type: ignore[misc,assignment]
main()
