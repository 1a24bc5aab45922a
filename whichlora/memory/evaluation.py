"""Bytes at the peak of an evaluation, which is a forward without a graph."""

from __future__ import annotations

from whichlora.memory import gradients, loss, moments, optimizer, step, weights
from whichlora.memory.training import Ledger
from whichlora.spec.numeric import Count, largest

_LASTING = (
    *weights.WEIGHTS.values(),
    gradients.ADAPTERS,
    gradients.FROZEN_ADAPTERS,
    gradients.SAVED_MODULES,
    optimizer.STATES,
)
_OF_A_MOMENT = {
    "layer_forward": (step.INPUTS, moments.LAYER_FORWARD),
    "loss_forward": (step.INPUTS, loss.LOSS_FORWARD, loss.HEAD_COPY),
}


def evaluation_bytes(checkpointed: Ledger) -> Count:
    """Live bytes at the peak of an evaluation: a layer's forward, or the loss.

    Gradients are None by then, nothing is kept for a backward, and no cache of keys is held.
    Kind: estimate: the hidden states around the layers are left out. Source: transformers 5.23
    `Trainer.evaluation_loop` with prediction_loss_only, `TrainingArguments.use_cache`.

    Args:
        checkpointed: the ledger of the same run with gradient checkpointing, whose layers run
            their forward without a graph.
    """
    peaks = []
    for moment, alive in _OF_A_MOMENT.items():
        total: Count = checkpointed.workspace_bytes
        for entry in checkpointed.moments[moment]:
            if entry.fact in _LASTING or entry.fact in alive:
                total = total + entry.num_bytes
        peaks.append(total)
    return largest(*peaks)
