"""What a member's own settings accept."""

from __future__ import annotations

import pytest

from whichlora.errors import ConfigError
from whichlora.spec.options import Option, OptionValue, by_own_names, filled


@pytest.mark.parametrize(
    ("default", "choices", "value", "message"),
    [
        ("A", ("A", "B"), "c", "size: 'c' is not accepted; accepted are A, B"),
        ("2", ("1", "2"), "3", "size: '3' is not accepted; accepted are 1, 2"),
        (("a",), ("a", "b"), ("a", "c"), "size: 'a,c' is not accepted; accepted are a, b"),
        (False, (), 1, "size: 1 is neither true nor false"),
        (0.1, (), True, "size: True is not a number"),
        (None, (), 0, "size: 0 is not a whole number from 1 on"),
    ],
)
def test_a_value_of_another_kind_is_refused(
    default: OptionValue | None, choices: tuple[str, ...], value: OptionValue, message: str
) -> None:
    option = Option(name="size", summary="", default=default, choices=choices)
    with pytest.raises(ConfigError, match=message):
        option.checked(value)


@pytest.mark.parametrize(
    ("default", "value", "chosen"),
    [(None, "q4_k_m", "Q4_K_M"), (("F16",), ("f16", "Q4_K_M"), ("F16", "Q4_K_M"))],
)
def test_a_choice_is_found_whatever_its_case(
    default: OptionValue | None, value: OptionValue, chosen: OptionValue
) -> None:
    option = Option(name="size", summary="", default=default, kind=str, choices=("F16", "Q4_K_M"))
    assert option.checked(value) == chosen


def test_what_is_not_asked_for_has_its_default() -> None:
    options = (
        Option(name="version", summary="", default="2", choices=("1", "2")),
        Option(name="beta", summary="", default=0.1),
        Option(name="size", summary="", default=None),
    )
    assert filled(options, {"version": 1}) == filled(options, {"version": "1"})
    assert filled(options, {"version": "1"}) == {"version": "1", "beta": 0.1, "size": None}
    assert filled(options, {"beta": 1})["beta"] == 1.0


@pytest.mark.parametrize("value", [0, -0.5, 1.5, 90])
def test_a_share_lies_between_0_and_1(value: float) -> None:
    option = Option(name="used", summary="", default=0.9, is_share=True)
    with pytest.raises(ConfigError, match="is no share between 0 and 1, such as"):
        option.checked(value)
    assert option.checked(1) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8k", 8_000),
        ("8K", 8_192),
        ("10G", 10 * 2**30),
        ("25.6k", 25_600),
        ("2m", 2_000_000),
        (" 3M ", 3 * 2**20),
        (512, 512),
    ],
)
def test_a_number_of_a_library_that_takes_suffixes_may_have_one(
    text: OptionValue, number: int
) -> None:
    option = Option(name="size", summary="", default=None, has_suffixes=True)
    assert option.checked(text) == number
    assert by_own_names([option], [("size", text)]) == (("size", number),)


@pytest.mark.parametrize("text", ["1.5K", "8kB", "k", "-8k", "0k"])
def test_what_a_library_does_not_read_so_is_no_number(text: str) -> None:
    option = Option(name="size", summary="", default=None, has_suffixes=True)
    with pytest.raises(ConfigError, match="is not a whole number from 1 on"):
        option.checked(text)


def test_a_suffix_is_no_part_of_other_numbers() -> None:
    with pytest.raises(ConfigError, match="'8k' is not a whole number"):
        Option(name="size", summary="", default=None).checked("8k")
