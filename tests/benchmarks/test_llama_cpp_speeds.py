"""Seconds of llama.cpp on a CPU core, of models that are not calibrated with: the bar is 15 %."""

from __future__ import annotations

import llama_cpp_speeds
import pytest

pytest.importorskip("scipy")


def test_steps_of_other_models_are_predicted_within_the_bar() -> None:
    found = llama_cpp_speeds.compared()
    models = {step.model for step, _ in found}
    assert models.isdisjoint(llama_cpp_speeds.CALIBRATED)
    assert len(models) >= 2
    for decoding in (True, False):
        sizes = sorted(abs(error) for step, error in found if step.is_decoding == decoding)
        assert len(sizes) >= 24
        assert sizes[len(sizes) // 2] < 0.06
        assert sizes[-1] < 0.15
