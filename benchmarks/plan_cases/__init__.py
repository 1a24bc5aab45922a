"""Plans with their right answers, by theme; importing a module registers its cases."""

from plan_cases import data, devices, jobs, names, safety, winners  # noqa: F401
from plan_cases.registry import CASES, WrongAnswerError

__all__ = ["CASES", "WrongAnswerError"]
