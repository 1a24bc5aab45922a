"""TRL's own trainers, traced on fake tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="pip install trl beside the profile extra")

import trainer_traces

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_the_ledger_has_the_bytes_that_trl_s_code_makes(seed: int) -> None:
    line = trainer_traces.draw(seed)
    assert trainer_traces.predicted(line) == pytest.approx(trainer_traces.traced(line), rel=0.015)
