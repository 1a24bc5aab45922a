"""Money, electricity and CO2 in words."""

from __future__ import annotations

import math
from collections.abc import Iterable

from whichlora.predict.largest import Placement
from whichlora.spec.costs import Interval, Offer, RunningCost
from whichlora.spec.results import Prediction


def format_money(amount: float | None, currency: str = "USD") -> str:
    """`amount` as people read it: 12.30 USD, 0.084 USD; - for None."""
    if amount is None:
        return "-"
    number = f"{amount:,.2f}" if amount >= 1 else _two_digits(amount)
    return f"{number} {currency}".rstrip()


def price_in_words(offer: Offer, num_gpus: int) -> str:
    """The price of an hour with its place and age."""
    hour = format_money(offer.per_hour(num_gpus), offer.currency)
    of_gpus = f" for {num_gpus} GPUs" if num_gpus > 1 else ""
    return f"{hour} an hour{of_gpus} ({offer.in_words})"


def cost_of(
    cost: RunningCost, seconds: float, what: str, *, money_alone: bool = False
) -> list[str]:
    """What `seconds` of a run take: money with the age of its price, electricity, CO2.

    Args:
        what: that takes the seconds, such as "1M tokens".
        money_alone: at the price that counts.
    """
    lines = []
    if cost.offer is not None:
        money = format_money(cost.money(seconds), cost.offer.currency)
        price = price_in_words(cost.offer, cost.num_gpus)
        lines.append(f"{what}: {money} at {price}" + spot_in_words(cost) * (not money_alone))
    kwh = None if money_alone else cost.kwh(seconds)
    if kwh is not None:
        line = f"{what}: {between(kwh)} kWh of the GPU boards"
        if (co2 := cost.co2_kg(seconds)) is not None and cost.grid is not None:
            grid = cost.grid
            line += (
                f", {between(co2)} kg CO2 in {grid.country} "
                f"({grid.g_per_kwh:.0f} g/kWh in {grid.year})"
            )
        lines.append(line)
    return lines


def cheapest_of(placements: Iterable[Placement]) -> Placement | None:
    """The accelerator on which a million tokens cost least, of those that fit."""
    return min(
        (each for each in placements if not math.isinf(_cost_where_it_fits(each))),
        key=_cost_where_it_fits,
        default=None,
    )


def cheapest_hour(placements: Iterable[Placement]) -> str:
    """The accelerator of the cheapest hour, of those that fit; empty where no price is known."""
    costs = [
        (cost.offer.per_hour(cost.num_gpus), placement.gpu.key, cost)
        for placement in placements
        if not math.isinf(_cost_where_it_fits(placement))
        and placement.prediction is not None
        and (cost := placement.prediction.cost) is not None
        and cost.offer is not None
    ]
    if not costs:
        return ""
    _, key, cost = min(costs, key=lambda each: each[:2])
    assert cost.offer is not None
    return f"cheapest by the hour: {key}, {price_in_words(cost.offer, cost.num_gpus)}"


def cheapest_first(placements: Iterable[Placement]) -> list[Placement]:
    """By the money of a million tokens; what does not fit or has no price comes last."""
    return sorted(placements, key=_cost_where_it_fits)


def _cost_where_it_fits(placement: Placement) -> float:
    prediction = placement.prediction
    if prediction is None or prediction.verdict != "fits" or prediction.cost is None:
        return math.inf
    money = prediction.cost.money(prediction.cost.s_per_million)
    return math.inf if money is None else money


def price_lines(predictions: Iterable[Prediction]) -> list[str]:
    """Of each accelerator and number of them, the price that costs were counted with."""
    lines: dict[str, None] = {}
    for prediction in predictions:
        cost = prediction.cost
        if cost is not None and cost.offer is not None:
            words = price_in_words(cost.offer, cost.num_gpus)
            lines[f"price of {prediction.gpu}: {words}{spot_in_words(cost)}"] = None
    return list(lines)


def per_million(prediction: Prediction) -> str:
    """Money for a million tokens; - where the run fails, or no price or time is known."""
    cost = prediction.cost
    if cost is None or cost.offer is None or prediction.verdict == "fails":
        return "-"
    return format_money(cost.money(cost.s_per_million), cost.offer.currency)


def per_hour(prediction: Prediction) -> str:
    """Money for an hour of all its cards; - where no price is known."""
    cost = prediction.cost
    if cost is None or cost.offer is None:
        return "-"
    return format_money(cost.offer.per_hour(cost.num_gpus), cost.offer.currency)


def of_training(prediction: Prediction) -> str:
    """Money for the whole training; - where the run fails, or no price or time is known."""
    cost, total = prediction.cost, prediction.training
    if cost is None or total is None or cost.offer is None or prediction.verdict == "fails":
        return "-"
    return format_money(cost.money(total.total_s), cost.offer.currency)


def spot_in_words(cost: RunningCost) -> str:
    """The end of a sentence; empty where nobody offers it."""
    if cost.spot is None:
        return ""
    return f"; spot {format_money(cost.spot.per_hour(cost.num_gpus), cost.spot.currency)}"


def between(bounds: Interval) -> str:
    """Bounds, each with two digits; the upper alone where the lower says nothing."""
    low, high = bounds
    if low <= 0:
        return f"at most {_two_digits(high)}"
    return f"{_two_digits(low)} to {_two_digits(high)}"


def _two_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:#.2g}"
