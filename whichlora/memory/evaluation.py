"""Bytes at the peak of an evaluation, which is a forward without a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whichlora.memory import allocator, gradients, lasting, loss, moments, optimizer, weights
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import training_ledger
from whichlora.spec.numeric import Count, added, largest

_LASTING = (
    *weights.WEIGHTS.values(),
    gradients.ADAPTERS,
    gradients.FROZEN_ADAPTERS,
    gradients.SAVED_MODULES,
    optimizer.STATES,
    lasting.REFERENCE_WEIGHTS,
    lasting.INPUTS,
)
_OF_A_MOMENT = {"layer_forward": moments.LAYER_FORWARD, "loss_forward": loss.LOSS_FORWARD}

LAST_STATES = Fact(
    part="activations",
    what="the last layer's output",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="a variable of the model's forward holds it until the loss is done",
    source="transformers 5.23 LlamaForCausalLM.forward: outputs.last_hidden_state",
)


def evaluation_moments(
    checkpointed: TrainingStep, of_rank: Mapping[str, tuple[Entry, ...]] | None = None
) -> dict[str, tuple[Entry, ...]]:
    """What is alive in a layer's forward and in the loss of an evaluation.

    Gradients are None by then, nothing is kept for a backward, and no cache of keys is held.
    Autocast's cache keeps its copies of what is trained, but no copy of a frozen head.
    Kind: estimate: the hidden states around the layers are left out. Source: transformers 5.23
    `Trainer.evaluation_loop` with prediction_loss_only, `TrainingArguments.use_cache`; torch 2.13
    `autocast_mode.cpp`, `cached_cast`.

    Args:
        checkpointed: the same run with gradient checkpointing, whose layers run their forward
            without a graph; it accumulates no gradients.
        of_rank: its moments as a strategy divides them, whose own tensors are alive, too.
    """
    # without a graph nobody saves the tanh of capped logits
    uncapped = replace(checkpointed, model=replace(checkpointed.model, logit_softcap=None))
    alone = training_ledger(uncapped, is_spread=of_rank is not None).moments
    known = {entry.fact for entries in alone.values() for entry in entries}
    counted = alone if of_rank is None else of_rank
    hidden_bytes = checkpointed.model.hidden_size * checkpointed.dtypes.stream_bytes
    last = Entry(LAST_STATES, checkpointed.tokens * hidden_bytes)
    copies = tuple(x for x in counted.get("loss_forward", ()) if x.fact is moments.AUTOCAST_COPIES)
    alive = {}
    for moment, fact in _OF_A_MOMENT.items():
        if moment not in counted:  # a stage of a pipeline that has no loss
            continue
        entries = [
            x
            for x in counted[moment]
            if x.fact in _LASTING or x.fact is fact or x.fact not in known
        ]
        alive[moment] = (*entries, *copies)
    if "loss_forward" in alive:
        adapted = Entry(loss.ADAPTED_FORWARD, checkpointed.loss.evaluated_head_bytes)
        alive["loss_forward"] = (*alive["loss_forward"], last, adapted)
    return alive


def evaluation_bytes(checkpointed: TrainingStep) -> Count:
    """Live bytes at the peak of an evaluation: a layer's forward, or the loss.

    Kind: estimate. Source: `evaluation_moments`, whose argument this one is.
    """
    alive = evaluation_moments(checkpointed).values()
    workspace_bytes = allocator.workspace_bytes(checkpointed.gpu, training=True)
    return workspace_bytes + largest(
        *(added(entry.num_bytes for entry in entries) for entries in alive)
    )
