"""The cases of `plans.py`: a question as a person puts it, and what checks the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plan_cases.folder import Folder

Check = Callable[[Folder], str]


class WrongAnswerError(AssertionError):
    """What was answered, and what is right."""


@dataclass(frozen=True, slots=True)
class Case:
    """One plan with its right answer.

    Args:
        check: runs the plan in a folder and returns what was answered; raises `WrongAnswerError`.
    """

    question: str
    check: Check


CASES: dict[str, Case] = {}


def case(question: str) -> Callable[[Check], Check]:
    """Register the decorated check under its own name."""

    def register(check: Check) -> Check:
        CASES[check.__name__.replace("_", "-")] = Case(question, check)
        return check

    return register


def expect(right: bool, answered: str) -> None:
    """Raise `WrongAnswerError` with what was answered unless it is right."""
    if not right:
        raise WrongAnswerError(answered)
