"""Prefix tuning: trained keys and values stand before those of each sequence in every layer.

Li and Liang 2021, arXiv:2101.00190; peft 0.21.2 `tuners/prefix_tuning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from whichlora.errors import ConfigError
from whichlora.methods import prompt_tuning
from whichlora.methods.base import OuterTensor, read_options
from whichlora.spec.architecture import Attention, ModelSpec
from whichlora.spec.run import RunConfig

# whose config has n_heads, which `_prepare_prompt_learning_config` does not look for
_HEADS_NOT_FOUND = ("dbrx", "mpt")


def outer_tensors(model: ModelSpec, *, tokens: int = 20) -> tuple[OuterTensor, ...]:
    """One table with the keys and values of all layers, a row for each token. Kind: exact.

    Source: `PrefixEncoder.__init__`; `_prepare_prompt_learning_config` on grouped keys.
    """
    attention = model.groups[0].layer.attentions[0]
    return (
        OuterTensor(
            name="prefix embedding",
            dims="num_virtual_tokens, num_hidden_layers 2 num_key_value_heads head_dim",
            rows=tokens,
            width=2 * model.num_hidden_layers * attention.k_width,
        ),
    )


def no_targets(model: ModelSpec, target_modules: tuple[str, ...]) -> tuple[str, ...]:
    """No layer gets an adapter.

    Raises:
        ConfigError: `model` is no decoder, or PEFT has no keys and values in the shape of a layer.
    """
    prompt_tuning.no_targets(model, target_modules)
    if model.model_type in _HEADS_NOT_FOUND:
        raise ConfigError(
            f"method: prefix-tuning of {model.model_type}: PEFT finds no number of heads in its "
            "config; use method prompt-tuning or lora"
        )
    layers = [layer.attentions for layer, _ in model.layers()]
    widths = {attention.k_width for attentions in layers for attention in attentions}
    plain = all(len(attentions) == 1 and _takes_prefix(attentions[0]) for attentions in layers)
    if not plain or len(widths) > 1:
        raise ConfigError(
            f"method: prefix-tuning puts keys and values of one shape before those of all layers; "
            f"{model.name} has layers that take none, use method prompt-tuning or lora"
        )
    return ()


def _takes_prefix(attention: Attention) -> bool:
    own_keys = attention.projection in ("plain", "scaled_keys", "copied")
    return attention.kind == "softmax" and own_keys and attention.k_width == attention.v_width


def with_options(run: RunConfig) -> dict[str, Any]:
    tokens = prompt_tuning.num_virtual_tokens(run)
    return {"prefix_tokens": tokens, "outer_tensors": partial(outer_tensors, tokens=tokens)}


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    return ("prefix-tuning: without gradient checkpointing, which would drop its keys and values",)


def read_peft(config: Any) -> Mapping[str, Any]:
    plain = {"num_transformer_submodules": (1,), "prefix_projection": (False,)}
    options = read_options(config, prompt_tuning.OPTIONS, plain=plain)["method_options"]
    return {"method_options": options}


METHOD = replace(
    prompt_tuning.METHOD,
    name="prefix-tuning",
    summary="trained keys and values before each sequence's in every layer",
    peft_class="peft.PrefixTuningConfig",
    read_peft=read_peft,
    with_options=with_options,
    virtual_tokens=0,
    prefix_tokens=20,
    checkpoints=False,
    outer_tensors=outer_tensors,
    find_targets=no_targets,
    notes=notes,
)
