"""Seconds of one step that verifies drafts, and of what drafts the next ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from whichlora.serving.base import Served, Stepping
from whichlora.serving.drafted import Drafts
from whichlora.serving.drafts import STATES_READ, drafting_model
from whichlora.serving.step_time import PARTS, Step, StepTimer, joined_product, step_timer
from whichlora.spec.layer import Linear

# Of the log of a step's time with drafts, beside that of a step without. Kind: measured: two
# published speeds, with stated lengths of 2.64 and 5, are 14 and 24 % lower than predicted
# (Qwen3.6-27B-FP8 on an H200 by vLLM, in 16 bit on an A100 by SGLang 0.5.17).
DRAFTS_DEVIATION = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingTimer:
    """Times the steps of a model whose tokens are drafted.

    Args:
        verifying: of the model, which reads all drafts of a sequence at once.
        first, further: of what drafts: over the tokens that were verified, then one by one; None
            where drafts are copied from texts.
    """

    verifying: StepTimer
    first: StepTimer | None
    further: StepTimer | None
    passes: int

    @property
    def stepping(self) -> Stepping:
        return self.verifying.stepping

    @property
    def deviation(self) -> float:
        """Of the log of a step's time."""
        return math.hypot(self.verifying.deviation, DRAFTS_DEVIATION)

    def seconds(self, step: Step) -> float:
        """Of `step`, and of the drafts for the next one.

        Kind: estimate: what drafts has no time of the host's own, and a table of drafts is one
        chain. Source: vLLM 0.33.0 v1/spec_decode/llm_base_proposer.py `propose`, v1/worker/gpu/
        spec_decode/target_dependent_ar/speculator.py; SGLang 0.5.23
        srt/speculative/eagle_worker_v2.py.
        """
        return self.verifying.seconds(step) + self._drafting(step)

    def _drafting(self, step: Step) -> float:
        if self.first is None or self.further is None:
            return 0.0
        drafting = self.first.seconds(step)
        if step.decoding and self.passes > 1:
            alone = Step(step.decoding, step.cached_tokens, step.decoding)
            drafting += (self.passes - 1) * self.further.seconds(alone)
        return drafting

    def parts(self, step: Step) -> dict[str, float]:
        """Seconds of `step` by kind of work, which add up to it."""
        parts = dict(zip(PARTS, self.verifying.parts(step).values(), strict=True))
        return {**parts, "drafts": self._drafting(step)}


def drafting_timer(
    served: Served,
    drafts: Drafts,
    *,
    stepping: Stepping,
    reduction_s: Callable[[float], float],
    exchange_s: Callable[[float], float] = float,
) -> DraftingTimer:
    """The timer of `served`, whose tokens are drafted, on one of the engine's equal GPUs.

    Args: as of `step_timer`.
    """

    def timer(asked: Served, steps: Stepping) -> StepTimer:
        return step_timer(asked, stepping=steps, reduction_s=reduction_s, exchange_s=exchange_s)

    verifying = replace(timer(served, stepping), queries=drafts.queries)
    model = drafting_model(served, drafts)
    if model is None:
        return DraftingTimer(verifying=verifying, first=None, further=None, passes=0)
    of_draft = replace(served, model=model, targets=())
    alone = replace(stepping, step_s=0.0, sequence_s=0.0, copied_token_s=0.0, plans_ahead=False)
    further = timer(of_draft, alone)
    if drafts.by != "model":  # a matrix joins the model's states with those of the draft
        states = STATES_READ if drafts.by == "eagle3" else 2
        joint = Linear(
            name="joint",
            in_features=states * served.model.hidden_size,
            out_features=model.hidden_size,
            reads="joint_in",
            quantisable=False,
        )
        products = (*further.products, joined_product(joint, of_draft, alone))
        further = replace(further, products=products)
    first = replace(further, queries=drafts.queries, samples_all=False)
    return DraftingTimer(verifying=verifying, first=first, further=further, passes=drafts.passes)
