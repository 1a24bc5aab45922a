"""The scheduler's rules, with steps whose time is known by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.serving.scheduler import Load, Rules, percentile, simulate, steady_token_s
from whichlora.serving.step_time import Step

RULES = Rules(max_num_seqs=64, max_step_tokens=1000, mixes=True, pool_tokens=1_000_000)
EVEN = Load(prompt_len=1000, new_tokens=101, concurrency=1, spread=0.0)


def tenth(step: Step) -> float:
    return 0.1


def by_tokens(step: Step) -> float:
    return 0.001 * step.tokens


def test_one_client_waits_for_its_prompt_and_then_for_each_token() -> None:
    waits = simulate(RULES, EVEN, tenth)
    assert waits.ttft_s == pytest.approx([0.1] * 10)
    assert waits.tpot_s == pytest.approx([0.1] * 10)
    assert waits.output_tokens_per_s == pytest.approx(101 / 10.1)
    assert waits.requests_per_s == pytest.approx(1 / 10.1)


@pytest.mark.parametrize(
    ("front_s", "plans_ahead", "steps"), [(0.0, False, 1), (0.05, False, 2), (0.05, True, 3)]
)
def test_a_request_waits_for_the_steps_that_are_planned(
    front_s: float, plans_ahead: bool, steps: int
) -> None:
    """It comes while another one is answered: a tenth of a second for each step."""
    rules = replace(RULES, front_s=front_s, plans_ahead=plans_ahead)
    waits = simulate(rules, replace(EVEN, concurrency=2, prompt_len=9, spread=0.1), tenth)
    assert percentile(waits.ttft_s, 50) == pytest.approx(0.1 * steps)


def test_a_request_of_an_idle_engine_waits_for_no_step() -> None:
    waits = simulate(replace(RULES, front_s=0.05, plans_ahead=True), EVEN, tenth)
    assert waits.ttft_s == pytest.approx([0.15] * 10)
    assert waits.slower(2.0, 0.05).ttft_s == pytest.approx([0.25] * 10)


def test_a_long_prompt_takes_as_many_steps_as_chunks() -> None:
    waits = simulate(RULES, replace(EVEN, prompt_len=2500), tenth)
    assert waits.ttft_s == pytest.approx([0.3] * 10)
    whole = simulate(
        replace(RULES, whole_prompts=True, mixes=False), replace(EVEN, prompt_len=2500), tenth
    )
    assert whole.ttft_s == pytest.approx([0.1] * 10)


def test_what_is_in_the_pool_already_is_not_read() -> None:
    steps: list[Step] = []

    def seen(step: Step) -> float:
        steps.append(step)
        return 0.1

    simulate(RULES, replace(EVEN, cached_prompt=999), seen)
    prompts = [step for step in steps if step.prompt_tokens]
    assert {step.prompt_tokens for step in prompts} == {1}
    assert {step.prompt_pairs for step in prompts} == {1000.0}


def test_clients_that_begin_at_once_wait_for_each_others_prompts() -> None:
    waits = simulate(RULES, replace(EVEN, concurrency=4), by_tokens)
    # a step has 1,000 tokens: the first prompt whole, then what those that decode leave of a step
    first = sorted(waits.ttft_s)
    assert first[0] >= 1.0
    assert max(waits.ttft_s) > 3.9


def test_prompts_alone_stop_the_others() -> None:
    load = replace(EVEN, concurrency=8, spread=0.1)
    mixed = simulate(RULES, load, by_tokens)
    alone = simulate(replace(RULES, mixes=False), load, by_tokens)
    assert percentile(alone.ttft_s, 50) != percentile(mixed.ttft_s, 50)
    assert sum(alone.tpot_s) > 0


def test_more_than_the_pool_holds_wait_and_all_are_answered() -> None:
    load = replace(EVEN, concurrency=8)
    waits = simulate(replace(RULES, pool_tokens=2300), load, tenth)
    assert len(waits.ttft_s) == 8 * 10
    assert percentile(waits.ttft_s, 90) > 3 * 10  # the third and later wait for whole answers
    everyone = simulate(RULES, load, tenth)
    assert waits.output_tokens_per_s < everyone.output_tokens_per_s / 2


def test_a_sequence_that_finds_no_room_is_read_anew() -> None:
    """Both are admitted with their prompts, and their answers do not fit beside each other."""
    tokens = []

    def seen(step: Step) -> float:
        tokens.append(step.prompt_tokens)
        return 0.1

    load = replace(EVEN, concurrency=2)
    waits = simulate(replace(RULES, pool_tokens=2080), load, seen)
    assert len(waits.ttft_s) == 20
    assert sum(tokens) > 20 * 1000  # prompts, and what was made before


def test_no_more_sequences_run_than_allowed() -> None:
    most = []

    def seen(step: Step) -> float:
        most.append(step.decoding)
        return 0.1

    simulate(replace(RULES, max_num_seqs=3), replace(EVEN, concurrency=8), seen)
    assert max(most) == 3


def test_a_rate_below_the_most_is_answered_and_one_above_queues() -> None:
    at_most = simulate(RULES, replace(EVEN, concurrency=64), by_tokens).requests_per_s
    calm = simulate(RULES, replace(EVEN, requests_per_s=at_most / 2), by_tokens)
    assert not calm.queue_grows
    assert calm.requests_per_s == pytest.approx(at_most / 2, rel=0.1)
    crowded = simulate(RULES, replace(EVEN, requests_per_s=4 * at_most), by_tokens)
    assert crowded.queue_grows
    assert crowded.requests_per_s == pytest.approx(at_most, rel=0.1)
    assert percentile(crowded.ttft_s, 50) > 10 * percentile(calm.ttft_s, 50)


def test_slower_steps_are_longer_waits() -> None:
    waits = simulate(RULES, EVEN, tenth)
    assert waits.slower(2.0).ttft_s == pytest.approx([0.2] * 10)
    assert waits.slower(2.0).output_tokens_per_s == pytest.approx(waits.output_tokens_per_s / 2)
    doubled = simulate(RULES, EVEN, lambda step: 0.2)
    assert doubled.output_tokens_per_s == pytest.approx(waits.slower(2.0).output_tokens_per_s)


def test_jumps_over_equal_steps_take_what_single_steps_take() -> None:
    """The time of a step grows with its context; a run of them is timed in its middle."""

    def growing(step: Step) -> float:
        return 1e-3 + 1e-7 * step.cached_tokens

    waits = simulate(RULES, replace(EVEN, prompt_len=10, new_tokens=1001), growing)
    # contexts 11 to 1010 of the 1,000 further tokens
    one_by_one = sum(1e-3 + 1e-7 * context for context in range(11, 1011)) / 1000
    assert waits.tpot_s == pytest.approx([one_by_one] * 10, rel=1e-9)


@pytest.mark.parametrize(("share", "value"), [(50, 5), (90, 9), (99, 10), (1, 1)])
def test_percentiles(share: int, value: int) -> None:
    assert percentile([float(n) for n in range(10, 0, -1)], share) == value


@pytest.mark.parametrize("mixes", [True, False])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_steady_state_is_that_of_many_requests(mixes: bool, concurrency: int) -> None:
    def seconds(step: Step) -> float:
        return 0.01 + 1e-5 * step.prompt_tokens + 1e-8 * step.cached_tokens

    rules = replace(RULES, mixes=mixes)
    load = Load(prompt_len=2500, new_tokens=400, concurrency=concurrency)
    simulated = 1 / simulate(rules, load, seconds).output_tokens_per_s
    assert steady_token_s(rules, load, seconds) == pytest.approx(simulated, rel=0.04)


def test_a_long_prompt_beside_answers_takes_as_long_as_its_chunks() -> None:
    """Chunks that fill a step are taken at once until an answer ends."""
    load = Load(prompt_len=9500, new_tokens=40, concurrency=3, spread=0.1)
    seen: list[Step] = []

    def seconds(step: Step) -> float:
        seen.append(step)
        return 0.001 * step.tokens

    waits = simulate(RULES, load, seconds)
    assert waits.output_tokens_per_s * waits.requests_per_s > 0
    assert len(seen) < 15 * len(waits.ttft_s)  # one by one these are more than 20 each


@pytest.mark.parametrize(
    "kept",
    [{}, {"keeps_blocks": True}, {"mixes": False}, {"mixes": False, "reserved_tokens": 4096}],
    ids="+".join,
)
def test_more_clients_than_there_is_room_for_cost_no_throughput(kept: dict[str, int]) -> None:
    """Sequences of 8,100 tokens, of which the pool holds 20."""
    rules = replace(RULES, pool_tokens=162_000, max_num_seqs=256, **kept)
    load = replace(EVEN, prompt_len=100, new_tokens=8000, spread=0.1)

    def half_fixed(step: Step) -> float:
        return 0.02 + 0.0001 * step.tokens

    fits = simulate(rules, replace(load, concurrency=18), half_fixed)
    beyond = simulate(rules, replace(load, concurrency=100), half_fixed)
    assert beyond.output_tokens_per_s > 0.9 * fits.output_tokens_per_s
    assert percentile(beyond.ttft_s, 50) > 10 * percentile(fits.ttft_s, 50)


def test_an_engine_that_reserves_answers_puts_none_back() -> None:
    rules = replace(RULES, pool_tokens=22_000, max_num_seqs=256, reserved_tokens=4096)
    load = replace(EVEN, prompt_len=100, new_tokens=1000, concurrency=100)
    running: list[int] = []

    def seen(step: Step) -> float:
        running.append(step.decoding)
        return 0.1

    waits = simulate(rules, load, seen)
    assert max(running) == 19  # 1,100 tokens each, and one more for each
    assert max(waits.tpot_s) < 0.1 * 1.2  # prompts stop the others for a step each


def test_many_places_do_not_hide_that_the_queue_grows() -> None:
    """All requests of a short test would run at once, and be answered together."""
    rules = replace(RULES, max_num_seqs=500, pool_tokens=10**9)
    load = replace(EVEN, prompt_len=100, new_tokens=100)
    most = simulate(rules, replace(load, concurrency=500), by_tokens).requests_per_s
    for share in (0.5, 0.9, 1.3, 5.0):
        waits = simulate(rules, replace(load, requests_per_s=share * most), by_tokens)
        assert waits.queue_grows == (share > 1)
        assert waits.requests_per_s == pytest.approx(min(1, share) * most, rel=0.1)
        assert waits.output_tokens_per_s == pytest.approx(100 * waits.requests_per_s)
