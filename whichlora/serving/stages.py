"""Stages of an engine's pipeline: the layers of each, and what the start of all of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whichlora.errors import ConfigError
from whichlora.memory.entries import Fact
from whichlora.memory.layer_bytes import keeps_keys
from whichlora.parallel.stages import part_of_model
from whichlora.serving.base import Served, Start
from whichlora.spec.architecture import ModelSpec

RECEIVED = Fact(
    part="activations",
    what="hidden states and residual that the stage before sends",
    shape="2 x [max_num_batched_tokens, hidden_size]",
    dtype="compute_bytes",
    why="graphs read them where they were captured, so they are there from the start",
    source="vLLM 0.33.0 v1/worker/gpu/model_runner.py:547 intermediate_tensors",
)
SENT_STATES = 2  # of each token, a hidden state and its residual; models/llama.py:399


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The part of a model that one rank of a pipeline has, all tensor-parallel ranks together.

    Args:
        number: from 1.
        part: without a table where another stage looks tokens up, without a head where another
            one scores; the whole model where there is one stage.
    """

    number: int
    part: ModelSpec

    @property
    def is_first(self) -> bool:
        return self.number == 1

    @property
    def is_last(self) -> bool:
        return self.part.head is not None


def stages_of(model: ModelSpec, layers: Sequence[int]) -> tuple[Stage, ...]:
    """The stages that have so many `layers` each.

    The first one looks tokens up, the last one has the last norm and the head. Of a tied table
    both have a copy.

    Kind: exact. Source: vLLM 0.33.0 `LlamaModel.__init__`, model_executor/models/llama.py:377-397,
    and `LlamaForCausalLM`, :502; SGLang 0.5.23 srt/models/llama.py, qwen2.py.
    """
    if len(layers) <= 1:
        return (Stage(number=1, part=model),)
    stages, begin = [], 0
    for number, count in enumerate(layers, start=1):
        is_last = number == len(layers)
        part = part_of_model(
            model,
            range(begin, begin + count),
            embeds=number == 1,
            ends=is_last,
            scores=is_last,
        )
        stages.append(Stage(number=number, part=part))
        begin += count
    return tuple(stages)


def received_bytes(stage: Stage, tokens: int, element_bytes: int) -> int:
    """What a stage keeps for the hidden states of `tokens` tokens. Kind: exact.

    Source: `RECEIVED`.
    """
    if stage.is_first:
        return 0
    return SENT_STATES * tokens * stage.part.hidden_size * element_bytes


def fullest(starts: Sequence[Start], option: str) -> Start:
    """Of the starts of all stages that of the one with the fewest blocks, which all have then.

    Kind: exact. Source: vLLM 0.33.0 `get_kv_cache_configs`, v1/core/kv_cache_planning.py:1580.

    Args:
        option: that states how many there are.
    """
    if len(starts) == 1:
        return starts[0]
    place = min(
        range(len(starts)),
        key=lambda each: (starts[each].pool.num_blocks, starts[each].pool.num_bytes),
    )
    start = starts[place]
    fault = start.fault and f"stage {place + 1} of {option} {len(starts)}: {start.fault}"
    return replace(start, stage=place + 1, fault=fault)


def check_stages(served: Served, option: str) -> None:
    """Refuse more stages than layers, and models whose layers do not stand in one row.

    Raises:
        ConfigError: one line, which names `option`.
    """
    stages, model = served.count(option) or 1, served.model
    if stages == 1:
        return
    if stages > model.num_hidden_layers:
        raise ConfigError(
            f"{option}: {model.name} has {model.num_hidden_layers} layers, too few for {stages} "
            "stages; give fewer"
        )
    if model.other_params > model.unloaded_params:
        raise ConfigError(
            f"{option}: not predicted for {model.name}, which is loaded with more than its text; "
            "use 1"
        )
    beside = model.around_linears or model.layer_input_norm or model.streams
    shares = any(group.shared or group.stack != "decoder" for group in model.groups)
    hands_on = any(keeps_keys(layer) for layer, _ in model.layers())
    if beside or shares or hands_on:
        raise ConfigError(
            f"{option}: not predicted for {model.name}, whose layers do not stand in one row "
            "between the embedding and the head; use 1"
        )


def stage_notes(
    start: Start, layers: Sequence[int], option: str, pools: Sequence[str] = ()
) -> list[str]:
    """How the layers are divided, and whose bytes are told; none where they are not.

    Args:
        pools: of the stages, in words, where their cards are unequal.
    """
    if len(layers) == 1:
        return []
    divided = " + ".join(map(str, layers))
    notes = [
        f"{option} {len(layers)}: {divided} layers; bytes are of stage {start.stage}, the fullest"
    ]
    return [*notes, f"pools of the stages: {', '.join(pools)}"] if pools else notes
