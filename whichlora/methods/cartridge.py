"""Cartridges: the cache of keys and values of a text, trained, of which the first tokens stay.

Eyuboglu et al. 2025, arXiv:2506.06266; peft 0.21.2 `tuners/cartridge`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from whichlora.errors import ConfigError
from whichlora.methods import prefix_tuning, prompt_tuning
from whichlora.methods.base import OuterTensor
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

_FROZEN = Option(
    name="num_frozen_tokens",
    summary="of the first of these tokens, which stay",
    default=1,
    least=0,
)
_OPTIONS = (*prompt_tuning.OPTIONS, _FROZEN)


def outer_tensors(
    model: ModelSpec, *, tokens: int = 20, frozen: int = 1
) -> tuple[OuterTensor, ...]:
    """The trained rows and those that stay, in the layout of prefix tuning. Kind: exact.

    Source: `CartridgeEncoder.__init__`.
    """
    (table,) = prefix_tuning.outer_tensors(model, tokens=tokens - frozen)
    first = replace(table, name="cartridge, first tokens", rows=frozen, frozen=True)
    return replace(table, name="cartridge"), *((first,) if frozen else ())


def with_options(run: RunConfig) -> dict[str, Any]:
    tokens = prompt_tuning.num_virtual_tokens(run)
    frozen = _FROZEN.whole(run.method_options)
    if frozen >= tokens:
        raise ConfigError(
            f"num_frozen_tokens must be below num_virtual_tokens, {tokens}, got {frozen}"
        )
    bound = partial(outer_tensors, tokens=tokens, frozen=frozen)
    return {"prefix_tokens": tokens, "outer_tensors": bound}


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    return ("cartridge: without gradient checkpointing, which would drop its keys and values",)


METHOD = replace(
    prefix_tuning.METHOD,
    name="cartridge",
    summary="prefix tuning that starts as the cache of a text, its first token frozen",
    peft_class="peft.CartridgeConfig",
    peft_config=partial(prompt_tuning.peft_config, options=_OPTIONS),
    read_peft=partial(prompt_tuning.read_peft, options=_OPTIONS),
    options=_OPTIONS,
    with_options=with_options,
    find_targets=partial(prefix_tuning.no_targets, method="cartridge"),
    outer_tensors=outer_tensors,
    notes=notes,
)
