"""What a trainer is: who runs the steps of a fine-tuning, and what it holds between the passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from whichlora.spec.run import RunConfig

OutputsHeld = Literal["until_loss", "until_backward", "until_step_ends", "until_next_outputs"]


def _drops_outputs(run: RunConfig) -> OutputsHeld:
    return "until_loss"


def _no_notes(run: RunConfig) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Who runs the steps of a fine-tuning.

    Args:
        steps: dotted name of the function that runs a few steps of it, as
            `whichlora.profiler.finetune:measure_finetune` does; profiles and traces call it.
        library_class: dotted name of the class whose steps these are; empty where a script writes
            them out. An exporter states which class its tool runs.
        outputs_held: how long a variable of the caller holds what the model returns (logits among
            it): until there is a loss, until its backward is done, until the step with the
            optimizer's update is done, or until the outputs of the next step take their place.
        widens_outputs: under autocast the caller gets fp32 copies of the outputs.
        narrows_embedding_states: an 8-bit optimizer has 8-bit states of embeddings, too.
        clips_gradients: their norm is computed and cut before each optimizer step.
        notes: what a user must know of a run.
    """

    name: str
    summary: str
    steps: str
    library_class: str = ""
    outputs_held: Callable[[RunConfig], OutputsHeld] = _drops_outputs
    widens_outputs: bool = False
    narrows_embedding_states: bool = False
    clips_gradients: bool = False
    notes: Callable[[RunConfig], tuple[str, ...]] = _no_notes
