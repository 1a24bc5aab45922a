"""Tensor parallelism against transformers' own code, on fake tensors and a fake process group."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import tp_traces

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("seed", [2, 5])
def test_a_traced_rank_has_the_bytes_of_the_ledger(seed: int) -> None:
    line = tp_traces.draw(seed)
    assert tp_traces.predicted(line) == pytest.approx(tp_traces.traced(line), rel=0.006)
