"""The tables of prices and electricity, and the user's own file."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from whichlora.errors import ConfigError, DataFileError
from whichlora.store.costs import find_grid, load_rates, near_countries, read_prices
from whichlora.store.gpus import list_gpus


def test_every_row_of_the_price_table_names_a_board_a_day_a_page_and_a_licence() -> None:
    table = read_prices()
    assert set(table) <= {gpu.key for gpu in list_gpus()}
    assert {"l4-24gb", "rtx-3090-24gb", "rtx-a6000-48gb", "h100-sxm-80gb"} <= set(table)
    for offer in (offer for offers in table.values() for offer in offers):
        assert datetime.date.fromisoformat(offer.date) >= datetime.date(2026, 1, 1)
        assert offer.provider
        assert offer.url
        assert offer.source
        assert offer.licence == "MIT"


def test_no_machine_that_may_be_taken_back_is_dearer_than_the_same_on_demand() -> None:
    for offers in read_prices().values():
        kept = {(each.provider, each.gpus): each for each in offers if not each.spot}
        for spot in (each for each in offers if each.spot):
            dearer = kept.get((spot.provider, spot.gpus))
            assert dearer is None or spot.usd_per_hour <= dearer.usd_per_hour


def test_prices_of_the_user_take_the_place_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("gpu,usd_per_hour,kind\nL4,0.3,\nl4,0.1,spot\n4090,0.2,on-demand\n")
    prices = load_rates(path).prices
    assert [(each.usd_per_hour, each.spot) for each in prices["l4-24gb"]] == [
        (0.3, False),
        (0.1, True),
    ]
    assert prices["rtx-4090-24gb"][0].usd_per_hour == 0.2
    assert prices["t4-16gb"] == read_prices()["t4-16gb"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("gpu\nl4\n", "has no column usd_per_hour; needed are gpu, usd_per_hour"),
        ("gpu,usd_per_hour,price\nl4,1,1\n", "column 'price' is not known; accepted are gpu"),
        ("gpu,usd_per_hour\nl4,cheap\n", ":2: usd_per_hour is not a number, got 'cheap'"),
        ("gpu,usd_per_hour\nl4,\n", ":2: usd_per_hour is empty"),
        ("gpu,usd_per_hour\nl4,-1\n", ":2: usd_per_hour: must be a number above 0"),
        ("gpu,usd_per_hour\nl4,1,2\n", ":2: has more cells than the 2 columns"),
        ("gpu,usd_per_hour\nl5,1\n", ":2: unknown GPU 'l5'"),
        ("gpu,usd_per_hour,kind\nl4,1,cheap\n", ":2: kind is 'cheap'; accepted are on-demand"),
        ("gpu,usd_per_hour,gpus\nl4,1,1.5\n", ":2: gpus is not a whole number, got '1.5'"),
        ("gpu,usd_per_hour,date\nl4,1,May\n", ":2: date: must be YYYY-MM-DD"),
        ("gpu,usd_per_hour\n", "has no row"),
        ("", "has no column gpu"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(DataFileError) as raised:
        read_prices(path)
    assert fault in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["FR", "fra", " France ", "FRANCE"])
def test_a_country_goes_by_its_name_and_both_codes(name: str) -> None:
    grid = find_grid(name)
    assert (grid.country, grid.code, grid.year) == ("France", "FRA", 2023)
    assert 20 < grid.g_per_kwh < 100  # mostly nuclear


def test_a_country_that_nobody_knows_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'Frence' is not known; did you mean France, Greece"):
        find_grid("Frence")
    with pytest.raises(ConfigError, match="give its name, such as France"):
        find_grid("zzzzzz")
    assert near_countries("germny")[0] == "Germany"
