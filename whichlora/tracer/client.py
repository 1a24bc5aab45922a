"""Ask a child process for the traced peaks of a job, so that the caller stays free of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import whichlora
from whichlora.errors import ConfigError
from whichlora.extras import require
from whichlora.spec.results import TracedPeak
from whichlora.spec.run import RunConfig

_TIMEOUT_S = 1800.0  # every layer of a 70B model takes minutes
_NEEDED = ("torch", "transformers", "peft", "accelerate")
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def require_tracing(asker: str) -> None:
    """Refuse the request of `asker` where the libraries of a trace are missing.

    Raises:
        ConfigError: as `extras.require`.
    """
    require(asker, *_NEEDED, extra="profile")


def trace_peaks(
    run: RunConfig,
    *,
    model_config: Mapping[str, Any],
    target_modules: Sequence[str] | str,
    device_kind: str = "cuda",
    compute_capability: str | None = None,
    layers: str = "2,4",
) -> TracedPeak:
    """Peaks of `run`, traced on fake tensors: no weights, no GPU.

    Args:
        model_config: the Hugging Face config.
        target_modules: leaf names that get an adapter, or "all-linear".
        device_kind, compute_capability: of the GPU; they decide which attention kernel runs.
        layers: "all", or "2,4" for four layers stretched to all.

    Raises:
        ConfigError: the libraries are missing, or cannot build or run the model.
    """
    require_tracing("engine: trace")
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    request = {
        "run": run.to_dict(),
        "model_config": dict(model_config),
        "target_modules": targets,
        "device_kind": device_kind,
        "compute_capability": compute_capability,
        "layers": layers,
    }
    package_parent = str(Path(whichlora.__file__).parent.parent)
    paths = [package_parent, os.environ.get("PYTHONPATH", "")]
    environment = _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    try:
        completed = subprocess.run(
            [sys.executable, "-m", "whichlora.tracer.trace"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=dict(os.environ) | environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"engine: tracing {run.model} took more than {_TIMEOUT_S:g} s; use engine ledger, or "
            "fewer tokens to generate"
        ) from None
    try:
        answer = json.loads(completed.stdout)
    except ValueError:
        lines = completed.stderr.strip().splitlines() or ["no output"]
        raise ConfigError(f"engine: tracing {run.model} died: {lines[-1][:300]}") from None
    if "error" in answer:
        raise ConfigError(f"engine: {run.model} can't be traced: {answer['error']}")
    return TracedPeak(**answer)
