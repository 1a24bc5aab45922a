"""Decisions on posterior samples: what is certain, what is worth a run, and when to stop."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from candidate_posteriors import A100, NAMES, candidate_posterior
from devices import CPU
from numpy.typing import NDArray
from search import replay as searching
from search import tables

from whichlora.calibration.fit import fit
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.counted import count_run
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.search.acquisition import (
    Decision,
    MeasuredState,
    SearchProblem,
    Spent,
    decide,
    stop,
    tiers,
)
from whichlora.search.candidate_posterior import CandidatePosterior
from whichlora.search.counted_candidate import count_training
from whichlora.search.loop import SearchLoop
from whichlora.search.posterior import REPEATABILITY, Coefficients, Posterior, condition
from whichlora.spec.plan import Budget, Objective, Prefer
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.timing.model import FEATURES


def of_no_regime(calibration: Calibration) -> Calibration:
    """With the intervals that a search has, whose candidates err together."""
    times = {name: replace(one, regime_scales={}) for name, one in calibration.time.items()}
    return replace(calibration, time=times)


def test_best_guesses_and_spreads_are_those_of_one_prediction_at_a_time() -> None:
    found, calibration = candidate_posterior(), of_no_regime(prior_calibration(A100))
    time, memory = found.time(calibration), found.memory(calibration)
    for i, job in enumerate(found.jobs):
        one = predict(job.model, job.run, A100, calibration)
        steps = 100 if job.run.phase == "finetune" else 1
        wanted = steps * (one.time.step_s or one.time.time_per_token_s)
        assert math.exp(time.log_value[i]) == pytest.approx(wanted)
        assert math.exp(memory.log_value[i]) == pytest.approx(
            one.memory.device_used_bytes, rel=1e-6
        )
        deviation = math.sqrt((time.loadings[i] ** 2).sum() + time.residual_covariance[i, i])
        low, high = one.time.interval_s
        if job.run.phase == "finetune":
            assert deviation == pytest.approx(math.log(high / low) / 2 / 1.644854)


def test_what_was_measured_is_known_and_its_neighbour_is_known_better() -> None:
    found, calibration = candidate_posterior(), prior_calibration(A100)
    before, after = found.time(calibration), found.time(calibration, {0: 0.1})
    assert after.log_value[0] == pytest.approx(before.log_value[0] + 0.1, abs=1e-2)
    assert after.residual_covariance[0, 0] == 0.0
    assert (after.loadings[0] == 0.0).all()
    # the same variant at another batch errs in the same direction, another model less so
    shift = after.log_value - before.log_value
    assert shift[1] > shift[3] > 0
    assert after.residual_covariance[1, 1] < 0.8 * before.residual_covariance[1, 1]
    assert shift[2] == 0.0  # inference is another phase


@pytest.mark.parametrize("k", [0.2, 8.0])
def test_one_measured_run_of_a_slower_device_brings_the_other_candidates_near(k: float) -> None:
    table = tables.invented_table(0)
    found, cold = CandidatePosterior(table.counted_candidates), prior_calibration(table.gpu)
    measured_position = next(i for i, run in enumerate(table.runs) if run.phase == "finetune")
    seconds = k * np.exp(found.time(cold).log_value)
    job = found.jobs[measured_position]
    step_s = k * float(predict(job.model, job.run, table.gpu, cold).time.step_s or 0.0)
    record = replace(table.records[measured_position], step_s=(step_s,) * 4)
    learned = fit([record], table.gpu, searching.find, held_out=False)
    error = found.time_error(measured_position, record, learned)
    after = found.time(learned, {measured_position: error}, before=cold)
    off = np.exp(np.abs(after.log_value - np.log(seconds))) - 1
    assert np.median(off[table.training]) < 0.25
    unknown = np.flatnonzero(table.training)[1:]
    before = found.time(cold)
    # a candidate of the same device is as uncertain as it was, relative to its time, or less
    spread = [(one.loadings[unknown] ** 2).sum(axis=1) for one in (before, after)]
    assert (spread[1] < 1.05 * spread[0]).all()
    assert (spread[1] > 0.02 * spread[0]).all()


def test_errors_larger_than_expected_widen_what_is_not_measured() -> None:
    found, calibration = candidate_posterior(), prior_calibration(A100)
    small, large = (
        found.time(calibration, {0: error}).residual_covariance for error in (0.01, 1.0)
    )
    assert small[3, 3] < found.time(calibration).residual_covariance[3, 3] < large[3, 3]


def test_a_measurement_narrows_coefficients_and_residuals_as_one_normal_distribution() -> None:
    rng = np.random.default_rng(0)
    work, root = rng.uniform(0.1, 1.0, (5, 3)), np.diag([0.3, 0.5, 0.2])
    noise, correlation = np.full(5, 0.2), 0.6 + 0.4 * np.eye(5)
    seen, rest = [0, 3], [1, 2, 4]
    own = correlation * np.outer(noise, noise)
    repeats = REPEATABILITY**2 * np.eye(2)
    inner = own[np.ix_(seen, seen)] + repeats
    errors = np.linalg.cholesky(inner) @ [1.0, 1.0]  # as large as was expected
    found = condition(
        np.zeros(5),
        work,
        noise,
        correlation,
        Coefficients(np.ones(3), root),
        dict(zip(seen, errors.tolist(), strict=True)),
        joint=True,
    )
    whole = work @ root @ root.T @ work.T + own
    gain = np.linalg.solve(whole[np.ix_(seen, seen)] + repeats, whole[seen]).T
    wanted = (whole - gain @ whole[seen])[np.ix_(rest, rest)]
    got = found.loadings @ found.loadings.T + found.residual_covariance
    assert got[np.ix_(rest, rest)] == pytest.approx(wanted)
    assert not got[seen].any()


def test_errors_of_similar_runs_move_together() -> None:
    found, calibration = candidate_posterior(), prior_calibration(A100)
    drawn = np.log(found.time(calibration).sample(4000, np.random.default_rng(0)))
    assert np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1] > 0.8
    posterior = found.time(calibration)
    assert np.median(drawn, axis=0) == pytest.approx(posterior.log_value, abs=0.1)


def test_in_no_sample_does_more_work_take_less_time() -> None:
    calibration = prior_calibration(CPU)
    model = load_model(NAMES[1])
    runs = [
        RunConfig(model=NAMES[1], method=method, seq_len=64, precision="fp32", quant="none")
        for method in ("lora", "dora")
    ]
    jobs = [resolve(model, run, CPU) for run in runs]
    counted_candidates = [count_training(count_run(job), {64: 1.0}, profiled=[64]) for job in jobs]
    more = np.array(counted_candidates[1].passes[0][2]) >= np.array(
        counted_candidates[0].passes[0][2]
    )
    assert more.all()
    found = CandidatePosterior(counted_candidates).time(calibration)
    exact = replace(found, residual_covariance=np.zeros((2, 2)))
    lora, dora = exact.sample(1000, np.random.default_rng(0)).T
    assert (dora >= lora).all()


def test_the_error_of_a_measurement_is_the_log_of_measured_over_predicted() -> None:
    table = tables.invented_table(0)
    found = CandidatePosterior(table.counted_candidates)
    calibration = prior_calibration(table.gpu)
    posterior = found.time(calibration)
    for position in (0, 4, 17):
        error = found.time_error(position, table.records[position], calibration)
        assert posterior.log_value[position] + error == pytest.approx(
            math.log(table.seconds[position]), abs=1e-6
        )


# --- decisions


def posterior(values: list[float], deviations: list[float]) -> Posterior:
    logs = np.log(np.array(values))
    nothing = np.zeros((len(values), 1)), np.diag(np.square(deviations))
    return Posterior(logs, *nothing, np.ones(1), np.zeros((1, 1)))


def problem(
    *,
    tier: list[float],
    most_s: float = math.inf,
    most_bytes: float = 100.0,
    prefer: Prefer = "size",
    price: list[float] | None = None,
) -> SearchProblem:
    """Fine-tunings of one model each, and one inference of each that surely serves."""
    number = len(tier)
    return SearchProblem(
        training=np.array([True] * number + [False] * number),
        form=np.array([*range(number)] * 2),
        tier=np.array(tier * 2),
        price=np.array((price or [1.0] * number) * 2),
        most_bytes=np.array([most_bytes] * 2 * number),
        most_s=np.array([most_s] * number + [math.inf] * number),
        prefer=prefer,
    )


def state(measured: NDArray[np.bool_], *, timed_out: tuple[int, ...] = ()) -> MeasuredState:
    flags = np.isin(np.arange(len(measured)), timed_out)
    return MeasuredState(
        measured=measured | flags, impossible=np.zeros(len(measured), dtype=bool), timed_out=flags
    )


def decided(
    field: SearchProblem,
    seconds: list[float],
    *,
    sure: tuple[int, ...] = (),
    num_bytes: list[float] | None = None,
    spread: float = 0.3,
    timed_out: tuple[int, ...] = (),
) -> Decision:
    """`sure`: fine-tunings that were measured; every inference was."""
    number = len(seconds)
    measured = np.array([i in sure for i in range(number)] + [True] * number)
    deviations = [0.0 if i in sure else spread for i in range(number)] + [0.0] * number
    return decide(
        field,
        state(measured, timed_out=timed_out),
        posterior(seconds + [1.0] * number, deviations),
        posterior((num_bytes or [1.0] * number) + [1.0] * number, [0.0] * 2 * number),
        np.ones(2 * number),
    )


def test_a_measured_largest_model_with_one_variant_is_certain() -> None:
    found = decided(problem(tier=[0.0, 1.0]), [1.0, 1.0], sure=(0,))
    assert (found.best, found.confidence, found.next_run) == (0, 1.0, None)


def test_a_larger_model_that_surely_misses_needs_no_run() -> None:
    found = decided(problem(tier=[0.0, 1.0], most_s=2.0), [90.0, 1.0], sure=(1,))
    assert (found.best, found.next_run) == (1, None)
    assert found.confidence == 1.0


def test_a_larger_model_that_may_meet_the_limit_is_next() -> None:
    found = decided(problem(tier=[0.0, 1.0], most_s=2.0), [2.0, 1.0], sure=(1,))
    assert (found.best, found.next_run) == (1, 0)
    assert found.confidence == pytest.approx(0.5, abs=0.05)


def test_a_time_out_is_neither_run_again_nor_taken_for_a_miss() -> None:
    field = problem(tier=[0.0, 1.0], most_s=2.0)
    found = decided(field, [2.0, 1.0], sure=(1,), timed_out=(0,))
    assert (found.best, found.next_run) == (1, None)
    assert found.confidence == pytest.approx(0.5, abs=0.05)


def test_what_only_a_timed_out_inference_could_confirm_is_not_trained() -> None:
    field = problem(tier=[0.0])
    for measured in ([False, False], [True, False]):
        found = decide(
            field,
            state(np.array(measured), timed_out=(1,)),
            posterior([1.0, 1.0], [0.1, 0.1]),
            posterior([1.0, 1.0], [0.0, 0.0]),
            np.array([100.0, 1.0]),
        )
        assert (found.best, found.next_run) == (None, None)
        assert found.confidence < 1


def test_of_one_size_the_faster_wins_and_two_percent_is_no_reason_to_measure() -> None:
    same = problem(tier=[0.0, 0.0])
    assert decided(same, [1.0, 0.99], sure=(0,), spread=1e-3).confidence == 1.0
    assert decided(same, [1.0, 0.9], sure=(0,), spread=1e-3).next_run == 1


@pytest.mark.parametrize(
    ("prefer", "winner"), [("size", 0), ("time", 2), ("memory", 1), ("price", 0)]
)
def test_the_preference_decides_who_wins(prefer: Prefer, winner: int) -> None:
    field = problem(tier=[0.0, 1.0, 2.0], prefer=prefer, price=[1.0, 2.0, 5.0])
    if prefer not in ("size", "order"):
        field = replace(field, tier=np.zeros(6))
    found = decided(field, [3.0, 2.0, 1.0], sure=(0, 1, 2), num_bytes=[9.0, 5.0, 7.0])
    assert found.best == winner


def test_the_users_own_order_goes_before_size() -> None:
    def places(objective: Objective) -> list[float]:
        return tiers([objective.place("large", 9), objective.place("small", 1)])

    assert places(Objective()) == [0.0, 1.0]
    assert places(Objective(prefer="order", order=("small", "large"))) == [1.0, 0.0]
    assert places(Objective(prefer="time")) == [0.0, 0.0]


def test_a_model_that_may_not_serve_is_asked_to_before_it_is_trained_at_length() -> None:
    field = problem(tier=[0.0])
    found = decide(
        replace(field, most_s=np.array([math.inf, 1.0])),
        state(np.zeros(2, dtype=bool)),
        posterior([1.0, 1.0], [0.1, 0.3]),
        posterior([1.0, 1.0], [0.0, 0.0]),
        np.array([100.0, 1.0]),
    )
    assert found.next_run == 1


@pytest.mark.parametrize(("seconds", "best"), [(1.0, 0), (1.001, None)])
def test_what_was_measured_to_equal_its_limit_meets_it_and_no_more(
    seconds: float, best: int | None
) -> None:
    assert decided(problem(tier=[0.0], most_s=1.0), [seconds], sure=(0,)).best == best
    field = problem(tier=[0.0], most_bytes=100.0)
    assert decided(field, [1.0], num_bytes=[100 * seconds], sure=(0,)).best == best


def test_nothing_can_meet_the_limits_is_an_answer_too() -> None:
    found = decided(problem(tier=[0.0, 1.0], most_s=0.01), [2.0, 1.0])
    assert (found.best, found.next_run, found.confidence) == (None, None, 1.0)


def test_the_search_says_why_it_stops() -> None:
    open_still = Decision(None, 0.5, 3, np.zeros(4), np.zeros(4))
    assert stop(open_still, Spent(), Budget()) is None
    assert stop(replace(open_still, confidence=0.96), Spent(), Budget()) == "certain"
    assert stop(replace(open_still, confidence=0.96), Spent(), Budget(confidence=0.99)) is None
    assert stop(replace(open_still, confidence=0.96), Spent(), Budget(confidence=0.96)) == "certain"
    assert stop(open_still, Spent(runs=4), Budget(runs=4)) == "runs"
    assert stop(open_still, Spent(device_s=60.0), Budget(device_s=60.0)) == "device_s"
    assert stop(open_still, Spent(device_s=59.0, runs=3), Budget(device_s=60.0, runs=4)) is None
    assert stop(replace(open_still, next_run=None), Spent(), Budget()) == "nothing left"


# --- when a run may end


@pytest.mark.parametrize(
    ("prefer", "best", "position", "decisive"),
    [
        ("size", None, 0, 2.0),  # the limit
        ("size", 0, 1, 0.5),  # what it has to beat
        ("size", 1, 0, 2.0),  # a measured one that is slower than the limit is none to beat
        ("size", 0, 2, 2.0),  # of a model that goes first, any time within the limit
        ("memory", 0, 1, 2.0),
        ("size", 0, 3, math.inf),  # an inference without a limit
    ],
)
def test_a_run_turns_on_its_limit_or_on_the_best_that_it_must_beat(
    monkeypatch: pytest.MonkeyPatch,
    prefer: Prefer,
    best: int | None,
    position: int,
    decisive: float,
) -> None:
    field = problem(tier=[1.0, 1.0, 0.0], most_s=2.0, prefer=prefer)
    search = SearchLoop(field, candidate_posterior(), prior_calibration(A100))
    measured = posterior([0.5, 3.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 6)
    monkeypatch.setattr(SearchLoop, "posteriors", lambda _: (measured, measured))
    decision = Decision(best, 0.5, position, np.zeros(6), np.zeros(6))
    assert search.decisive_s(position, decision) == pytest.approx(decisive)


def test_a_replayed_run_that_ends_early_costs_what_it_made() -> None:
    table = tables.invented_table(0)
    record = next(one for one in table.records if one.step_s)
    (step_s, *_) = record.step_s
    slow = searching.ended_early(record, step_s / 2)
    assert len(slow.step_s) == len(slow.batch_seq_len) == 2
    assert slow.device_s == pytest.approx(record.device_s - 2 * step_s)
    assert searching.ended_early(record, step_s * 2) == record


# --- whole searches


@pytest.mark.slow
def test_searches_on_invented_devices_find_the_winner_in_a_few_runs() -> None:
    found = [
        result
        for seed in range(3)
        for result in searching.replay(
            tables.invented_table(seed),
            4,
            lambda problem: searching.ours(problem, Budget()),
            seed,
        )
    ]
    # sure to 95 %: one of twenty may be wrong
    assert sum(result.near for result in found) >= len(found) - 1
    assert mean(result.share for result in found) < 0.15
    assert all(result.confidence >= 0.95 for result in found if result.certain)


def test_a_budget_of_runs_is_kept() -> None:
    table = tables.invented_table(1)
    (found,) = searching.replay(
        table, 1, lambda problem: searching.ours(problem, Budget(runs=2)), 1
    )
    assert found.runs <= 2


def test_every_feature_has_a_place_in_a_counted_candidate() -> None:
    train = RunConfig(model=NAMES[1])
    job = resolve(load_model(NAMES[1]), train, CPU)
    (one,) = count_training(count_run(job), {64: 2.0}, profiled=[64]).passes
    assert len(one[2]) == len(FEATURES)


@pytest.mark.parametrize(
    ("seconds", "is_worth_a_run"), [(0.995, False), (0.985, False), (0.9, True)]
)
def test_a_rival_must_promise_at_least_2_percent_to_be_worth_a_run(
    seconds: float, is_worth_a_run: bool
) -> None:
    field = problem(tier=[0.0, 0.0])
    found = decided(field, [1.0, seconds], sure=(0,), spread=1e-6)
    assert found.best == 0
    assert (found.next_run == 1) is is_worth_a_run
    assert found.confidence == (0.0 if is_worth_a_run else 1.0)


def test_any_gain_of_a_better_tier_is_worth_a_run() -> None:
    found = decided(problem(tier=[1.0, 0.0]), [1.0, 1.0], sure=(0,), spread=1e-6)
    assert found.next_run == 1
