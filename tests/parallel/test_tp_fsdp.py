"""Tensor parallelism and FSDP together: kept traces of the real code, and one traced anew."""

from __future__ import annotations

from statistics import median

import pytest
import tp_fsdp_traces
from markdown_tables import quantile


def test_peaks_are_those_of_the_kept_traces() -> None:
    errors = sorted(map(abs, tp_fsdp_traces.errors()))
    assert len(errors) >= 25
    assert median(errors) < 0.001
    assert quantile(errors, 0.9) < 0.01
    assert errors[-1] < 0.01


@pytest.mark.oracle
def test_a_rank_holds_what_the_real_libraries_hold() -> None:
    record = next(each for each in tp_fsdp_traces.records() if each["run"]["method"] == "lora")
    assert tp_fsdp_traces.traced(record) == record["peak_bytes"]
