"""Candidates of two models in both stages on an A100."""

from __future__ import annotations

from dataclasses import replace

from whichlora.predict.outline import outline_inference, outline_training
from whichlora.predict.resolve import resolve
from whichlora.search.candidate_posterior import Outlook
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

A100 = find_gpu("a100-sxm-80gb")
NAMES = ("Qwen/Qwen2.5-0.5B", "HuggingFaceTB/SmolLM2-135M")


# --- what is believed


def outlook(**changes: object) -> Outlook:
    """Two models and two batch sizes in both stages."""
    outlines = []
    for name in NAMES:
        model = load_model(name)
        for batch_size in (4, 8):
            train = replace(
                RunConfig(model=name, batch_size=batch_size, seq_len=2048, **changes)  # type: ignore[arg-type]
            )
            outlines.append(
                outline_training(resolve(model, train, A100), {2048: 100}, num_batches=5)
            )
        serve = RunConfig(model=name, phase="inference", batch_size=4)
        outlines.append(outline_inference(resolve(model, serve, A100), num_runs=5))
    return Outlook(outlines)
