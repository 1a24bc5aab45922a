"""Trainable tokens: some rows of the token table are trained, and all of it is copied for them.

peft 0.21.2 `tuners/trainable_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from whichlora.errors import ConfigError
from whichlora.methods.base import PEFT_COMPARISON, Method, OuterTensor
from whichlora.methods.prompt_tuning import IGNORES, no_targets
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig

_TOKENS = Option(
    name="token_indices", summary="ids of the trained tokens, joined with +", default="0", kind=str
)


def _indices(run: RunConfig) -> tuple[int, ...]:
    """The ids.

    Raises:
        ConfigError: one of them is no whole number from 0 on, or is named twice.
    """
    stated = _TOKENS.text(run.method_options)
    parts = stated.split("+")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            f"token_indices: {stated!r} is no list of token ids; give whole numbers joined with +, "
            "such as 128000+128001"
        )
    indices = tuple(int(part) for part in parts)
    if len(set(indices)) < len(indices):
        raise ConfigError(f"token_indices: {stated!r} names a token twice; name each once")
    return indices


def outer_tensors(model: ModelSpec, *, tokens: int = 1) -> tuple[OuterTensor, ...]:
    """One row for each token. Kind: exact. Source: `TrainableTokensLayer.update_layer`."""
    width = model.embeddings[0].width
    dims = "tokens, hidden_size"
    return (OuterTensor(name="rows of trained tokens", dims=dims, rows=tokens, width=width),)


def with_options(run: RunConfig) -> dict[str, Any]:
    return {"outer_tensors": partial(outer_tensors, tokens=len(_indices(run)))}


def peft_config(run: RunConfig) -> dict[str, Any]:
    return {_TOKENS.name: list(_indices(run))}


def read_peft(config: Any) -> Mapping[str, Any]:
    stated = config.target_modules
    names = [] if stated is None else [stated] if isinstance(stated, str) else list(stated)
    if any(name.rpartition(".")[2] != "embed_tokens" for name in names):
        raise ConfigError(
            f"TrainableTokensConfig.target_modules={config.target_modules!r} is not modelled; the "
            "token table is"
        )
    indices = "+".join(str(index) for index in sorted(config.token_indices))
    differs = indices and indices != _TOKENS.default
    return {"method_options": ((_TOKENS.name, indices),) if differs else ()}


def notes(run: RunConfig, adapts_experts: bool) -> tuple[str, ...]:
    if run.phase != "finetune" or _TOKENS.name in dict(run.method_options):
        return ()
    return (
        "token_indices is taken as 0; name the tokens that you train: --method-option "
        "token_indices=…",
    )


METHOD = Method(
    name="trainable-tokens",
    summary="some rows of the token table",
    peft_class="peft.TrainableTokensConfig",
    peft_config=peft_config,
    read_peft=read_peft,
    parameter_prefix="trainable_tokens_",
    ignores=IGNORES,
    options=(_TOKENS,),
    with_options=with_options,
    copies_table=True,
    outer_tensors=outer_tensors,
    find_targets=no_targets,
    merging=lambda base_bytes: base_bytes,
    notes=notes,
    learning_rate=0.2,
    rate_source=PEFT_COMPARISON,
)
