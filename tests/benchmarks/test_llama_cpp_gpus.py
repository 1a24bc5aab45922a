"""Published speeds of llama.cpp: cards are predicted from the others of their capability."""

from __future__ import annotations

import llama_cpp_gpus
import pytest

from whichlora.serving.llama_cpp_rates import BLOCK_RATES, BLOCK_READS


@pytest.mark.slow
def test_cards_that_are_left_out_are_predicted_from_the_others() -> None:
    found = llama_cpp_gpus.left_out()
    for kind, middle, most in (("decode", 0.04, 0.1), ("prompt", 0.08, 0.3)):
        sizes = sorted(abs(error) for speed, error in found if speed.kind == kind)
        assert len(sizes) >= 20
        assert sizes[len(sizes) // 2] < middle
        assert sizes[-1] < most


def test_constants_are_what_the_scoreboard_gives() -> None:
    known = [speed for speed in llama_cpp_gpus.speeds() if speed.group == llama_cpp_gpus.FITTED]
    reads, constants = llama_cpp_gpus.fitted(known)
    assert reads == pytest.approx(BLOCK_READS)
    assert constants.keys() == BLOCK_RATES.keys()
    for capability, (kernel_s, products) in constants.items():
        assert BLOCK_RATES[capability].kernel_s == pytest.approx(kernel_s, rel=0.03)
        assert BLOCK_RATES[capability].products == pytest.approx(products, rel=0.01)
