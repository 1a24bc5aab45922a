"""Prompt tuning: trained embeddings of virtual tokens stand before each sequence.

Lester et al. 2021, arXiv:2104.08691; peft 0.21.2 `tuners/prompt_tuning`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from whichlora.errors import ConfigError
from whichlora.methods.base import (
    PEFT_COMPARISON,
    RANK_SETTINGS,
    Method,
    OuterTensor,
    read_options,
    stated_options,
)
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

VIRTUAL_TOKENS = Option(
    name="num_virtual_tokens", summary="trained tokens before each sequence", default=20
)
OPTIONS = (VIRTUAL_TOKENS,)
IGNORES = RANK_SETTINGS | {"target_modules", "modules_to_save"}


def num_virtual_tokens(run: RunConfig) -> int:
    return VIRTUAL_TOKENS.whole(run.method_options)


def outer_tensors(model: ModelSpec, *, tokens: int = 20) -> tuple[OuterTensor, ...]:
    """One table, a row for each virtual token. Kind: exact. Source: `PromptEmbedding`."""
    return (
        OuterTensor(
            name="prompt embedding",
            dims="num_virtual_tokens, hidden_size",
            rows=tokens,
            width=model.embeddings[0].width,
        ),
    )


def no_targets(model: ModelSpec, target_modules: tuple[str, ...]) -> tuple[str, ...]:
    """No layer gets an adapter.

    Raises:
        ConfigError: `model` has an encoder, whose input PEFT treats otherwise.
    """
    if model.task != "causal-lm" or len({group.stack for group in model.groups}) > 1:
        raise ConfigError(
            f"method: what is trained before the layers is predicted for decoders; {model.name} is "
            "none, use method lora"
        )
    return ()


def with_options(run: RunConfig) -> dict[str, Any]:
    tokens = num_virtual_tokens(run)
    return {"virtual_tokens": tokens, "outer_tensors": partial(outer_tensors, tokens=tokens)}


def peft_config(run: RunConfig, *, options: Sequence[Option] = OPTIONS) -> dict[str, Any]:
    return {VIRTUAL_TOKENS.name: num_virtual_tokens(run)} | stated_options(run, options)


def read_peft(
    config: Any,
    *,
    options: Sequence[Option] = OPTIONS,
    plain: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
) -> Mapping[str, Any]:
    """Its `options`; a width of an encoder that PEFT filled in is left out."""
    accepted = {"num_transformer_submodules": (1,), **plain}
    stated = read_options(config, options, plain=accepted)["method_options"]
    filled_in = ("encoder_hidden_size", config.token_dim)
    return {"method_options": tuple(pair for pair in stated if pair != filled_in)}


METHOD = Method(
    name="prompt-tuning",
    summary="trained embeddings of tokens before each sequence",
    peft_class="peft.PromptTuningConfig",
    peft_config=peft_config,
    read_peft=read_peft,
    parameter_prefix="prompt_encoder.",
    merges=False,
    serve="as-trained",
    ignores=IGNORES,
    options=OPTIONS,
    with_options=with_options,
    virtual_tokens=20,
    outer_tensors=outer_tensors,
    find_targets=no_targets,
    learning_rate=1e-3,
    rate_source=PEFT_COMPARISON,
)
