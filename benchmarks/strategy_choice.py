"""Whether `parallel: auto` finds the best of all strategies: `strategy_choice.py [--draw 400]`.

`auto` leaves strategies that divide the model out where it takes them to be slower. Drawn runs are
judged under every strategy, and the best of these is compared with its choice.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.alike import Predictor
from whichlora.predict.parallel_choice import Spreading, best_first, candidates, in_order
from whichlora.predict.predict import JudgedRun
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.parallel import requested
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    "Qwen/Qwen2.5-0.5B",
    "EleutherAI/pythia-1.4b",
    "google/gemma-2-2b",
    "Qwen/Qwen2.5-7B",
    "mistralai/Mistral-7B-v0.1",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.1-70B",
)
CARDS = (
    "rtx-3060-12gb",
    "rtx-3090-24gb",
    "rtx-4090-24gb",
    "rtx-a6000-48gb",
    "t4-16gb",
    "l4-24gb",
    "a10g-24gb",
    "l40s-48gb",
    "v100-sxm2-32gb",
    "a100-sxm-80gb",
    "h100-sxm-80gb",
    "b200-180gb",
    "mi300x-192gb",
)
LINKS = (None, None, None, "2GB/s", "10GB/s", "25GB/s", "200GB/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One run on several GPUs, whose strategy is open.

    Args:
        tried: strategies that `auto` judges, of `accepted`.
        is_best: whether the one that it takes is the best of all.
    """

    run: RunConfig
    gpu: GpuSpec
    accepted: int
    tried: int
    is_best: bool


def draws(seed: int) -> Iterator[tuple[RunConfig, GpuSpec]]:
    """Runs without end."""
    rng = random.Random(seed)
    while True:
        gpus, batch_size = rng.choice((2, 2, 3, 4, 4, 6, 8, 8, 16)), rng.choice((1, 1, 2, 4, 8))
        asked = {"gpus": gpus, "nodes": 2 if gpus == 16 else 1, "interconnect": rng.choice(LINKS)}
        global_batch_size = rng.choice((None, None, None, batch_size * gpus, 4 * batch_size * gpus))
        steps = 1 if global_batch_size else rng.choice((1, 1, 2, 4, 8))
        run = RunConfig(
            model=rng.choice(MODELS),
            method=rng.choice(("lora", "qlora", "dora", "full", "full")),
            batch_size=batch_size,
            seq_len=rng.choice((128, 512, 1024, 2048, 4096, 8192, 32768)),
            gradient_accumulation_steps=steps,
            gradient_checkpointing=rng.choice((None, True, False)),
            parallel=requested({**asked, "global_batch_size": global_batch_size}),
        )
        yield run, find_gpu(rng.choice(CARDS))


def compared(run: RunConfig, gpu: GpuSpec) -> Drawn | None:
    """`run` under every strategy with its defaults; None where none of these surely fits."""
    model, calibration, predictor = load_model(run.model), load_calibration(gpu), Predictor()

    def judged(one: RunConfig) -> JudgedRun:
        return predictor.judge(model, one, gpu, calibration)

    every = []
    for config in candidates(run.parallel):
        try:
            judgement = judged(replace(run, parallel=config))
        except ConfigError:
            continue
        every.append(Spreading(config=config, prediction=judgement))
    if not any(each.prediction.verdict == "fits" for each in every):
        return None
    tried = best_first(run, judged)
    is_best = tried[0].config == in_order(every)[0].config
    return Drawn(run=run, gpu=gpu, accepted=len(every), tried=len(tried), is_best=is_best)


def drawn(number: int, seed: int = 1) -> list[Drawn]:
    """So many runs of which a strategy surely fits."""
    found: list[Drawn] = []
    for run, gpu in draws(seed):
        one = compared(run, gpu)
        if one is not None:
            found.append(one)
        if len(found) == number:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found = drawn(arguments.draw, arguments.seed)
    best = sum(one.is_best for one in found)
    fewer = sum(one.tried < one.accepted for one in found)
    share = sum(one.tried for one in found) / sum(one.accepted for one in found)
    print(f"{best} of {len(found)} choices are the best of all strategies")
    print(f"{fewer} of them by fewer strategies; {100 * share:.0f} % of all are judged")
    for one in found:
        if not one.is_best:
            print(f"not the best: {one.run} on {one.gpu.key}")


if __name__ == "__main__":
    main()
