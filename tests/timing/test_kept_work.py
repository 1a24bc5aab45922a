"""What kernels compute and move, against kept traces of the real code: `benchmarks/traces/`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import served_work_traces
import work_traces
from trace_records import read

from whichlora.store.hub import load_model

LINES = list(read(work_traces.RECORDS))[::6]
# A term of the loss that the tape has not; copies inside of an operator, and an update, that the
# trace has not.
_OTHER_KERNELS = ("adalora", "boft", "lora-fa")


@pytest.fixture(scope="module")
def errors() -> list[tuple[str, dict[str, float]]]:
    return [(line["run"]["method"], work_traces.errors(line)) for line in LINES]


@pytest.mark.parametrize(
    ("quantity", "usual", "worst"), [("flops", 0.03, 0.15), ("bytes", 0.03, 0.45)]
)
def test_products_and_bytes_are_those_of_the_traces(
    errors: list[tuple[str, dict[str, float]]], quantity: str, usual: float, worst: float
) -> None:
    sizes = [abs(found[quantity]) for _, found in errors if quantity in found]
    assert len(sizes) > 30
    assert median(sizes) < usual
    assert max(sizes) < worst


def test_a_kernel_runs_for_each_operator(errors: list[tuple[str, dict[str, float]]]) -> None:
    sizes = [
        abs(found["kernels"])
        for method, found in errors
        if "kernels" in found and method not in _OTHER_KERNELS
    ]
    assert median(sizes) < 0.06
    assert max(sizes) < 0.4


EXCEPTED: dict[tuple[str, str], dict[Callable[[dict[str, Any]], bool], float]] = {
    # an indexer chooses the keys
    ("prefill", "bytes"): {lambda run: run["model"] == "zai-org/GLM-5.2": 0.3},
    # of one sequence, eager products read keys and values in place
    ("decode", "bytes"): {lambda run: run["batch_size"] == 1 and run["attn"] == "eager": 1.7},
}
"""Runs whose errors have a cause of their own, and how large these may be."""


@pytest.mark.parametrize(
    ("work_pass", "quantity", "usual", "worst"),
    [
        ("prefill", "kernels", 0.005, 0.2),  # Mamba 2's chunks
        ("prefill", "bytes", 0.005, 0.15),
        ("prefill", "peak", 0.001, 0.015),
        ("decode", "kernels", 0.04, 0.16),
        ("decode", "bytes", 0.005, 0.15),
        ("decode", "peak", 0.001, 0.02),
    ],
)
def test_a_forward_is_that_of_the_traces(
    work_pass: str, quantity: str, usual: float, worst: float
) -> None:
    found = [
        (line["run"], abs(served_work_traces.errors(line)[work_pass, quantity]))
        for line in read(served_work_traces.RECORDS)
    ]
    assert len(found) > 120
    assert median(size for _, size in found) < usual
    for run, size in found:
        excepted = EXCEPTED.get((work_pass, quantity), {}).items()
        assert size < max([worst, *(most for is_such, most in excepted if is_such(run))]), run


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["gpt_neox", "qwen3_moe"])
def test_traces_of_forwards_are_as_they_were_kept(kind: str) -> None:
    kept = next(
        line
        for line in read(served_work_traces.RECORDS)
        if load_model(line["run"]["model"]).model_type == kind
    )
    line = served_work_traces.draw(kept["run"]["model"], 0)
    assert served_work_traces.traced(line) == kept
