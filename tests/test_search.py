"""Candidates against limits: who meets them, who may, who cannot, and whom to measure next."""

from dataclasses import replace

import pytest
from candidates import USABLE_BYTES, Truth, World, measurement, prediction
from hypothesis import given
from hypothesis import strategies as st

from whichlora.plan import Limits
from whichlora.search import (
    MIN_CHANCE,
    Quantity,
    choose_any,
    choose_finetune,
    choose_inference,
    choose_nothing,
    dominated,
    judge,
    kept_models,
    winner,
)
from whichlora.specs import RunConfig
from whichlora.units import GiB

TRAIN = RunConfig(model="org/small", seq_len=100)
SERVE = RunConfig(model="org/small", phase="inference", max_new_tokens=10)


def quantity(value: float, factor: float = 1.5, *, measured: bool = False) -> Quantity:
    if measured:
        return Quantity(value=value, low=value, high=value, measured=True)
    return Quantity(value=value, low=value / factor, high=value * factor, measured=False)


# --- one quantity against one bound


@pytest.mark.parametrize(("value", "chance"), [(9.9, 1.0), (10.0, 1.0), (10.1, 0.0)])
def test_a_measured_value_equal_to_its_bound_meets_it(value: float, chance: float) -> None:
    assert quantity(value, measured=True).chance_below(10.0) == chance


def test_a_prediction_at_its_bound_is_a_coin_toss() -> None:
    assert quantity(10.0).chance_below(10.0) == pytest.approx(0.5)


@pytest.mark.parametrize(("confidence", "tail"), [(0.9, 0.05), (0.95, 0.025)])
def test_the_bounds_of_an_interval_are_its_quantiles(confidence: float, tail: float) -> None:
    found = replace(quantity(10.0, 2.0), confidence=confidence)
    assert found.chance_below(5.0) == pytest.approx(tail, abs=1e-6)
    assert found.chance_below(20.0) == pytest.approx(1 - tail, abs=1e-6)


@given(
    value=st.floats(1e-6, 1e12),
    factor=st.floats(1.001, 100),
    bounds=st.tuples(st.floats(1e-6, 1e12), st.floats(1e-6, 1e12)),
)
def test_a_looser_bound_is_never_less_likely_to_be_met(
    value: float, factor: float, bounds: tuple[float, float]
) -> None:
    tight, loose = sorted(bounds)
    found = quantity(value, factor)
    assert 0.0 <= found.chance_below(tight) <= found.chance_below(loose) <= 1.0


# --- one candidate


def test_without_limits_only_the_device_decides() -> None:
    found = judge(prediction(TRAIN), Limits())
    assert [check.limit for check in found.checks] == ["memory of the device"]
    assert found.verdict == "meets"


def test_a_run_that_needs_more_than_the_device_has_misses() -> None:
    assert judge(prediction(TRAIN, used_bytes=30 * GiB), Limits()).verdict == "misses"


def test_an_interval_around_the_limit_is_undecided() -> None:
    found = judge(prediction(TRAIN, used_bytes=USABLE_BYTES), Limits())
    assert found.verdict == "undecided"
    assert found.chance == pytest.approx(0.5, abs=0.01)


def test_the_limits_of_the_other_phase_do_not_count() -> None:
    limits = Limits(time_per_token_s=1e-9, inference_bytes=1)
    assert judge(prediction(TRAIN), limits).verdict == "meets"
    limits = Limits(total_time_s=1e-9, finetune_bytes=1)
    assert judge(prediction(SERVE), limits).verdict == "meets"


def test_a_measurement_takes_the_place_of_the_prediction() -> None:
    undecided = prediction(TRAIN, used_bytes=USABLE_BYTES)
    found = judge(undecided, Limits(), measurement=measurement(TRAIN, used_bytes=USABLE_BYTES))
    assert found.measured
    assert found.verdict == "meets"  # a peak equal to what the device has fits
    more = measurement(TRAIN, used_bytes=USABLE_BYTES + 1)
    assert judge(undecided, Limits(), measurement=more).verdict == "misses"


def test_the_counter_closest_to_the_card_is_taken() -> None:
    found = replace(
        measurement(TRAIN, used_bytes=5 * GiB),
        peak_reserved_bytes=6 * GiB,
        device_used_bytes=7 * GiB,
    )
    assert judge(prediction(TRAIN), Limits(), measurement=found).memory_bytes.value == 7 * GiB


def test_measured_time_per_token_is_of_the_tokens_that_were_trained() -> None:
    run = replace(TRAIN, batch_size=4, gradient_accumulation_steps=2)
    found = replace(measurement(run), step_s=(2.0, 1.0), batch_seq_len=(100, 50))
    judged = judge(prediction(run), Limits(), measurement=found)
    assert judged.time_per_token_s.value == pytest.approx(3.0 / (150 * 4 * 2))


def test_measured_time_per_token_is_of_all_generated_tokens() -> None:
    run = replace(SERVE, batch_size=4)
    found = replace(measurement(run), generate_s=(9.0, 2.0, 1.0))
    judged = judge(prediction(run), Limits(time_per_token_s=0.05), measurement=found)
    assert judged.time_per_token_s.value == pytest.approx(2.0 / 40)
    assert judged.verdict == "meets"


@pytest.mark.parametrize("outcome", ["oom", "crashed", "killed", "timeout", "error"])
def test_a_run_that_failed_misses_and_says_how(outcome: str) -> None:
    failed = measurement(TRAIN, outcome=outcome, detail="one line")  # type: ignore[arg-type]
    found = judge(prediction(TRAIN), Limits(), measurement=failed)
    assert found.verdict == "misses"
    assert found.failure == f"{outcome}: one line"
    assert found.chance == 0.0
    assert found.measured


