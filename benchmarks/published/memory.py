"""Published memory figures beside ours, and why some are far apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import published
from published import MEMORY, Observation, gpu_of
from whichlora.memory.training import Ledger
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.judged import judged_run
from whichlora.predict.predict import memory_prediction
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import ResolvedRun, resolve

STEADY_PARTS = ("weights", "adapters", "optimizer_states")
FORWARD = ("layer_forward", "loss_forward")
# Moments by what a phase is called; the backward has all others.
PHASES: dict[str, Callable[[str], bool]] = {
    "peak_in_forward": lambda moment: moment in FORWARD,
    "peak_in_backward": lambda moment: moment not in (*FORWARD, "optimizer_step", "loading"),
    "peak_in_optimizer": lambda moment: moment == "optimizer_step",
}


@dataclass(frozen=True, slots=True)
class Compared:
    observation: Observation
    predicted: float

    @property
    def error(self) -> float:
        """Signed and relative; positive where the prediction is too high."""
        return self.predicted / self.observation.value - 1


def predicted_bytes(one: Observation) -> float:
    """What we say the counter of `one` reads."""
    job = resolve(one.model, one.run, gpu_of(one.gpu))
    if one.quantity == "allocated_between_steps":
        found = ledger(job)
        entries = found.moments["optimizer_step"]
        static = sum(entry.num_bytes for entry in entries if entry.part in STEADY_PARTS)
        return float(static + found.workspace_bytes)
    if one.quantity == "allocated_after_step":
        found = ledger(job)
        entries = (x for x in found.moments["optimizer_step"] if x.part != "temporary")
        # `model.config.use_cache` was left on: the outputs hold keys and values, too
        tokens = one.run.batch_size * (one.run.seq_len + job.method.added_tokens)
        elements = sum(
            count * attention.cache_elements
            for layer, count in one.model.layers()
            for attention in layer.attentions
        )
        cache = tokens * elements * job.dtypes.compute_bytes
        return float(sum(x.num_bytes for x in entries) + found.workspace_bytes + cache)
    if one.quantity in ("allocated_after_load", "reserved_before_training"):
        entries = ledger(job).moments["optimizer_step"]
        return float(sum(x.num_bytes for x in entries if x.part in ("weights", "adapters")))
    if one.quantity in PHASES:
        return _phase_bytes(one, job)
    if one.quantity == "allocated_after_forward":  # the 16-bit logits are gone by then
        narrow = 2 * one.run.batch_size * one.run.seq_len * one.model.vocab_size
        return _moment_bytes(ledger(job), "loss_forward") - narrow
    memory, _ = memory_prediction(judged_run(job, prior_calibration(job.gpu)))
    if one.quantity in ("peak_allocated", "perhaps_allocated"):
        return memory.peak_allocated_bytes
    if one.quantity == "peak_reserved":
        return memory.peak_reserved_bytes
    return memory.device_used_bytes


def _phase_bytes(one: Observation, job: ResolvedRun) -> float:
    """The largest moment of a phase."""
    found = ledger(job)
    return max(
        _moment_bytes(found, moment) for moment in found.moments if PHASES[one.quantity](moment)
    )


def _moment_bytes(found: Ledger, moment: str) -> float:
    return float(sum(entry.num_bytes for entry in found.moments[moment]) + found.workspace_bytes)


@cache
def compared_memory() -> tuple[Compared, ...]:
    """Every published memory figure beside ours."""
    return tuple(
        Compared(one, predicted_bytes(one))
        for one in published.read_all()
        if isinstance(one, Observation) and one.quantity in MEMORY
    )


def _is_forward_alone(one: Observation) -> bool:
    return one.source == "optimum_benchmark" and one.run.max_new_tokens == 1


def _is_near_the_card(one: Observation) -> bool:
    return one.value > 0.85 * gpu_of(one.gpu).memory_bytes


# What is different in a run that is far off: the first that applies.
EXPLANATIONS: tuple[tuple[Callable[[Observation], bool], str], ...] = (
    (
        lambda one: one.run.method == "psoft",
        "`psoft_svd` full keeps all right singular vectors of a matrix decomposed on a GPU",
    ),
    (
        lambda one: one.source == "nntile_overhead",
        "a replay of two steps leaves more idle than the run had",
    ),
    (
        lambda one: one.source == "peft_method_comparison",
        "tokens of the longest batch are read off another row",
    ),
    (
        lambda one: (
            one.source == "optimum_benchmark"
            and dict(one.run.libraries)["transformers"] == "4.34.1"
            and one.quantity != "peak_allocated"
        ),
        "the runs of 2023-10-31 reserve 21.9 GiB in fp16 whatever the batch, and 2 GiB more than "
        "others with GPTQ: what loading left in the cache",
    ),
    (
        _is_forward_alone,
        "the benchmark holds the last output, its cache and fp32 logits, while it repeats the "
        "forward",
    ),
    (
        lambda one: one.source == "unsloth_notebooks",
        "lengths of batches differ, and the longest row is taken as cut: the pool is an estimate",
    ),
    (
        lambda one: one.source == "fitcheck_t4" and one.quantity == "peak_reserved",
        "the pool is what loading and a warm-up step have left: an estimate",
    ),
    (
        lambda one: one.quantity == "peak_reserved" and one.run.phase == "inference",
        "segments that a growing cache outgrows: an estimate, and machines differ by 2 times",
    ),
    (
        lambda one: one.source == "qwen3_speed",
        "its script is not published, and no pass over a prompt shows in what it measured",
    ),
    (
        lambda one: one.source == "transformers_sdpa_generate",
        "eager scores of GPT-NeoX, which its release widens and the run, it seems, did not",
    ),
    (
        lambda one: one.source == "training_pages",
        "on an AMD card, whose workspaces nobody has compared",
    ),
    (
        lambda one: one.source == "inference_pages" and one.quantity.startswith("perhaps"),
        "neither the counter nor the releases are stated",
    ),
    (
        lambda one: one.quantity.startswith("perhaps"),
        "the counter is not stated, and the model's first remote code was not read",
    ),
    (
        _is_near_the_card,
        "near the card's limit the allocator gives idle segments back and reserves less",
    ),
    (
        lambda one: (
            one.source == "optimum_benchmark"
            and dict(one.run.libraries).get("transformers", "") < "4.44"
        ),
        "commits of May to August 2024: one configuration reads 17.0 and 18.8 GiB, 27.9 and 31.5",
    ),
    (
        lambda one: one.quantity == "device_used" and one.run.method == "full",
        "idle segments are an upper bound: some take the gradients",
    ),
    (
        lambda one: one.quantity == "device_used",
        "idle segments are an upper bound: the loss takes some of the layers'",
    ),
)


def explanation(one: Observation) -> str:
    """Why the prediction of `one` is far off."""
    found = (text for applies, text in EXPLANATIONS if applies(one))
    return next(found, "not explained")
