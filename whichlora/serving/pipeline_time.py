"""Seconds of one step of a batch that passes the stages of a pipeline, as others do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from whichlora.serving.base import Served, Stepping
from whichlora.serving.stages import SENT_STATES, stages_of
from whichlora.serving.step_time import PARTS, Step, StepTimer, step_timer


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimer:
    """Times the steps of one of several equal batches.

    Args:
        stages: the timer of each; that of the last one has the head, and what the host does.
        sends_s: seconds of all sends from stage to stage, by the bytes of a batch's states.
        sent_bytes: of the states of one token.
        batches: that are under way at once, as many as stages where these are filled.
    """

    stages: tuple[StepTimer, ...]
    sends_s: Callable[[float], float]
    sent_bytes: int
    batches: int = 1

    @property
    def stepping(self) -> Stepping:
        return self.stages[-1].stepping

    @property
    def deviation(self) -> float:
        """Of the log of a step's time."""
        return max(stage.deviation for stage in self.stages)

    def seconds(self, step: Step) -> float:
        """Until a batch that does `step` may begin its next one.

        It passes all stages one after the other; where other batches fill them, the slowest stage
        sets the pace of all. Where the passes of a step are at different stages, it sets theirs.

        Kind: estimate: the batches are equal, a send waits for no other one, and the stages'
        hosts prepare a step while the GPUs before them work.
        Source: vLLM 0.33.0 v1/engine/core.py `step_with_batch_queue`, config/vllm.py:588
        max_concurrent_batches; SGLang 0.5.23 srt/managers/scheduler_pp_mixin.py `event_loop_pp`;
        llama.cpp 0c1e570 ggml/src/ggml-backend.cpp `ggml_backend_sched_compute_splits`.
        """
        each = [stage.seconds(step) for stage in self.stages]
        passing = sum(each) + self.sends_s(step.tokens * self.sent_bytes)
        at_once = self.stepping.passes_at_once
        if at_once is not None:
            passes = self.stepping.passes(step.tokens)
            return (passing + (passes - 1) * max(*each, passing / at_once)) / passes
        return max(passing, self.batches * max(each))

    def parts(self, step: Step) -> dict[str, float]:
        """Seconds of `step` by kind of work, which add up to it."""
        each = [stage.parts(step) for stage in self.stages]
        parts = {part: sum(seconds[part] for seconds in each) for part in PARTS}
        parts["sends"] = self.sends_s(step.tokens * self.sent_bytes)
        total, seconds = sum(parts.values()), self.seconds(step)
        overlapping = min(1.0, seconds / total)
        parts = {part: overlapping * each for part, each in parts.items()}
        return parts | {"pipeline_idle": max(0.0, seconds - total)}


def pipeline_timer(
    served: Served,
    *,
    stepping: Stepping,
    reduction_s: Callable[[float], float],
    sends_s: Callable[[float], float],
) -> PipelineTimer:
    """The timer of `served` on the stages of `stepping`.

    Args:
        reduction_s: seconds of an all-reduce among the ranks of a stage, by bytes.
        sends_s: as of `PipelineTimer`.
    """
    silent = replace(stepping, step_s=0.0, sequence_s=0.0, copied_token_s=0.0)
    stages = stages_of(served.model, stepping.stage_layers)
    cards = [served.gpu.beside[number] for number in stepping.stage_cards]
    return PipelineTimer(
        stages=tuple(
            step_timer(
                replace(served, model=stage.part, gpu=gpu),
                stepping=stepping if stage.is_last else silent,
                reduction_s=reduction_s,
            )
            for stage, gpu in zip(stages, cards or [served.gpu] * len(stages), strict=True)
        ),
        sends_s=sends_s,
        sent_bytes=SENT_STATES * served.model.hidden_size * served.dtypes.compute_bytes,
    )
