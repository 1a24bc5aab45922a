"""A plain loop whose step is a function of its own, called once per batch.

    def train_step(batch):
        outputs = model(**batch)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

All else is as in `loop`: `outputs` holds the logits and the graph through the backward and the
optimizer's step. A function's variables go when it returns, so that the next forward finds none.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.run import RunConfig
from whichlora.trainers import loop
from whichlora.trainers.base import OutputsHeld


def _outputs_held(run: RunConfig) -> OutputsHeld:
    return "until_step_ends"


TRAINER = replace(
    loop.TRAINER,
    name="loop-function",
    summary="a plain loop whose step is a function that holds `outputs`",
    outputs_held=_outputs_held,
)
