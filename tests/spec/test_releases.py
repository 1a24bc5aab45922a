"""What was installed in a month."""

from __future__ import annotations

from itertools import pairwise

import pytest

from whichlora.errors import ConfigError
from whichlora.spec.releases import LIBRARIES, by_month, installed_in, is_date, month_of
from whichlora.spec.versions import Libraries, release_numbers


def test_months_follow_each_other_and_releases_never_go_back() -> None:
    months = [tuple(map(int, month.split("-"))) for month in by_month()]
    for (year, month), after in pairwise(months):
        assert after == ((year, month + 1) if month < 12 else (year + 1, 1))
    for library in LIBRARIES:
        numbers = [release_numbers(row[library]) for row in by_month().values()]
        assert numbers == sorted(numbers)


def test_a_day_is_its_month_and_names_every_library() -> None:
    installed = installed_in("2024-05-19")
    assert installed == installed_in("2024-05")
    assert installed["transformers"] == "4.40.1"  # 2024-04-23 on PyPI; 4.40.2 came on 2024-05-06
    assert installed["trl"] == "0.8.6"  # its tag is of 2024-04-22
    assert installed["unsloth"] == "2024.4"
    assert installed_in("2025-01")["unsloth"] == "2024.12"
    assert Libraries.of(installed.items()).transformers == "4.40.1"


def test_dates_are_told_from_versions_and_others_are_refused() -> None:
    assert is_date("2024-05")
    assert is_date("2024-05-19")
    assert not any(map(is_date, ("2024-13", "transformers=4.40", "2024.05")))
    with pytest.raises(ConfigError, match="libraries: 2019-05: releases are known from 2023-02"):
        installed_in("2019-05")


def test_a_release_is_of_the_last_month_in_which_it_was_the_newest() -> None:
    assert month_of("transformers", "4.57.3") == "2026-01"
    assert month_of("trl", "0.17.0") == "2025-05"
    assert month_of("trl", "0.17.9") == ""
