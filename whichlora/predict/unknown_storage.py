"""Copies in 4 bit of which it is unknown which matrices they leave in 16 bit."""

from __future__ import annotations

from dataclasses import replace

from whichlora.predict.predict import verdict
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.results import MemoryPrediction, Prediction
from whichlora.spec.run import BNB_QUANTS
from whichlora.spec.wide_modules import names_wide_modules
from whichlora.units import format_bytes

_MARK = "-unsloth-bnb-4bit"
# Files of such copies over plain nf4, less one. Eight plain copies of as many models have what is
# counted, to 0.1 % (Qwen2.5-VL: 2 %). Source: what cells that load print of model*.safetensors,
# github.com/unslothai/notebooks at 0736906f to bdda2efc; GB in the comments.
_MORE = {
    "gemma-3-4b-it": 0.412,  # 4.56 for 3.23
    "gemma-3-4b-pt": 0.356,  # 4.38
    "llama-3.1-8b-instruct": 0.045,  # 5.96 for 5.70
    "llama-3.2-11b-vision-instruct": 0.087,  # 7.18 for 6.60
    "llama-3.2-3b-instruct": 0.048,  # 2.35 for 2.24
    "magistral-small-2506": 0.053,  # 14.9 for 14.15
    "magistral-small-2509": 0.053,
    "phi-4": 0.143,  # 10.39 for 9.09
    "qwen2.5-3b-instruct": 0.149,  # 2.36 for 2.06
    "qwen2.5-vl-7b-instruct": 0.17,  # 6.9 for 5.90; 7.21 before September 2025
    "qwen3-14b": 0.12,  # 11.12 for 9.93
    "qwen3-14b-base": 0.12,
    "qwen3-vl-8b-instruct": 0.207,  # 7.7 for 6.38
}
# The most of these, for copies that are not among them. QwQ-32B lies beyond: its ten files of
# March 2025 (revision b5d53e9f, most MLPs in 16 bit) have about 48 GB, 2.5 times the plain copy.
MOST_WIDER = max(_MORE.values())


def with_unknown_storage(prediction: Prediction, model: ModelSpec) -> Prediction:
    """`prediction` of a copy that holds more than plain 4 bits: by its files, or up to the most.

    Kind: estimate.
    """
    if names_wide_modules(model.config) or prediction.run.quant not in BNB_QUANTS:
        return prediction
    memory = prediction.memory
    weights = memory.breakdown.get("weights", 0)
    share = _MORE.get(model.name.rpartition("/")[2].lower().removesuffix(_MARK))
    if share is None:
        more = round(weights * MOST_WIDER)
        note = (
            f"{model.name} keeps some matrices in 16 bit, which its config.json names, and it is "
            f"not here: up to {format_bytes(more)} more; give the path of that file as the model"
        )
        changed = _with_bounds(memory, 0, more)
    else:
        more = round(weights * share)
        note = (
            f"{model.name} keeps some matrices in 16 bit: {format_bytes(more)} more than plain 4 "
            "bits, as its files are larger; which matrices those are, its config.json names"
        )
        changed = replace(
            _with_bounds(memory, more, more),
            peak_allocated_bytes=memory.peak_allocated_bytes + more,
            peak_reserved_bytes=memory.peak_reserved_bytes + more,
            device_used_bytes=memory.device_used_bytes + more,
            breakdown={**memory.breakdown, "weights": weights + more},
        )
    judged = verdict(*changed.interval_bytes, prediction.usable_bytes)
    was_open = prediction.verdict in ("fits", "undecided")
    return replace(
        prediction,
        memory=changed,
        verdict=judged if was_open else prediction.verdict,
        fits=prediction.fits and judged == "fits",
        notes=(note, *prediction.notes),
    )


def _with_bounds(memory: MemoryPrediction, low: int, high: int) -> MemoryPrediction:
    """`memory` whose intervals lie higher."""

    def moved(bounds: tuple[int, int]) -> tuple[int, int]:
        return bounds[0] + low, bounds[1] + high

    return replace(
        memory,
        interval_bytes=moved(memory.interval_bytes),
        allocated_interval_bytes=moved(memory.allocated_interval_bytes),
        reserved_interval_bytes=moved(memory.reserved_interval_bytes),
    )
