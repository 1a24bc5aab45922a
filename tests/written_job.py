"""The functions of a written `train.py`, for tests that call them one by one."""

import importlib.util
from pathlib import Path
from types import ModuleType


def script_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.parent.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
