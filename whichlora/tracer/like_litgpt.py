"""Steps of LitGPT, whose model is none of transformers, so that profiles have none to run."""

from __future__ import annotations

from typing import Any

from whichlora.errors import MeasurementError


def measure_litgpt(*_: Any, **__: Any) -> dict[str, Any]:
    """Refuse: `benchmarks/litgpt_traces.py` runs its code on fake tensors.

    Raises:
        MeasurementError: always.
    """
    raise MeasurementError("trainer: litgpt can't be profiled or traced; use profile: none")
