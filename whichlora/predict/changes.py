"""One choice of a run made differently, in words and settings: what may change its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias, get_args

from whichlora.methods import COMPARED, get_method
from whichlora.predict.parallel_choice import candidates
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import (
    ATTENTION,
    BNB_QUANTS,
    FOUR_BIT_BNB,
    FP32_PRECISIONS,
    AttentionKernel,
    RunConfig,
)
from whichlora.trainers import get_trainer

Change: TypeAlias = tuple[str, dict[str, Any]]


def holds_inputs(run: RunConfig) -> bool:
    """Whether products keep inputs that no checkpoint without `use_reentrant` can drop.

    Source: bitsandbytes 0.50 `MatMul8bitLt.forward`, whose `ctx.tensors` no hook of saved tensors
    sees; `Libraries.linear4bit_keeps_input`.
    """
    four_bit = run.quant in FOUR_BIT_BNB and run.versions.linear4bit_keeps_input
    return run.quant == "int8" or four_bit


def methods(run: RunConfig) -> Iterator[Change]:
    for name in dict.fromkeys((*COMPARED, run.method)):
        if name == run.method:
            yield name, {}
        else:  # each with its own storage of the base
            plain = {"method_options": ()} if run.method_options else {}
            yield name, {"method": name, "quant": None, "prepare_kbit": None, **plain}


def strategies(run: RunConfig) -> Iterator[Change]:
    """Every strategy alone, with its default options but for the run's own."""
    if run.parallel.is_one_device:
        return
    yield run.parallel.strategy, {}
    for config in candidates(replace(run.parallel, options=())):
        if len(config.names) == 1 and config.strategy != run.parallel.strategy:
            yield config.strategy, {"parallel": config}


def _storage_changes(run: RunConfig) -> Iterator[Change]:
    """The storage of the base and its preparation, each on its own and both together.

    Whether a base is prepared follows from its storage and from the loss head where nobody says
    it, so every change names it.
    """
    if run.phase == "inference":
        name = "4-bit base weights" if run.quant == "none" else "base weights not quantised"
        yield name, {"quant": "nf4-dq" if run.quant == "none" else "none"}
        return
    prepared = bool(run.prepare_kbit) and run.quant in BNB_QUANTS
    if run.quant == "none":
        yield "4-bit base weights", {"quant": "nf4-dq", "prepare_kbit": False}
        name = "4-bit base weights, prepared for k-bit training"
        yield name, {"quant": "nf4-dq", "prepare_kbit": True}
        return
    name = "base weights not quantised" + ", nor prepared for k-bit training" * prepared
    yield name, {"quant": "none", "prepare_kbit": False}
    if run.quant in BNB_QUANTS:
        name = f"base {'not ' * prepared}prepared for k-bit training"
        yield name, {"prepare_kbit": not prepared}


def _loss_changes(run: RunConfig) -> Iterator[Change]:
    """Another loss head, and TRL's with the recipe that it belongs to."""
    held = {"prepare_kbit": run.prepare_kbit} if run.quant in BNB_QUANTS else {}
    if run.loss_head != "hf":
        if "hf" not in get_trainer(run.trainer).loss_heads:
            return
        yield "hf loss, with whole logits", {"loss_head": "hf"} | held
        return
    for head in ("trl-fused", "liger"):
        yield f"{head} loss, without logits", {"loss_head": head} | held
    if held.get("prepare_kbit"):
        name = "TRL's recipe: trl-fused loss, base not prepared for k-bit training"
        yield name, {"loss_head": "trl-fused", "prepare_kbit": False}


def changes(run: RunConfig, model: ModelSpec) -> Iterator[Change]:
    """One choice at a time, made the other way; `run` has its defaults filled in."""
    training = run.phase == "finetune"
    trains_base = training and get_method(run.method).trains_base
    if run.batch_size > 1:
        yield "half the batch", {"batch_size": run.batch_size // 2}
    if not trains_base:
        yield from _storage_changes(run)
    for attn in get_args(AttentionKernel):
        if attn != run.attn:
            yield f"{attn} attention", {"attn": attn}
    if not training:
        if run.prompt_len > 1:
            yield "half the prompt", {"prompt_len": run.prompt_len // 2}
        if run.max_new_tokens > 1 and model.task != "encoder":
            yield "half the new tokens", {"max_new_tokens": run.max_new_tokens // 2}
        return
    if run.seq_len > 1:
        yield "half the sequence", {"seq_len": run.seq_len // 2}
    checkpointing = run.gradient_checkpointing
    yield (
        "no gradient checkpointing" if checkpointing else "gradient checkpointing",
        {"gradient_checkpointing": not checkpointing},
    )
    if checkpointing and holds_inputs(run) and not run.use_reentrant:
        yield "reentrant checkpointing", {"use_reentrant": True}
    if run.precision in FP32_PRECISIONS or run.base_dtype == "float32":
        yield "bf16 with autocast", {"precision": "bf16", "base_dtype": "auto"}
    yield from _loss_changes(run)
    is_8bit = "8bit" in run.optimizer
    yield (
        "32-bit optimizer" if is_8bit else "8-bit optimizer",
        {"optimizer": "adamw_torch_fused" if is_8bit else "adamw_8bit"},
    )
    if not trains_base and run.target_modules != (ATTENTION,):
        yield "adapters on attention only", {"target_modules": (ATTENTION,)}
