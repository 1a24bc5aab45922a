"""Runs a script that uses DeepSpeed on a CPU: `python deepspeed_on_cpu.py train.py`."""

from __future__ import annotations

import os
import runpy
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.comm.torch

deepspeed.comm.torch.build_shm_op = lambda: None  # it would be compiled, and gloo does without

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
