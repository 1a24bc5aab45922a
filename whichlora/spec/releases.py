"""What pip installed in a month: a thread or a script has a date, and seldom versions."""

from __future__ import annotations

import re
from functools import cache

from whichlora.errors import ConfigError

LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "deepspeed")
# The newest releases on PyPI on the first day of a month, in the order of LIBRARIES.
# Written by benchmarks/releases_by_month.py, which asks uv for them (`--exclude-newer`).
_BY_MONTH = """
2023-02 1.13.1 4.26.0 0.2.1 0.0.2 0.36.0 0.16.0 0.8.0
2023-03 1.13.1 4.26.1 0.3.0 0.1.0 0.37.0 0.16.0 0.8.1
2023-04 2.0.0 4.27.4 0.4.1 0.2.0 0.37.2 0.18.0 0.8.3
2023-05 2.0.0 4.28.1 0.4.1 0.2.0 0.38.1 0.18.0 0.9.1
2023-06 2.0.1 4.29.2 0.4.1 0.3.0 0.39.0 0.19.0 0.9.2
2023-07 2.0.1 4.30.2 0.4.6 0.3.0 0.39.1 0.20.3 0.9.5
2023-08 2.0.1 4.31.0 0.4.7 0.4.0 0.41.0 0.21.0 0.10.0
2023-09 2.0.1 4.32.1 0.7.1 0.5.0 0.41.1 0.22.0 0.10.2
2023-10 2.0.1 4.33.3 0.7.1 0.5.0 0.41.1 0.23.0 0.10.3
2023-11 2.1.0 4.34.1 0.7.2 0.5.0 0.41.1 0.24.1 0.11.1
2023-12 2.1.1 4.35.2 0.7.4 0.6.2 0.41.2 0.25.0 0.12.4
2024-01 2.1.2 4.36.2 0.7.7 0.7.1 0.41.3 0.25.0 0.12.6
2024-02 2.2.0 4.37.2 0.7.10 0.8.2 0.42.0 0.26.1 0.13.1
2024-03 2.2.1 4.38.2 0.7.11 0.9.0 0.42.0 0.27.2 0.13.4
2024-04 2.2.2 4.39.2 0.8.1 0.10.0 0.43.0 0.28.0 0.14.0
2024-05 2.3.0 4.40.1 0.8.6 0.10.0 0.43.1 0.29.3 0.14.2
2024-06 2.3.0 4.41.2 0.8.6 0.11.1 0.43.1 0.30.1 0.14.2
2024-07 2.3.1 4.42.3 0.9.4 0.11.1 0.43.1 0.31.0 0.14.4
2024-08 2.4.0 4.43.3 0.9.6 0.12.0 0.43.3 0.33.0 0.14.4
2024-09 2.4.0 4.44.2 0.10.1 0.12.0 0.43.3 0.33.0 0.15.0
2024-10 2.4.1 4.45.1 0.11.1 0.13.0 0.44.1 0.34.2 0.15.1
2024-11 2.5.1 4.46.1 0.12.0 0.13.2 0.44.1 1.1.0 0.15.3
2024-12 2.5.1 4.46.3 0.12.1 0.13.2 0.44.1 1.1.1 0.16.0
2025-01 2.5.1 4.47.1 0.13.0 0.14.0 0.45.0 1.2.1 0.16.2
2025-02 2.6.0 4.48.2 0.14.0 0.14.0 0.45.1 1.3.0 0.16.3
2025-03 2.6.0 4.49.0 0.15.2 0.14.0 0.45.3 1.4.0 0.16.4
2025-04 2.6.0 4.50.3 0.16.0 0.15.1 0.45.4 1.6.0 0.16.5
2025-05 2.7.0 4.51.3 0.17.0 0.15.2 0.45.5 1.6.0 0.16.7
2025-06 2.7.0 4.52.4 0.18.1 0.15.2 0.46.0 1.7.0 0.16.9
2025-07 2.7.1 4.53.0 0.19.0 0.15.2 0.46.0 1.8.1 0.17.1
2025-08 2.7.1 4.54.1 0.20.0 0.17.0 0.46.1 1.9.0 0.17.4
2025-09 2.8.0 4.56.0 0.22.1 0.17.1 0.47.0 1.10.1 0.17.5
2025-10 2.8.0 4.56.2 0.23.0 0.17.1 0.48.0 1.10.1 0.17.6
2025-11 2.9.0 4.57.1 0.24.0 0.17.1 0.48.2 1.11.0 0.18.1
2025-12 2.9.1 4.57.3 0.25.1 0.18.0 0.48.2 1.12.0 0.18.2
2026-01 2.9.1 4.57.3 0.26.2 0.18.0 0.49.0 1.12.0 0.18.3
2026-02 2.10.0 5.0.0 0.27.1 0.18.1 0.49.1 1.12.0 0.18.5
2026-03 2.10.0 5.2.0 0.29.0 0.18.1 0.49.2 1.12.0 0.18.6
2026-04 2.11.0 5.4.0 1.0.0 0.18.1 0.49.2 1.13.0 0.18.9
2026-05 2.11.0 5.7.0 1.3.0 0.19.1 0.49.2 1.13.0 0.18.9
2026-06 2.12.0 5.9.0 1.5.1 0.19.1 0.49.2 1.13.0 0.19.1
2026-07 2.12.1 5.12.1 1.7.0 0.19.1 0.49.2 1.14.0 0.19.2
2026-08 2.13.0 5.14.1 1.9.2 0.20.0 0.50.0 1.14.0 0.19.3
2026-09 2.13.0 5.16.1 1.12.0 0.20.0 0.50.2 1.14.0 0.19.6
2026-10 2.14.1 5.18.0 1.14.1 0.21.2 0.50.2 1.15.0 0.19.7
2026-11 2.15.0 5.22.1 1.16.0 0.21.2 0.50.2 1.15.0 0.19.8
2026-12 2.15.0 5.24.0 1.16.0 0.21.2 0.50.2 1.15.0 0.19.8
"""
_DATE = re.compile(r"(?P<year>20[0-9]{2})-(?P<month>0[1-9]|1[0-2])(-[0-3][0-9])?")


def is_date(text: str) -> bool:
    """Whether `text` is a month or a day, such as 2024-05 or 2024-05-19."""
    return _DATE.fullmatch(text) is not None


def installed_in(date: str) -> dict[str, str]:
    """Versions by library that were the newest on the first day of the month of `date`.

    Unsloth's versions are the months of their releases: it is that of the month before.

    Kind: exact. Source: PyPI, as of the table.

    Raises:
        ConfigError: a month that the table lacks.
    """
    year, month = date.split("-")[:2]
    table = by_month()
    if f"{year}-{month}" not in table:
        first, *_, last = table
        raise ConfigError(
            f"libraries: {date}: releases are known from {first} to {last}; name versions, such as "
            "transformers=5.23.0"
        )
    before = (int(year), int(month) - 1) if month != "01" else (int(year) - 1, 12)
    return {**table[f"{year}-{month}"], "unsloth": "{}.{}".format(*before)}


def month_of(library: str, version: str) -> str:
    """The last month on whose first day `version` was the newest; empty where the table lacks it.

    Kind: exact. Source: PyPI, as of the table.
    """
    return next(
        (month for month in reversed(by_month()) if by_month()[month].get(library) == version), ""
    )


@cache
def by_month() -> dict[str, dict[str, str]]:
    """The table: months, oldest first, with the versions of LIBRARIES."""
    rows = (line.split() for line in _BY_MONTH.split("\n") if line)
    return {month: dict(zip(LIBRARIES, versions, strict=True)) for month, *versions in rows}
