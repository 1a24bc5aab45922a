"""Answers that a trainer lets its model write between steps: a generation inside a fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry
from whichlora.memory.inference import Generation, inference_ledger
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import ROLLOUT, Ledger
from whichlora.parallel import list_strategies
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.numeric import Count
from whichlora.spec.parallel import ONE_GPU

_OF_TRAINING = ("weights", "adapters")  # parts that a generation shares with the steps


def check_rollout(job: ResolvedRun) -> None:
    """Refuse a rollout that is not predicted.

    Raises:
        ConfigError: of a model that is divided.
    """
    rollout = job.trainer.rollout(job.run) if job.run.phase == "finetune" else None
    if rollout is None:
        return
    if job.layout is not None and not all(
        strategy.keeps_weights for strategy, _ in job.layout.strategies
    ):
        whole = ", ".join(name for name, each in list_strategies().items() if each.keeps_weights)
        raise ConfigError(
            f"parallel: the answers that {job.trainer.name} lets the model write are predicted "
            f"where every GPU has all of its weights; use one of {whole}, or vllm_mode server"
        )


def rollout_job(job: ResolvedRun) -> ResolvedRun | None:
    """The generation of one rollout of `job`, as a run of its own; None where there is none."""
    rollout = job.trainer.rollout(job.run) if job.run.phase == "finetune" else None
    if rollout is None:
        return None
    run = replace(
        job.run,
        phase="inference",
        serve=None if job.method.trains_base else "as-trained",
        quant="none" if job.method.trains_base else job.run.quant,
        kv_cache="vllm" if rollout.by_engine else "dynamic",
        trainer="transformers",
        trainer_options=(),
        loss_head="hf",
        batch_size=rollout.batch_size,
        prompt_len=rollout.prompt_len,
        max_new_tokens=rollout.new_tokens,
        parallel=ONE_GPU,
    )
    return resolve(job.model, run, job.gpu)


def rollout_sizes(job: ResolvedRun, counts: Mapping[str, Count]) -> dict[str, Count]:
    """Sizes of the generation where the step has `counts` of `ResolvedRun.size_names`."""
    rollout = job.trainer.rollout(job.run)
    assert rollout is not None
    return {
        "batch_size": counts["batch_size"] * (rollout.batch_size // job.run.batch_size),
        "prompt_len": counts["seq_len"] - rollout.new_tokens,
        "max_new_tokens": rollout.new_tokens,
        "r": counts["r"],
    }


def with_rollout(counted: Ledger, step: TrainingStep, generation: Generation) -> Ledger:
    """`counted` and the moments of a generation beside what the training holds all the time.

    Kind: estimate: sampling's own copies of the last scores are left out.
    Source: TRL 1.16 `GRPOTrainer._generate_single_turn`: no gradients and no batch are there.
    """
    moments: dict[str, tuple[Entry, ...]] = {}
    for name, entries in inference_ledger(generation).moments.items():
        if name == "loading":
            continue
        written = tuple(entry for entry in entries if entry.part not in _OF_TRAINING)
        moments[f"{ROLLOUT}{name}"] = (*step.static, *written)
    return replace(counted, moments=counted.moments | moments)
