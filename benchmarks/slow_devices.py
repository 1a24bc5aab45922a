"""Devices far from their prior, learned from a handful of runs: `slow_devices.py [--write]`.

No device here is real. Each is the prior of a real one, slowed down `k` times as a whole, as a
board (without its host), or in one resource: its arithmetic (the peak of the datasheet over `k`),
its memory (the bandwidth over `k`), or its host (launches and constants times `k`). A few random
runs calibrate; judged are fine-tuning, prompt pass and decoding of other models, batch sizes and
lengths. `--write` puts the tables into docs/accuracy/slow_devices.md.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
from markdown_tables import markdown_table, write_page

from whichlora.calibration.fit_time import fit_phases
from whichlora.calibration.samples import Sample
from whichlora.predict.coefficients import TIME_PHASES
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.quantities import forward_features, step_features
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing import model as timing
from whichlora.timing.model import PER_COUNT, TimeModel, prior_model

PAGE, TITLE = "slow_devices", "Devices far from their prior"
SLOWER = (0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 20.0)
COUNTS = (3, 4, 5, 6, 8)
CLEAN = 0.03  # deviation of the log of a run that is repeated
DEVICES = ("a100-sxm-80gb", "rtx-4090-24gb", "cpu")
# What of a machine is slower at once.
SLOW: Mapping[str, tuple[str, ...]] = {
    "all of it": ("arithmetic", "memory", "host"),
    "the board": ("arithmetic", "memory"),
    "arithmetic": ("arithmetic",),
    "memory": ("memory",),
    "host": ("host",),
}
MODELS: Mapping[str, tuple[str, ...]] = {
    "cuda": (
        "Qwen/Qwen2.5-0.5B",
        "HuggingFaceTB/SmolLM2-1.7B",
        "EleutherAI/pythia-2.8b",
        "Qwen/Qwen2.5-7B",
        "meta-llama/Llama-3.1-8B",
        "google/gemma-2-9b",
    ),
    "cpu": (
        "HuggingFaceTB/SmolLM2-135M",
        "EleutherAI/pythia-160m",
        "HuggingFaceTB/SmolLM2-360M",
        "EleutherAI/pythia-410m",
        "Qwen/Qwen2.5-0.5B",
        "openai-community/gpt2",
    ),
}
SHAPES = {
    "cuda": ((1, 128), (1, 512), (4, 512), (2, 2048), (8, 1024), (16, 256)),
    "cpu": ((1, 32), (1, 64), (2, 64), (1, 256), (4, 128), (8, 32)),
}
METHODS = ("lora", "full", "dora", "qlora")


@dataclass(frozen=True, slots=True)
class Timed:
    """One time of one run: what is predicted, and what the slow device would answer."""

    run: RunConfig
    phase: str
    features: Mapping[str, float]
    seconds: float


def jobs_of(gpu: GpuSpec) -> list[ResolvedRun]:
    """Runs of every model and shape, methods and phases spread over them."""
    kind = "cpu" if gpu.kind == "cpu" else "cuda"
    precision = "fp32" if kind == "cpu" else "bf16"
    jobs = []
    for name, (i, (batch_size, length)) in product(MODELS[kind], enumerate(SHAPES[kind])):
        model = load_model(name)
        for j in range(2):
            train = RunConfig(
                model=name,
                method=METHODS[(i + 2 * j + MODELS[kind].index(name)) % len(METHODS)],
                batch_size=batch_size,
                seq_len=length,
                gradient_checkpointing=(i + j) % 2 == 0,
                precision=precision,
                optimizer="adamw_torch",
            )
            jobs.append(resolve(model, train, gpu))
        serve = RunConfig(
            model=name,
            phase="inference",
            batch_size=batch_size,
            prompt_len=length,
            max_new_tokens=64,
            precision=precision,
        )
        jobs.append(resolve(model, serve, gpu))
    return jobs


def features_of(job: ResolvedRun) -> dict[str, Mapping[str, float]]:
    """Features by phase."""
    if job.run.phase == "finetune":
        return {"finetune": step_features(job)}
    context = job.run.prompt_len + job.run.max_new_tokens // 2
    return {
        "prefill": forward_features(job, context=job.run.prompt_len, decoding=False),
        "decode": forward_features(job, context=context, decoding=True),
    }


@cache
def answers(key: str, slow: str, k: float) -> tuple[Timed, ...]:
    """What a device answers that is `k` times slower than the prior of `key`."""
    nominal = find_gpu(key)
    by_compute, by_memory, by_host = (
        k if part in SLOW[slow] else 1.0 for part in ("arithmetic", "memory", "host")
    )
    rates = {dtype: rate / by_compute for dtype, rate in nominal.peak_flops_per_s.items()}
    real = replace(nominal, bandwidth_bytes_per_s=nominal.bandwidth_bytes_per_s / by_memory)
    watts = None if nominal.power_w is None else nominal.power_w / by_compute  # of the same share
    real = replace(real, peak_flops_per_s=rates, power_w=watts)
    truth = {phase: _slowed_host(prior_model(nominal, phase), by_host) for phase in TIME_PHASES}
    return tuple(
        Timed(
            job.run,
            phase,
            features,
            float(timing.seconds(truth[phase], features_of(replace(job, gpu=real))[phase])[0]),
        )
        for job in jobs_of(nominal)
        for phase, features in features_of(job).items()
    )


def _slowed_host(model: TimeModel, k: float) -> TimeModel:
    return replace(
        model, mean={name: v * (k if name in PER_COUNT else 1.0) for name, v in model.mean.items()}
    )


def sample(one: Timed, seconds: float) -> Sample:
    return Sample(one.run.model, one.features, seconds, record=str(hash(one.run)))


def fitted(gpu: GpuSpec, samples: Sequence[tuple[str, Sample]]) -> Mapping[str, TimeModel]:
    """The product's fit of all phases."""
    return fit_phases(
        {phase: [one for name, one in samples if name == phase] for phase in TIME_PHASES}, gpu
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """What a fit is taught.

    Args:
        count: of runs.
        noise: deviation of the log of a measured time.
        phases: of the runs.
    """

    count: int
    noise: float
    phases: tuple[str, ...] = ("finetune", "inference")


@dataclass(frozen=True, slots=True)
class Judged:
    """One time that no fit saw: log of predicted over real, and whether the interval held."""

    phase: str
    error: float
    inside: bool


def judged(key: str, slow: str, k: float, asked: Asked, seed: int) -> Iterator[Judged]:
    """Times of three models by a fit to a few runs of three others."""
    dice = random.Random(f"{key} {slow} {k} {asked} {seed}")
    gpu = find_gpu(key)
    everything = answers(key, slow, k)
    names = sorted({one.run.model for one in everything})
    taught = set(dice.sample(names, 3))
    runs = {one.run for one in everything}
    pool = sorted(
        (run for run in runs if run.model in taught and run.phase in asked.phases), key=str
    )
    chosen = dice.sample(pool, asked.count)
    samples = [
        (one.phase, sample(one, one.seconds * dice.lognormvariate(0, asked.noise)))
        for one in everything
        if one.run in chosen
    ]
    models = fitted(gpu, samples)
    for one in everything:
        if one.run.model in taught:
            continue
        model = models[one.phase]
        real = one.seconds * dice.lognormvariate(0, asked.noise)
        total = float(timing.seconds(model, one.features)[0])
        reach = TWO_SIDED_Z[TIME_CONFIDENCE] * timing.log_deviation(model, one.features, total)
        error = math.log(total / real)
        yield Judged(one.phase, error, abs(error) <= reach)


def _all_judged(slow: str, k: float, asked: Asked, seeds: int) -> list[Judged]:
    return [
        one for key in DEVICES for seed in range(seeds) for one in judged(key, slow, k, asked, seed)
    ]


def _cell(found: Sequence[Judged]) -> str:
    """Median, 90th percentile and worst size of the errors in per cent; the share inside."""
    sizes = np.array([abs(math.expm1(one.error)) for one in found])
    errors = (np.median(sizes), np.quantile(sizes, 0.9), sizes.max())
    inside = np.mean([one.inside for one in found])
    return f"{', '.join(f'{100 * one:.0f}' for one in errors)}; {100 * inside:.0f}"


def learned(seeds: int, noise: float) -> str:
    """How far off other models are after a few runs of both stages."""
    rows = [
        (
            slow,
            f"{k:g}",
            *(_cell(_all_judged(slow, k, Asked(count, noise), seeds)) for count in COUNTS),
        )
        for slow, k in product(SLOW, SLOWER)
    ]
    return markdown_table(("slower", "times", *(f"{count} runs" for count in COUNTS)), rows)


def other_phases(seeds: int) -> str:
    """What fine-tunings alone say of inference, and inference of fine-tuning."""
    rows = []
    for slow, k in product(SLOW, SLOWER):
        cells = []
        for phase, unseen in (("finetune", ("prefill", "decode")), ("inference", ("finetune",))):
            found = _all_judged(slow, k, Asked(5, CLEAN, (phase,)), seeds)
            cells.append(_cell([one for one in found if one.phase in unseen]))
        rows.append((slow, f"{k:g}", *cells))
    return markdown_table(
        ("slower", "times", "inference, of 5 fine-tunings", "fine-tuning, of 5 inferences"), rows
    )


def covered(seeds: int) -> str:
    """The share inside the interval where runs scatter as much as the priors state."""
    rows = []
    for key, count in product(DEVICES, COUNTS):
        gpu = find_gpu(key)
        noise = prior_model(gpu, "finetune").noise
        found = [
            one
            for slow, k, seed in product(SLOW, SLOWER, range(seeds))
            for one in judged(key, slow, k, Asked(count, noise), seed)
        ]
        rows.append(
            (
                key,
                f"{100 * noise:.0f} %",
                count,
                f"{100 * np.mean([one.inside for one in found]):.0f} %",
            )
        )
    return markdown_table(("device", "scatter of a run", "runs", "inside the 90 % interval"), rows)


def document(seeds: int) -> str:
    """All tables as Markdown."""
    return "\n\n".join(
        [
            "Invented devices: the prior of a real device, slower or faster as a whole, as a board "
            "(without its host) or in one resource. Random runs of three models calibrate, three "
            "other models are predicted. Runs repeat to 3 %. Cells are sizes of errors in per cent "
            "(median, 90th percentile, worst), then the share inside the 90 % interval.",
            learned(seeds, CLEAN),
            "A phase without runs:",
            other_phases(seeds),
            "Runs that scatter around the formulas as the priors state, all devices above "
            "together:",
            covered(seeds),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5, help="draws of runs for each cell")
    parser.add_argument("--write", action="store_true", help="store the tables in docs/accuracy")
    asked = parser.parse_args()
    text = document(asked.seeds)
    print(text)
    if asked.write:
        write_page(PAGE, TITLE, text)


if __name__ == "__main__":
    main()
