"""Runs cases of a target, each within a time limit, and keeps those that end as none may."""

from __future__ import annotations

import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whichlora.errors import WhichLoraError

LIMIT_S = 60.0  # of one case; the slowest honest ones take a second where nothing else works


class Hang(BaseException):
    """A case that took longer than its limit; no `except Exception` may swallow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Something that reads what a stranger wrote.

    Args:
        make: a case from a seeded generator; JSON types, so that a failing one can be told.
        run: what must end, with an answer or with an error of ours, given the case and a folder.
    """

    name: str
    make: Callable[[random.Random], Any]
    run: Callable[[Any, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case that hung, raised what is no error of ours, or told it in no clear line."""

    target: str
    seed: str
    case: Any
    fault: str
    where: str


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_message(error: WhichLoraError) -> None:
    """An error of ours is text in lines that can be printed; a config's may be several."""
    assert str(error).strip(), "an error without a message"
    assert "Traceback" not in str(error)


def run_case(
    target: Target, seed: str, folder: Path, *, limit_s: float = LIMIT_S
) -> Failure | None:
    """The case that `seed` makes; None where it ends as it may."""
    case = target.make(random.Random(seed))
    try:
        with time_limit(limit_s):
            target.run(case, folder)
    except WhichLoraError as error:
        check_message(error)
        return None
    except (Exception, Hang) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [one for one in frames if "/whichlora/" in one.filename] or frames
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        fault = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        return Failure(target=target.name, seed=seed, case=case, fault=fault, where=where)
    return None


def run_target(
    target: Target,
    *,
    cases: int,
    seed: int,
    folder: Path,
    budget_s: float | None = None,
    limit_s: float = LIMIT_S,
) -> tuple[list[Failure], int]:
    """Failures among `cases` cases, and how many were run before `budget_s` was spent."""
    failures: list[Failure] = []
    start = time.monotonic()
    for number in range(cases):
        if budget_s is not None and time.monotonic() - start > budget_s:
            return failures, number
        failure = run_case(target, f"{target.name}-{seed}-{number}", folder, limit_s=limit_s)
        if failure is not None:
            failures.append(failure)
    return failures, cases
