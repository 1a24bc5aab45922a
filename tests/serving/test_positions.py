"""The longest context that an engine derives from the config of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devices import A100

from whichlora.calibration.load import load_calibration
from whichlora.families import build
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.serving import get_engine
from whichlora.serving.base import Start
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

RUN = RunConfig(model="Qwen/Qwen2.5-1.5B", phase="inference", context=2048)
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def started(engine: str, release: str, positions: int) -> Start:
    """Of a config with YaRN that states so many positions."""
    config = dict(load_model(RUN.model).config)
    config |= {"max_position_embeddings": positions, "rope_scaling": YARN}
    model = build(config, name="local/yarn")
    run = replace(RUN, serving=engine, libraries=((engine, release),))
    start = get_engine(engine).start
    assert start is not None
    return start(resolve(model, run, A100).served)


@pytest.mark.parametrize(
    ("engine", "release", "positions", "longest"),
    [
        ("vllm", "0.8.5", 32768, 131072),
        ("vllm", "0.29.0", 32768, 131072),
        ("vllm", "0.29.0", 131072, 131072),
        ("vllm", "0.30.0", 32768, 32768),  # which takes the config by its word
        ("vllm", "0.33.0", 131072, 131072),
        ("sglang", "0.5.23", 32768, 32768),
        ("sglang", "0.5.23", 131072, 131072),
    ],
)
def test_positions_of_yarn_are_those_that_a_release_derives(
    engine: str, release: str, positions: int, longest: int
) -> None:
    start = started(engine, release, positions)
    assert start.longest_context == longest
    assert not start.is_beyond(longest)
    assert f"beyond the {longest} positions" in start.fault_at(longest + 1)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_longest_context_told_is_the_one_that_starts_of_a_linear_factor(engine: str) -> None:
    run = replace(RUN, model="deepseek-ai/deepseek-coder-6.7b-base", serving=engine)
    model = load_model(run.model)
    assert model.max_position_embeddings == 16384
    serving = predict(model, run, A100, load_calibration(A100)).serving
    assert serving is not None
    assert serving.max_context == 65536
    asked = replace(run, context=serving.max_context)
    answer = predict(model, asked, A100, load_calibration(A100)).serving
    assert answer is not None
    assert answer.starts
