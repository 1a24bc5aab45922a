"""Write whichlora/spec/module_paths.py: where the linear layers of each type of model are.

One model of each type is built without storage, as the profiler builds it, so that the installed
transformers says the names. `tests/spec/test_targets_oracle.py` holds the table to PEFT.

    python benchmarks/module_paths.py            write it
    python benchmarks/module_paths.py --check    say what differs (exit code 1)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from transformers.pytorch_utils import Conv1D

from whichlora.profiler.build import meta_model
from whichlora.spec.run import RunConfig
from whichlora.tracer.extrapolate import shallow

PAGE = ROOT / "whichlora" / "spec" / "module_paths.py"
LAYERS = 4


def config_of(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return dict(content.get("config") or content)


def built(name: str, config: dict[str, Any]) -> Any:
    """With few layers, where these can stand for all."""
    run = RunConfig(model=name, quant="none")
    try:
        return meta_model(run, shallow(config, LAYERS), device="cpu")
    except Exception:  # of a config that lists its layers
        return meta_model(run, config, device="cpu")


def linear_paths(model: Any) -> list[str]:
    """Names of the linear modules, numbers of layers and experts as "{}"."""
    return sorted(
        {
            re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | Conv1D)
        }
    )


def all_paths() -> dict[str, list[str]]:
    paths: dict[str, list[str]] = {}
    files = (ROOT / "models_db").glob("*.json")
    for file in sorted(files, key=lambda path: (path.stat().st_size, path.name)):
        config = config_of(file)
        kind = config.get("model_type")
        if not kind or kind in paths:
            continue
        try:
            paths[kind] = linear_paths(built(file.stem, config))
        except Exception as error:  # a type that transformers or its extras lack
            print(f"left out: {kind} ({file.stem}): {str(error)[:80]!r}", file=sys.stderr)
    return paths


def page(paths: dict[str, list[str]]) -> str:
    """Types with the same paths stand together; leaves of one module stand in one line."""
    types = defaultdict(list)
    for kind, names in paths.items():
        leaves = defaultdict(list)
        for name in names:
            parent, _, leaf = name.rpartition(".")
            leaves[parent].append(leaf)
        types[tuple(f"{parent}: {' '.join(leaves[parent])}" for parent in leaves)].append(kind)
    groups = sorted((sorted(kinds), lines) for lines, kinds in types.items())
    rows = "\n".join(
        f"    **dict.fromkeys({tuple(kinds)!r}, {lines!r})," for kinds, lines in groups
    )
    return f'''# ruff: noqa: E501
"""Where the linear layers of each type of model are; written by `benchmarks/module_paths.py`.

A line has a module, numbers of layers and experts as "{{}}", and its linear layers.

Source: transformers {transformers.__version__}, modules of `from_config`.
"""

from __future__ import annotations

from collections.abc import Mapping

LINEAR_PATHS: Mapping[str, tuple[str, ...]] = {{
{rows}
}}
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--config",
        str(ROOT / "pyproject.toml"),
        "-",
    ]
    text = page(all_paths())
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    if check:
        sys.exit(PAGE.read_text(encoding="utf-8") != done.stdout)
    PAGE.write_text(done.stdout, encoding="utf-8")


if __name__ == "__main__":
    main()
