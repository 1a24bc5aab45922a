"""The optimizer steps of one profile, and which of them are timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileStep:
    """One optimizer step of a profile.

    Args:
        seq_len: padded length of its batch.
        what: it does, in words.
        is_timed: whether its time is kept.
        is_counted: whether it runs under the memory profiler of a device without counters.
    """

    seq_len: int
    what: str
    is_timed: bool = False
    is_counted: bool = False


def profile_steps(
    seq_lens: Sequence[int], *, num_counted: int, warms_lengths: bool
) -> Iterator[ProfileStep]:
    """Steps that time each of `seq_lens` once, in their order.

    The first one is not timed: it grows the allocator, creates the optimizer's states and selects
    kernels. It has the longest batch, as those have that count memory, so that the peak is known
    before the timed steps, which may end early.

    Args:
        num_counted: steps under the memory profiler.
        warms_lengths: a step that is not timed comes before the first timed one of each length.
    """
    longest = max(seq_lens)
    warm = ProfileStep(seq_len=longest, what="warming up")
    yield warm
    counted = ProfileStep(seq_len=longest, what="counting memory", is_counted=True)
    yield from [counted] * num_counted
    seen = {longest}
    for number, length in enumerate(seq_lens, 1):
        if warms_lengths and length not in seen:
            yield ProfileStep(seq_len=length, what=warm.what)
        seen.add(length)
        what = f"in batch {number} of {len(seq_lens)}"
        yield ProfileStep(seq_len=length, what=what, is_timed=True)


def steps_by_length(seq_lens: Sequence[int], torch_device: str) -> Counter[int]:
    """How many steps of each length a profile of `seq_lens` makes on a device of that type.

    Where torch counts no memory, one step runs under its profiler. On CUDA each length is warmed:
    on an H200 the first step at a new one took 0.2 to 2.5 s longer, as libraries load kernels then.
    """
    is_cuda = torch_device == "cuda"
    steps = profile_steps(seq_lens, num_counted=int(not is_cuda), warms_lengths=is_cuda)
    return Counter(step.seq_len for step in steps)
