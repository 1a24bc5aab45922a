"""Candidates of two models in both stages on an A100."""

from __future__ import annotations

from dataclasses import replace

from whichlora.predict.counted import count_run
from whichlora.predict.resolve import resolve
from whichlora.search.candidate_posterior import CandidatePosterior
from whichlora.search.counted_candidate import count_inference, count_training
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

A100 = find_gpu("a100-sxm-80gb")
NAMES = ("Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M")


# --- the posterior


def candidate_posterior(**changes: object) -> CandidatePosterior:
    """Two models and two batch sizes in both stages."""
    counted_candidates = []
    for name in NAMES:
        model = load_model(name)
        for batch_size in (4, 8):
            train = replace(
                RunConfig(model=name, batch_size=batch_size, seq_len=2048, **changes)  # type: ignore[arg-type]
            )
            counted_candidates.append(
                count_training(
                    count_run(resolve(model, train, A100)), {2048: 100}, profiled=[2048] * 5
                )
            )
        serve = RunConfig(model=name, phase="inference", batch_size=4)
        counted_candidates.append(
            count_inference(count_run(resolve(model, serve, A100)), num_runs=5)
        )
    return CandidatePosterior(counted_candidates)
