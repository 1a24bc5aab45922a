"""Unsloth's own LoRA functions on fake tensors, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

if None in (find_spec("unsloth"), find_spec("unsloth_zoo")):  # imports need a GPU
    pytest.skip("pip install --no-deps unsloth unsloth_zoo", allow_module_level=True)

import kernel_traces
import trainer_traces

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("seed", [1000, 1001, 1002])
@pytest.mark.parametrize("draw", [kernel_traces.draw_unsloth, kernel_traces.draw_unsloth_experts])
def test_the_ledger_has_the_bytes_that_unsloth_s_functions_make(
    draw: Callable[[int], dict[str, Any]], seed: int
) -> None:
    line = draw(seed)
    traced = kernel_traces.traced(line)["traced"]
    assert trainer_traces.predicted(line) == pytest.approx(traced, rel=0.01)
