"""The memory of a Python that has answered, from which a page starts without importing anything."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from whichlora.errors import ConfigError

_TIMEOUT_S = 300
_NAMED_ERROR = re.compile(r"[A-Z]\w*Error: ")
# What is imported, and what is cached, the digest of the formulas among it.
_WARM = """
import gc, json, sys
sys.path.insert(0, "/whichlora")
import ruamel.yaml
from whichlora.page.questions import answer
for question in {questions!r}:
    for part in answer(json.dumps(question)):
        pass
gc.collect()
gc.freeze()  # a third of a million objects, which the first collections would pass again
"""


def node() -> str | None:
    """The Node.js of this machine, which runs Pyodide when a page is built."""
    return shutil.which("node")


def snapshot(site: Mapping[str, bytes], questions: list[dict[str, str]], program: str) -> bytes:
    """What `program`, a Node.js, has in memory after `questions`, packed.

    Raises:
        ConfigError: it does not run Pyodide.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, data in site.items():
            (Path(folder) / name).write_bytes(data)
        (Path(folder) / "warm.py").write_text(_WARM.format(questions=questions), encoding="utf-8")
        script = Path(folder) / "snapshot.mjs"
        script.write_bytes((files("whichlora.page") / "site" / script.name).read_bytes())
        try:
            subprocess.run(
                [program, str(script), folder],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"node: {program} can't run Pyodide ({_fault(error)}); use Node.js 20 or newer, or "
                "take it off the path"
            ) from None
        return gzip.compress((Path(folder) / "snapshot").read_bytes(), mtime=0)


def _fault(error: Exception) -> str:
    """The line of a failed Node.js that names the error, among those of its stack."""
    lines = (getattr(error, "stderr", "") or str(error)).splitlines()
    named = [line for line in lines if _NAMED_ERROR.match(line)]
    return (named or lines)[-1].strip()[:200]
