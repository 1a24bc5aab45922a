"""The GPU benchmark without a GPU: what it would measure, resuming, and its tables."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import accuracy
import designs
import pytest
import sweep

from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import resolve
from whichlora.spec.results import Measurement, Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu

H100 = find_gpu("h100-sxm-80gb")


@cache
def predicted(run: RunConfig) -> Prediction:
    """The prediction of `run`, which the tests of this file ask for up to four times."""
    return predict(designs.model_of(run), run, H100, prior_calibration(H100))


@pytest.fixture(scope="module", autouse=True)
def _each_run_predicted_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(designs, "predict", lambda model, run, gpu, calibration: predicted(run))
        yield


@pytest.fixture(scope="module")
def planned() -> list[designs.Planned]:
    return designs.planned(H100, tuple(designs.GROUPS))


@pytest.mark.slow
def test_the_memory_design_meets_every_setting_with_every_family(
    planned: list[designs.Planned],
) -> None:
    runs = [one.run for one in planned if one.group == "memory"]
    assert len(runs) >= 80
    assert len({run.model for run in runs}) >= 8
    assert {run.method for run in runs} == {"full", "lora", "qlora", "dora", "qdora"}
    for setting in ("precision", "attn", "gradient_checkpointing", "optimizer", "padding"):
        counts = Counter(getattr(run, setting) for run in runs)
        assert len(counts) >= 2, setting
        assert min(counts.values()) >= 20, setting
    assert {run.batch_size for run in runs} >= {1, 2, 4, 8, 16, 32}
    assert min(run.seq_len for run in runs) == 128
    assert max(run.seq_len for run in runs) == 8192


@pytest.mark.slow
def test_every_run_but_those_at_the_boundary_fits_by_prediction(
    planned: list[designs.Planned],
) -> None:
    for one in planned:
        assert predicted(one.run).verdict == (one.expected or "fits"), sweep.name(one)


@pytest.mark.slow
def test_the_same_command_plans_the_same_runs(planned: list[designs.Planned]) -> None:
    again = designs.planned(H100, tuple(designs.GROUPS))
    assert [sweep.design_of(one) for one in again] == [sweep.design_of(one) for one in planned]
    assert len({sweep.design_of(one) for one in planned}) == len(planned)


class PredictedDevice:
    """A profiler that measures exactly what is predicted."""

    def __init__(self, **settings: Any) -> None:
        self.provenance = settings["provenance"]
        self.measured: list[RunConfig] = []

    def __enter__(self) -> "PredictedDevice":
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...

    def measure(self, run: RunConfig, **keywords: Any) -> Measurement:
        self.measured.append(run)
        found = predicted(run)
        number = keywords["num_batches"]
        lengths = tuple(keywords["seq_lens"] * number)[:number]
        step_s = found.time.step_s
        time: dict[str, Any] = {"prefill_s": (found.time.prefill_s,) * number}
        if step_s is not None:
            time = {"step_s": (step_s,) * number, "batch_seq_len": lengths}
        elif found.time.decode_s_per_token is not None:
            time["decode_s_per_token"] = (found.time.decode_s_per_token,) * number
        moments = ledger(resolve(designs.model_of(run), run, H100))
        return Measurement(
            id=f"{len(self.measured)}-{run.model}-{hash((run, number))}",
            gpu=H100.key,
            date="2026-01-01T00:00:00",
            config=run.to_dict(),
            outcome="ok",
            peak_allocated_bytes=found.memory.peak_allocated_bytes,
            peak_reserved_bytes=found.memory.peak_reserved_bytes * 2,
            device_used_bytes=found.memory.device_used_bytes,
            moment_peak_bytes={name: moments.moment_bytes(name) for name in moments.moments},
            provenance=self.provenance,
            **time,
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "Profiler", PredictedDevice)
    monkeypatch.setattr(sweep, "device_facts", dict)
    monkeypatch.setattr(sweep, "missing_package", lambda one: "")


def run_sweep(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> None:
    command = ["sweep.py", "--gpu", H100.key, "--out", str(out), *words]
    monkeypatch.setattr(sys, "argv", command)
    sweep.main()


@pytest.mark.usefixtures("device")
def test_a_second_slice_goes_on_where_the_first_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep(monkeypatch, tmp_path, "--groups", "activations")
    assert "12 runs, 12 left" in capsys.readouterr().out
    run_sweep(monkeypatch, tmp_path, "--groups", "activations,puzzle")
    assert "14 runs, 2 left" in capsys.readouterr().out
    run_sweep(monkeypatch, tmp_path, "--groups", "activations,puzzle")
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.usefixtures("device")
def test_a_run_longer_than_the_slice_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sweep(monkeypatch, tmp_path, "--groups", "puzzle", "--minutes", "0.01")
    assert "2 left for the next slice" in capsys.readouterr().out


@pytest.mark.usefixtures("device")
def test_the_tables_show_what_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(accuracy, "NUM_DRAWS", 3)  # each is a fit
    run_sweep(monkeypatch, tmp_path, "--groups", "activations,boundary,real,inference")
    records = sweep.read_measurements([tmp_path], H100.key)
    text = accuracy.document(H100, records, "")
    allocated = text[text.index("### Peak allocated") : text.index("### Peak reserved")]
    assert "| 0.0 % | 0.0 % |" in allocated
    reserved = text[text.index("### Peak reserved") : text.index("### Used on the device")]
    assert "| 50.0 % | 50.0 % |" in reserved
    assert "are off by more than 8 %" in reserved
    assert "| cold |" in text
    assert "leave one model out" in text
    # boundary runs that had to fail were "ok" on this device
    assert "6 of 12 as predicted" in text
    totals = [line for line in text.splitlines() if line.startswith("| real,")]
    assert len(totals) == 5
    assert all("| +0.0 % |" in line or "| -0.0 % |" in line for line in totals)

    worse = [
        replace(one, peak_allocated_bytes=round((one.peak_allocated_bytes or 0) * 0.8))
        for one in records[:12]
    ]
    assert "+25.0 %" in "".join(accuracy.memory_section(list(accuracy.all_judged(H100, worse))))
