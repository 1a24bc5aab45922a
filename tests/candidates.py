"""Predictions and measurements made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whichlora.spec.plan import DatasetConfig, Limits, Plan
from whichlora.spec.results import (
    Measurement,
    MemoryPrediction,
    Outcome,
    Prediction,
    TimePrediction,
)
from whichlora.spec.run import RunConfig
from whichlora.units import GiB

USABLE_BYTES = 20 * GiB
SERVE = RunConfig(model="org/good", phase="inference", prompt_len=16, max_new_tokens=8)


def plan(train: RunConfig, models: tuple[str, ...], **settings: Any) -> Plan:
    """A plan of one candidate for each of `models`, `train` and `SERVE`."""
    return Plan(
        source=Path("plan.yaml"),
        output_dir=Path("out"),
        gpu="cpu",
        models=models,
        inference=SERVE,
        inference_batch_sizes=(1,),
        prompt_lens=(16,),
        max_new_tokens=(8,),
        finetune=train,
        methods=("lora",),
        ranks=(16,),
        finetune_batch_sizes=(4,),
        limits=Limits(),
        dataset=DatasetConfig(),
        **settings,
    )


def prediction(
    run: RunConfig,
    *,
    num_params: int = 10**9,
    used_bytes: float = 8 * GiB,
    memory_factor: float = 1.1,
    time_s: float = 0.1,
    time_factor: float = 1.5,
    usable_bytes: int = USABLE_BYTES,
) -> Prediction:
    """A prediction whose intervals reach from value / factor to value * factor.

    Args:
        time_s: per step (fine-tuning) or per token (inference).
    """
    training = run.phase == "finetune"
    used = round(used_bytes)
    tokens = run.batch_size * run.seq_len if training else 1
    interval = (round(used / memory_factor), round(used * memory_factor))
    return Prediction(
        run=run,
        gpu="made-up",
        num_params=num_params,
        num_trainable_params=0,
        memory=MemoryPrediction(
            peak_allocated_bytes=used,
            peak_reserved_bytes=used,
            device_used_bytes=used,
            interval_bytes=interval,
            allocated_interval_bytes=interval,
            reserved_interval_bytes=interval,
            breakdown={"weights": used},
            moment="loss",
        ),
        time=TimePrediction(
            step_s=time_s if training else None,
            tokens_per_s=tokens / time_s,
            prefill_s=None if training else time_s,
            decode_s_per_token=None if training else time_s,
            time_per_token_s=time_s / tokens,
            interval_s=(time_s / time_factor, time_s * time_factor),
            breakdown={"products": time_s},
        ),
        usable_bytes=usable_bytes,
        fits=used * memory_factor <= usable_bytes,
        verdict="undecided",
        basis="made up",
    )


def measurement(
    run: RunConfig,
    *,
    used_bytes: float = 8 * GiB,
    step_s: float = 0.1,
    generate_s: float = 0.1,
    outcome: Outcome = "ok",
    detail: str = "",
) -> Measurement:
    training = run.phase == "finetune"
    ok = outcome == "ok"
    return Measurement(
        id=f"{run.model}-{run.phase}-{run.method}-{run.batch_size}",
        gpu="made-up",
        date="2026-11-21T00:00:00+00:00",
        config=run.to_dict(),
        outcome=outcome,
        detail=detail,
        step_s=(step_s,) if ok and training else (),
        batch_seq_len=(run.seq_len,) if ok and training else (),
        generate_s=(generate_s,) if ok and not training else (),
        peak_allocated_bytes=round(used_bytes) if ok else None,
    )
