"""The moments of a rank whose gradients are taken away as they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from whichlora.memory import moments as one_device
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.images import TowerStep, with_images
from whichlora.memory.lasting import ACCUMULATED
from whichlora.memory.step import TrainingStep
from whichlora.memory.towers import PIXELS

# of `as_accumulated`; a tied head's part, which waits in autograd, is none of them
GRADIENTS = (ACCUMULATED, one_device.ALL_GRADIENTS)


def as_accumulated(step: TrainingStep) -> Mapping[str, tuple[Entry, ...]]:
    """The moments where each gradient is gone as soon as the next one comes.

    That is how they are where gradients of earlier micro-steps exist; what exists in their place
    is added by the stage.
    """
    run = replace(step.run, gradient_accumulation_steps=2)
    accumulating = replace(step, run=run)
    moments = with_images(accumulating, one_device.training_moments(accumulating))
    if step.model.tower is None:
        return moments
    pixels = TowerStep.of(step, step.model.tower).pixels  # of as many batches as the run's own
    return {
        name: tuple(pixels if entry.fact is PIXELS else entry for entry in entries)
        for name, entries in moments.items()
    }


def without(entries: Iterable[Entry], *facts: Fact) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries if not any(entry.fact is fact for fact in facts))
