"""Copies in 4 bit of which it is unknown what they leave in 16 bit."""

from __future__ import annotations

from dataclasses import replace

from whichlora.predict.predict import verdict
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.results import Prediction
from whichlora.spec.run import BNB_QUANTS
from whichlora.spec.wide_modules import names_wide_modules
from whichlora.units import format_bytes

# Qwen2-VL-2B, the most of what is published: 1.36 GB in plain nf4, 1.81 as uploaded.
# Source: unsloth.ai/blog/dynamic-4bit. Qwen3-14B loads 11.9 GiB in a T4, where nf4 has 9.25.
MOST_WIDER = 1 / 3


def with_unknown_storage(prediction: Prediction, model: ModelSpec) -> Prediction:
    """`prediction` with a wider upper bound where the copy may hold more than plain 4 bits.

    Kind: estimate.
    """
    if names_wide_modules(model.config) or prediction.run.quant not in BNB_QUANTS:
        return prediction
    memory = prediction.memory
    more = round(memory.breakdown.get("weights", 0) * MOST_WIDER)

    def wider(bounds: tuple[int, int]) -> tuple[int, int]:
        return bounds[0], bounds[1] + more

    note = (
        f"{model.name} keeps some matrices in 16 bit, which its config.json names, and it is not "
        f"here: up to {format_bytes(more)} more; give the path of that file as the model"
    )
    interval = wider(memory.interval_bytes)
    judged = verdict(interval[0], interval[1], prediction.usable_bytes)
    return replace(
        prediction,
        memory=replace(
            memory,
            interval_bytes=interval,
            allocated_interval_bytes=wider(memory.allocated_interval_bytes),
            reserved_interval_bytes=wider(memory.reserved_interval_bytes),
        ),
        verdict=judged if prediction.verdict == "fits" else prediction.verdict,
        fits=prediction.fits and judged == "fits",
        notes=(note, *prediction.notes),
    )
