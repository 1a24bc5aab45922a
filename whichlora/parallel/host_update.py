"""What strategies share that update offloaded states on the host: their option and their note."""

from __future__ import annotations

from whichlora.parallel.base import Spread
from whichlora.spec.options import Option

OMP_NUM_THREADS = Option(
    name="omp_num_threads",
    summary="threads of each process in the update of what is offloaded; torchrun sets 1",
    default=1,
)


def threads_of(spread: Spread) -> int:
    """Threads of each process.

    Kind: exact. Source: torch 2.13 `distributed/run.py` sets OMP_NUM_THREADS to 1.
    """
    value = spread.options[OMP_NUM_THREADS.name]
    return value if isinstance(value, int) else 1


def update_note(spread: Spread) -> str:
    """What decides the seconds of an update on the host."""
    return (
        f"offload: the host's update is timed with OMP_NUM_THREADS={threads_of(spread)} in each "
        "process (torchrun sets 1), on an average host; 'whichlora calibrate --links' measures one"
    )
