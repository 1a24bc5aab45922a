"""Costs as sentences."""

from whichlora.predict.cost_words import between


def test_a_lower_bound_that_says_nothing_is_left_out() -> None:
    assert between((0.009, 0.027)) == "0.0090 to 0.027"
    assert between((0.0, 0.027)) == "at most 0.027"
