"""What an hour of accelerators takes: money, electricity and the CO2 of it."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from whichlora.errors import ConfigError

Interval = tuple[float, float]

MOST_PRICE = 10**6  # of an hour; a larger one is a slipped key
_MOST_TOGETHER = 1024
_J_PER_KWH = 3.6e6
_TOKENS = 10**6  # that a rate is stated for where no data is given


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A price of an hour of one GPU.

    Args:
        gpu: key of the accelerator.
        usd_per_hour: of one GPU; of another `currency` where a user states it.
        gpus: that are rented together.
        spot: whether the machine may be taken back.
        date: day of the price, YYYY-MM-DD; empty where nobody says.
        url: its page, or the name of the instance.

    Raises:
        ConfigError: a number out of range, or a date that is none.
    """

    gpu: str
    usd_per_hour: float
    provider: str = ""
    region: str = ""
    gpus: int = 1
    spot: bool = False
    date: str = ""
    url: str = ""
    source: str = ""
    licence: str = ""
    currency: str = "USD"

    def __post_init__(self) -> None:
        if not 0 < self.usd_per_hour <= MOST_PRICE:
            raise ConfigError(
                f"usd_per_hour: must be a number above 0, at most {MOST_PRICE:,}, "
                f"got {self.usd_per_hour!r}"
            )
        if type(self.gpus) is not int or not 1 <= self.gpus <= _MOST_TOGETHER:
            raise ConfigError(
                f"gpus: must be a whole number from 1 to {_MOST_TOGETHER}, got {self.gpus!r}"
            )
        if self.date:
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                raise ConfigError(f"date: must be YYYY-MM-DD, got {self.date!r}") from None

    def per_hour(self, num_gpus: int) -> float:
        """The price of an hour of `num_gpus`, in machines of `gpus` each."""
        machines = -(-num_gpus // self.gpus)
        return machines * self.gpus * self.usd_per_hour

    @property
    def in_words(self) -> str:
        """Who asks it for what, and since when: "RunPod, on demand, 2026-05-24"."""
        together = f", {self.gpus} rented together" if self.gpus > 1 else ""
        place = " ".join(word for word in (self.provider, self.region) if word)
        words = (place, "spot" if self.spot else "on demand", self.date)
        return ", ".join(word for word in words if word) + together


YOURS = "your price"


def own_price(gpu: str, price: float) -> Offer:
    """A price that the user states, in a currency of the user's own."""
    return Offer(gpu=gpu, usd_per_hour=price, provider=YOURS, currency="")


def cheapest(offers: Iterable[Offer], num_gpus: int = 1, *, spot: bool = False) -> Offer | None:
    """The offer that an hour of `num_gpus` costs least with; None where there is none."""
    kind = [offer for offer in offers if offer.spot == spot]
    return min(kind, key=lambda offer: offer.per_hour(num_gpus), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The electricity of one country.

    Args:
        g_per_kwh: CO2 equivalents of a kWh, mean of `year`.
    """

    country: str
    code: str
    g_per_kwh: float
    year: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCost:
    """What a run takes for as long as it runs, on all its GPUs.

    Args:
        offer, spot: the cheapest price on demand, and of machines that may be taken back.
        power_w: bounds of what the boards draw; without host, cooling and network.
        tokens_per_s: of the run, which a rate per million tokens comes from.
    """

    num_gpus: int = 1
    offer: Offer | None = None
    spot: Offer | None = None
    power_w: Interval | None = None
    grid: Grid | None = None
    tokens_per_s: float = math.nan

    @property
    def s_per_million(self) -> float:
        """Seconds of a million tokens; NaN where the time is not known."""
        return _TOKENS / self.tokens_per_s if self.tokens_per_s > 0 else math.nan

    def money(self, seconds: float) -> float | None:
        """In the currency of `offer`; None where no price or no time is known."""
        if self.offer is None or math.isnan(seconds):
            return None
        return self.offer.per_hour(self.num_gpus) * seconds / 3600

    def kwh(self, seconds: float) -> Interval | None:
        """Bounds of the electricity that the boards take."""
        if self.power_w is None or math.isnan(seconds):
            return None
        low, high = (watts * seconds / _J_PER_KWH for watts in self.power_w)
        return low, high

    def co2_kg(self, seconds: float) -> Interval | None:
        """Bounds of the CO2 equivalents of that electricity."""
        kwh = self.kwh(seconds)
        if kwh is None or self.grid is None:
            return None
        low, high = (1e-3 * self.grid.g_per_kwh * each for each in kwh)
        return low, high

    def to_dict(self, seconds: float | None = None) -> dict[str, Any]:
        """The JSON shape: of `seconds`, or without them of a million tokens."""
        total_s = self.s_per_million if seconds is None else seconds
        return {
            "of": "million tokens" if seconds is None else "whole run",
            "seconds": None if math.isnan(total_s) else total_s,
            "money": self.money(total_s),
            "offer": None if self.offer is None else asdict(self.offer),
            "spot": None if self.spot is None else asdict(self.spot),
            "power_w": self.power_w,
            "kwh": self.kwh(total_s),
            "co2_kg": self.co2_kg(total_s),
            "grid": None if self.grid is None else asdict(self.grid),
        }
