"""Candidates against limits: who meets them, who may, who cannot."""

import math
from dataclasses import replace

import pytest
from candidates import USABLE_BYTES, measurement, prediction
from hypothesis import given
from hypothesis import strategies as st

from whichlora.search.feasibility import (
    MIN_CHANCE,
    Candidate,
    Quantity,
    best_of_models,
    bolder_than,
    closest,
    dominated,
    judge,
    kept_models,
    predicted_winner,
    rejected_before,
    relaxations,
)
from whichlora.spec.plan import Limits, Objective
from whichlora.spec.run import RunConfig
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


def test_an_encoder_is_timed_by_the_tokens_it_reads() -> None:
    run = replace(SERVE, batch_size=2, prompt_len=50)
    predicted = prediction(run)
    reads = replace(predicted, time=replace(predicted.time, decode_s_per_token=None))
    found = judge(reads, Limits(), measurement=measurement(run, generate_s=1.0))
    assert found.time_per_token_s.value == pytest.approx(1.0 / 100)


def test_a_time_out_says_so_and_leaves_open_whether_the_limits_are_met() -> None:
    stopped = measurement(TRAIN, outcome="timeout", detail="one line")
    found = judge(prediction(TRAIN), Limits(), measurement=stopped)
    assert found.timed_out
    assert not found.failed
    assert found.verdict != "misses"
    assert found.failure == "timeout: one line"
    assert found.source == "predicted"
    assert judge(prediction(TRAIN), Limits(), measurement=measurement(TRAIN)).source == "measured"


@pytest.mark.parametrize("outcome", ["oom", "crashed", "killed", "error"])
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


# --- the answer of a dry run, and what it left out


def candidate(model: str, size: int, used: float = 8 * GiB, total: float = 100.0) -> Candidate:
    run = replace(TRAIN, model=model)
    guess = prediction(run, num_params=size, used_bytes=used)
    return judge(guess, Limits(), total_s=quantity(total))


def test_a_dry_run_answers_with_what_meets_every_limit_as_surely_as_asked() -> None:
    hopeless = candidate("org/hopeless", 10, USABLE_BYTES * 2)
    unlikely = candidate("org/unlikely", 9, USABLE_BYTES * 1.05)
    likely = candidate("org/likely", 8, USABLE_BYTES / 1.05)
    sure, small = candidate("org/sure", 4), candidate("org/small", 1)
    found = [small, hopeless, sure, likely, unlikely]
    assert predicted_winner(found, 0.5) is likely
    assert predicted_winner(found, 0.95) is sure
    assert bolder_than(sure, found, 0.95) == [unlikely, likely]
    assert predicted_winner([unlikely, likely], 0.95) is None
    assert bolder_than(None, [unlikely, likely], 0.95) == [unlikely, likely]
    assert kept_models([unlikely, likely]) == ("org/likely",)


def test_a_dry_run_is_no_surer_of_a_model_than_of_its_serving() -> None:
    doubtful = replace(candidate("org/large", 9), chance_to_serve=0.8)
    sure = candidate("org/small", 1)
    assert predicted_winner([doubtful, sure], 0.95) is sure
    assert bolder_than(sure, [doubtful, sure], 0.95) == [doubtful]


def test_the_faster_method_goes_before_one_that_holds_more_and_reserves_less() -> None:
    def of(method: str, used: float, live: float, total: float) -> Candidate:
        one = candidate("org/m", 4, used, total)
        run = replace(one.run, method=method)
        memory = replace(one.prediction.memory, peak_allocated_bytes=int(live))
        return replace(one, prediction=replace(one.prediction, run=run, memory=memory))

    slow = of("qdora", USABLE_BYTES / 1.2, 6 * GiB, 145)
    fast = of("qlora", USABLE_BYTES / 1.075, 6 * GiB - 1, 100)
    assert slow.chance > 0.95 > fast.chance > 0.9
    assert predicted_winner([slow, fast], 0.95) is fast
    assert best_of_models([slow, fast], 0.95) == {"org/m": fast}
    larger = of("qlora", USABLE_BYTES / 1.075, 6 * GiB + 1, 100)
    assert predicted_winner([slow, larger], 0.95) is slow
    unsure = of("qlora", USABLE_BYTES / 1.05, 6 * GiB - 1, 100)
    assert unsure.chance < 0.9
    assert predicted_winner([slow, unsure], 0.95) is slow


