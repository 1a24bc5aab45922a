"""A contribution holds what was measured, and nothing of who measured it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from databases import GPU, MODEL, a_database, a_record, ids

from whichlora.calibration.database import merge_records
from whichlora.calibration.share.contribution import (
    NotPublicError,
    public_record,
    require_public_model,
)
from whichlora.cli import main
from whichlora.spec.results import Measurement
from whichlora.store.gpus import find_gpu
from whichlora.store.measurements import read_measurements
from whichlora.store.models import find_model
from whichlora.store.record import encode_record

SECRET = "acme-secret"


def a_private_record(number: int = 0, **changes: Any) -> Measurement:
    """A record with the user's own text in every field that takes one."""
    record = a_record(number)
    versions = {"torch": f"2.13.0+{SECRET}", "transformers": "5.23.0.dev0", SECRET: "1.0"}
    private: dict[str, Any] = {
        "id": f"{SECRET}-{number}",
        "detail": f"/home/{SECRET}/model: no such file",
        "moment_peak_bytes": {SECRET: 7, "loss_backward": 8},
        "engine_log": {SECRET: 1.0, "weights_bytes": 2.0},
        "environment": {
            **dict.fromkeys(("device", "cpu", "platform", "host", "python", SECRET), SECRET),
            "driver": "570.86",
            "libraries": versions,
            "num_threads": 8,
            "power_limit_w": 69.5,
        },
        "provenance": dict.fromkeys(
            ("run_id", "command", "config", "source", "measured_by", "busy", SECRET),
            f"/data/{SECRET}",
        ),
    }
    return replace(record, **private | changes)


def public(record: Measurement) -> Measurement:
    model = require_public_model(record, find_model(str(record.config["model"])))
    return public_record(record, model, find_gpu(GPU))


def test_no_text_of_a_user_is_left_and_every_number_is() -> None:
    record = a_private_record()
    shared = public(record)
    assert SECRET not in encode_record(shared, "record").decode()
    assert (shared.step_s, shared.batch_seq_len) == (record.step_s, record.batch_seq_len)
    assert shared.peak_allocated_bytes == record.peak_allocated_bytes
    assert shared.run == record.run
    assert shared.date == record.date[:10]
    assert shared.environment == {
        "device": find_gpu(GPU).name,
        "driver": "570.86",
        "num_threads": 8,
        "power_limit_w": 69.5,
        "libraries": {"torch": "2.13.0", "transformers": "5.23.0.dev0"},
    }
    assert shared.provenance == {"source": "contributed", "busy": "yes"}
    assert (shared.moment_peak_bytes, shared.engine_log) == (
        {"loss_backward": 8},
        {"weights_bytes": 2.0},
    )
    assert shared.id == public(replace(record, id="another", provenance={"busy": "x"})).id


def config_of(**settings: Any) -> dict[str, Any]:
    return {**a_record().config, **settings}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": config_of(model=f"/home/{SECRET}/llama")}, "its model is not in the shipped"),
        ({"config": config_of(model=f"{SECRET}/llama-3.1-8b")}, "its model is not in the shipped"),
        ({"model_config": {"model_type": "llama", "name": SECRET}}, "another config"),
        ({"config": config_of(target_modules=[SECRET])}, "target_modules is a text of your own"),
        ({"config": config_of(trainer_options={"beta": SECRET})}, "trainer_options is a text"),
        ({"config": config_of(method_options={SECRET: 1})}, "method_options is a text"),
        (
            {"config": config_of(parallel={"strategy": "ddp", "gpus": 2, "interconnect": SECRET})},
            "parallel is a text of your own",
        ),
    ],
)
def test_a_text_that_the_run_depends_on_leaves_the_record_out(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotPublicError, match=reason) as refused:
        public(a_private_record(**changes))
    assert SECRET not in str(refused.value)


@pytest.mark.slow
def test_the_folder_holds_records_that_merge_and_a_report(tmp_path: Path) -> None:
    own, folder, other = tmp_path / "own", tmp_path / "shared", tmp_path / "other"
    slow = a_private_record(7, step_s=(1e-9,) * 3)
    elsewhere = a_private_record(9, config=config_of(model=f"{SECRET}/model"))
    not_predicted = a_private_record(10, config=config_of(quant="fp8"))  # its error may quote it
    a_database(own, [*map(a_private_record, (0, 1, 2, 3)), slow, elsewhere, not_predicted])
    command = ["calibrate", "contribute", str(folder), "--gpu", GPU, "--calibration-dir", str(own)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert f"{GPU}: 4 records" in done.stdout
    assert "its model is not in the shipped database: 1 records" in done.stdout
    assert "this release can't predict it: 1 records" in done.stdout
    report = (folder / "REPORT.md").read_text(encoding="utf-8")
    assert "can't be true: step: " in report
    assert "| a100-sxm-80gb | peak allocated | 4 | 0.0% |" in report
    for path in folder.rglob("*"):
        assert path.is_dir() or SECRET not in path.read_text(encoding="utf-8")
    assert merge_records(folder, calibration_dir=other).added == {GPU: 4}
    assert all(name.startswith("shared-") for name in ids(other))
    models = {record.config["model"] for record in read_measurements([other], GPU)}
    assert models == {MODEL}
    again = CliRunner().invoke(main, command)
    assert (again.exit_code, again.stderr) == (
        2,
        f"{folder}: is not empty; name a new folder for the contribution\n",
    )
