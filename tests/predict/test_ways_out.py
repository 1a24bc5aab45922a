"""What makes a run fit that does not: each way is the prediction of what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whichlora import estimate
from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.judged import judged_memory
from whichlora.predict.resolve import resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction, WayOut
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.terminal.assumed import ways_out_lines

MODEL, PHI = "Qwen/Qwen2.5-7B", "microsoft/Phi-4-mini-instruct"
RTX_4090 = find_gpu("rtx-4090-24gb")


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


def test_a_strategy_on_one_gpu_may_be_left_out() -> None:
    settings = {"method": "full", "gpus": 1, "parallel": "zero3", "seq_len": 1024}
    (way, *_) = ways = failing("a100-80gb", **settings).ways_out
    assert way.settings["parallel"].is_one_device
    plain = again(way, "a100-80gb", **settings)
    assert plain.memory.device_used_bytes == pytest.approx(way.device_used_bytes, rel=0.01)
    assert len(ways) > 1
    line = next(iter(ways_out_lines([failing("a100-80gb", **settings)])))
    assert line.startswith("fits without a strategy (--parallel none): ")


def test_nothing_is_looked_for_where_a_row_fits() -> None:
    predictions = estimate(MODEL, "3090", method=["full", "qlora"], seq_len=512)
    assert {prediction.verdict for prediction in predictions} == {"fails", "fits"}
    assert not list(ways_out_lines(predictions))


def test_a_run_that_may_fit_is_told_what_surely_does() -> None:
    (prediction,) = estimate(MODEL, "3090", method="lora", seq_len=3584)
    assert prediction.verdict == "undecided"
    assert prediction.ways_out
    for way in prediction.ways_out:
        assert again(way, "3090", method="lora", seq_len=3584).verdict == "fits"


def test_of_a_table_the_run_that_lacks_least_has_ways() -> None:
    predictions = estimate(MODEL, "8GB", method=["full", "lora"], seq_len=512)
    assert [bool(prediction.ways_out) for prediction in predictions] == [False, True]


@pytest.mark.parametrize(
    ("model_key", "file"),
    [
        (
            "model_name_or_path",
            {"finetuning_type": "lora", "lora_target": "all", "per_device_train_batch_size": 4}
            | {"cutoff_len": 8192, "disable_gradient_checkpointing": True},
        ),
        (
            "base_model",
            {"adapter": "lora", "lora_target_linear": True, "lora_r": 16, "lora_alpha": 32}
            | {"micro_batch_size": 4, "sequence_len": 2048, "gradient_checkpointing": True},
        ),
    ],
)
def test_a_file_with_the_keys_of_a_way_fits(
    tmp_path: Path, model_key: str, file: dict[str, Any]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(file | {model_key: MODEL}))
    (prediction,) = estimate(gpu="l4-24gb", from_file=path)
    ways = [way for way in prediction.ways_out if way.keys]
    assert ways
    lines = "\n".join(ways_out_lines([prediction]))
    for way in ways:
        assert all(key in lines for key in way.keys)
        path.write_text(json.dumps(file | {model_key: MODEL} | {**way.keys}))
        (changed,) = estimate(gpu="l4-24gb", from_file=path)
        assert changed.verdict == "fits"
        assert changed.memory.device_used_bytes <= way.device_used_bytes  # a switch may do more


def test_a_strategy_that_refuses_the_model_is_no_way_out() -> None:
    """The tp plan of Phi 3 gathers what its joint projection returns, which is not modelled."""
    settings = {"method": "qlora", "batch_size": 16, "padding": "none", "seq_len": 1024}
    (prediction,) = estimate(PHI, RTX_4090.key, **settings)
    assert prediction.verdict == "fails"
    spreads = [
        way.settings["parallel"] for way in prediction.ways_out if "parallel" in way.settings
    ]
    assert all("tp" not in config.names for config in spreads)
    spread = ParallelConfig(strategy="tp", gpus=2)
    job = resolve(model := load_model(PHI), RunConfig(model=PHI, parallel=spread), RTX_4090)
    assert model.model_type == "phi3"
    with pytest.raises(ConfigError, match="tp can't divide"):
        judged_memory(job, load_calibration(RTX_4090))
