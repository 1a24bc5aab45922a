"""`device_map="auto"`: one process has all GPUs, each with some of the layers, one at a time.

Source: transformers 5.23 `integrations/accelerate.py`; accelerate 1.15 `dispatch_model`, whose
hooks move a layer's inputs to its GPU, and the model's outputs to the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from whichlora.errors import ConfigError
from whichlora.memory import loss
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.step import TrainingStep
from whichlora.methods import weight_dtype
from whichlora.parallel.base import Message, Moments, RankKind, Spread, Strategy
from whichlora.parallel.placement import (
    balanced_caps,
    is_quantised_on_device,
    modules_of,
    placed,
)
from whichlora.parallel.stages import check_can_be_parted, part_of_model
from whichlora.spec.numeric import Count
from whichlora.spec.run import RunConfig
from whichlora.units import format_bytes

RETURNED_LOGITS = Fact(
    part="logits_and_loss",
    what="copy of the logits on the first GPU",
    shape="[batch_size, seq_len, vocab_size]",
    dtype="compute_bytes, and fp32 where accelerate widens them",
    why="the model returns its outputs where its inputs were",
    source="accelerate dispatch_model: AlignDevicesHook(io_same_device=True)",
)
NEXT_CHECKPOINT = Fact(
    part="activations",
    what="checkpoint of the next GPU's first layer",
    shape="[batch_size, seq_len, hidden_size]",
    dtype="stream_bytes",
    why="a checkpoint keeps its argument where it was made, and copies it when it runs",
    source="transformers GradientCheckpointingLayer; accelerate AlignDevicesHook.pre_forward",
)
_OF_LAYERS: tuple[str, ...] = ("layer_forward", "layer_backward", "first_layer_backward")
_OF_HEAD = ("loss_forward", "loss_backward", "head_backward")


@dataclass(frozen=True, slots=True)
class Share:
    """What one GPU gets; GPUs that get nothing are left out."""

    gpu: int
    layers: range
    embeds: bool
    ends: bool
    scores: bool


_placed_once = lru_cache(maxsize=64)(placed)  # a check, a split and notes ask for the same


def shares(step: TrainingStep, gpus: int) -> tuple[Share, ...]:
    """What `device_map="auto"` puts on each GPU.

    Kind: exact. Source: `placement.placed`.

    Raises:
        ConfigError: the weights do not fit.
    """
    model = step.model
    element_bytes = 4 if weight_dtype(step.run) == "float32" else 2
    modules = modules_of(model, step.dtypes, element_bytes)
    caps = [float(step.gpu.memory_bytes)] * gpus
    quantised = is_quantised_on_device(step.dtypes)
    places = _placed_once(tuple(modules), tuple(balanced_caps(modules, caps, quantised=quantised)))
    if places is None:
        total = format_bytes(int(sum(module.num_bytes for module in modules)))
        raise ConfigError(
            f"parallel: device-map can't place the {total} of {model.name} on {gpus} x "
            f"{step.gpu.key}, and would leave layers to the host; use more GPUs, or quant nf4"
        )
    of_layers = [places[f"layer {number}"] for number in range(model.num_hidden_layers)]
    holding = []
    for gpu in range(gpus):
        numbers = [number for number, place in enumerate(of_layers) if place == gpu]
        begin = numbers[0] if numbers else model.num_hidden_layers
        share = Share(
            gpu,
            range(begin, begin + len(numbers)),
            embeds=places[modules[0].children[0].name] == gpu,
            ends=places["final norms"] == gpu,
            scores=places["head"] == gpu,
        )
        if numbers or share.embeds or share.ends or share.scores:
            holding.append(share)
    return tuple(holding)


def _split(rank: RankKind, spread: Spread) -> tuple[RankKind, ...]:
    kinds = []
    dtypes = replace(rank.step.dtypes, loads_at_once=True)
    for share in shares(rank.step, spread.size):
        part = part_of_model(
            rank.step.model,
            share.layers,
            embeds=share.embeds,
            ends=share.ends,
            scores=share.scores,
        )
        kinds.append(
            replace(
                rank,
                name=f"GPU {share.gpu}",
                ranks=(share.gpu,),
                at_rest=replace(rank.at_rest, model=part),
                step=replace(rank.step, model=part, dtypes=dtypes),
            )
        )
    return tuple(kinds)


def returned_logits(step: TrainingStep) -> tuple[Count, Count]:
    """Bytes of the logits on the first GPU: when they come, and while the caller holds them.

    Kind: exact. Source: accelerate 1.15 `AlignDevicesHook.post_forward`, `ConvertOutputsToFp32`.
    """
    dtypes = step.dtypes
    elements = step.tokens * step.model.vocab_size
    if step.run.loss_head != "hf":
        return 0 * elements, 0 * elements
    widens = step.trainer.widens_outputs and dtypes.under_autocast and dtypes.compute_bytes == 2
    width = 4 if widens else dtypes.compute_bytes
    held = step.trainer.outputs_held(step.run) != "until_loss"
    return elements * (dtypes.compute_bytes + 4 * widens), elements * width * held


def _moments(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    step, model = rank.step, rank.step.model
    left_out = () if model.num_hidden_layers else _OF_LAYERS
    if model.head is None:
        left_out = (*left_out, *_OF_HEAD)
    changed = {
        name: tuple(entry for entry in entries if entry.fact is not loss.KEPT_LOGITS)
        for name, entries in moments.items()
        if name not in left_out
    }
    is_first, is_last = not model.continues, bool(model.final_norms)
    if step.run.gradient_checkpointing and not (is_first and is_last):
        stream = step.tokens * model.stream_width * step.dtypes.stream_bytes
        beside = Entry(NEXT_CHECKPOINT, stream * ((not is_last) - (not is_first)))
        changed = {
            name: (*entries, beside) if name in ("layer_forward", "layer_backward") else entries
            for name, entries in changed.items()
        }
    if is_first:
        come, held = returned_logits(step)
        if model.head is not None:
            come = held
        changed = {
            name: entries if name == "loading" else (*entries, Entry(RETURNED_LOGITS, held))
            for name, entries in changed.items()
        }
        arriving = (*step.always, step.saved_in_layers, step.remainders)
        changed["outputs_return"] = (*arriving, Entry(RETURNED_LOGITS, come))
    return changed


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    step, model = rank.step, rank.step.model
    micro_steps = step.run.gradient_accumulation_steps
    stream = step.tokens * model.stream_width * step.dtypes.stream_bytes
    messages = [
        ("hidden states to the next GPU", stream, not model.final_norms),
        ("their gradient to the GPU before", stream, model.continues),
        ("hidden states to the head's GPU", stream, model.final_norms and model.head is None),
        ("logits to the first GPU", returned_logits(step)[0], model.head and model.continues),
    ]
    return tuple(
        Message(what=what, collective="send", num_bytes=num_bytes, count=micro_steps, size=2)
        for what, num_bytes, is_sent in messages
        if is_sent
    )


def _check(step: TrainingStep, spread: Spread) -> None:
    check_can_be_parted(step, "device-map")
    if len(spread.config.names) > 1 or spread.config.nodes > 1:
        raise ConfigError(
            "parallel: device-map is one process on one machine, which nothing is combined with; "
            "use pp, tp or fsdp"
        )
    shares(step, spread.size)


def _notes(step: TrainingStep, spread: Spread) -> tuple[str, ...]:
    given = shares(step, spread.size)
    notes = ["device-map: one GPU computes at a time, so more of them make no step faster"]
    empty = sorted(set(range(spread.size)) - {share.gpu for share in given})
    if empty:
        numbers = ", ".join(map(str, empty))
        notes.append(f"device-map: transformers' rule leaves GPU {numbers} without any layer")
    return tuple(notes)


def _model_arguments(run: RunConfig, spread: Spread) -> Mapping[str, Any]:
    return {"device_map": "auto"}


STRATEGY = Strategy(
    name="device-map",
    summary="some of the layers on every GPU, one GPU at work at a time",
    divides="model",
    order="one after the other",
    check=_check,
    split=_split,
    moments=_moments,
    update_share=lambda spread: 1.0,
    messages=_messages,
    loading=lambda step, spread: 0,
    training_arguments=lambda run, spread: {},
    model_arguments=_model_arguments,
    launcher="python",
    notes=_notes,
)
