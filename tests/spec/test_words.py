"""What is said of a word that nothing accepts."""

import pytest

from whichlora.spec.words import meant, unknown

METHODS = ("full", "lora", "qlora", "dora", "p-tuning", "prefix-tuning", "prompt-tuning", "vera")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("LoRA", "lora"),
        ("ptuning", "p-tuning"),
        ("prefix", "prefix-tuning"),
        ("lorax", "lora"),
        ("qlroa", "qlora"),
        ("lroa", "lora"),
        ("p", ""),  # begins several
        ("galore", ""),
        ("", ""),
    ],
)
def test_a_word_that_differs_a_little_is_what_was_meant(value: str, word: str) -> None:
    assert meant(value, METHODS) == word


def test_a_task_that_sounds_alike_is_not_proposed() -> None:
    tasks = ("sequence-classification", "token-classification")
    assert meant("text-classification", tasks) == ""
    assert meant("sequence-clasification", tasks) == "sequence-classification"


def test_the_line_has_the_setting_the_value_and_what_is_accepted() -> None:
    line = "--parallel: 'ZeRO-3' is not known; did you mean zero3; accepted are zero2, zero3"
    assert unknown("--parallel", "ZeRO-3", ["zero2", "zero3"]) == line
    assert unknown("x", 3, ["a"]) == "x: 3 is not known; accepted are a"


def test_classes_of_optimizers_are_those_of_their_names() -> None:
    names = ("paged_adamw_8bit", "paged_adamw_32bit", "adamw_8bit", "paged_lion_32bit")
    assert meant("PagedAdamW", names) == "paged_adamw_32bit"
    assert meant("PagedAdamW8bit", names) == "paged_adamw_8bit"
    assert meant("PagedLion", names) == "paged_lion_32bit"