def test_what_comes_closest_misses_little_and_few_limits() -> None:
    def one(model: str, used: float, total: Quantity) -> Candidate:
        guess = prediction(replace(TRAIN, model=model), used_bytes=used)
        return judge(guess, Limits(total_time_s=10.0), total_s=total)

    fast, slow = one("org/fast", 8 * GiB, quantity(50.0)), one("org/slow", GiB, quantity(90.0))
    unsure = one("org/unsure", 8 * GiB, quantity(80.0, 5.0))
    large = one("org/large", 2 * USABLE_BYTES, quantity(30.0))
    assert unsure.chance > max(each.chance for each in (fast, slow, large))
    assert closest([slow, unsure, large, fast]) is fast
    likely = one("org/likely", 8 * GiB, quantity(11.0, 1.5))
    assert closest([fast, likely]) is likely
    assert closest([]) is None


def test_what_would_have_won_is_listed_best_first() -> None:
    tiny, good = candidate("org/tiny", 1, 99 * GiB), candidate("org/good", 5)
    large, huge = candidate("org/large", 8, 30 * GiB), candidate("org/huge", 9, 90 * GiB)
    found = [tiny, good, large, huge]
    assert rejected_before(good, found) == [huge, large]
    assert rejected_before(None, found) == [huge, large, good, tiny]


@pytest.mark.parametrize(
    ("objective", "first"),
    [
        (Objective(), "org/large"),
        (Objective(prefer="time"), "org/small"),
        (Objective(prefer="memory"), "org/middle"),
        (Objective(prefer="order", order=("org/middle", "org/large", "org/small")), "org/middle"),
    ],
)
def test_the_objective_ranks_what_meets_the_limits(objective: Objective, first: str) -> None:
    def one(model: str, size: int, used: float, total: float) -> Candidate:
        guess = prediction(replace(TRAIN, model=model), num_params=size, used_bytes=used)
        return judge(guess, Limits(), total_s=quantity(total), objective=objective)

    found = [
        one("org/small", 1, 5 * GiB, 10.0),
        one("org/middle", 2, 2 * GiB, 20.0),
        one("org/large", 3, 9 * GiB, 30.0),
    ]
    assert min(found, key=lambda each: each.rank).run.model == first


def test_limits_of_a_gpu_take_the_place_of_the_general_ones_one_by_one() -> None:
    general = Limits(total_time_s=10.0, finetune_bytes=5)
    assert general.but(Limits(finetune_bytes=7)) == Limits(total_time_s=10.0, finetune_bytes=7)
    assert general.but(Limits()) == general


def test_a_candidate_just_below_certainty_is_not_taken_for_certain() -> None:
    check = judge(prediction(TRAIN, used_bytes=USABLE_BYTES / 1.1**0.8), Limits()).checks[0]
    assert MIN_CHANCE < check.chance < 1 - MIN_CHANCE
    assert check.verdict == "undecided"


def test_the_time_per_token_beside_a_total_is_of_the_same_batches() -> None:
    total = Quantity(value=90.0, low=80.0, high=120.0, measured=False)
    profiled = measurement(TRAIN, step_s=1.0)
    for measured in (None, profiled):
        found = judge(
            prediction(TRAIN), Limits(), total_s=total, total_tokens=1000, measurement=measured
        )
        time = found.time_per_token_s
        assert (time.value, time.low, time.high) == (0.09, 0.08, 0.12)


def test_the_sides_of_a_quantity_may_reach_differently_far() -> None:
    lopsided = Quantity(value=8.0, low=1.0, high=9.0, measured=False, confidence=0.95)
    assert lopsided.chance_below(8.0) == pytest.approx(0.5)
    assert lopsided.chance_below(9.0) == pytest.approx(0.975)
    assert lopsided.chance_below(1.0) == pytest.approx(0.025)
    assert lopsided.chance_below(4.0) > 0.2


def test_a_further_error_widens_a_quantity_and_keeps_its_value() -> None:
    exact = Quantity(value=8.0, low=8.0, high=8.0, measured=True, confidence=0.9)
    wide = exact.widened(0.1)
    assert wide.high / wide.value == pytest.approx(math.exp(1.645 * 0.1), rel=1e-3)
    assert wide.low * wide.high == pytest.approx(64.0)
    assert wide.widened(0.1).high < wide.widened(0.2).high
    assert exact.widened(0.0) == exact


