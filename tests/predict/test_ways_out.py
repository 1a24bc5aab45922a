"""What makes a run fit that does not: each way is the prediction of what it says."""

from __future__ import annotations

from typing import Any

import pytest

from whichlora import estimate
from whichlora.spec.results import Prediction, WayOut
from whichlora.terminal.assumed import ways_out_lines

MODEL = "Qwen/Qwen2.5-7B"


def failing(gpu: str, **settings: Any) -> Prediction:
    (prediction,) = estimate(MODEL, gpu, **settings)
    assert prediction.verdict == "fails"
    return prediction


def again(way: WayOut, gpu: str, **settings: Any) -> Prediction:
    changed = dict(way.settings)
    if "parallel" in changed:
        config = changed.pop("parallel")
        changed |= {"gpus": config.gpus, "parallel": config.strategy, **dict(config.options)}
    stated = {name: value for name, value in changed.items() if value not in (None, ())}
    (prediction,) = estimate(MODEL, way.gpu or gpu, **{**settings, **stated})
    return prediction


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora", "batch_size": 16, "seq_len": 1024},
        {"method": "full", "batch_size": 2, "seq_len": 1024},
        {"method": "lora", "gradient_checkpointing": False, "batch_size": 2, "seq_len": 2048},
    ],
)
def test_every_way_fits_as_it_says(settings: dict[str, Any]) -> None:
    ways = failing("3090", **settings).ways_out
    assert 1 <= len(ways) <= 3
    for way in ways:
        prediction = again(way, "3090", **settings)
        assert prediction.verdict == "fits"
        assert prediction.memory.device_used_bytes == pytest.approx(way.device_used_bytes, rel=0.01)


def test_a_smaller_batch_has_as_many_rows_in_a_step() -> None:
    settings = {"method": "lora", "batch_size": 16, "seq_len": 1024}
    (way, *_) = failing("3090", **settings).ways_out
    size, steps = (way.settings[name] for name in ("batch_size", "gradient_accumulation_steps"))
    assert size * steps == 16
    (twice,) = estimate(MODEL, "3090", **{**settings, "batch_size": 2 * size})
    assert twice.verdict != "fits"
    line = next(iter(ways_out_lines([failing("3090", **settings)])))
    assert line.startswith(f"fits with --batch-size {size} --gradient-accumulation-steps {steps}: ")


def test_nothing_is_looked_for_where_a_row_fits() -> None:
    predictions = estimate(MODEL, "3090", method=["full", "qlora"], seq_len=512)
    assert {prediction.verdict for prediction in predictions} == {"fails", "fits"}
    assert not list(ways_out_lines(predictions))


def test_of_a_table_the_run_that_lacks_least_has_ways() -> None:
    predictions = estimate(MODEL, "8GB", method=["full", "lora"], seq_len=512)
    assert [bool(prediction.ways_out) for prediction in predictions] == [False, True]
