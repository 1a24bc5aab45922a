"""The loop over a device: it ends, it measures nothing twice, and pruning loses no winner."""

from dataclasses import replace

import pytest
from candidates import USABLE_BYTES, Truth, World, prediction
from hypothesis import given, settings
from hypothesis import strategies as st

from whichlora.plan import Limits
from whichlora.search import (
    WORTHWHILE_GAIN,
    choose_any,
    choose_finetune,
    choose_inference,
    choose_nothing,
    kept_models,
    winner,
)
from whichlora.specs import RunConfig
from whichlora.units import GiB
from whichlora.validation import check, rejected_before

MEMORY_FACTOR, TIME_FACTOR = 1.2, 2.0
# Bounds are quantiles at 95 % (memory) and 90 % (time); a candidate is dropped at 5 % on one
# side, so an honest truth lies between the 5 % and 95 % quantiles of its prediction.
MEMORY_REACH = MEMORY_FACTOR ** (1.644 / 1.96)
TIME_REACH = TIME_FACTOR**0.999


@st.composite
def honest_worlds(draw: st.DrawFn, phase: str) -> World:
    """Predictions whose intervals contain what the device will say."""
    truths = []
    spread = st.floats(-1.0, 1.0)
    for index in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([1, 3, 8]))
        for batch_size in range(1, draw(st.integers(1, 3)) + 1):
            run = RunConfig(
                model=f"org/model-{index}",
                phase=phase,  # type: ignore[arg-type]
                batch_size=batch_size,
                seq_len=100,
                max_new_tokens=10,
            )
            used = draw(st.floats(2.0, 40.0)) * GiB
            time_s = draw(st.floats(0.01, 1.0))
            total = draw(st.floats(10.0, 1000.0))
            guess = prediction(
                run,
                num_params=size * 10**9,
                used_bytes=used,
                memory_factor=MEMORY_FACTOR,
                time_s=time_s,
                time_factor=TIME_FACTOR,
            )
            truths.append(
                Truth(
                    predicted=guess,
                    used_bytes=used * MEMORY_REACH ** draw(spread),
                    time_s=time_s * TIME_REACH ** draw(spread),
                    total_s=(total, total * TIME_REACH ** draw(spread))
                    if phase == "finetune"
                    else None,
                    total_factor=TIME_FACTOR,
                )
            )
    limits = Limits(
        time_per_token_s=draw(st.none() | st.floats(0.01, 1.0)),
        total_time_s=draw(st.none() | st.floats(10.0, 1000.0)),
        inference_bytes=draw(st.none() | st.integers(4 * GiB, 30 * GiB)),
        finetune_bytes=draw(st.none() | st.integers(4 * GiB, 30 * GiB)),
    )
    return World(truths, limits)


@settings(max_examples=300, deadline=None)
@given(world=honest_worlds("finetune"))
def test_pruned_search_finds_the_winner_of_brute_force(world: World) -> None:
    everything = World(world.truths, world.limits)
    all_found = check(everything.judge_all, choose_any, everything.measure, everything.learn)
    best = winner(all_found, "all")
    checked = check(world.judge_all, choose_finetune, world.measure, world.learn)
    found = winner(checked, "frontier")
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.prediction.num_params == best.prediction.num_params
        assert found.total_s is not None
        assert best.total_s is not None
        # a rival that promises less than 2 % is not worth a run
        assert found.total_s.value * WORTHWHILE_GAIN <= best.total_s.value * (1 + 1e-9)
    assert len(world.calls) <= len(everything.calls)


@settings(max_examples=300, deadline=None)
@given(world=honest_worlds("inference"))
def test_pruned_search_keeps_the_models_that_brute_force_keeps(world: World) -> None:
    everything = World(world.truths, world.limits)
    all_found = check(everything.judge_all, choose_any, everything.measure, everything.learn)
    found = check(world.judge_all, choose_inference, world.measure, world.learn)
    assert set(kept_models(found, "frontier")) == set(kept_models(all_found, "all"))
    assert len(world.calls) <= len(everything.calls)


@settings(deadline=None)
@given(world=honest_worlds("finetune"))
def test_no_candidate_is_measured_twice(world: World) -> None:
    check(world.judge_all, choose_finetune, world.measure, world.learn)
    assert len(world.calls) == len(set(world.calls))


def test_a_dry_run_measures_nothing() -> None:
    run = RunConfig(model="org/a")
    world = World([Truth(prediction(run), 8 * GiB, 0.1, (1.0, 1.0))], Limits())
    (found,) = check(world.judge_all, choose_nothing, world.measure, world.learn)
    assert world.calls == []
    assert not found.measured


def test_what_one_run_teaches_spares_another() -> None:
    first, second = RunConfig(model="org/a"), RunConfig(model="org/b")
    guesses = [
        Truth(prediction(first, num_params=9, used_bytes=USABLE_BYTES), 30 * GiB, 0.1, (1.0, 1.0)),
        Truth(prediction(second, num_params=8, used_bytes=USABLE_BYTES), 30 * GiB, 0.1, (1.0, 1.0)),
    ]
    world = World(guesses, Limits())

    def learn(found: object) -> None:
        """The refit sees that memory was underestimated, and the second run falls unmeasured."""
        world.learn(found)  # type: ignore[arg-type]
        larger = prediction(second, num_params=8, used_bytes=30 * GiB)
        world.truths[1] = replace(world.truths[1], predicted=larger)

    found = check(world.judge_all, choose_finetune, world.measure, learn)
    assert world.calls == [first]
    assert [one.verdict for one in found] == ["misses", "misses"]


def test_a_measurement_that_is_not_taken_in_is_our_bug() -> None:
    run = RunConfig(model="org/a")
    world = World([Truth(prediction(run), 8 * GiB, 0.1, (1.0, 1.0))], Limits())
    with pytest.raises(AssertionError, match="was measured and is still open"):
        check(world.judge_all, choose_finetune, world.measure, lambda found: None)


def test_what_would_have_won_is_listed_best_first() -> None:
    def one(model: str, size: int, used: float) -> Truth:
        run = RunConfig(model=model)
        return Truth(prediction(run, num_params=size, used_bytes=used), used, 0.1, (1.0, 1.0))

    world = World(
        [
            one("org/tiny", 1, 99 * GiB),
            one("org/good", 5, 1 * GiB),
            one("org/large", 8, 30 * GiB),
            one("org/huge", 9, 90 * GiB),
        ],
        Limits(),
    )
    found = check(world.judge_all, choose_finetune, world.measure, world.learn)
    best = winner(found, "frontier")
    assert best is not None
    assert best.run.model == "org/good"
    before = rejected_before(best, found)
    assert [candidate.run.model for candidate in before] == ["org/huge", "org/large"]
    assert len(rejected_before(None, found)) == 3
