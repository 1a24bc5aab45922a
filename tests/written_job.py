"""The functions of a written `train.py`, for tests that call them one by one."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from whichlora.exports.recipe import Recipe
from whichlora.exports.train_script import train_script
from whichlora.spec.data_format import DataFormat
from whichlora.spec.run import RunConfig


def train_script_of(run: RunConfig, **recipe: Any) -> str:
    """The source of a `train.py`, by further fields of a `Recipe`."""
    return train_script(Recipe(run=run, gpu="a100-sxm-80gb", **recipe))


def script_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.parent.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_job(
    checkpoint: Path, data_format: DataFormat, settings: dict[str, Any], **recipe: Any
) -> Path:
    """The `train.py` beside a small checkpoint whose rows have something beside the text.

    Args:
        settings: of the run.
        recipe: further fields of the `Recipe`.
    """
    run = RunConfig(
        model=str(checkpoint), padding="padded", batch_size=2, precision="fp32", r=4, seq_len=64
    )
    path = checkpoint.parent / "train.py"
    text = train_script_of(
        replace(run, **settings),
        model_config=json.loads((checkpoint / "config.json").read_text()),
        target_modules="all-linear",
        data_format=data_format,
        **recipe,
    )
    path.write_text(text)
    return path
