"""The worlds of a shortlist err as much as a single prediction says that it may."""

from __future__ import annotations

import numpy as np
import pytest

from whichlora import api, timing
from whichlora.calibration import prior_calibration
from whichlora.numeric import TWO_SIDED_Z
from whichlora.prediction import MEMORY_CONFIDENCE, TIME_CONFIDENCE, predict, step_features
from whichlora.resolution import resolve
from whichlora.shortlist import Group, _Worlds
from whichlora.specs import RunConfig

GPU = api.find_gpu("a100-sxm-80gb")
SPEC = api.load_model("Qwen/Qwen2.5-0.5B")
TRAIN = RunConfig(model=SPEC.name, batch_size=2, seq_len=512, r=8)


def worlds(monkeypatch: pytest.MonkeyPatch) -> _Worlds:
    monkeypatch.setattr("whichlora.shortlist.NUM_WORLDS", 20_000)
    return _Worlds(np.random.default_rng(0), prior_calibration(GPU))


def test_a_training_errs_as_its_prediction_does(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {
        "batch_size": np.array([[2, 4]]),
        "seq_len": np.array([[512, 512]]),
        "r": np.array([[8], [16]]),
    }
    steps = [{512: 30.0, 256: 10.0}, {512: 15.0}]
    job = resolve(SPEC, TRAIN, GPU)
    group = Group(job=job, axes=axes, steps=steps)
    seconds, num_bytes = worlds(monkeypatch).training(group)
    model = prior_calibration(GPU).time["finetune"]
    expected = []
    for r in (8, 16):
        for batch_size, counts in zip((2, 4), steps, strict=True):
            expected.append(
                sum(
                    number
                    * timing.seconds(
                        model, step_features(job, batch_size=batch_size, seq_len=width, r=r)
                    )[0]
                    for width, number in counts.items()
                )
            )
    assert seconds[0] == pytest.approx(expected)
    # the second candidate of each rank has steps of one length only: as one prediction of it
    features = step_features(job, batch_size=4, seq_len=512, r=8)
    total, _ = timing.seconds(model, features)
    deviation = timing.log_deviation(model, features, total)
    assert np.log(seconds[1:, 1]).std() == pytest.approx(deviation, rel=0.03)
    # runs of one model and method mostly err together, and not wholly
    together = np.corrcoef(np.log(seconds[1:, :2]).T)[0, 1]
    assert 0.7 < together < 0.9999
    found = predict(SPEC, TRAIN, GPU, prior_calibration(GPU)).memory
    assert num_bytes[0][0] == pytest.approx(found.device_used_bytes)
    above = found.interval_bytes[1] - found.device_used_bytes
    spread = num_bytes[1:, 0].std()
    assert spread == pytest.approx(above / TWO_SIDED_Z[MEMORY_CONFIDENCE], rel=0.03)


def test_an_inference_errs_as_its_prediction_does(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig(model=SPEC.name, phase="inference", batch_size=4, prompt_len=256)
    axes = {"batch_size": np.array([[4]])}
    group = Group(job=resolve(SPEC, run, GPU), axes=axes)
    seconds, num_bytes = worlds(monkeypatch).serving(group)
    assert seconds.shape == num_bytes.shape == (20_000, 1)
    found = predict(SPEC, run, GPU, prior_calibration(GPU)).time
    assert seconds[0][0] == pytest.approx(found.time_per_token_s, rel=1e-6)
    reach = np.log(found.interval_s[1] / found.time_per_token_s)
    spread = np.log(seconds[1:, 0]).std()
    assert spread == pytest.approx(reach / TWO_SIDED_Z[TIME_CONFIDENCE], rel=0.03)


@pytest.mark.parametrize(("lora_alpha", "of_rank_16"), [(None, 32), (20, 20)])
def test_a_candidate_of_a_group_has_its_own_settings(
    lora_alpha: int | None, of_rank_16: int
) -> None:
    axes = {
        "batch_size": np.array([[2, 4, 8]]),
        "seq_len": np.array([[512, 480, 384]]),
        "r": np.array([[8], [16]]),
    }
    group = Group(job=resolve(SPEC, TRAIN, GPU), axes=axes, lora_alpha=lora_alpha)
    assert (group.shape, group.size) == ((2, 3), 6)
    run = group.run(4)
    assert (run.batch_size, run.seq_len, run.r, run.lora_alpha) == (4, 480, 16, of_rank_16)
    assert [one.batch_size for one in group.runs()] == [2, 4, 8, 2, 4, 8]
