"""`calibrate --measure` on a device that answers from the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_profiler import FakeProfiler
from plan_runs import Silent, write_config

from whichlora.cli import main
from whichlora.config import load_plan
from whichlora.store.host import read_host
from whichlora.workflow import collect

pytestmark = pytest.mark.usefixtures("fake_device")


def test_few_runs_halve_the_error_of_all_candidates(
    tmp_path: Path,
    fake_device: type[FakeProfiler],
) -> None:
    progress = Silent()
    found = collect.measure(write_config(tmp_path), budget_s=600.0, progress=progress).after
    trained = [run for run in fake_device.calls if run.phase == "finetune"]
    assert 1 <= len(trained) <= 9  # of 18 candidates; inferences cost less and are all measured
    assert len(set(fake_device.calls)) == len(fake_device.calls)
    assert found.num_records == len(fake_device.calls)
    assert found.time["finetune"].num_runs > 0
    assert found.held_out["finetune"].median < found.cold["finetune"].median / 2
    assert "no run tells more" in progress.said[-1]


def test_the_launches_of_this_host_are_measured_once_and_kept(
    tmp_path: Path,
    fake_device: type[FakeProfiler],
) -> None:
    first, second = Silent(), Silent()
    config = write_config(tmp_path)
    collect.measure(config, budget_s=600.0, progress=first)
    assert "a launch takes 20.8 µs on this host" in first.said
    folder = load_plan(config).calibration_dir
    assert folder is not None
    (key,) = (path.parent.name for path in folder.glob("*/host.json"))
    host = read_host(folder, key)
    assert host is not None
    assert host.launch_s == pytest.approx(1.3 * 16e-6)
    collect.measure(config, budget_s=600.0, progress=second)
    assert not any("a launch takes" in line for line in second.said)


def test_the_budget_ends_the_measuring(
    tmp_path: Path,
    fake_device: type[FakeProfiler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collect, "START_S", 0.1)
    collect.measure(write_config(tmp_path), budget_s=5.0, progress=Silent())
    assert 1 <= len(fake_device.calls) <= 5  # a run of the fake device costs a second


def test_a_budget_without_a_unit_is_refused(tmp_path: Path) -> None:
    path = str(write_config(tmp_path))
    done = CliRunner().invoke(main, ["calibrate", "--measure", path, "--budget", "10"])
    assert done.exit_code == 2
    assert "budget: '10' is not a duration with a unit" in done.stderr


def test_the_command_measures_and_says_what_improved(
    tmp_path: Path,
    fake_device: type[FakeProfiler],
) -> None:
    path = str(write_config(tmp_path))
    done = CliRunner().invoke(main, ["calibrate", "--measure", path, "--budget", "2min"])
    assert done.exit_code == 0, done.stderr
    assert "datasheet alone" in done.stdout
    assert fake_device.calls


@pytest.mark.parametrize("name", ["missing.yaml"])
def test_a_config_that_is_not_there_is_one_line(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["calibrate", "--measure", str(tmp_path / name)])
    assert done.exit_code == 2
    assert name in done.stderr
