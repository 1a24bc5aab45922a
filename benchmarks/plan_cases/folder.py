"""The folder that a case works in: its files, the commands it calls, what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Result:
    """How one command ended.

    Args:
        code: exit code; None where it had to be stopped.
    """

    code: int | None
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of what it said on stderr, or else on stdout."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1] if lines else ""

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.stderr


@dataclass(frozen=True, slots=True)
class Folder:
    """An empty folder with a calibration folder of its own, and no hub."""

    path: Path

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file, its folders included."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
        """A JSONL file."""
        return self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    def write_plan(self, name: str = "plan.yaml", **keys: Any) -> Path:
        """A plan; JSON is YAML, too."""
        return self.write(name, json.dumps(keys, indent=1))

    def environment(self, **more: str) -> dict[str, str]:
        """What commands see: this folder's calibrations, and no hub."""
        return (
            dict(os.environ)
            | {
                "WHICHLORA_CALIBRATION": str(self.path / "calibration"),
                "HF_HUB_OFFLINE": "1",
                "COLUMNS": "160",
            }
            | more
        )

    def call(self, *command: str, **environment: str) -> Result:
        """Any command in this folder."""
        try:
            done = subprocess.run(
                command,
                cwd=self.path,
                env=self.environment(**environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired as stopped:
            return Result(None, _text(stopped.stdout), _text(stopped.stderr))
        return Result(done.returncode, done.stdout, done.stderr)

    def whichlora(self, *arguments: str, **environment: str) -> Result:
        """A command line of WhichLoRA."""
        return self.call(sys.executable, "-m", "whichlora", *arguments, **environment)

    def answer(self, plan: str = "plan") -> dict[str, Any]:
        """`answer.json` of the plan of that name."""
        text = (self.path / "runs" / plan / "answer.json").read_text(encoding="utf-8")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file."""
        text = (self.path / name).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
