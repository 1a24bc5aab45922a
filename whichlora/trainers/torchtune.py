"""torchtune's recipes of supervised fine-tuning: a loop whose step drops the logits.

    loss = self._loss_fn(logits, labels)
    del logits
    current_loss.backward()

With `optimizer_in_bwd` each parameter has an optimizer of its own, which runs when its gradient is
there, and drops it. Layers are counted as those of transformers.

Source: torchtune 0.6.1 recipes/full_finetune_single_device.py and lora_finetune_single_device.py,
`_loss_step`; training/memory.py `register_optim_in_bwd_hooks`; modules/loss; 0.7
`LinearCrossEntropyLoss`; training/_activation_offloading.py `OffloadActivations`.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.options import Option
from whichlora.spec.run import RunConfig
from whichlora.spec.versions import Libraries
from whichlora.trainers import loop
from whichlora.trainers.base import ChunkedLoss, Defaults, always, drops_outputs

IN_BACKWARD = Option(
    name="optimizer_in_bwd",
    summary="each parameter is updated when its gradient is there, which then goes",
    default=False,
)
OFFLOADS = Option(
    name="enable_activation_offloading",
    summary="inputs of checkpointed layers go to the host",
    default=False,
)
WHOLE = "CrossEntropyLoss"
_CHUNKED = {
    "CEWithChunkedOutputLoss": ChunkedLoss(parts=8),
    "LinearCrossEntropyLoss": ChunkedLoss(parts=8, in_loss=True),
}
LOSSES = tuple(_CHUNKED)
LOSS = Option(
    name="loss",
    summary="the cross entropy, of all tokens at once or in eight parts",
    default=WHOLE,
    choices=(WHOLE, *LOSSES),
)


COMPILES = Option(
    name="compile",
    summary="the loss in parts is compiled; layers are counted as they are",
    default=False,
)


def _in_backward(run: RunConfig) -> bool:
    return bool(run.trainer_option(IN_BACKWARD.name))


def _chunked_loss(run: RunConfig) -> ChunkedLoss | None:
    computed = _CHUNKED.get(str(run.trainer_option(LOSS.name)))
    compiles = bool(run.trainer_option(COMPILES.name))
    return None if computed is None else replace(computed, compiled=compiles)


def _offloads(run: RunConfig) -> bool:
    return bool(run.trainer_option(OFFLOADS.name))


def _defaults(libraries: Libraries) -> Defaults:
    """`dtype: bf16` and checkpoints of most of its configurations; nothing casts weights."""
    return Defaults(
        told_dtype="bfloat16", narrows_adapters=True, autocasts_quantised=False, checkpoints=True
    )


def _check(run: RunConfig) -> None:
    """What the recipes refuse. Source: their `__init__`."""
    faults = (
        (
            run.precision not in ("bf16-pure", "fp32", "tf32"),
            f"precision: trainer torchtune has bf16-pure and fp32, got {run.precision}",
        ),
        (
            _in_backward(run) and run.gradient_accumulation_steps > 1,
            "optimizer_in_bwd: needs gradient_accumulation_steps 1, got "
            f"{run.gradient_accumulation_steps}",
        ),
        (
            _in_backward(run) and run.method != "full",
            f"optimizer_in_bwd: is of method full, got {run.method}",
        ),
        (
            _in_backward(run) and run.parallel.gpus > 1,
            f"optimizer_in_bwd: is predicted on one GPU, got {run.parallel.gpus}",
        ),
        (
            _offloads(run) and not run.gradient_checkpointing,
            "enable_activation_offloading: needs gradient_checkpointing",
        ),
    )
    for is_wrong, text in faults:
        if is_wrong:
            raise ConfigError(f"{text}; leave it out")


TRAINER = replace(
    loop.TRAINER,
    name="torchtune",
    also_called={},
    summary="torchtune's recipes of supervised fine-tuning",
    steps="whichlora.tracer.without_steps:refuse",
    library_class="torchtune.recipe_interfaces.FTRecipeInterface",
    takes_images=False,
    options=(IN_BACKWARD, OFFLOADS, LOSS, COMPILES),
    outputs_held=drops_outputs,
    chunked_loss=_chunked_loss,
    updates_in_backward=_in_backward,
    offloads=_offloads,
    defaults=_defaults,
    has_one_way=True,
    keeps_base=always,
    check=_check,
    notes=lambda run: (),
)