def test_a_quantity_in_parts_keeps_how_far_it_reaches() -> None:
    parts = Quantity(value=90.0, low=80.0, high=120.0, measured=True, confidence=0.5).divided(10)
    assert parts == Quantity(value=9.0, low=8.0, high=12.0, measured=True, confidence=0.5)


def test_a_further_error_adds_to_each_side_as_independent_errors_do() -> None:
    lopsided = Quantity(value=8.0, low=8 / math.exp(0.3), high=8 * math.exp(0.6), measured=True)
    wide = lopsided.widened(0.4 / 1.6448536)
    assert math.log(wide.value / wide.low) == pytest.approx(0.5)
    assert math.log(wide.high / wide.value) == pytest.approx(math.hypot(0.6, 0.4))
    assert not wide.measured


def test_what_is_believed_counts_until_there_is_a_measurement() -> None:
    memory, time = quantity(5 * GiB), quantity(0.001)
    believed = {"memory": memory, "time_per_token_s": time}
    found = judge(prediction(TRAIN), Limits(), **believed)  # type: ignore[arg-type]
    assert (found.memory_bytes, found.time_per_token_s) == (memory, time)
    run = measurement(TRAIN, used_bytes=7 * GiB, step_s=0.2)
    found = judge(prediction(TRAIN), Limits(), measurement=run, **believed)  # type: ignore[arg-type]
    assert found.memory_bytes.value == 7 * GiB
    assert found.time_per_token_s.value == pytest.approx(0.2 / 100)
    failed = measurement(TRAIN, outcome="error")
    found = judge(prediction(TRAIN), Limits(), measurement=failed, **believed)  # type: ignore[arg-type]
    assert (found.memory_bytes, found.time_per_token_s) == (memory, time)


def test_the_interval_of_a_step_is_that_of_each_of_its_tokens() -> None:
    trained = judge(prediction(TRAIN, time_s=0.1, time_factor=2.0), Limits()).time_per_token_s
    assert (trained.value, trained.low, trained.high) == pytest.approx((1e-3, 0.5e-3, 2e-3))
    served = judge(prediction(SERVE, time_s=0.1, time_factor=2.0), Limits()).time_per_token_s
    assert (served.value, served.low, served.high) == pytest.approx((0.1, 0.05, 0.2))


def test_limits_are_those_of_the_phase() -> None:
    limits = Limits(finetune_bytes=1, inference_bytes=2, time_per_token_s=3.0, total_time_s=4.0)
    total = quantity(1.0)
    trained = judge(prediction(TRAIN), limits, total_s=total).checks
    assert [(check.unit, check.bound) for check in trained] == [
        ("bytes", USABLE_BYTES),
        ("bytes", 1),
        ("s", 4.0),
    ]
    served = judge(prediction(SERVE), limits).checks
    assert [(check.unit, check.bound) for check in served] == [
        ("bytes", USABLE_BYTES),
        ("bytes", 2),
        ("s", 3.0),
    ]


def test_the_smallest_change_of_one_limit_that_would_help_is_named() -> None:
    limits = Limits(finetune_bytes=10 * GiB, total_time_s=100.0)

    def candidate(name: str, gib: float, seconds: float, **more: str) -> Candidate:
        run = replace(TRAIN, model=name)
        found = prediction(run, used_bytes=gib * GiB)
        return judge(found, limits, total_s=quantity(seconds, measured=True), **more)  # type: ignore[arg-type]

    both = candidate("org/both", 30, 1000)
    large, larger = candidate("org/large", 12, 50), candidate("org/larger", 15, 50)
    slow, slower = candidate("org/slow", 5, 200), candidate("org/slower", 5, 300)
    failed = candidate("org/failed", 11, 50, failure="error")
    found = relaxations([both, larger, large, failed, slower, slow])
    assert {one.candidate.run.model for one in found} == {large.run.model, slow.run.model}
    assert {one.check.limit: one.check.quantity.value for one in found} == {
        "peak memory limit": 12 * GiB,
        "total time limit": 200.0,
    }
    assert relaxations([candidate("org/fits", 5, 50)]) == []
