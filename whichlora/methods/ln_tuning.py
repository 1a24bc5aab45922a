"""LN tuning: a copy of every norm is trained, and nothing else.

Zhao et al. 2023, arXiv:2312.11420; peft 0.21.2 `tuners/ln_tuning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.errors import ConfigError
from whichlora.methods.base import (
    RANK_SETTINGS,
    Method,
    adapted_modules,
    read_options,
)
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import ALL_LINEAR, ATTENTION, RunConfig


def find_targets(model: ModelSpec, target_modules: tuple[str, ...]) -> tuple[str, ...]:
    """Leaf names of the norms of the stream: all of them, or those that are named.

    Raises:
        ConfigError: a name that no norm of the model has, or no norm has weights (OLMo).
    """
    norms = [*(norm for layer, _ in model.layers() for norm in layer.norms), *model.final_norms]
    names = {norm.name for norm in norms if norm.weight}
    if not names:
        raise ConfigError(
            f"method: ln-tuning of {model.name}: its norms have no weights; use method lora"
        )
    if set(target_modules) <= {ALL_LINEAR, ATTENTION}:
        return tuple(sorted(names))
    for target in target_modules:
        if target not in names:
            raise ConfigError(
                f"target_modules: {target!r} is no norm of {model.name}, which ln-tuning trains; "
                f"accepted are {', '.join(sorted(names))}; without it all of them"
            )
    return tuple(sorted(target_modules))


def peft_config(run: RunConfig) -> dict[str, Any]:
    return adapted_modules(run)


def read_peft(config: Any) -> Mapping[str, Any]:
    targets = config.target_modules
    if not isinstance(targets, set | list | tuple):
        raise ConfigError(f"LNTuningConfig.target_modules={targets!r}: a pattern is not modelled")
    return {"target_modules": tuple(sorted(targets)), **read_options(config, ())}


METHOD = Method(
    name="ln-tuning",
    summary="a trained copy of every norm",
    peft_class="peft.LNTuningConfig",
    peft_config=peft_config,
    read_peft=read_peft,
    parameter_prefix="ln_tuning_",
    ignores=RANK_SETTINGS | {"adapter_dtype"},
    find_targets=find_targets,
    merging=lambda base_bytes: 0,
)
