"""Steps of llama.cpp on a CPU: by its own log of the same file, for other lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devices import CPU
from hypothesis import given
from hypothesis import strategies as st

from whichlora.predict.resolve import resolve
from whichlora.serving.base import LoggedTimes
from whichlora.serving.cpu_timer import CpuTimer, cpu_timer
from whichlora.serving.llama_cpp import logged_timer, stepping
from whichlora.serving.step_time import PARTS, Step
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

RUN = RunConfig(
    model="Qwen/Qwen3-0.6B",
    phase="inference",
    serving="llama-cpp",
    serving_options=(("file_type", "Q4_K_M"),),
    prompt_len=200,
    max_new_tokens=100,
)
LOG = LoggedTimes(run=RUN, values={"ttft_s": 2.0, "tpot_s": 0.05})


def timer(*logs: LoggedTimes, run: RunConfig = RUN) -> CpuTimer | None:
    served = resolve(load_model(run.model), run, CPU).served
    return cpu_timer(served, "Q4_K_M", stepping(served), logs)


def known(*logs: LoggedTimes) -> CpuTimer:
    found = timer(*logs)
    assert found is not None
    return found


def prompt(tokens: int) -> Step:
    return Step(0, 0.0, 1, tokens, tokens * (tokens + 1) / 2)


def test_a_log_is_what_it_was_read_from() -> None:
    assert known(LOG).seconds(prompt(200)) == pytest.approx(2.0)
    assert known(LOG).seconds(Step(1, 250, 1)) == pytest.approx(0.05)


def test_two_logs_of_one_length_have_the_least_relative_errors() -> None:
    twice = replace(LOG, values={"ttft_s": 4.0, "tpot_s": 0.05})
    seconds = known(LOG, twice).seconds(prompt(200))
    errors = (seconds / 2.0 - 1) ** 2 + (seconds / 4.0 - 1) ** 2
    for other in (0.99 * seconds, 1.01 * seconds):
        assert errors < (other / 2.0 - 1) ** 2 + (other / 4.0 - 1) ** 2


def test_logs_of_two_lengths_tell_what_attention_takes() -> None:
    """A machine whose attention is three times as slow as one log makes us think."""
    usual = known(LOG)
    slow = replace(usual, cached_s=3 * usual.cached_s, pair_s=3 * usual.pair_s)

    def log(prompt_len: int) -> LoggedTimes:
        run = replace(RUN, prompt_len=prompt_len)
        decoded, read = Step(1, prompt_len + 50, 1), prompt(prompt_len)
        return LoggedTimes(
            run=run, values={"ttft_s": slow.seconds(read), "tpot_s": slow.seconds(decoded)}
        )

    far = Step(1, 8000, 1)
    alone, both = known(log(200)), known(log(200), log(3000))
    assert alone.seconds(far) < 0.7 * slow.seconds(far)
    assert both.seconds(far) == pytest.approx(slow.seconds(far), rel=0.03)
    assert both.seconds(prompt(8000)) == pytest.approx(slow.seconds(prompt(8000)), rel=0.05)


@given(st.integers(1, 8), st.integers(0, 4000), st.integers(0, 512))
def test_more_of_anything_takes_longer_and_parts_add_up(rows: int, cached: int, read: int) -> None:
    found = known(LOG)
    step = Step(rows, float(cached), rows, read, read * cached)
    parts = found.parts(step)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == pytest.approx(found.seconds(step))
    more = Step(rows + 1, cached + 1.0, rows + 1, read + 1, (read + 1) * (cached + 1))
    assert found.seconds(more) > found.seconds(step)


def test_several_slots_are_known_less_well() -> None:
    two = timer(LOG, run=replace(RUN, batch_size=2))
    assert two is not None
    assert two.deviation > known(LOG).deviation
    assert two.seconds(Step(2, 500, 2)) == pytest.approx(2 * known(LOG).seconds(Step(1, 250, 1)))


def test_logs_of_other_files_do_not_tell() -> None:
    of_model = replace(LOG, run=replace(RUN, model="Qwen/Qwen2.5-0.5B"))
    of_mix = replace(LOG, run=replace(RUN, serving_options=(("file_type", "Q8_0"),)))
    assert timer(of_model, of_mix) is None
    assert timer(replace(LOG, values={"ttft_s": 2.0})) is None


def test_a_gpu_is_not_timed_by_logs() -> None:
    served = resolve(load_model(RUN.model), RUN, find_gpu("rtx-4090-24gb")).served
    assert logged_timer(served, lambda: [LOG]) is None
