"""Liger's kernels in the Trainer: `use_liger_kernel` and `liger_kernel_config`.

Source: transformers 5.23 `TrainingArguments`, integrations/liger.py `apply_liger_kernel`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from whichlora.errors import ConfigError
from whichlora.spec.kernels import NO_KERNELS, FusedKernels
from whichlora.spec.liger import LIGER_KERNELS, LOSSES, fused_kernels, liger_kernels, liger_notes
from whichlora.spec.options import Option
from whichlora.spec.run import USUAL_HEAD, LossHead, RunConfig

USE = Option(
    name="use_liger_kernel",
    summary="Liger's kernels in place of the model's norms, rotary positions, MLP and loss",
    default=None,
    kind=bool,
)
CONFIG = Option(
    name="liger_kernel_config",
    summary=f'which of them, as JSON: {{"rope": false}}; {", ".join(LIGER_KERNELS)}',
    default=None,
    kind=str,
)
OPTIONS = (USE, CONFIG)
# The loss alone → the switch, whose other kernels take no more memory.
AS_SWITCH: Mapping[str, bool] = {"liger": True}
_LOSS = "fused_linear_cross_entropy"
_LOSS_ALONE = {name: name == _LOSS for name in LIGER_KERNELS}


def kernel_config(run: RunConfig) -> Mapping[str, bool]:
    """`liger_kernel_config` of `run`.

    Raises:
        ConfigError: no JSON object of kernels and switches.
    """
    text = run.trainer_option(CONFIG.name)
    try:
        config = {} if text is None else json.loads(str(text))
    except ValueError:
        config = None
    is_switches = isinstance(config, dict) and all(isinstance(v, bool) for v in config.values())
    unknown = sorted(set(config) - set(LIGER_KERNELS)) if is_switches and config else []
    if not is_switches or unknown:
        raise ConfigError(
            f"{CONFIG.name}: {unknown[0] if unknown else text!r} is not accepted; accepted is "
            f'JSON such as {{"rope": false}}, of {", ".join(LIGER_KERNELS)}'
        )
    return dict(config or {})


def uses_liger(run: RunConfig) -> bool:
    """Whether Liger's kernels are asked for.

    Raises:
        ConfigError: kernels are named, and none is asked for.
    """
    uses = bool(run.trainer_option(USE.name))
    if run.trainer_option(CONFIG.name) is not None and not uses:
        raise ConfigError(f"{CONFIG.name}: needs {USE.name}; set it to true, or leave this out")
    return uses


def kernels(run: RunConfig, model_type: str) -> FusedKernels:
    """Those of the layers of a model of this type.

    Raises:
        ConfigError: they are not predicted.
    """
    return fused_kernels(model_type, _on(run, model_type))


def loss_of(run: RunConfig, model_type: str) -> LossHead:
    """Liger's loss where it replaces the model's; a loss that the run names stays."""
    is_usual = run.loss_head == USUAL_HEAD
    return "liger" if is_usual and _LOSS in _on(run, model_type) else run.loss_head


def _on(run: RunConfig, model_type: str) -> frozenset[str]:
    return liger_kernels(model_type, kernel_config(run)) if uses_liger(run) else frozenset()


def notes_of(run: RunConfig, model_type: str) -> tuple[str, ...]:
    """What Liger does not replace, and what is predicted otherwise."""
    return liger_notes(model_type, kernel_config(run)) if uses_liger(run) else ()


def kernels_beside_loss(run: RunConfig, model_type: str) -> FusedKernels:
    """Those of the layers, in a trainer that computes the loss itself.

    Raises:
        ConfigError: they are not predicted.
    """
    if not uses_liger(run):
        return NO_KERNELS
    config = {**kernel_config(run), **dict.fromkeys(LOSSES, False)}
    return fused_kernels(model_type, liger_kernels(model_type, config))


def arguments(run: RunConfig) -> Mapping[str, Any]:
    """The options as `TrainingArguments` takes them, `loss_head` liger among them."""
    options: dict[str, Any] = dict(run.trainer_options)
    if CONFIG.name in options:
        options[CONFIG.name] = dict(kernel_config(run))
    if run.loss_head == "liger" and not options.get(USE.name):
        options |= {USE.name: True, CONFIG.name: dict(_LOSS_ALONE)}
    return options
