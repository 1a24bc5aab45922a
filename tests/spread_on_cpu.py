"""Runs a script under FSDP or DeepSpeed on a CPU: `python spread_on_cpu.py SCRIPT ARGUMENT...`."""

from __future__ import annotations

import os
import runpy
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

os.environ["DS_ACCELERATOR"] = "cpu"


def use_fsdp() -> None:
    """accelerate 1.15 takes FSDP for that of a device: a CPU silently gets DDP (`state.py`)."""
    from accelerate import state

    unpatched = state.AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        unpatched(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None and self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type = state.DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init


def use_one_backend() -> None:
    """Offloading to the host has one for the GPU, too, and pins memory for it."""
    from accelerate import state

    unpatched = state.PartialState.__init__

    def init(self: Any, *arguments: Any, backend: str | None = None, **options: Any) -> None:
        unpatched(self, *arguments, backend=backend and "gloo", **options)

    state.PartialState.__init__ = init
    torch.Tensor.pin_memory = lambda self, *_: self


def release_buffers_here() -> None:
    """Gives gloo's thread time to drop its buffers first: the profiler sees this thread's releases.

    Without it a busy machine now and then has one gathered layer too many in what is measured.
    """
    from torch.distributed import Work

    wait = Work.wait

    def wait_for_release(self: Any, *arguments: Any, **options: Any) -> Any:
        result = wait(self, *arguments, **options)
        time.sleep(0.002)
        return result

    Work.wait = wait_for_release


def use_deepspeed() -> None:
    """Without the operator for shared memory, which would be compiled; gloo does without."""
    import deepspeed.comm.torch  # noqa: F401 whose name the package hides

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


if __name__ == "__main__":
    use_fsdp()
    use_one_backend()
    release_buffers_here()
    if find_spec("deepspeed"):
        use_deepspeed()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    from accelerate.state import PartialState

    spread = PartialState._shared_state["distributed_type"].value
    threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    num_threads = sum("gloo" in name for name in threads)
    # in one write: the other ranks write to the same pipe
    sys.stdout.write(f"distributed_type: {spread}\nthreads of gloo: {num_threads}\n")
