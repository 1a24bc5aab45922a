"""Trainers whose model is none of transformers, so that profiles and traces have none to run."""

from __future__ import annotations

from typing import Any

from whichlora.errors import MeasurementError
from whichlora.spec.run import RunConfig


def refuse(model: Any, run: RunConfig, *_: Any, **__: Any) -> dict[str, Any]:
    """Stand in the place of steps; benchmarks/litgpt_traces.py runs those of LitGPT.

    Raises:
        MeasurementError: always.
    """
    raise MeasurementError(f"trainer: {run.trainer} can't be profiled or traced; use profile: none")
