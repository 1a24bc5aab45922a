"""Steps of TRL's trainers that were kept, against a calibration to the Trainer's."""

from __future__ import annotations

from statistics import median

import pytest
import trainers_on_cpu


@pytest.mark.slow
def test_steps_of_each_trainer_follow_from_a_calibration_to_the_trainer_s() -> None:
    times = trainers_on_cpu.by_run(trainers_on_cpu.records())
    assert {*trainers_on_cpu.calibrating(), *trainers_on_cpu.predicted()} == set(times)
    errors = {run: abs(error) for run, error in trainers_on_cpu.errors(times).items()}
    assert median(errors.values()) < 0.10
