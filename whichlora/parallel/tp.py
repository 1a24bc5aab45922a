"""Tensor parallelism of transformers: every matrix is divided, the hidden states are whole.

Source: transformers 5.23 `distributed/tensor_parallel.py`, `base_model_tp_plan` of its configs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.memory import loss
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.lasting import ACCUMULATED
from whichlora.memory.step import TrainingStep
from whichlora.methods import lora
from whichlora.parallel.base import Message, Moments, RankKind, Spread, Strategy
from whichlora.parallel.division import COLUMNS, PLANNED, ROWS, WITHOUT_PLAN, divided_model
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count, added, largest
from whichlora.spec.options import Option
from whichlora.spec.run import USUAL_HEAD
from whichlora.spec.targets import adapted

PARTIAL_SUM = Fact(
    part="temporary",
    what="a rank's part of a sum, and the sum",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="compute_bytes",
    why="the all-reduce of a product divided by rows makes a new tensor",
    source="torch DTensor redistribute: funcol.all_reduce",
)
GATHERED_LOGITS = Fact(
    part="logits_and_loss",
    what="logits while they are gathered, beyond those of the loss",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="compute_bytes",
    count="2 + 1 / ranks, less the logits of the loss",
    why="a rank's own columns, what the gather puts one after the other, and the columns in order",
    source="torch 2.13 _functional_collectives.py _maybe_view_chunk_cat",
)
WHOLE_TABLE_GRADIENT = Fact(
    part="gradients",
    what="gradient of the whole token embedding",
    shape="[vocab_size, hidden_size]",
    dtype="of the parameter",
    why="every rank makes all rows, as a part of a sum that the optimizer's step reduces",
    source="torch DTensor embedding_dense_backward: placement Partial",
)


def _table_bytes(step: TrainingStep, spread: Spread) -> int:
    """Gradient of the whole token embedding, of which a rank keeps a part of the rows.

    Kind: exact. Source: torch 2.13 `distributed/tensor/_ops/_embedding_ops.py`; fake tensors.
    """
    if not step.method.trains_base:
        return 0
    return step.model.embeddings[0].num_params * spread.size * step.param_bytes


def _gathered_logits(step: TrainingStep, spread: Spread, entries: Sequence[Entry]) -> Entry:
    """Exceeds the loss's own memory only where logits are not widened after the gather.

    Kind: exact. Source: torch 2.13 `_functional_collectives.py`, `_maybe_view_chunk_cat`: ranks
    are gathered one after the other, and their columns joined by `torch.cat`; fake tensors.
    """
    vocab_bytes = loss.logit_width(step.model) * step.dtypes.compute_bytes
    gathering = step.tokens * (2 * vocab_bytes + vocab_bytes // spread.size)
    of_loss = added(entry.num_bytes for entry in entries if entry.fact is loss.LOSS_FORWARD)
    return Entry(GATHERED_LOGITS, largest(gathering - of_loss, 0))


def _split(rank: RankKind, spread: Spread) -> tuple[RankKind, ...]:
    divided = divided_model(rank.step.model, spread.size)
    # `initialize_tensor_parallelism` of transformers 5.23 makes a device_map
    dtypes = replace(rank.step.dtypes, loads_at_once=True)
    return (
        replace(
            rank,
            at_rest=replace(rank.at_rest, model=divided),
            step=replace(rank.step, model=divided, dtypes=dtypes),
        ),
    )


def _moments(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    step = rank.step
    like = 0 * step.tokens
    summed = Entry(PARTIAL_SUM, step.tokens * step.model.hidden_size * step.dtypes.compute_bytes)
    whole = Entry(WHOLE_TABLE_GRADIENT, _table_bytes(step, spread) + like)
    changed = dict(moments)
    if "layer_forward" in changed:
        changed["layer_forward"] = (*changed["layer_forward"], summed)
    in_loss = changed.get("loss_forward", ())
    has_logits = step.run.loss_head == USUAL_HEAD  # fused heads make them in tiles
    if has_logits and any(entry.fact is loss.LOSS_FORWARD for entry in in_loss):
        changed["loss_forward"] = (*in_loss, _gathered_logits(step, spread, in_loss))
    if not step.method.trains_base:
        return changed
    # the sum with the head's gradient is divided by rows; alone, the whole table stays a part of a
    # sum, which `_fused_adamw_` divides, so that both are there
    if "embedding_backward" in changed:
        changed["embedding_backward"] = (*changed["embedding_backward"], whole)
        return changed
    waiting = Entry(WHOLE_TABLE_GRADIENT, whole.num_bytes * (spread.size - 1) // spread.size)
    if step.accumulates:
        changed = {
            name: (*entries, waiting) if any(x.fact is ACCUMULATED for x in entries) else entries
            for name, entries in changed.items()
        }
    update = changed["optimizer_step"]
    tables = (waiting, whole) if step.accumulates else (waiting,)
    return changed | {
        "embedding_backward": (*update, *tables),
        "optimizer_step": (*update, whole),
    }


def _modules(step: TrainingStep, leaves: frozenset[str]) -> int:
    """Modules of all layers of whose results, or of whose inputs, every rank has a part."""
    return sum(
        count * linear.count
        for layer, count in step.model.layers()
        for linear in layer.linears
        if linear.name in leaves
    )


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    step = rank.step
    micro_steps = step.run.gradient_accumulation_steps
    width = step.dtypes.compute_bytes
    stream = step.tokens * step.model.hidden_size * width
    rows, columns = _modules(step, ROWS), _modules(step, COLUMNS)
    layers = step.model.num_hidden_layers
    # a checkpoint made again ends before the all-reduce after its last product (`early_stop`)
    recomputed = 0
    if step.run.gradient_checkpointing:
        recomputed = rows - (0 if step.run.use_reentrant else layers)
    adapters = sum(
        count * linear.count
        for layer, count in step.model.layers()
        for linear in adapted(layer, step.targets)
        if linear.name in COLUMNS
    )

    def message(what: str, collective: Any, num_bytes: Count, count: Count) -> Message:
        return Message(
            what=what,
            collective=collective,
            num_bytes=num_bytes,
            count=count * micro_steps,
            size=spread.size,
        )

    # `DTensor.from_local` reduces the gradient of the input of every module by itself: five times
    # a layer of Llama's, not twice
    sums = (
        message("sums of the ranks' products", "all_reduce", stream, rows + 1 + recomputed),
        message("gradients of the modules' inputs", "all_reduce", stream, columns + 1),
        message(
            "logits",
            "all_gather",
            step.tokens * loss.logit_width(step.model) * width,
            1,
        ),
    )
    if not step.method.trains_base:
        of_rank = step.tokens * step.r * width
        return (*sums, message("gradients of A·x of the adapters", "all_reduce", of_rank, adapters))
    table = Message(
        what="gradient of the token embedding",
        collective="reduce_scatter",
        num_bytes=_table_bytes(step, spread),
        count=1,
        size=spread.size,
        micro_steps=1,
    )
    return (*sums, table)


def _check(step: TrainingStep, spread: Spread) -> None:
    model, size = step.model, spread.size
    if model.model_type not in PLANNED:
        reason = "has no base_model_tp_plan in transformers 5.23"
        if model.model_type not in WITHOUT_PLAN:
            reason = "has a base_model_tp_plan that is not modelled"
        raise ConfigError(
            f"parallel: tp can't divide {model.name}, whose type {model.model_type} {reason}; "
            "use fsdp"
        )
    if step.run.quant not in (None, "none"):
        raise ConfigError(
            f"parallel: tp can't divide weights of quant {step.run.quant}: transformers divides "
            "quantised matrices of torchao and FP8 alone; use quant none, or fsdp"
        )
    for layer, _ in model.layers():
        for attention in layer.attentions:
            heads = attention.num_key_value_heads
            if heads % size or attention.num_attention_heads % size:
                raise ConfigError(
                    f"tp_size: {size} ranks can't share the {attention.num_attention_heads} query "
                    f"and {heads} key/value heads of {model.name} evenly; use a divisor of {heads}"
                )
    _check_adapters(step)


def _check_adapters(step: TrainingStep) -> None:
    if step.method.trains_base:
        return
    if step.method.forward is not lora.forward:
        raise ConfigError(
            f"parallel: tp divides adapters of lora alone in peft 0.21, not of {step.method.name}; "
            "use method lora"
        )
    if step.run.modules_to_save:
        raise ConfigError(
            "modules_to_save: what peft copies of a divided module is not modelled; leave it out "
            "with parallel tp"
        )
    # run on two gloo processes: the forward fails
    by_rows = sorted(set(step.targets) & ROWS)
    if by_rows:
        by_columns = {
            linear.name for layer, _ in step.model.layers() for linear in _by_columns(layer.linears)
        }
        raise ConfigError(
            f"target_modules: {', '.join(by_rows)} can't get adapters with parallel tp: peft 0.21 "
            "makes them for a rank's part of the input, transformers 5.23 takes that for all of "
            f"it, and the forward fails; use {', '.join(sorted(by_columns))}"
        )


def _by_columns(linears: tuple[Linear, ...]) -> tuple[Linear, ...]:
    return tuple(linear for linear in linears if linear.name in COLUMNS)


def _notes(step: TrainingStep, spread: Spread) -> tuple[str, ...]:
    return (
        "tp: torch 2.13 neither clips nor updates a list of divided and whole tensors together: "
        "set max_grad_norm 0, and give the optimizer a group of parameters for each",
    )


STRATEGY = Strategy(
    name="tp",
    summary="a part of every matrix on every GPU, one micro-batch for all",
    divides="model",
    options=(
        Option(name="tp_size", summary="GPUs among which every matrix is divided", default=None),
    ),
    size_option="tp_size",
    check=_check,
    split=_split,
    moments=_moments,
    update_share=lambda spread: 1 / spread.size,
    messages=_messages,
    loading=lambda step, spread: 0,  # its device map cuts tensors as they are read
    notes=_notes,
    replicas_refused="accelerate's ParallelismConfig takes no tp_size with replicas of the whole "
    "model; use tp+fsdp",
)
