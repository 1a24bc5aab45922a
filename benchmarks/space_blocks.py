"""Spaces of millions of candidates, generated and judged block by block in bounded memory.

The search itself lists a few dozen candidates; these blocks time the formulas on arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.predict.alike import under_load
from whichlora.predict.coefficients import Calibration
from whichlora.predict.judged import judged_memory, judged_time, least_training_bytes
from whichlora.predict.quantities import num_tokens
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.predict.serving import service_of, taken_bytes
from whichlora.predict.serving_time import steady_time_per_token_s
from whichlora.search.pareto import pareto
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Runs judged at once: enough that Python's part is small, few enough for a processor's cache.
BLOCK_RUNS = 1 << 16


@dataclass(frozen=True, slots=True)
class Block:
    """Runs that differ in their three array settings only.

    Args:
        axes: values of each array setting; their product is the block.
    """

    job: ResolvedRun
    axes: Mapping[str, tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.axes.values())

    @property
    def mesh(self) -> dict[str, NDArray[np.int64]]:
        """The axes as arrays that broadcast to the shape of the block."""
        import numpy as np

        return dict(zip(self.axes, np.ix_(*map(np.asarray, self.axes.values())), strict=True))

    def run(self, position: int) -> RunConfig:
        """The run at `position` of the flattened block."""
        import numpy as np

        index = np.unravel_index(position, self.shape)
        chosen: dict[str, Any] = {
            name: values[int(i)] for (name, values), i in zip(self.axes.items(), index, strict=True)
        }
        return replace(self.job.run, **chosen)

    def runs(self) -> Iterator[RunConfig]:
        """All runs, by position."""
        for values in itertools.product(*self.axes.values()):
            chosen: dict[str, Any] = dict(zip(self.axes, values, strict=True))
            yield replace(self.job.run, **chosen)


def blocks(
    base: RunConfig,
    settings: Mapping[str, Sequence[Any]],
    gpus: Sequence[GpuSpec],
    find_model: Callable[[str], ModelSpec],
    *,
    block_runs: int = BLOCK_RUNS,
) -> Iterator[Block]:
    """Every combination of `settings` on every device, one block after the other.

    What excludes itself (flash attention on a device without it, full fine-tuning of quantised
    weights) is passed over; ranks are not told apart where there is no adapter.

    Args:
        base: settings that all candidates share.
        settings: a list of values by name of a `RunConfig` field.
    """
    outside = [name for name in settings if name not in ("model", *_INSIDE)]
    for name in settings.get("model", (base.model,)):
        model = find_model(name)
        for values in itertools.product(*(settings[name] for name in outside)):
            run = replace(base, model=name, **dict(zip(outside, values, strict=True)))
            for gpu in gpus:
                try:
                    job = resolve(model, run, gpu)
                except ConfigError:
                    continue
                yield from _split(job, settings, block_runs)


_INSIDE = ("batch_size", "seq_len", "r", "prompt_len", "max_new_tokens")


def _split(
    job: ResolvedRun, settings: Mapping[str, Sequence[Any]], block_runs: int
) -> Iterator[Block]:
    """The runs of one job in blocks of at most `block_runs`, cut along the longest axis."""
    axes = {name: tuple(settings.get(name, (getattr(job.run, name),))) for name in job.size_names}
    if not job.has_adapters:
        axes["r"] = axes["r"][:1]
    pending = [axes]
    while pending:
        part = pending.pop()
        size = 1
        for values in part.values():
            size *= len(values)
        if size <= block_runs:
            yield Block(job, part)
            continue
        longest = max(part, key=lambda name: len(part[name]))
        half = len(part[longest]) // 2
        pending.append(part | {longest: part[longest][half:]})
        pending.append(part | {longest: part[longest][:half]})


@dataclass(frozen=True, slots=True)
class Judged:
    """A block, and the predictions of its runs that are possible.

    Args:
        size: how many runs the block has.
        possible: positions in the flattened block of the runs that no lower bound rules out.
        time_per_token_s, memory_bytes: of these.
        likely: which of these are predicted within the limit.
    """

    block: Block
    size: int
    possible: NDArray[np.intp]
    time_per_token_s: Array
    memory_bytes: Array
    likely: NDArray[np.bool_]


def judge_blocks(
    space: Iterable[Block],
    calibration_of: Callable[[GpuSpec], Calibration],
    *,
    limit_bytes: float | None = None,
) -> Iterator[Judged]:
    """Each block against its device; nothing is kept of it afterwards.

    A run is ruled out only by a lower bound: of its live tensors, or of its memory. What is ruled
    out is not timed.

    Args:
        limit_bytes: of device memory, beside what the device has.
    """
    for block in space:
        yield _judge(block, calibration_of(block.job.gpu), limit_bytes)


def _judge(block: Block, calibration: Calibration, limit_bytes: float | None) -> Judged:
    import numpy as np

    job = block.job
    most = min(job.gpu.memory_bytes, limit_bytes or job.gpu.memory_bytes)
    size = math.prod(block.shape)
    if job.has_pool:
        return _judge_served(block, calibration, most)
    positions, sizes = _opened(block, calibration, most)
    if not positions.size:
        empty = np.zeros(0)
        return Judged(block, size, positions.ravel(), empty, empty, empty.astype(np.bool_))
    memory = judged_memory(job, calibration, **sizes)
    is_possible = np.broadcast_to(memory.least() <= most, positions.shape)

    def of_possible(values: Any) -> Array:
        return np.asarray(np.broadcast_to(values, positions.shape)[is_possible])

    memory_bytes = of_possible(memory.device_used_bytes)
    possible_sizes = {name: of_possible(values) for name, values in sizes.items()}
    return Judged(
        block=block,
        size=size,
        possible=positions[is_possible],
        time_per_token_s=_time_per_token(job, calibration, possible_sizes),
        memory_bytes=memory_bytes,
        likely=memory_bytes <= most,
    )


def _judge_served(block: Block, calibration: Calibration, most: float) -> Judged:
    """A block of an engine that takes its memory when it starts, whatever is asked of it then.

    A run is possible where the engine starts, and likely where all that is asked runs at once.
    """
    import numpy as np

    job, first = block.job, service_of(block.job)
    assert first is not None
    possible, seconds, taken, likely = list[int](), list[float](), list[int](), list[bool]()
    for position, run in enumerate(block.runs()):
        asked = replace(job, run=run)
        served = asked.served
        service = under_load(job.engine, served, first)
        start = service.start
        if start.fault_at(served.context):
            continue
        possible.append(position)
        seconds.append(steady_time_per_token_s(asked, served, service, calibration))
        taken.append(taken_bytes(job, start))
        at_once = start.max_running(served.context, served.shared_tokens)
        likely.append(taken[-1] <= most and run.batch_size <= at_once)
    return Judged(
        block=block,
        size=math.prod(block.shape),
        possible=np.array(possible, dtype=np.intp),
        time_per_token_s=np.array(seconds, dtype=np.float64),
        memory_bytes=np.array(taken, dtype=np.float64),
        likely=np.array(likely, dtype=np.bool_),
    )


def _opened(
    block: Block, calibration: Calibration, most: float
) -> tuple[NDArray[np.intp], dict[str, Array]]:
    """Positions of the runs worth a ledger, and their sizes, which broadcast to them.

    Left out are batches that hold more than `most` bytes at their loss, whatever the rank is.
    """
    import numpy as np

    job, shape = block.job, block.shape
    sizes = {name: values.astype(np.float64) for name, values in block.mesh.items()}
    positions = np.arange(math.prod(shape)).reshape(shape)
    if job.run.phase != "finetune":
        return positions, sizes
    ranks = sizes.pop("r")
    least = least_training_bytes(job, calibration, **sizes, least_r=ranks.min())
    is_open = np.broadcast_to(least <= most, (*shape[:-1], 1))[..., 0]
    opened = {
        name: np.broadcast_to(values[..., 0], is_open.shape)[is_open][:, None]
        for name, values in sizes.items()
    }
    return positions[is_open], opened | {"r": ranks.reshape(1, -1)}


def _time_per_token(
    job: ResolvedRun, calibration: Calibration, sizes: Mapping[str, Array]
) -> Array:
    import numpy as np

    num_runs = len(next(iter(sizes.values())))
    if not num_runs:
        return np.zeros(0)
    seconds = judged_time(job, calibration, **sizes).total_s
    return np.broadcast_to(seconds / num_tokens(job, **sizes), (num_runs,))


@dataclass(slots=True)
class ParetoFront:
    """Runs that no other beats in both time and memory, kept while blocks pass by."""

    time_s: list[float] = field(default_factory=list)
    memory_bytes: list[float] = field(default_factory=list)
    runs: list[tuple[RunConfig, str]] = field(default_factory=list)

    def add(self, judged: Judged) -> None:
        """Take in the likely runs of a block."""
        import numpy as np

        chosen = np.flatnonzero(judged.likely)
        chosen = chosen[pareto(judged.time_per_token_s[chosen], judged.memory_bytes[chosen])]
        time_s = [*self.time_s, *judged.time_per_token_s[chosen].tolist()]
        memory_bytes = [*self.memory_bytes, *judged.memory_bytes[chosen].tolist()]
        best = pareto(np.array(time_s), np.array(memory_bytes)).tolist()
        gpu = judged.block.job.gpu.key
        positions = judged.possible[chosen].tolist()
        num_before = len(self.runs)
        self.time_s = [time_s[i] for i in best]
        self.memory_bytes = [memory_bytes[i] for i in best]
        self.runs = [
            self.runs[i] if i < num_before else (judged.block.run(positions[i - num_before]), gpu)
            for i in best
        ]
