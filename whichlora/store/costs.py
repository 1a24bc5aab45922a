"""Prices of accelerators and CO2 of electricity: `costs/prices.csv`, `costs/grid_carbon.csv`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.costs import Grid, Offer
from whichlora.store.gpus import find_gpu
from whichlora.store.paths import data_folder
from whichlora.store.table import number, read_table

FOLDER, PRICES, GRID = "costs", "prices.csv", "grid_carbon.csv"
PRICE_COLUMNS = (
    "gpu",
    "usd_per_hour",
    "kind",
    "provider",
    "region",
    "gpus",
    "date",
    "url",
    "source",
    "licence",
)
NEEDED = ("gpu", "usd_per_hour")
GRID_COLUMNS = ("iso3", "iso2", "country", "g_per_kwh", "year", "source", "licence")
KINDS = {"": False, "on-demand": False, "spot": True}


@cache
def read_prices(path: Path | None = None) -> Mapping[str, tuple[Offer, ...]]:
    """Offers by key of the accelerator; without `path` those that came with this installation.

    Raises:
        DataFileError: naming file, line, column and what is accepted.
    """
    offers: dict[str, tuple[Offer, ...]] = {}
    for where, cells in read_table(path or data_folder(FOLDER) / PRICES, PRICE_COLUMNS, NEEDED):
        kind = cells.get("kind", "").lower()
        if kind not in KINDS:
            raise DataFileError(f"{where}: kind is {kind!r}; accepted are on-demand and spot")
        together = number(cells, "gpus", where) if cells.get("gpus") else 1.0
        if not together.is_integer():
            raise DataFileError(f"{where}: gpus is not a whole number, got {cells['gpus']!r}")
        texts = ("provider", "region", "date", "url", "source", "licence")
        try:
            offer = Offer(
                # the keys of our own file are checked by a test: a name costs 0.1 ms to look up
                gpu=cells["gpu"] if path is None else find_gpu(cells["gpu"]).key,
                usd_per_hour=number(cells, "usd_per_hour", where),
                gpus=int(together),
                spot=KINDS[kind],
                **{name: cells.get(name, "") for name in texts},
            )
        except ConfigError as error:
            raise DataFileError(f"{where}: {error}") from None
        offers[offer.gpu] = (*offers.get(offer.gpu, ()), offer)
    if not offers:
        raise DataFileError(f"{path}: has no row; give one price or leave the file out")
    return offers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What costs are predicted from.

    Args:
        prices: offers by key of the accelerator.
        grid: None where no country is named.
    """

    prices: Mapping[str, tuple[Offer, ...]]
    grid: Grid | None = None


def load_rates(prices: Path | None = None, country: str | None = None) -> Rates:
    """The price table, of which the file `prices` replaces accelerators, and a country.

    Raises:
        ConfigError: no such country.
        DataFileError: a fault of the file.
    """
    offers = read_prices()
    if prices is not None:
        offers = {**offers, **read_prices(prices)}
    return Rates(prices=offers, grid=None if country is None else find_grid(country))


@cache
def _grids() -> tuple[tuple[str, Grid], ...]:
    path = data_folder(FOLDER) / GRID
    return tuple(
        (
            cells["iso2"],
            Grid(
                country=cells["country"],
                code=cells["iso3"],
                g_per_kwh=number(cells, "g_per_kwh", where),
                year=int(cells["year"]),
                source=cells["source"],
            ),
        )
        for where, cells in read_table(path, GRID_COLUMNS, ("iso3", "country", "g_per_kwh", "year"))
    )


def find_grid(name: str) -> Grid:
    """The electricity of the country that `name` means: its name, or a code of ISO 3166.

    Raises:
        ConfigError: no such country, with the nearest names.
    """
    wanted = name.strip().casefold()
    for iso2, grid in _grids():
        if wanted in (iso2.casefold(), grid.code.casefold(), grid.country.casefold()):
            return grid
    near = near_countries(name)
    hint = f"did you mean {', '.join(near)}" if near else "give its name, such as France"
    raise ConfigError(f"country: {name!r} is not known; {hint}, or its code, such as FR or FRA")


def near_countries(name: str) -> list[str]:
    """Countries whose names are spelled like `name`, the most similar first."""
    names = {grid.country.casefold(): grid.country for _, grid in _grids()}
    nearest = difflib.get_close_matches(name.strip().casefold(), names, n=3, cutoff=0.5)
    return [names[each] for each in nearest]
