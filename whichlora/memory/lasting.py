"""What is alive for a whole optimizer step: weights, adapters, states, gradients and the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from whichlora.memory import activations, optimizer
from whichlora.memory.entries import Entry, Fact, Group, Tensor, listed
from whichlora.memory.gradients import adapter_entries, outer_bytes
from whichlora.memory.layer_passes import STAGING, staging_bytes
from whichlora.memory.loading import unquantised_matrix_bytes, unsplit_weights
from whichlora.memory.weights import EMBEDDING_WEIGHTS, hosted_bytes, weight_entries
from whichlora.spec.numeric import added
from whichlora.spec.run import FOUR_BIT_BNB

if TYPE_CHECKING:
    from whichlora.memory.step import TrainingStep

INPUTS = Fact(
    part="activations",
    what="token ids, labels, mask, rotary tables",
    shape="[batch_size, seq_len]",
    dtype="int64",
    count="3",
    why="the batch, and cosines and sines that all layers share",
    source="transformers Trainer._prepare_inputs; RotaryEmbedding.forward",
)
ACCUMULATED = Fact(
    part="gradients",
    what="accumulated gradients",
    shape="[trained_params]",
    dtype="of the parameter",
    why="earlier micro-steps of this optimizer step left them",
    source="torch AccumulateGrad",
)
OUTER_COPIES = Fact(
    part="activations",
    what="16-bit copies of trained matrices before the first layer",
    shape="[those that the method lists]",
    dtype="compute_bytes",
    why="autocast casts them, and the gradient of what they read needs them",
    source="torch autocast_mode.cpp cached_cast; peft PromptEncoder.forward",
)
SCORES = Fact(
    part="optimizer_states",
    what="scores of the trained parameters",
    shape="[trained_params]",
    dtype="of the parameter",
    count="number of them that the method lists",
    why="PEFT reads them when it chooses ranks, and keeps them from step to step",
    source="peft RankAllocator.update_ipt",
)
REFERENCE_WEIGHTS = Fact(
    part="weights",
    what="weights of the reference",
    shape="[params]",
    dtype="of the trained weights",
    why="all weights are trained, so that the frozen reference is a model of its own",
    source="TRL 1.16 DPOTrainer.__init__, KTOTrainer.__init__: create_model_from_path",
)
LEFT_GRADIENT = Fact(
    part="gradients",
    what="gradient of the frozen token table",
    shape="[vocab_size, hidden_size]",
    dtype="embedding_bytes",
    why="the table that took its place is not frozen; the optimizer has not heard of it, so that "
    "nobody drops its gradient",
    source="litgpt 0.5.13 finetune/lora.py main; bitsandbytes StableEmbedding",
)
EXPANSION = Fact(
    part="temporary",
    what="room for a quantised matrix in 16 bit",
    shape="[out_features, in_features]",
    dtype="compute_bytes",
    why="one buffer, in which each forward expands its weights, is never freed",
    source="unsloth 2026.10.9 kernels/utils.py, fast_dequantize, WEIGHT_BUFFERS",
)


def whole_step(step: TrainingStep) -> tuple[Entry, ...]:
    """Entries of the whole step: weights, adapters and the optimizer's states."""
    weights, run = _weights_on_gpu(step), step.run
    unsplit = unsplit_weights(
        step.model,
        step.dtypes,
        step.gpu,
        expandable=run.expandable_segments,
        like=step.tokens,
    )
    entries = [*weights, unsplit]
    if not step.method.trains_base:
        entries += adapter_entries(step.model, run, step.dtypes, step.method, step.targets, step.r)
    states = optimizer.state_bytes(
        step.tensors,
        optimizer=run.optimizer,
        device_kind=step.gpu.kind,
        narrow_embeddings=step.trainer.narrows_embedding_states(run),
    )
    entries.append(Entry(optimizer.STATES, states + 0 * step.num_trained))
    if step.method.num_scores:
        entries.append(Entry(SCORES, step.method.num_scores * step.gradients.total))
    if step.has_reference and step.method.trains_base:
        copied = added(entry.num_bytes for entry in weights)
        entries.append(Entry(REFERENCE_WEIGHTS, copied))
    if step.gradients.left:
        entries.append(Entry(LEFT_GRADIENT, step.gradients.left + 0 * step.tokens))
    kernels = step.dtypes.kernels
    in_buffer = kernels.adapters and kernels.keeps_expanded and not step.dtypes.adapters_drop
    if in_buffer and step.dtypes.quant in FOUR_BIT_BNB:
        expanded = unquantised_matrix_bytes(step.model, step.dtypes)
        entries.append(Entry(EXPANSION, expanded + 0 * step.tokens))
    if run.gradient_checkpointing and step.trainer.offloads(run):
        buffers = step.trainer.staging_buffers(run)
        staged = staging_bytes(step.model, tokens=step.tokens, buffers=buffers)
        entries.append(Entry(STAGING, staged))
    entries += [replace(each, num_bytes=each.num_bytes + 0 * step.tokens) for each in step.beside]
    return tuple(entries)


