"""What a fine-tuning takes besides its steps: evaluations, and checkpoints on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from whichlora.memory.allocator import context_bytes
from whichlora.memory.checkpoint import CheckpointBytes, checkpoint_bytes
from whichlora.memory.evaluation import evaluation_bytes, evaluation_moments
from whichlora.predict.coefficients import Calibration
from whichlora.predict.judged import judge_moments
from whichlora.predict.judgement import MemoryJudgement
from whichlora.predict.quantities import (
    by_part,
    of_each_source,
    rank_kinds,
    running_model,
    training_step,
    update_of,
)
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.numeric import Count, Real
from whichlora.spec.plan import SAVED_SHARE, Keeping
from whichlora.spec.results import known_values
from whichlora.timing import model as timing
from whichlora.timing import training_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Besides:
    """Evaluations and checkpoints of one fine-tuning.

    Args:
        evaluations: passes over the validation rows in the whole training.
        evaluation_s: seconds of all of them, part of the total time; NaN where there is no time.
        evaluation_peak_bytes: device memory of one, without the allocator's idle cache.
        checkpoints: how many are written in the whole training.
        checkpoint_weights_bytes, checkpoint_optimizer_bytes: of one, on disk.
        kept_bytes: of all that are kept at once, on disk.
    """

    evaluations: int
    evaluation_s: float
    evaluation_peak_bytes: int | None
    checkpoints: int
    checkpoint_weights_bytes: int
    checkpoint_optimizer_bytes: int
    kept_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return known_values(asdict(self))


def num_evaluations(keeping: Keeping, *, num_steps: int, epochs: float) -> int:
    """Passes over the validation rows of a whole training, the one at its end among them."""
    if keeping.eval_steps is None:
        return math.ceil(epochs)
    return math.ceil(num_steps / keeping.eval_steps) if keeping.evaluates else 0


def num_checkpoints(keeping: Keeping, *, num_steps: int) -> int:
    """Checkpoints of a whole training, the one at its end among them.

    Source: transformers 5.23, `TrainerState.compute_steps`: a share of the steps is rounded up.
    """
    if not keeping.saves:
        return 0
    each = keeping.save_steps or math.ceil(num_steps * SAVED_SHARE)
    return math.ceil(num_steps / each)


def evaluation_features(job: ResolvedRun, *, width: Count) -> dict[str, Real]:
    """Time features of one evaluation batch: forwards whose every token is scored.

    A trainer's reference computes as many as the model does.
    """
    return of_each_source(job, partial(_evaluation_features, job), {"seq_len": width})


def _evaluation_features(job: ResolvedRun, *, seq_len: Count) -> dict[str, Real]:
    model, last_len = job.at_length(seq_len)
    done = training_work.evaluation_work(
        replace(running_model(job), model=model),
        batch_size=job.num_sequences,
        seq_len=last_len,
        logits_loss=job.trainer.logits_loss(job.run),
        update=update_of(job),
    )
    further = job.trainer.forwards(job.run)
    passes = 1 + further.policy + further.reference
    counted = timing.features(done, job.gpu, dtype=job.dtype)
    return {name: passes * value for name, value in counted.items()}


def evaluation_seconds(
    job: ResolvedRun, calibration: Calibration, widths: Mapping[int, float]
) -> float:
    """Seconds of one pass over the validation rows.

    Args:
        widths: padded length to number of batches.
    """
    model = calibration.time["prefill"]
    return sum(
        count * float(timing.seconds(model, evaluation_features(job, width=width))[0])
        for width, count in widths.items()
    )


def evaluation_of_ranks(
    job: ResolvedRun, calibration: Calibration, **sizes: Count
) -> MemoryJudgement:
    """Device memory of an evaluation on several GPUs, of the rank that needs most.

    What a strategy gathers, and keeps for the steps, is there as in a forward of training.
    Kind: estimate. Source: `evaluation_moments`.

    Args:
        sizes: of `ResolvedRun.size_names`, in place of the run's own.
    """
    run = replace(
        job.run, gradient_checkpointing=True, lora_dropout=0.0, gradient_accumulation_steps=1
    )
    uncapped = replace(job.model, logit_softcap=None)
    evaluated = replace(job, run=run, model=uncapped)
    layout = evaluated.layout
    assert layout is not None
    kinds = rank_kinds(evaluated, **sizes)
    ledgers = [layout.ledger(kind) for kind in kinds]
    moments = {
        f"{kind.name}: {name}": entries
        for kind, counted in zip(kinds, ledgers, strict=True)
        for name, entries in evaluation_moments(kind.step, counted.moments).items()
    }
    most = replace(ledgers[0], moments=moments, idle_bytes=0)
    return judge_moments(evaluated, by_part(evaluated, most), calibration)


def evaluation_peak_bytes(job: ResolvedRun, calibration: Calibration, *, width: int) -> int:
    """Device memory of an evaluation whose longest batch is `width` tokens long.

    The ratio of measured to counted bytes is that of training. Kind: estimate.
    """
    if job.layout is not None:
        return int(evaluation_of_ranks(job, calibration, seq_len=width).device_used_bytes)
    run = replace(job.run, gradient_checkpointing=True, lora_dropout=0.0)
    alive = evaluation_bytes(training_step(replace(job, run=run), seq_len=width))
    mean = calibration.memory.mean
    context = context_bytes(job.gpu, job.dtypes.libraries) * mean["context"]
    return round(float(alive) * mean["weights"] + context)


def bytes_of_checkpoint(job: ResolvedRun) -> CheckpointBytes:
    """Bytes on disk of one checkpoint of `job`."""
    return checkpoint_bytes(
        job.model,
        job.dtypes,
        job.method,
        training_step(job).tensors,
        targets=job.targets,
        optimizer_name=job.run.optimizer,
    )


def besides(
    job: ResolvedRun,
    calibration: Calibration,
    keeping: Keeping,
    *,
    widths: Mapping[int, float],
    num_steps: int,
    epochs: float,
) -> Besides:
    """Evaluations and checkpoints of a whole training of `job`.

    Args:
        widths: padded length to the number of evaluation batches of the whole training.
    """
    written = num_checkpoints(keeping, num_steps=num_steps)
    each = bytes_of_checkpoint(job)
    passes = num_evaluations(keeping, num_steps=num_steps, epochs=epochs) if widths else 0
    peak = evaluation_peak_bytes(job, calibration, width=max(widths)) if widths else None
    is_known = job.gpu.is_timed or not widths
    seconds = evaluation_seconds(job, calibration, widths) if is_known else math.nan
    return Besides(
        evaluations=passes,
        evaluation_s=seconds,
        evaluation_peak_bytes=peak,
        checkpoints=written,
        checkpoint_weights_bytes=int(each.weights),
        checkpoint_optimizer_bytes=int(each.optimizer_states),
        kept_bytes=min(written, keeping.save_total_limit) * int(each.total),
    )
