"""What a run does where its user does not say.

The rule: settings that are left open are those that files and scripts of WhichLoRA state, with
which most runs fit: 16-bit weights under autocast and gradient checkpointing. What the trainer does
by itself may take many times as much, so `predict.assumed` says it beside the answer. Only where
the user states a release of the trainer's own library (`Trainer.dated_by`), which asks what that
release does, or where it has no other way (`Trainer.has_one_way`), are its own defaults those of
the run. What a file of another tool leaves out is read
by its importer, by the same facts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from whichlora.methods import get_method
from whichlora.serving import get_engine
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig, precision_of_weights
from whichlora.trainers import get_trainer
from whichlora.trainers.base import Defaults

OF_DTYPES = ("base_dtype", "adapter_dtype", "compute_dtype")


def is_dated(run: RunConfig) -> bool:
    """Whether the trainer's own defaults are those of the run."""
    trainer = get_trainer(run.trainer)
    return trainer.dated_by in dict(run.libraries) or (
        trainer.has_one_way and run.phase == "finetune"
    )


def own_settings(model: ModelSpec, run: RunConfig) -> dict[str, Any]:
    """What the trainer of `run` does by itself, of the settings that `run` leaves open."""
    trainer = get_trainer(run.trainer)
    if run.phase != "finetune" or trainer.defaults is None:
        return {}
    defaults = trainer.defaults(run.versions)
    settings = _own_precision(model, run, defaults)
    if run.gradient_checkpointing is None:
        settings["gradient_checkpointing"] = defaults.checkpoints and _can_checkpoint(model, run)
    return settings


def _own_precision(model: ModelSpec, run: RunConfig, defaults: Defaults) -> dict[str, Any]:
    """Of weights that are not quantised; others compute in 16 bit in any case."""
    method = get_method(run.method)
    is_open = run.precision == "auto" and all(getattr(run, name) == "auto" for name in OF_DTYPES)
    is_plain = (run.quant or method.base_quant) == "none"
    if not is_open or not is_plain or "quantization_config" in model.config:
        without = is_open and not defaults.autocasts_quantised
        return precision_of_weights("no", "bfloat16", narrows_adapters=True) if without else {}
    weights = defaults.loaded_dtype(run.versions, model.dtype)
    if defaults.autocasts:
        return {"base_dtype": weights} if weights == "float32" else {}
    narrows = method.trains_base or defaults.narrows_adapters
    return precision_of_weights("no", weights, narrows_adapters=narrows)


def _can_checkpoint(model: ModelSpec, run: RunConfig) -> bool:
    return model.supports_checkpointing and get_method(run.method).checkpoints


def with_open_settings(model: ModelSpec, run: RunConfig) -> RunConfig:
    """`run` with checkpointing where model and method have it, or with its trainer's defaults."""
    if is_dated(run):
        run = replace(run, **own_settings(model, run))
    if run.gradient_checkpointing is not None:
        return run
    is_on = run.phase == "inference" or _can_checkpoint(model, run)
    return replace(run, gradient_checkpointing=is_on)


def with_precision(run: RunConfig, gpu: GpuSpec, *, is_stored: bool = False) -> RunConfig:
    """`run` in fp16 where it names no precision and the GPU has no bf16, else in bf16.

    An engine's release may multiply weights of some forms in fp16 alone: then it is fp16 of these,
    as engines take the dtype of a checkpoint, and is open until the form is known.

    Args:
        is_stored: whether `run` has the form of the checkpoint already.
    """
    if run.precision != "auto":
        return run
    if not gpu.has_bf16:
        return replace(run, precision="fp16")
    if run.phase == "inference":
        engine = get_engine(run.serving)
        older = engine.libraries(run).older
        narrow = [
            quant for quant, since in engine.float16_alone.items() if older(engine.library, since)
        ]
        if narrow and not is_stored:
            return run
        if run.quant in narrow:
            return replace(run, precision="fp16")
    return replace(run, precision="bf16")