def test_the_larger_model_ranks_before_the_faster_one() -> None:
    large = judge(prediction(TRAIN, num_params=8, time_s=9.0), Limits())
    small = judge(prediction(TRAIN, num_params=7, time_s=0.1), Limits())
    assert large.rank < small.rank


def test_less_time_then_less_memory_break_ties() -> None:
    def rank(total: float, used: float) -> tuple[float, ...]:
        total_s = quantity(total)
        return judge(prediction(TRAIN, used_bytes=used), Limits(), total_s=total_s).rank

    assert rank(1.0, 9.0) < rank(2.0, 1.0)
    assert rank(1.0, 1.0) < rank(1.0, 2.0)


# --- out of memory spares what asks for more


@pytest.mark.parametrize("setting", ["batch_size", "seq_len", "prompt_len", "max_new_tokens"])
def test_a_run_that_asks_more_than_a_failed_one_is_dominated(setting: str) -> None:
    more = replace(TRAIN, **{setting: getattr(TRAIN, setting) + 1})
    assert dominated(more, [TRAIN]) == TRAIN
    assert dominated(TRAIN, [TRAIN]) == TRAIN
    assert dominated(TRAIN, [more]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"method": "qlora"},
        {"model": "org/other"},
        {"r": 8},
        {"gradient_checkpointing": False},
        {"precision": "fp32"},
    ],
)
def test_a_run_that_differs_otherwise_is_not_dominated(change: dict[str, object]) -> None:
    assert dominated(replace(TRAIN, batch_size=99, **change), [TRAIN]) is None  # type: ignore[arg-type]


def test_less_of_one_dimension_is_enough_to_be_worth_a_try() -> None:
    assert dominated(replace(TRAIN, batch_size=99, seq_len=99), [TRAIN]) is None


# --- whom to measure


def truth(run: RunConfig, *, size: int = 1, used: float = 8 * GiB, total: float = 100.0) -> Truth:
    guess = prediction(run, num_params=size, used_bytes=used)
    return Truth(predicted=guess, used_bytes=used, time_s=0.1, total_s=(total, total))


def test_a_model_that_surely_serves_needs_no_run() -> None:
    (found,) = World([Truth(prediction(SERVE), 8 * GiB, 0.1)], Limits()).judge_all()
    assert found.verdict == "meets"
    assert choose_inference([found]) is None
    assert kept_models([found], "frontier") == ("org/small",)


def test_the_most_promising_configuration_of_the_largest_open_model_is_next() -> None:
    def one(model: str, size: int, batch: int, used: float) -> Truth:
        run = replace(SERVE, model=model, batch_size=batch)
        return Truth(prediction(run, num_params=size, used_bytes=used), used, 0.1)

    world = World(
        [
            one("org/small", 1, 1, USABLE_BYTES),
            one("org/large", 9, 4, USABLE_BYTES * 1.05),
            one("org/large", 9, 2, USABLE_BYTES * 1.01),
            one("org/huge", 99, 1, USABLE_BYTES * 9),
        ],
        Limits(),
    )
    chosen = choose_inference(world.judge_all())
    assert chosen is not None
    assert (chosen.run.model, chosen.run.batch_size) == ("org/large", 2)


def test_what_cannot_meet_a_limit_is_never_chosen() -> None:
    hopeless = truth(TRAIN, size=9, total=1000.0)
    world = World([hopeless, truth(replace(TRAIN, batch_size=2))], Limits(total_time_s=200.0))
    chosen = choose_finetune(world.judge_all())
    assert chosen is not None
    assert chosen.run.batch_size == 2


def test_a_smaller_model_is_not_measured_once_a_larger_one_is_known_to_meet() -> None:
    world = World([truth(TRAIN, size=9), truth(replace(TRAIN, model="org/tiny"))], Limits())
    world.learn(world.measure(TRAIN))
    assert choose_finetune(world.judge_all()) is None


def test_a_rival_of_the_same_model_must_promise_less_time() -> None:
    rival = truth(replace(TRAIN, batch_size=2), total=100.0)
    world = World([truth(TRAIN, total=100.0), rival], Limits())
    world.learn(world.measure(TRAIN))
    chosen = choose_finetune(world.judge_all())
    assert chosen is not None  # within its interval it may be a third faster
    slower = truth(replace(TRAIN, batch_size=2), total=200.0)
    world = World([truth(TRAIN, total=100.0), slower], Limits())
    world.learn(world.measure(TRAIN))
    assert choose_finetune(world.judge_all()) is None


def test_a_dry_run_chooses_nothing_and_everything_means_everything() -> None:
    world = World([truth(TRAIN), truth(replace(TRAIN, batch_size=2), total=1e9)], Limits())
    found = world.judge_all()
    assert choose_nothing(found) is None
    assert choose_any(found) is found[0]
    world.learn(world.measure(found[0].run))
    chosen = choose_any(world.judge_all())
    assert chosen is not None
    assert chosen.run.batch_size == 2


def test_a_winner_was_measured_unless_predictions_are_all_there_is() -> None:
    world = World([truth(TRAIN)], Limits())
    assert winner(world.judge_all(), "frontier") is None
    assert winner(world.judge_all(), "none") is not None
    world.learn(world.measure(TRAIN))
    assert winner(world.judge_all(), "frontier") is not None


def test_a_candidate_just_below_certainty_is_not_taken_for_certain() -> None:
    check = judge(prediction(TRAIN, used_bytes=USABLE_BYTES / 1.1**0.8), Limits()).checks[0]
    assert MIN_CHANCE < check.chance < 1 - MIN_CHANCE
    assert check.verdict == "undecided"