def _weights_on_gpu(step: TrainingStep) -> list[Entry]:
    """Weights without the token table and the head where a trainer keeps them in host memory."""
    weights = weight_entries(step.model, step.dtypes, like=step.tokens)
    names = step.trainer.hosts(step.run)
    if not names:
        return weights
    hosted = hosted_bytes(step.model, step.dtypes, names)
    return [
        replace(entry, num_bytes=entry.num_bytes - hosted)
        if entry.fact is EMBEDDING_WEIGHTS
        else entry
        for entry in weights
    ]


def within_layers(step: TrainingStep) -> tuple[Entry, ...]:
    """Entries that live from the first layer's forward to its backward."""
    # `position_embeddings` of `LlamaModel.forward`: a local variable of the loop over layers.
    # The products of `apply_rotary_pos_emb` save them, or the `partial` of each checkpoint
    # holds them
    rotary = Tensor(
        "cosines and sines",
        constant=activations.rotary_bytes(step.model, step.dtypes, span=step.seq_len),
        dims="2, seq_len, rotary_dim",
        element_bytes=step.dtypes.stream_bytes,
    )
    return _lasting(step, rotary)


def around_layers(step: TrainingStep) -> tuple[Entry, ...]:
    """Those of them that are there before the first layer's forward, and after its backward."""
    return _lasting(step)


def _lasting(step: TrainingStep, *tables: Tensor) -> tuple[Entry, ...]:
    # `batch_samples` and `inputs` of transformers 5.23 `Trainer._run_epoch` name the batch
    # until the next is read; the `del inputs` of `training_step` drops its own name only
    of_source = 2 * 8 * (step.source_tokens - step.tokens)  # ids and mask
    batch = Tensor("token ids, labels, mask", 24, constant=of_source, element_bytes=8)
    # `Trainer` calls `zero_grad` once per optimizer step: `.grad` of earlier micro-steps
    # exists in the next forward
    accumulated = step.gradients.total if step.accumulates else 0 * step.num_trained
    return (
        *step.static,
        Entry(ACCUMULATED, accumulated),
        *_outer_copies(step),
        *step.waiting,
        listed(INPUTS, Group(tensors=(batch, *tables), **step.sized)),
    )


def _outer_copies(step: TrainingStep) -> tuple[Entry, ...]:
    factors = [t for t in step.method.outer_tensors(step.model) if t.is_factor]
    dtypes = step.dtypes
    if not factors or not dtypes.under_autocast or outer_bytes(dtypes) < 4:
        return ()
    copied = sum(factor.num_params for factor in factors) * dtypes.compute_bytes
    return (Entry(OUTER_COPIES, copied + 0 * step.tokens),)
