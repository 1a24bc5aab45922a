"""Several GPUs of llama.cpp beside what it says itself."""

from __future__ import annotations

import statistics

import llama_cpp_split
import pytest


def test_each_device_holds_what_llama_cpp_plans() -> None:
    found = list(llama_cpp_split.compared(("plan", "start")))
    exact = [each.error for each in found if each.row["what"] in ("weights", "cache")]
    assert max(map(abs, exact)) < 1e-4
    buffers = [each for each in found if each.row["what"] == "compute"]
    errors = sorted(abs(each.error) for each in buffers)
    assert statistics.median(errors) < 1e-4
    assert errors[-1] < 0.01
    allocated = [abs(each.error) for each in buffers if each.row["check"] == "start"]
    assert max(allocated) < 1e-3


@pytest.mark.sampled(6)
@pytest.mark.parametrize("model", llama_cpp_split.MODELS)
def test_fit_leaves_the_same_matrices_on_each_device(model: str) -> None:
    fits = list(llama_cpp_split.compared(("fit",), model))
    assert len(fits) == 9
    differ = [each.row["free_mib"] for each in fits if not each.is_equal]
    assert differ == (["5000,3000,2000,2000"] if "Qwen3-Next" in model else [])


def test_several_gpus_are_as_much_faster_as_published() -> None:
    found = [each for each in llama_cpp_split.speedups() if each.speed.model.endswith("8B")]
    for kind, bar in (("decode", 0.06), ("prompt", 0.12)):
        errors = [abs(each.error) for each in found if each.speed.kind == kind]
        assert statistics.median(errors) == pytest.approx(0, abs=bar)
