"""A calibration as it is loaded: what is known of this host goes into it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from whichlora.calibration.database import state_launch
from whichlora.calibration.load import load_calibration
from whichlora.cli import main
from whichlora.predict.coefficients import Calibration
from whichlora.predict.predict import predict
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

MODEL = load_model("HuggingFaceTB/SmolLM2-135M")
RUN = RunConfig(model=MODEL.name, phase="inference", batch_size=1)
L4 = find_gpu("l4-24gb")


def decode_s(calibration: Calibration) -> float:
    return predict(MODEL, RUN, L4, calibration).time.decode_s_per_token or 0.0


def test_a_stated_launch_is_what_decoding_takes(tmp_path: Path) -> None:
    unknown = load_calibration(L4, tmp_path)
    state_launch("l4", 42.0, tmp_path)
    known = load_calibration(L4, tmp_path)
    # the prior of 21 counts a twentieth beside a value that is known to 6 %
    assert decode_s(known) == pytest.approx(2 * decode_s(unknown), rel=0.12)
    assert known.basis(memory_runs=0, time_runs=0, passes={"decode": {}}).endswith(
        "; a launch takes 42 µs on this host"
    )
    before, after = (predict(MODEL, RUN, L4, calibration).time for calibration in (unknown, known))
    widths = [time.interval_s[1] / time.interval_s[0] for time in (before, after)]
    assert widths[1] < widths[0]


def test_another_accelerator_stays_as_it_was(tmp_path: Path) -> None:
    state_launch("l4", 42.0, tmp_path)
    gpu = find_gpu("h100-sxm-80gb")
    assert load_calibration(gpu, tmp_path).launch_s is None


def test_a_launch_beside_other_hosts_gives_way(tmp_path: Path) -> None:
    gpu = find_gpu("a100-sxm-80gb")
    shipped = load_calibration(gpu, tmp_path)
    state_launch(gpu.key, 12.0, tmp_path)
    here = load_calibration(gpu, tmp_path)
    for phase, model in here.time.items():
        assert model.mean["launch"] == pytest.approx(12e-6, rel=0.06), phase
        assert model.mean["weights"] == shipped.time[phase].mean["weights"]


def test_the_command_keeps_a_launch(tmp_path: Path) -> None:
    folder = ["--calibration-dir", str(tmp_path)]
    done = CliRunner().invoke(main, ["calibrate", "--gpu", "l4", "--launch-us", "28", *folder])
    assert done.exit_code == 0, done.output
    assert load_calibration(L4, tmp_path).launch_s == pytest.approx(28e-6)
    nowhere = CliRunner().invoke(main, ["calibrate", "--launch-us", "28", *folder])
    assert nowhere.exit_code == 2
    assert "--launch-us needs one --gpu" in nowhere.output
    absurd = CliRunner().invoke(main, ["calibrate", "--gpu", "l4", "--launch-us", "0", *folder])
    assert absurd.exit_code == 2
    assert "launch_us: must be from 0.1" in absurd.output
