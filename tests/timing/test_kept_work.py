"""What kernels compute and move, against kept traces of the real code: `benchmarks/traces/`."""

from __future__ import annotations

from statistics import median

import pytest
import work_traces
from trace_records import read

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
