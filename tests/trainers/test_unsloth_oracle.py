"""Unsloth's own LoRA functions on fake tensors, without a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("unsloth") is None:  # which can't be imported without a GPU
    pytest.skip("pip install --no-deps unsloth", allow_module_level=True)

import kernel_traces
import trainer_traces

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("seed", [1000, 1001, 1002])
def test_the_ledger_has_the_bytes_that_unsloth_s_functions_make(seed: int) -> None:
    line = kernel_traces.draw_unsloth(seed)
    assert trainer_traces.predicted(line) == pytest.approx(kernel_traces.traced(line), rel=0.01)
