"""Liger's own functions on fake tensors, without their Triton kernels."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("liger_kernel") is None:  # not imported here: it would meet modules of other tests
    pytest.skip("pip install liger-kernel beside the profile extra", allow_module_level=True)

import kernel_traces
import trainer_traces

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("seed", [1000, 1001, 1002, 1003])
def test_the_ledger_has_the_bytes_that_liger_s_code_makes(seed: int) -> None:
    line = kernel_traces.draw_liger(seed)
    traced = kernel_traces.traced(line)["traced"]
    assert trainer_traces.predicted(line) == pytest.approx(traced, rel=0.01)
