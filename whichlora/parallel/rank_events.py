"""What ranks share whose requests are written: hooks of gradients, tensors of other streams."""

from __future__ import annotations

from collections.abc import Callable

from whichlora.memory import optimizer
from whichlora.memory.event_list import EventList, Instance
from whichlora.memory.gradients import Trained
from whichlora.memory.step import TrainingStep
from whichlora.memory.step_events import StepEvents, has_events
from whichlora.parallel import deepspeed
from whichlora.parallel.deepspeed import Partitioned
from whichlora.spec.architecture import parts_of

Drop = Callable[[], None]


class RankEvents(StepEvents):
    """The events of a rank, which is told of each gradient.

    Attributes:
        has_stream: messages have a stream of their own.
    """

    hooks_gradients = True
    has_stream = True

    def __init__(self, step: TrainingStep) -> None:
        super().__init__(step)
        self._looks_up = False  # the block that runs is none of the layers

    def _born(self, num_bytes: int) -> Drop:
        """A tensor of a message; what frees it."""
        if self.has_stream:
            return self.list.born_aside(num_bytes)
        number = self.list.born(num_bytes)
        return lambda: self.list.die(number)

    def _embed(
        self, step: TrainingStep, look: Callable[[], list[int]], *, accumulated: bool
    ) -> tuple[int, int, Instance | None]:
        self._looks_up = True
        embedded = super()._embed(step, look, accumulated=accumulated)
        self._looks_up = False
        return embedded


class ZeroEvents(RankEvents):
    """Those of a rank under DeepSpeed's ZeRO, whose share `part` states."""

    def __init__(self, part: Partitioned) -> None:
        super().__init__(part.step)
        self._part = part
        self._on_host = deepspeed.offloads(part.spread, "optimizer")
        self._overlaps = bool(part.spread.options["overlap_comm"])
        self.has_stream = self._overlaps and not part.step.gpu.is_cpu
        self._bucket_elements = deepspeed.bucket_elements(part.step, part.spread)

    def _update(self, elements: int, *, first: bool) -> None:
        """The optimizer's update of one flat vector of `elements`."""
        kind, name = self.step.gpu.kind, self.step.run.optimizer
        master = Trained(rows=1, width=elements, param_bytes=deepspeed.MASTER_BYTES)
        if first:
            self.list.stay(optimizer.state_blocks(master, optimizer=name, device_kind=kind))
        for temporaries in self._part.temporary_blocks(master):
            self.list.pass_by(temporaries)


def rank_requests(
    step: TrainingStep, events: Callable[[], StepEvents], *, several_stacks: bool = False
) -> EventList | None:
    """Large requests of loading and two steps in order; None where they are not written.

    Args:
        events: makes what writes them.
        several_stacks: it writes those of an encoder and a decoder, too.
    """
    model = step.model
    if not has_events(step) or model.tower is not None:
        return None
    return events().whole_run() if several_stacks or len(parts_of(model)) == 1 else None
