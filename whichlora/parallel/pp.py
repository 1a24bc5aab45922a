"""Pipeline parallelism, 1F1B: some of the layers on every GPU, several micro-batches under way.

Source: torch 2.13 `distributed/pipelining`, `Schedule1F1B` and `PipelineStage`; layers per stage as
transformers 5.23 `PipelineStage.layer_range_for_rank` divides them.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.step import TrainingStep
from whichlora.parallel.base import Message, Moments, RankKind, Spread, Strategy
from whichlora.parallel.stages import check_can_be_parted, part_of_model
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option

WAITING = Fact(
    part="activations",
    what="saved tensors of further micro-batches",
    shape="listed for one",
    dtype="listed for one",
    count="micro-batches under way, less one",
    why="their backward comes once the later stages have sent a gradient",
    source="torch Schedule1F1B: warmup_chunks = min(n_microbatches, num_stages - stage_index)",
)
OUTPUTS = Fact(
    part="activations",
    what="what the stage returned",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    count="micro-batches under way",
    why="fwd_cache holds it until its backward begins",
    source="torch _PipelineStageBase.forward_one_chunk",
)
BUFFERS = Fact(
    part="activations",
    what="buffers that hidden states and gradients are received in",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    count="one of each per micro-batch, less those that a checkpoint holds",
    why="made once, for all micro-batches of a step",
    source="torch PipelineStage: _RecvInfo.buffer of every chunk",
)


def layer_range(stage: int, stages: int, num_layers: int) -> range:
    """Layers of one stage; the last one has what is left over.

    Kind: exact. Source: transformers 5.23 `PipelineStage.layer_range_for_rank`.
    """
    each = num_layers // stages
    return range(stage * each, num_layers if stage == stages - 1 else (stage + 1) * each)


def under_way(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose forward is done or running, and whose backward is not.

    Kind: exact. Source: torch 2.13 `Schedule1F1B._step_microbatches`.
    """
    return min(micro_batches, stages - stage)


def _split(rank: RankKind, spread: Spread) -> tuple[RankKind, ...]:
    model, stages = rank.step.model, spread.size
    each = len(rank.ranks) // stages
    kinds = []
    for stage in range(stages):
        is_last = stage == stages - 1
        part = part_of_model(
            model,
            layer_range(stage, stages, model.num_hidden_layers),
            embeds=stage == 0,
            ends=is_last,
            scores=is_last,
        )
        prefix = "" if rank.name == "every rank" else f"{rank.name}, "
        kinds.append(
            replace(
                rank,
                name=f"{prefix}stage {stage}",
                ranks=rank.ranks[stage * each : (stage + 1) * each],
                at_rest=replace(rank.at_rest, model=part),
                step=replace(rank.step, model=part),
            )
        )
    return tuple(kinds)


def _stage(rank: RankKind) -> int:
    return int(rank.name.rpartition(" ")[2])


def _stream(step: TrainingStep) -> Count:
    return step.tokens * step.model.stream_width * step.dtypes.stream_bytes


def _moments(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    step, model, stage = rank.step, rank.step.model, _stage(rank)
    micro_batches = step.run.gradient_accumulation_steps
    num_under_way = under_way(stage, spread.size, micro_batches)
    stream = _stream(step)
    is_last = model.head is not None
    received = (int(model.continues) + int(not is_last)) * micro_batches
    kept = 0
    if model.continues and step.run.gradient_checkpointing:
        kept = num_under_way  # the first layer's checkpoint is the buffer itself
    buffers = Entry(BUFFERS, received * stream)
    waiting = (
        Entry(WAITING, (num_under_way - 1) * step.saved_for_backward.num_bytes),
        Entry(OUTPUTS, 0 * stream if is_last else num_under_way * stream),
        Entry(BUFFERS, -kept * stream),
    )
    left_out = () if is_last else ("loss_forward", "loss_backward", "head_backward")
    changed = {}
    for name, entries in moments.items():
        if name in left_out:
            continue
        if name == "loading":
            changed[name] = entries
        elif name == "optimizer_step":
            changed[name] = (*entries, buffers)
        else:
            changed[name] = (*entries, buffers, *waiting)
    return changed


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    step, model = rank.step, rank.step.model
    messages = (
        ("hidden states to the next stage", model.head is None),
        ("their gradient to the stage before", model.continues),
    )
    return tuple(
        Message(
            what=what,
            collective="send",
            num_bytes=_stream(step),
            count=step.run.gradient_accumulation_steps,
            size=2,
        )
        for what, is_sent in messages
        if is_sent
    )


def _check(step: TrainingStep, spread: Spread) -> None:
    check_can_be_parted(step, "pp")
    stages, micro_batches = spread.size, step.run.gradient_accumulation_steps
    if micro_batches < stages:
        raise ConfigError(
            f"gradient_accumulation_steps: {micro_batches} micro-batches are fewer than the "
            f"{stages} stages of pp, which torch's Schedule1F1B refuses; give {stages} or more"
        )
    if step.model.num_hidden_layers < stages:
        raise ConfigError(
            f"pp_size: {stages} stages for the {step.model.num_hidden_layers} layers of "
            f"{step.model.name}; give {step.model.num_hidden_layers} or fewer"
        )


def _notes(step: TrainingStep, spread: Spread) -> tuple[str, ...]:
    micro_batches = step.run.gradient_accumulation_steps
    idle = (spread.size - 1) / (micro_batches + spread.size - 1)
    return (
        f"pp: stages are idle {100 * idle:.0f} % of a step, with {micro_batches} micro-batches",
        "pp: transformers' own pp_size generates only; training runs under Schedule1F1B of "
        "torch.distributed.pipelining, whose step() needs return_outputs=False, else the last "
        "stage holds the logits of all micro-batches",
    )


STRATEGY = Strategy(
    name="pp",
    summary="some of the layers on every GPU, several micro-batches under way (1F1B)",
    divides="model",
    order="pipelined",
    options=(
        Option(name="pp_size", summary="stages that the layers are divided into", default=None),
    ),
    size_option="pp_size",
    check=_check,
    split=_split,
    moments=_moments,
    messages=_messages,
    notes=_notes,
)
