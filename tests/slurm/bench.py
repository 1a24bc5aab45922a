"""Sweeps on a real cluster that answer from the formulas, but for planned mischief."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sweep_config
from cluster import Cluster

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

NODE_COMMAND = shlex.join([sys.executable, str(HERE / "node_command.py")])
H100 = ("NVIDIA H100 80GB HBM3", 85_520_809_984)
A100 = ("NVIDIA A100-SXM4-80GB", 85_899_345_920)
V100_32 = ("Tesla V100-SXM2-32GB", 34_359_738_368)
V100_16 = ("Tesla V100-SXM2-16GB", 16_945_512_448)
L40S = ("NVIDIA L40S", 48_305_799_168)
BOARDS = {"h0": H100, "a0": A100, "big": V100_32, "small": V100_16, "l0": L40S}


@dataclass
class Bench:
    """A config in a folder of its own, and the commands that a user would type."""

    folder: Path
    cluster: Cluster
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / "out"

    @property
    def env(self) -> dict[str, str]:
        own = {
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
        }
        return {**os.environ, **self.cluster.env, **own}

    def write(
        self, *, mischief: Mapping[str, Mapping[str, str]] | None = None, **slurm: Any
    ) -> Path:
        """A config whose nodes answer from the formulas, but for the tasks in `mischief`."""
        nodes = self.folder / "nodes.json"
        nodes.write_text(json.dumps({"boards": BOARDS, "mischief": mischief or {}}))
        environment = {"WHICHLORA_TEST_NODES": str(nodes), "PYTHONPATH": str(ROOT)}
        section = {
            "command": NODE_COMMAND,
            "cpus_per_task": 1,
            "memory": "1200MiB",
            "environment": environment,
            **slurm,
        }
        settings: dict[str, Any] = {
            "output_dir": "out",
            "calibration_dir": "calibration",
            "slurm": {key: value for key, value in section.items() if value},
        }
        return sweep_config.write_config(self.folder, **(settings | self.settings))

    def write_example(self) -> Path:
        """examples/slurm.yaml as it is shipped, but for what its nodes run."""
        examples = ROOT / "examples"
        folder = self.folder / "examples"
        shutil.copytree(examples, folder)
        nodes = self.folder / "nodes.json"
        nodes.write_text(json.dumps({"boards": BOARDS, "mischief": {}}))
        environment = {"WHICHLORA_TEST_NODES": str(nodes), "PYTHONPATH": str(ROOT)}
        own = {"command": NODE_COMMAND, "environment": environment}
        path = folder / "slurm.yaml"
        with path.open("a") as file:  # its last section is that of slurm
            file.writelines(f"  {key}: {json.dumps(value)}\n" for key, value in own.items())
        return path

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "whichlora", "slurm", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.env,
            cwd=self.folder,
            # a job in the background inherits an ignored one, which Python would leave so
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def whichlora(self, *arguments: str | Path, code: int = 0) -> str:
        process = self.start(*arguments)
        try:
            said, _ = process.communicate(timeout=240)
        finally:
            process.kill()
        assert process.returncode == code, said
        return said

    def close(self, follower: subprocess.Popen[str]) -> None:
        """As Ctrl-C does."""
        follower.send_signal(signal.SIGINT)
        follower.communicate(timeout=30)

    def wake(self) -> None:
        (self.folder / "awake").touch()

    def logs(self) -> str:
        return "".join(path.read_text() for path in (self.run_dir / "logs").iterdir())

    def recommendation(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "recommendation.json").read_text())
        return found

    def records(self) -> list[dict[str, Any]]:
        """What the calibration folder holds."""
        return [
            json.loads(line)
            for path in sorted((self.folder / "calibration").glob("*/measurements/*.jsonl"))
            for line in path.read_text().splitlines()
        ]


def wait_until(ready: Callable[[], Any], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.2)
