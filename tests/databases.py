"""Records of an A100 and databases that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.measurements import MeasurementLog, read_measurements

GPU = "a100-sxm-80gb"
MODEL = "meta-llama/Llama-3.1-8B"


def a_record(number: int = 0, **changes: Any) -> Measurement:
    """What an A100 would measure if the priors were right."""
    gpu = find_gpu(GPU)
    phase = "inference" if number % 3 == 2 else "finetune"
    run = RunConfig(model=MODEL, phase=phase, batch_size=1 + number % 4, seq_len=1024)  # type: ignore[arg-type]
    found = predict(load_model(MODEL), run, gpu, prior_calibration(gpu))
    time = found.time
    values: dict[str, Any] = {
        "id": f"run-{number}",
        "gpu": GPU,
        "date": f"2026-01-{1 + number % 28:02}T10:00:00+00:00",
        "config": found.run.to_dict(),
        "outcome": "ok",
        "step_s": (time.step_s,) * 3 if time.step_s else (),
        "batch_seq_len": (1024,) * 3 if time.step_s else (),
        "prefill_s": (time.prefill_s,) if time.prefill_s else (),
        "decode_s_per_token": (time.decode_s_per_token,) if time.decode_s_per_token else (),
        "peak_allocated_bytes": found.memory.peak_allocated_bytes,
        "environment": {"driver": "570.86", "host": {"cores": 16}, "versions": {"torch": "2.13.0"}},
        "provenance": {"run_id": "7", "command": "whichlora run a.yaml"},
    }
    return Measurement(**values | changes)


def a_database(folder: Path, records: Sequence[Measurement], name: str = "run") -> Path:
    for record in records:
        MeasurementLog(folder, record.gpu, name).append(record)
    return folder


def ids(folder: Path, gpu: str = GPU) -> list[str]:
    return sorted(record.id for record in read_measurements([folder], gpu))
