"""The steps of a profile: which are timed, and how many there are of each length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whichlora.spec.profile_steps import profile_steps, steps_by_length

LENGTHS = st.lists(st.integers(1, 8), min_size=1, max_size=10)


@given(LENGTHS, st.integers(0, 2), st.booleans())
def test_each_length_is_timed_once_in_its_order(
    seq_lens: list[int], num_counted: int, warms_lengths: bool
) -> None:
    steps = [*profile_steps(seq_lens, num_counted=num_counted, warms_lengths=warms_lengths)]
    assert [step.seq_len for step in steps if step.is_timed] == seq_lens
    assert not steps[0].is_timed
    assert sum(step.is_counted for step in steps) == num_counted


@given(LENGTHS)
def test_on_cuda_no_length_is_new_when_it_is_timed(seq_lens: list[int]) -> None:
    seen: set[int] = set()
    for step in profile_steps(seq_lens, num_counted=0, warms_lengths=True):
        assert not step.is_timed or step.seq_len in seen
        seen.add(step.seq_len)
    counted = steps_by_length(seq_lens, "cuda")
    assert counted.total() == len(seq_lens) + len(set(seq_lens))


def test_a_profile_without_counters_counts_memory_at_the_longest() -> None:
    assert steps_by_length([8, 16, 8], "cpu") == {16: 3, 8: 2}
