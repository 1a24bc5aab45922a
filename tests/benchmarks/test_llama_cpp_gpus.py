"""Published speeds of llama.cpp: cards are predicted from the others of their capability."""

from __future__ import annotations

import math

import llama_cpp_gpus
import pytest

from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.serving.llama_cpp_host import (
    CROSSING_S,
    HOST_DEVIATION,
    HOST_FLOPS_PER_BYTE,
    HOST_KERNEL_S,
    HOST_READS,
    PROMPT_DEVIATION,
    PROMPT_HOSTS,
    SHARED_READS,
)
from whichlora.serving.llama_cpp_rates import BLOCK_RATES, BLOCK_READS
from whichlora.spec.numeric import TWO_SIDED_Z


@pytest.mark.slow
def test_cards_that_are_left_out_are_predicted_from_the_others() -> None:
    found = llama_cpp_gpus.left_out()
    for kind, middle, most in (("decode", 0.04, 0.1), ("prompt", 0.08, 0.3)):
        sizes = sorted(abs(error) for speed, error in found if speed.kind == kind)
        assert len(sizes) >= 20
        assert sizes[len(sizes) // 2] < middle
        assert sizes[-1] < most


def test_constants_are_what_the_scoreboard_gives() -> None:
    known = [speed for speed in llama_cpp_gpus.speeds() if speed.group == llama_cpp_gpus.FITTED]
    reads, constants = llama_cpp_gpus.fitted(known)
    assert reads == pytest.approx(BLOCK_READS)
    assert constants.keys() == BLOCK_RATES.keys()
    for capability, (kernel_s, products) in constants.items():
        assert BLOCK_RATES[capability].kernel_s == pytest.approx(kernel_s, rel=0.03)
        assert BLOCK_RATES[capability].products == pytest.approx(products, rel=0.01)


@pytest.mark.slow
def test_hosts_give_the_constants_of_what_they_compute() -> None:
    constants = llama_cpp_gpus.fitted_hosts(llama_cpp_gpus.speeds(llama_cpp_gpus.HOSTS))
    assert constants.reads == pytest.approx(HOST_READS)
    assert constants.kernel_s == pytest.approx(HOST_KERNEL_S)
    assert constants.crossing_s == pytest.approx(CROSSING_S, rel=0.05)


def test_most_published_speeds_with_a_host_lie_inside_the_interval() -> None:
    every = llama_cpp_gpus.speeds(llama_cpp_gpus.HOSTS)
    cases = [each for each in every if each.gpu != llama_cpp_gpus.ANY_PROCESSOR]
    assert len(cases) >= 40
    sizes, inside = [], 0
    for case in cases:
        timer = llama_cpp_gpus.hosted_of(case)
        error = abs(math.log(case.seconds / case.predicted_s(timer)))
        sizes.append(error)
        inside += error <= TWO_SIDED_Z[TIME_CONFIDENCE] * timer.deviation
    assert sorted(sizes)[len(sizes) // 2] < 0.15
    assert inside >= 0.85 * len(cases)


def test_processors_alone_are_near_published_speeds_that_nothing_is_fitted_to() -> None:
    """AmpereOne's 192 cores wait longer for each other."""
    cases = [
        each
        for each in llama_cpp_gpus.speeds(llama_cpp_gpus.HOSTS)
        if each.group == "processor alone" and "5200" not in each.host
    ]
    assert len(cases) >= 13
    logs = [math.log(each.seconds / llama_cpp_gpus.hosted_seconds(each)) for each in cases]
    assert max(map(abs, logs)) < TWO_SIDED_Z[TIME_CONFIDENCE] * HOST_DEVIATION
    assert sorted(map(abs, logs))[len(logs) // 2] < 0.14


def test_memory_of_a_gpu_is_read_slower_by_its_processor() -> None:
    cases = [
        each
        for each in llama_cpp_gpus.speeds(llama_cpp_gpus.HOSTS)
        if each.group == "processor, memory shared"
    ]
    logs: dict[str, list[float]] = {}
    for each in cases:
        error = math.log(llama_cpp_gpus.hosted_seconds(each) / each.seconds)
        logs.setdefault(each.host, []).append(error)
    share = HOST_READS * math.exp(sum(sum(of) / len(of) for of in logs.values()) / len(logs))
    assert share == pytest.approx(SHARED_READS, abs=0.01)


def test_prompts_of_processors_give_what_they_multiply() -> None:
    flops, deviation, count = llama_cpp_gpus.fitted_prompts()
    assert (round(flops, 1), count) == (HOST_FLOPS_PER_BYTE, PROMPT_HOSTS)
    assert deviation == pytest.approx(PROMPT_DEVIATION, abs=0.01)


def test_tokens_of_experts_and_recurrent_layers_are_near_published_ones() -> None:
    """Nothing is fitted to them."""
    for group, least, middle, most in (("experts", 15, 0.06, 0.2), ("recurrent", 8, 0.08, 0.15)):
        errors = [
            abs(case.seconds / case.predicted_s(case.timer()) - 1)
            for case in llama_cpp_gpus.speeds(llama_cpp_gpus.MODELS)
            if (case.group, case.kind) == (group, "decode")
        ]
        assert len(errors) >= least
        assert sorted(errors)[len(errors) // 2] < middle
        assert max(errors) < most
