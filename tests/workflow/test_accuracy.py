"""The accuracy page: each record beside a prediction that did not see it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from databases import GPU, a_database, a_record

from whichlora.errors import CalibrationError
from whichlora.predict.coefficients import prior_calibration
from whichlora.store.gpus import find_gpu
from whichlora.terminal import accuracy_document, as_markdown
from whichlora.workflow import accuracy
from whichlora.workflow.accuracy import rows_of
from whichlora.workflow.contribute import contribute

TRUE = a_record(0)


def test_a_record_of_what_is_predicted_has_no_error_and_lies_inside() -> None:
    gpu = find_gpu(GPU)
    rows = {row.quantity: row for row in rows_of(TRUE, gpu, prior_calibration(gpu))}
    assert set(rows) == {"peak allocated", "step"}
    for row in rows.values():
        assert row.error == pytest.approx(0.0, abs=1e-9)
        assert row.is_inside
    slow = replace(TRUE, step_s=tuple(3 * seconds for seconds in TRUE.step_s))
    (step,) = (row for row in rows_of(slow, gpu, prior_calibration(gpu)) if row.quantity == "step")
    assert step.error == pytest.approx(1 / 3 - 1)
    assert not step.is_inside


def test_shorter_batches_are_compared_at_their_own_length() -> None:
    gpu = find_gpu(GPU)
    short = replace(TRUE, batch_seq_len=(256,) * 3)
    at_256 = replace(short, config={**short.config, "seq_len": 256})
    rows = [
        {row.quantity: row.predicted for row in rows_of(record, gpu, prior_calibration(gpu))}
        for record in (short, at_256, TRUE)
    ]
    assert rows[0]["step"] == rows[1]["step"]
    assert rows[0]["peak allocated"] == rows[2]["peak allocated"]


def test_without_a_record_there_is_no_page_and_nothing_to_contribute(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no record of l4-24gb to compare"):
        accuracy.accuracies(["l4"], tmp_path)
    with pytest.raises(CalibrationError, match="nothing to contribute"):
        contribute(tmp_path / "shared", ["l4"], tmp_path)


@pytest.mark.slow
def test_the_page_names_errors_by_software_and_the_worst_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "calibration_roots", lambda _: [tmp_path])
    monkeypatch.setattr(accuracy, "load_calibration", lambda gpu, _: prior_calibration(gpu))
    wrong = replace(
        a_record(4), id="twice", peak_allocated_bytes=2 * (a_record(4).peak_allocated_bytes or 0)
    )
    failed = replace(a_record(1), id="oom", outcome="oom", step_s=(), batch_seq_len=())
    older = {**a_record(3).config, "libraries": {"torch": "2.1.2"}}
    a_database(tmp_path, [TRUE, wrong, failed, replace(a_record(3), config=older)])
    found = accuracy.accuracies([GPU], tmp_path)
    page = as_markdown(accuracy_document(found))
    assert page.startswith("# Predicted against measured\n\n## by accelerator\n")
    assert "| a100-sxm-80gb | torch 2.1.2 | peak allocated | 1 |" in page
    assert "| -50.0% | no | twice |" in page
    assert f"- {GPU}: 4 records of 2026-01-01 to 2026-01-05; formulas " in page
    assert {row["record"] for row in found[0].to_dict()["rows"]} == {"run-0", "run-3", "twice"}
