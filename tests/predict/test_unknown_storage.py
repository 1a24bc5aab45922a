"""Copies in 4 bit of which it is unknown what they leave in 16 bit."""

from __future__ import annotations

import pytest

from whichlora.api import estimate
from whichlora.predict.unknown_storage import MOST_WIDER

PLAIN, DYNAMIC = "unsloth/Qwen3-14B-bnb-4bit", "unsloth/Qwen3-14B-unsloth-bnb-4bit"


def test_the_upper_bound_of_a_dynamic_upload_is_wider_and_a_note_says_so() -> None:
    plain, dynamic = (
        estimate(name, "t4", method="qlora", trainer="unsloth", batch_size=2)[0]
        for name in (PLAIN, DYNAMIC)
    )
    more = round(plain.memory.breakdown["weights"] * MOST_WIDER)
    low, high = plain.memory.interval_bytes
    assert dynamic.memory.interval_bytes == (low, high + more)
    assert dynamic.memory.device_used_bytes == plain.memory.device_used_bytes
    assert (plain.verdict, dynamic.verdict) == ("fits", "undecided")
    # the notebook of Qwen3 (14B) on a T4 printed 14.5 GiB
    assert low < 14.508 * 2**30 < high + more
    assert any("keeps some matrices in 16 bit, which its config.json" in n for n in dynamic.notes)
    assert not any("which its config.json" in note for note in plain.notes)


@pytest.mark.parametrize("name", ["unsloth/zephyr-sft-bnb-4bit", "unsloth/llama-3-8b-bnb-4bit"])
def test_uploads_of_unsloth_are_known_by_their_names(name: str) -> None:
    (prediction,) = estimate(name, "t4", method="qlora", trainer="unsloth")
    assert prediction.run.quant == "nf4-dq"
    assert any(f"{name}: taken as" in note for note in prediction.notes)
