"""Copies in 4 bit of which it is unknown what they leave in 16 bit."""

from __future__ import annotations

import pytest

from whichlora.api import estimate
from whichlora.predict.unknown_storage import MOST_WIDER
from whichlora.spec.results import Prediction


def answers(model: str) -> list[Prediction]:
    """Of its plain copy in 4 bit, and of the one with matrices in 16 bit."""
    return [
        estimate(f"unsloth/{model}{mark}-4bit", "t4", method="qlora", trainer="unsloth")[0]
        for mark in ("-bnb", "-unsloth-bnb")
    ]


def test_a_dynamic_upload_takes_what_its_files_have() -> None:
    """11.12 GB, which Unsloth's notebook prints while it loads."""
    plain, dynamic = answers("Qwen3-14B")
    weights = dynamic.memory.breakdown["weights"]
    assert weights == pytest.approx(11.12e9, rel=0.002)
    more = weights - plain.memory.breakdown["weights"]
    assert dynamic.memory.device_used_bytes == plain.memory.device_used_bytes + more
    assert sum(dynamic.memory.breakdown.values()) == dynamic.memory.device_used_bytes
    for name in ("interval_bytes", "allocated_interval_bytes", "reserved_interval_bytes"):
        before, after = getattr(plain.memory, name), getattr(dynamic.memory, name)
        assert after == (before[0] + more, before[1] + more)
    assert any("as its files are larger" in note for note in dynamic.notes)
    assert not any("as its files are larger" in note for note in plain.notes)


def test_the_upper_bound_of_another_is_wider_by_the_most_of_these() -> None:
    plain, dynamic = answers("Qwen3-8B")
    more = round(plain.memory.breakdown["weights"] * MOST_WIDER)
    assert 0.4 < MOST_WIDER < 0.42  # gemma-3-4b-it
    low, high = plain.memory.interval_bytes
    assert dynamic.memory.interval_bytes == (low, high + more)
    assert dynamic.memory.device_used_bytes == plain.memory.device_used_bytes
    assert any("keeps some matrices in 16 bit, which its config.json" in n for n in dynamic.notes)


@pytest.mark.parametrize("name", ["unsloth/zephyr-sft-bnb-4bit", "unsloth/llama-3-8b-bnb-4bit"])
def test_uploads_of_unsloth_are_known_by_their_names(name: str) -> None:
    (prediction,) = estimate(name, "t4", method="qlora", trainer="unsloth")
    assert prediction.run.quant == "nf4-dq"
    assert any(f"{name}: taken as" in note for note in prediction.notes)
