"""Bytes, seconds and counts: what people write and read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.errors import ConfigError
from whichlora.units import (
    MAX_BYTES,
    GiB,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_tokens,
    rows_are,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GiB),
        ("24GB", 24 * 10**9),
        ("24 gib", 24 * GiB),
        (" 1.5 TiB ", 1536 * GiB),
        ("512 MiB", GiB // 2),
        ("2kb", 2000),
        ("1e3MB", 10**9),
        (".5KiB", 512),
        ("4096", 4096),
        ("0B", 0),
    ],
)
def test_a_size_is_read_as_it_is_written(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24G", "24 GiBs", "-1GiB", "1,5GiB", "x", "1 2GB"])
def test_what_is_no_size_is_refused_with_its_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--budget: .* is not a size; write a number with"):
        parse_bytes(text, setting="--budget")


@pytest.mark.parametrize("text", ["2e18", "1000001TB", "9" * 400 + "GB"])
def test_more_than_any_device_has_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is more than any device has"):
        parse_bytes(text)


@given(st.integers(0, MAX_BYTES // GiB))
def test_binary_and_decimal_units_are_never_mixed_up(count: int) -> None:
    assert parse_bytes(f"{count}GiB") == count * GiB
    assert parse_bytes(f"{count}GB") == count * 10**9


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (80 * GiB, "80.00 GiB"),
        (100 * GiB, "100.0 GiB"),
        (2048 * GiB, "2.00 TiB"),
        (-GiB, "-1.00 GiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, MAX_BYTES))
def test_a_shown_size_reads_back_within_one_percent(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (22e-6, "22 µs"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (1.0, "1 s"),
        (45.67, "45.7 s"),
        (200.0, "3 min 20 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (2 * 3600 + 5 * 60, "2 h 05 min"),
        (76 * 3600, "3 d 04 h"),
    ],
)
def test_seconds_are_shown_in_the_unit_people_think_in(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (2.17, "2.2"),
        (9.99, "10"),
        (12.3, "12"),
        (12, "12"),
        (3, "3"),
        (12_500, "12.5k"),
        (134_515_008, "135M"),
        (8_030_261_248, "8.03B"),
        (1e12, "1T"),
    ],
)
def test_counts_are_shown_with_the_suffixes_of_the_field(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999_885_952, "1B"), (999_400_000, "999M"), (1e9, "1B"), (999, "999")]
)
def test_a_count_that_rounds_up_to_a_thousand_takes_the_next_unit(count: float, text: str) -> None:
    assert format_count(count) == text


def test_one_row_has_a_sentence_of_its_own() -> None:
    assert rows_are(1, "cut") == "1 row is cut"
    assert rows_are(2000, "left out", " without text") == "2,000 rows without text are left out"


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("8k", 8192), (" 128K ", 131072)])
def test_thousands_of_tokens_are_1024(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "4kk", "4.5k", "4m"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^seq_len: .* is no number of tokens; give such as 4096"
    ):
        parse_tokens(text, setting="seq_len")
