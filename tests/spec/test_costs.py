"""What an hour costs: whole machines, bounds of electricity, and values that check themselves."""

from __future__ import annotations

import math

import pytest

from whichlora.errors import ConfigError
from whichlora.spec.costs import Grid, Offer, RunningCost, cheapest, own_price

EIGHT = Offer(gpu="h100-sxm-80gb", usd_per_hour=2.0, gpus=8, provider="A", date="2026-05-24")
ONE = Offer(gpu="h100-sxm-80gb", usd_per_hour=3.0, provider="B", region="eu-1")
SPOT = Offer(gpu="h100-sxm-80gb", usd_per_hour=1.0, provider="B", spot=True)
FRANCE = Grid(country="France", code="FRA", g_per_kwh=50.0, year=2023, source="a test")


def test_a_machine_of_eight_is_paid_for_whole() -> None:
    assert [EIGHT.per_hour(number) for number in (1, 8, 9)] == [16.0, 16.0, 32.0]
    assert cheapest([EIGHT, ONE, SPOT], 1) == ONE
    assert cheapest([EIGHT, ONE, SPOT], 8) == EIGHT
    assert cheapest([EIGHT, ONE, SPOT], 8, spot=True) == SPOT
    assert cheapest([SPOT]) is None


def test_an_offer_says_who_asks_and_since_when() -> None:
    assert EIGHT.in_words == "A, on demand, 2026-05-24, 8 rented together"
    assert SPOT.in_words == "B, spot"
    assert own_price("gpu", 1.5).currency == ""


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"usd_per_hour": 0.0}, "usd_per_hour: must be a number above 0"),
        ({"usd_per_hour": math.nan}, "usd_per_hour: must be a number above 0"),
        ({"usd_per_hour": 1.0, "gpus": 0}, "gpus: must be a whole number from 1"),
        ({"usd_per_hour": 1.0, "date": "May"}, "date: must be YYYY-MM-DD, got 'May'"),
    ],
)
def test_an_offer_out_of_range_is_refused(values: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        Offer(gpu="gpu", **values)  # type: ignore[arg-type]


def test_an_hour_of_two_boards_takes_twice_the_money_and_their_power() -> None:
    cost = RunningCost(
        num_gpus=2, offer=ONE, power_w=(100.0, 700.0), grid=FRANCE, tokens_per_s=1000.0
    )
    assert cost.money(3600) == 6.0
    assert cost.kwh(3600) == pytest.approx((0.1, 0.7))
    assert cost.co2_kg(3600) == pytest.approx((0.005, 0.035))
    assert cost.s_per_million == 1000.0
    content = cost.to_dict()
    assert (content["of"], content["seconds"]) == ("million tokens", 1000.0)
    assert content["money"] == pytest.approx(6.0 / 3.6)
    assert cost.to_dict(7200)["money"] == 12.0


def test_what_is_not_known_has_no_number() -> None:
    cost = RunningCost()
    assert cost.money(60) is cost.kwh(60) is cost.co2_kg(60) is None
    assert cost.to_dict()["seconds"] is None
    assert RunningCost(power_w=(1.0, 2.0)).co2_kg(60) is None
