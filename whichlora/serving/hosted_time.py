"""Seconds of one step of an engine that leaves a part of the model in the host's memory.

Few tokens are computed there, by the host. Of many a GPU computes that part, too, with weights that
are copied to it first. Both wait for each other, so that a step is the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from whichlora.serving.base import Served, Stepping
from whichlora.serving.cpu_timer import ROWS_DEVIATION
from whichlora.serving.kernel_rates import KernelRates
from whichlora.serving.step_time import PARTS, ModelPart, Step, StepTimer, step_timer
from whichlora.spec.gpu import GpuSpec

HOST, COPIES, CROSSINGS = "host", "weight_copies", "crossings"  # parts of a step beside `PARTS`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hosted:
    """How a model lies on GPUs and in the host's memory.

    Args:
        parts: of each GPU that has some, by its number.
        on_host: the layers' matrices there; `scores_on_host`: whether the head is, too.
        host: what its processor and memory are taken for; `rates` what kernels reach on it.
        crossings: of a pass, times that GPUs wait for the host and it for them, with
            `crossing_s` each, and the deviation of its log.
        copied_from: tokens of a pass from which on a GPU computes with copies; None where no GPU
            does.
        copied_share: of what the link reaches from pinned memory, the speed of these copies;
            shared_bytes_per_s: of copies within memory that both share, None where a link is
            between them.
        bandwidth_deviation: of the log of the host's bandwidth, where nobody states it; else 0.
        prompt_deviation: of the log of a prompt's time that the host takes, over one token's.
    """

    parts: tuple[tuple[int, ModelPart], ...]
    on_host: ModelPart
    scores_on_host: bool
    host: GpuSpec
    rates: Callable[[GpuSpec, str], KernelRates]
    crossings: int
    crossing_s: float
    crossing_deviation: float
    copied_from: int | None
    copied_share: float
    shared_bytes_per_s: float | None
    bandwidth_deviation: float
    prompt_deviation: float

    @property
    def is_alone(self) -> bool:
        """Whether no GPU has a part in it."""
        return not self.parts and self.copied_from is None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedTimer:
    """Times the steps of one model on GPUs and their host.

    Args:
        devices: a timer of what each GPU has.
        host: of the layers in its memory, computed there; `copied` on a GPU, None where none does.
        head: on the host; None where a GPU has it.
        copied_bytes_per_s: of weights to a GPU.
    """

    devices: tuple[StepTimer, ...]
    host: StepTimer
    copied: StepTimer | None
    head: StepTimer | None
    hosted: Hosted
    copied_bytes_per_s: float

    @property
    def stepping(self) -> Stepping:
        return self.host.stepping

    @property
    def deviation(self) -> float:
        """Of the log of a step's time: that of one sequence that decodes, with its parts' own.

        Kind: estimate: parts err apart, and a prompt's copies as much as a step's reads.
        """
        one = Step(decoding=1, cached_tokens=0.0, sampled=1)
        host_s = self._on_host_s(one)
        devices_s = [timer.seconds(one) for timer in self.devices]
        rows = self.hosted.is_alone and (self.stepping.max_num_seqs or 1) > 1
        own = math.hypot(
            self.host.deviation, self.hosted.bandwidth_deviation, ROWS_DEVIATION * rows
        )
        errors = [
            seconds * each.deviation for seconds, each in zip(devices_s, self.devices, strict=True)
        ]
        crossings_s = self.hosted.crossings * self.hosted.crossing_s
        crossing_error = self.hosted.crossing_deviation * crossings_s
        error = math.hypot(own * host_s, crossing_error, sum(errors))
        return error / (host_s + crossings_s + sum(devices_s))

    @property
    def prompt_deviation(self) -> float:
        """Of the log of a prompt's time: where the host is alone, it multiplies.

        Kind: estimate.
        """
        if not self.hosted.is_alone:
            return self.deviation
        return math.hypot(
            self.hosted.prompt_deviation, self.host.deviation, self.hosted.bandwidth_deviation
        )

    def seconds(self, step: Step) -> float:
        """Of `step`."""
        return sum(self.parts(step).values())

    def parts(self, step: Step) -> dict[str, float]:
        """Seconds of `step` by kind of work, which add up to it.

        Kind: estimate. Source: llama.cpp 0c1e570 ggml/src/ggml-backend.cpp:969, 1662
        `ggml_backend_sched_compute_splits`, which copies only after what came before is done.
        """
        passes = self.stepping.passes(step.tokens)
        timers = list(self.devices)
        beside = {HOST: 0.0, COPIES: 0.0, CROSSINGS: 0.0}
        copied_from = self.hosted.copied_from
        if self.copied is None or copied_from is None or step.tokens / passes < copied_from:
            beside[HOST] = self.host.seconds(step)
        else:
            timers.append(self.copied)
            beside[COPIES] = self._copies_s(self.copied, step, passes)
        if self.head is not None:
            beside[HOST] += self.head.seconds(step)
        beside[CROSSINGS] = passes * self.hosted.crossings * self.hosted.crossing_s
        each = [timer.parts(step) for timer in timers]
        return {part: sum(seconds[part] for seconds in each) for part in PARTS} | beside

    def _on_host_s(self, step: Step) -> float:
        seconds = self.host.seconds(step)
        return seconds + (self.head.seconds(step) if self.head is not None else 0.0)

    def _copies_s(self, copied: StepTimer, step: Step, passes: int) -> float:
        """Of weights that tokens chose, for each pass, and of cached keys and values once."""
        weights = passes * copied.weight_bytes(step.tokens / passes)
        before = step.prompt_pairs / step.prompt_tokens if step.prompt_tokens else 0.0
        cached = copied.cached_bytes(step.cached_tokens + passes * before)
        return (weights + cached) / self.copied_bytes_per_s


def hosted_timer(
    served: Served,
    hosted: Hosted,
    *,
    stepping: Stepping,
    link_bytes_per_s: float,
) -> HostedTimer:
    """The timer of `served` on the GPUs and the host of `hosted`.

    Args:
        link_bytes_per_s: of pinned memory to a GPU.
    """
    cards = served.gpu.beside or (served.gpu,) * (1 + max((n for n, _ in hosted.parts), default=0))
    on_host = replace(served, gpu=hosted.host)
    host_stepping = replace(stepping, rates=hosted.rates)

    def on(gpu: GpuSpec, part: ModelPart) -> StepTimer:
        of_card = replace(served, gpu=gpu)
        return step_timer(of_card, stepping=stepping, reduction_s=_alone_s, part=part)

    def by_host(part: ModelPart) -> StepTimer:
        return step_timer(on_host, stepping=host_stepping, reduction_s=_alone_s, part=part)

    nothing = ModelPart(
        layers=(0,) * len(hosted.on_host.layers),
        linears=({},) * len(hosted.on_host.layers),
        scores=True,
    )
    return HostedTimer(
        devices=tuple(on(cards[number], part) for number, part in hosted.parts),
        host=by_host(hosted.on_host),
        copied=None if hosted.copied_from is None else on(cards[0], hosted.on_host),
        head=by_host(nothing) if hosted.scores_on_host else None,
        hosted=hosted,
        copied_bytes_per_s=hosted.shared_bytes_per_s or hosted.copied_share * link_bytes_per_s,
    )


def _alone_s(num_bytes: float) -> float:
    return 0.0
