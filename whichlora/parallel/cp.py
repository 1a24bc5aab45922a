"""Context parallelism: each rank has two parts of every sequence, and keys and values of all pass.

Source: accelerate 1.15 `Accelerator._prepare_cp`, `ParallelismConfig.cp_size`; torch 2.13
`_templated_ring_attention` with its load balance, by "allgather". It runs with FSDP version 2
alone, which shards parameters among these ranks, too.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.memory.step import TrainingStep
from whichlora.parallel.base import Message, RankKind, Spread, Strategy
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention
from whichlora.spec.numeric import Count, is_plain
from whichlora.spec.options import Option


def ringed(model: ModelSpec, size: int) -> ModelSpec:
    """`model` whose attention gets keys and values of `size` ranks.

    Kind: exact. Source: torch 2.13 `_templated_ring_attention`.
    """
    return model.with_attentions(lambda attention: replace(attention, ring=size))


def _split(rank: RankKind, spread: Spread) -> tuple[RankKind, ...]:
    def part(step: TrainingStep) -> TrainingStep:
        tokens = step.seq_len // spread.size
        return replace(step, model=ringed(step.model, spread.size), seq_len=tokens)

    return (replace(rank, at_rest=part(rank.at_rest), step=part(rank.step)),)


def _key_elements(attention: Attention) -> int:
    return attention.num_key_value_heads * (attention.head_dim + attention.v_head_dim)


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    """Keys and values are gathered in each pass, and their fp32 gradients go around once."""
    step, size = rank.step, spread.size
    run, width = step.run, step.dtypes.compute_bytes
    forwards = run.gradient_accumulation_steps * (1 + bool(run.gradient_checkpointing))
    messages = []
    for group in step.model.groups:
        elements = sum(map(_key_elements, group.layer.attentions))
        states: Count = step.tokens * elements
        for what, collective, num_bytes, count in (
            ("keys and values, forward", "all_gather", size * width * states, forwards),
            (
                "keys and values, backward",
                "all_gather",
                size * width * states,
                run.gradient_accumulation_steps,
            ),
            (
                "gradients of keys and values",
                "send",
                4 * states,
                size * run.gradient_accumulation_steps,
            ),
        ):
            messages.append(
                Message(
                    what=what,
                    collective=collective,  # type: ignore[arg-type]
                    num_bytes=num_bytes,
                    count=group.count * count,
                    size=size,
                )
            )
    return tuple(messages)


def _check(step: TrainingStep, spread: Spread) -> None:
    attentions = [attention for layer in step.model.layers() for attention in layer[0].attentions]
    if any(
        attention.kind != "softmax" or attention.sliding_window or attention.sparse
        for attention in attentions
    ):
        raise ConfigError(
            f"parallel: accelerate refuses context parallelism for {step.model.model_type}, whose "
            "layers do not all attend to all earlier tokens; use tp or fsdp"
        )
    is_ring = step.dtypes.uses_sdpa and all(
        attention.sdpa == "fused" and attention.causal and attention.position in ("rope", "none")
        for attention in attentions
    )
    if not is_ring or step.dtypes.compute_bytes != 2:
        raise ConfigError(
            "parallel: torch's ring attention has the flash kernel of SDPA alone, which "
            f"{step.model.model_type} with attn {step.run.attn} in {step.run.precision} does not "
            "run; use tp or fsdp"
        )
    parts = 2 * spread.size
    remainder = step.seq_len % parts
    if is_plain(remainder) and remainder:
        raise ConfigError(
            f"seq_len: {step.seq_len} can't be divided into two parts for each of {spread.size} "
            f"ranks; give a multiple of {parts}"
        )


STRATEGY = Strategy(
    name="cp",
    summary="a part of every sequence on every GPU, keys and values gathered (ring attention)",
    divides="model",
    options=(Option(name="cp_size", summary="GPUs that share each sequence", default=None),),
    size_option="cp_size",
    check=_check,
    split=_split,
    messages=_messages,
    needs_shards="accelerate runs context parallelism with FSDP version 2 alone; use cp+fsdp",
)
