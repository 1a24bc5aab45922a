"""Published speeds of llama.cpp on Macs and AMD's GPUs give the constants, and lie inside."""

from __future__ import annotations

import llama_cpp_backends
import pytest

from whichlora.serving.llama_cpp_rates import ARCHITECTURE_RATES, KIND_RATES


def test_constants_are_what_the_scoreboards_give() -> None:
    macs, amd = llama_cpp_backends.fitting()
    reads, kernel_s, shares = llama_cpp_backends.fitted_metal(macs)
    rates = KIND_RATES["mps"]
    assert reads == pytest.approx(rates.reads)
    assert kernel_s == pytest.approx(rates.kernel_s, rel=0.03)
    assert shares["in blocks"] == pytest.approx(rates.products, rel=0.01)
    assert shares["16 bit"] == pytest.approx(rates.plain_products, rel=0.01)
    by_architecture = llama_cpp_backends.fitted_amd(amd)
    assert by_architecture.keys() == ARCHITECTURE_RATES.keys()
    for architecture, (kernel_s, products) in by_architecture.items():
        assert ARCHITECTURE_RATES[architecture].kernel_s == pytest.approx(kernel_s, rel=0.03)
        assert ARCHITECTURE_RATES[architecture].products == pytest.approx(products, rel=0.01)


@pytest.mark.slow
def test_macs_that_are_left_out_are_predicted_from_the_others() -> None:
    sizes = sorted(abs(error) for _, error in llama_cpp_backends.left_out())
    assert len(sizes) >= 100
    assert sizes[len(sizes) // 2] < 0.05
    assert sizes[-1] < 0.16


def test_most_speeds_of_releases_that_are_not_old_lie_inside_the_interval() -> None:
    fits = (llama_cpp_backends.METAL, *llama_cpp_backends.AMD, *llama_cpp_backends.OLD)
    inside = [each for case, _, each in llama_cpp_backends.compared() if case.group not in fits]
    assert len(inside) >= 50
    assert sum(inside) / len(inside) > 0.85
