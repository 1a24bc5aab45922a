"""The model of one GPU that has some of the layers, and perhaps the embedding or the head."""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.memory.step import TrainingStep
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import LayerGroup

_LOSS_HEADS = ("hf", "liger")


def placed_groups(model: ModelSpec) -> list[tuple[LayerGroup, tuple[int, ...]]]:
    """Each group of equal layers with their places; in order where nobody said them."""
    placed, begin = [], 0
    for group in model.groups:
        places = group.positions or tuple(range(begin, begin + group.count))
        placed.append((group, places))
        begin += group.count
    return placed


def _groups_in(model: ModelSpec, layers: range) -> tuple[LayerGroup, ...]:
    groups: list[LayerGroup] = []
    for group, places in placed_groups(model):
        inside = tuple(place - layers.start for place in places if place in layers)
        groups.append(replace(group, count=len(inside), positions=inside))
    filled = tuple(group for group in groups if group.count)
    return filled or (groups[0],)


def part_of_model(
    model: ModelSpec, layers: range, *, embeds: bool, ends: bool, scores: bool
) -> ModelSpec:
    """The part of `model` with `layers`, in whose place it has a group of none.

    Args:
        embeds: it has the tables that tokens are looked up in.
        ends: it has the last norm.
        scores: it has the head.

    Kind: exact. Source: parameters by module of transformers 5.23.
    """
    head = model.head
    share = len(layers) / model.num_hidden_layers
    tables = model.embeddings
    if not embeds:
        tables = tuple(replace(table, rows=0, width=0) for table in tables)
    return replace(
        model,
        groups=_groups_in(model, layers),
        embeddings=tables,
        embedding_norms=model.embedding_norms if embeds else (),
        embedding_dropouts=model.embedding_dropouts if embeds else (),
        final_norms=model.final_norms if ends else (),
        final_dropouts=model.final_dropouts if ends else (),
        head=head if scores else None,
        head_tied=model.head_tied and embeds and scores,
        buffer_bytes=round(model.buffer_bytes * share),
        older_buffers=tuple((until, round(size * share)) for until, size in model.older_buffers),
    )


def check_can_be_parted(step: TrainingStep, name: str) -> None:
    """Refuse models whose layers do not stand in one row between an embedding and a head.

    Raises:
        ConfigError: two stacks, shared layers, a tower beside the text, inputs of every layer.
    """
    model = step.model
    rows = {group.stack for group in model.groups}
    beside = model.other_params or model.around_linears or model.layer_input_norm
    is_row = len(rows) == 1 and not any(group.shared for group in model.groups)
    attentions = (attention for layer, _ in model.layers() for attention in layer.attentions)
    hands_on = any(each.sparse is not None and each.sparse.hands_on for each in attentions)
    if not is_row or beside or model.head is None or step.shares_keys or hands_on:
        raise ConfigError(
            f"parallel: {name} is modelled for decoders whose layers stand in one row between the "
            f"embedding and the head, which {model.name} is not; use fsdp"
        )
    if step.run.loss_head not in _LOSS_HEADS:
        other = [head for head in _LOSS_HEADS if head in step.trainer.loss_heads]
        advice = (
            " or ".join(other) or f"ddp, fsdp or zero: trainer {step.trainer.name} has no other"
        )
        raise ConfigError(
            f"loss_head: {step.run.loss_head} is not modelled with parallel {name}; use {advice}"
        )
