"""Prefix tuning: trained keys and values stand before those of each sequence in every layer.

Li and Liang 2021, arXiv:2101.00190; peft 0.21.2 `tuners/prefix_tuning`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from whichlora.errors import ConfigError
from whichlora.methods import prompt_tuning
from whichlora.methods.base import OuterTensor
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.layer import Attention
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

_PROJECTED = Option(
    name="prefix_projection", summary="two matrices make the prefix in training", default=False
)
_HIDDEN = Option(
    name="encoder_hidden_size",
    summary="width between these matrices; without it that of a layer's keys",
    default=None,
)
_OPTIONS = (*prompt_tuning.OPTIONS, _PROJECTED, _HIDDEN)
# whose config has n_heads, which `_prepare_prompt_learning_config` does not look for
_HEADS_NOT_FOUND = ("dbrx", "mpt")


def outer_tensors(
    model: ModelSpec, *, tokens: int = 20, projected: bool = False, hidden: int | None = None
) -> tuple[OuterTensor, ...]:
    """One table with the keys and values of all layers, a row for each token. Kind: exact.

    With a projection it is made of a smaller table by two matrices, and it alone is saved.
    Source: `PrefixEncoder.__init__`; `_prepare_prompt_learning_config` on grouped keys.
    """
    key_width = model.groups[0].layer.attentions[0].k_width
    width = 2 * model.num_hidden_layers * key_width
    made = OuterTensor(
        name="prefix embedding",
        dims="num_virtual_tokens, num_hidden_layers 2 num_key_value_heads head_dim",
        rows=tokens,
        width=width,
        frozen=projected,
        served_only=projected,
    )
    if not projected:
        return (made,)
    inner = hidden or key_width
    first = OuterTensor(
        name="prefix embedding, before its projection",
        dims="num_virtual_tokens, num_key_value_heads head_dim",
        rows=tokens,
        width=key_width,
        training_only=True,
    )
    return made, first, *_encoder((inner, key_width), (width, inner))


def _encoder(*shapes: tuple[int, int]) -> Iterator[OuterTensor]:
    for number, (rows, columns) in enumerate(shapes, 1):
        yield OuterTensor(
            name=f"projection: matrix {number}",
            dims="out_features, in_features",
            rows=rows,
            width=columns,
            is_factor=True,
            training_only=True,
        )
        yield OuterTensor(
            name=f"projection: matrix {number}, bias",
            dims="out_features",
            rows=1,
            width=rows,
            training_only=True,
        )


def no_targets(
    model: ModelSpec, target_modules: tuple[str, ...], *, method: str = "prefix-tuning"
) -> tuple[str, ...]:
    """No layer gets an adapter.

    Raises:
        ConfigError: `model` is no decoder, or PEFT has no keys and values in the shape of a layer.
    """
    prompt_tuning.no_targets(model, target_modules)
    if model.model_type in _HEADS_NOT_FOUND:
        raise ConfigError(
            f"method: {method} of {model.model_type}: PEFT finds no number of heads in its "
            "config; use method prompt-tuning or lora"
        )
    layers = [layer.attentions for layer, _ in model.layers()]
    widths = {attention.k_width for attentions in layers for attention in attentions}
    plain = all(len(attentions) == 1 and _takes_prefix(attentions[0]) for attentions in layers)
    if not plain or len(widths) > 1:
        raise ConfigError(
            f"method: {method} puts keys and values of one shape before those of all layers; "
            f"{model.name} has layers that take none, use method prompt-tuning or lora"
        )
    return ()


def _takes_prefix(attention: Attention) -> bool:
    own_keys = attention.projection in ("plain", "scaled_keys", "copied")
    return attention.kind == "softmax" and own_keys and attention.k_width == attention.v_width


def with_options(run: RunConfig) -> dict[str, Any]:
    tokens = prompt_tuning.num_virtual_tokens(run)
    hidden = _HIDDEN.of(run.method_options)
    bound = partial(
        outer_tensors,
        tokens=tokens,
        projected=_PROJECTED.flag(run.method_options),
        hidden=None if hidden is None else int(str(hidden)),
    )
    return {"prefix_tokens": tokens, "outer_tensors": bound}


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    return ("prefix-tuning: without gradient checkpointing, which would drop its keys and values",)


METHOD = replace(
    prompt_tuning.METHOD,
    name="prefix-tuning",
    summary="trained keys and values before each sequence's in every layer",
    peft_class="peft.PrefixTuningConfig",
    peft_config=partial(prompt_tuning.peft_config, options=_OPTIONS),
    read_peft=partial(prompt_tuning.read_peft, options=_OPTIONS),
    options=_OPTIONS,
    with_options=with_options,
    virtual_tokens=0,
    prefix_tokens=20,
    checkpoints=False,
    outer_tensors=outer_tensors,
    find_targets=no_targets,
    notes=notes,
)
