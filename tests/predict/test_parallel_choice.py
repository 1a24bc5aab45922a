"""`parallel: auto`: the fastest that fits, and a line for each of the next ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import strategy_choice

from whichlora.errors import ConfigError
from whichlora.parallel import list_strategies
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.parallel_choice import (
    _why_none,
    best_first,
    best_spread,
    candidates,
    choice_notes,
    smallest_candidates,
)
from whichlora.predict.predict import predict
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

GPU = find_gpu("a100-sxm-80gb")
MODEL = load_model("meta-llama/Llama-3.2-1B")
ASKED = ParallelConfig(strategy="auto", gpus=4)
RUN = RunConfig(model=MODEL.name, seq_len=512, parallel=ASKED)
BASE = predict(MODEL, replace(RUN, parallel=ParallelConfig()), GPU, prior_calibration(GPU))


def answer(run: RunConfig, *, size: int, speed: float, verdict: str) -> Prediction:
    memory = replace(BASE.memory, device_used_bytes=size, interval_bytes=(size, size))
    time = replace(BASE.time, tokens_per_s=speed)
    return replace(BASE, run=run, memory=memory, time=time, verdict=verdict)


ALL = list(candidates(ASKED))
OF_DATA = [each for each in ALL if list_strategies()[each.names[0]].divides == "data"]
OF_MODEL = [each for each in ALL if each not in OF_DATA]


def test_every_strategy_alone_is_a_candidate() -> None:
    alone = [config.strategy for config in candidates(ASKED) if "+" not in config.strategy]
    assert alone == list(list_strategies())


def test_an_option_leaves_the_strategies_that_have_it() -> None:
    views = replace(ASKED, options=(("gradient_as_bucket_view", True),))
    left = list(candidates(views))
    assert {"ddp"} <= {name for config in left for name in config.names}
    for config in left:
        assert "ddp" in config.names
        assert ("gradient_as_bucket_view", True) in config.options


def test_an_option_that_no_strategy_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="depth: no strategy of parallel auto has these options"):
        list(candidates(replace(ASKED, options=(("depth", 3),))))


def test_the_fastest_that_fits_comes_first_then_the_smallest() -> None:
    answers = {
        "ddp": {"size": 90, "speed": 9.0, "verdict": "fails"},
        "slow": {"size": 20, "speed": 3.0, "verdict": "fits"},
        "fast": {"size": 30, "speed": 4.0, "verdict": "fits"},
        "near": {"size": 81, "speed": 8.0, "verdict": "undecided"},
    }
    names = iter(answers)

    def predicted(run: RunConfig) -> Prediction:
        name = next(names, None)
        if name is None:
            raise ConfigError("no more")
        renamed = replace(run, parallel=replace(run.parallel, strategy=name))
        return answer(renamed, **answers[name])

    wide = replace(RUN, parallel=replace(ASKED, gpus=8))
    if len(list(candidates(wide.parallel))) < len(answers):
        pytest.skip("fewer strategies than cases")
    order = [each.prediction.run.parallel.strategy for each in best_first(wide, predicted)]
    assert order == ["fast", "slow", "near", "ddp"]


def test_where_nothing_fits_what_can_be_offloaded_is_tried() -> None:
    tried: list[ParallelConfig] = []

    def predicted(run: RunConfig) -> Prediction:
        tried.append(run.parallel)
        return answer(run, size=90, speed=1.0, verdict="fails")

    best_first(RUN, predicted)
    smallest = list(smallest_candidates(ASKED))
    assert tried == [*OF_DATA, *OF_MODEL, *smallest]
    assert {"offload"} == {name for config in smallest for name, _ in config.options}
    stated = replace(ASKED, options=(("offload", ("optimizer",)),))
    assert list(smallest_candidates(stated)) == []


@pytest.mark.parametrize(
    ("verdict", "waits", "tried_too"),
    [("fits", 0.04, []), ("fits", 0.06, OF_MODEL), ("undecided", 0.0, OF_MODEL)],
)
def test_the_model_is_divided_where_dividing_the_data_may_not_fit_or_waits_for_links(
    verdict: str, waits: float, tried_too: list[ParallelConfig]
) -> None:
    tried: list[ParallelConfig] = []
    of_model = set(OF_MODEL)
    step_s = BASE.time.step_s
    assert step_s is not None

    def predicted(run: RunConfig) -> Prediction:
        tried.append(run.parallel)
        said = answer(run, size=9, speed=1.0, verdict=verdict)
        if run.parallel in of_model:
            said = replace(said, verdict="fits")
        return replace(said, time=replace(said.time, breakdown={"communication": waits * step_s}))

    best_first(RUN, predicted)
    assert OF_MODEL
    assert tried == [*OF_DATA, *tried_too]


def test_the_choice_is_the_best_of_all_strategies() -> None:
    """A seeded sample of `benchmarks/strategy_choice.py`."""
    found = strategy_choice.drawn(25, seed=7)
    assert all(one.is_best for one in found)
    assert sum(one.tried < one.accepted for one in found) > 5


def test_the_notes_name_the_choice_and_the_next_ones() -> None:
    def predicted(run: RunConfig) -> Prediction:
        return predict(MODEL, run, GPU, prior_calibration(GPU))

    spreadings = best_first(RUN, predicted)
    notes = choice_notes(spreadings)
    best = best_spread(RUN, predicted)
    assert best.notes[: len(notes)] == notes
    assert notes[0].startswith(f"parallel auto on 4 GPUs: {spreadings[0].config.strategy}")
    assert len(notes) == 1 + min(3, len(spreadings) - 1)
    assert best.verdict == "fits"


def test_what_every_strategy_refuses_is_refused() -> None:
    def refuses(run: RunConfig) -> Prediction:
        raise ConfigError("bias: cannot be divided")

    with pytest.raises(ConfigError, match=r"^bias: cannot be divided$"):
        best_first(RUN, refuses)


def test_what_most_strategies_refuse_is_said_alone() -> None:
    def refuse(run: RunConfig) -> Prediction:
        reason = "one of its own" if run.parallel.strategy == "cp" else "interconnect: 'warp'"
        raise ConfigError(reason)

    run = RunConfig(model="m", parallel=ParallelConfig(strategy="auto", gpus=4))
    with pytest.raises(ConfigError, match=r"^interconnect: 'warp'$"):
        best_first(run, refuse)


def test_few_reasons_are_said_once_each_and_those_of_the_run_first() -> None:
    """A GRPO whose engine is too small was refused in a line of 3,700 characters."""

    def refuse(run: RunConfig) -> Prediction:
        if run.parallel.strategy in ("ddp", "zero1"):
            raise ConfigError("trainer: the engine is too small")
        raise ConfigError(f"parallel: not for {run.parallel.strategy}")

    run = RunConfig(model="m", parallel=ParallelConfig(strategy="auto", gpus=4))
    with pytest.raises(ConfigError, match=r"^trainer: the engine is too small$"):
        best_first(run, refuse)
    reasons = Counter({f"parallel: not for {name}": 1 for name in "abcde"})
    assert _why_none(reasons) == (
        "parallel: not for a; parallel: not for b; parallel: not for c; and 2 more reasons"
    )


def test_in_an_unknown_time_all_gpus_compute() -> None:
    def of_memory(run: RunConfig) -> Prediction:
        size = 1 if run.parallel.strategy == "device-map" else 2
        prediction = answer(run, size=size, speed=math.nan, verdict="fits")
        unknown = replace(prediction.time, time_per_token_s=math.nan, step_s=math.nan)
        return replace(prediction, time=unknown)

    spreadings = best_first(RUN, of_memory)
    assert spreadings[0].config in OF_DATA
    assert "divides the data with least memory" in choice_notes(spreadings)[0]
