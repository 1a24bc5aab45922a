"""A small share of the fuzzing in every run of the tests; `python tests/fuzz` does more."""

import json
import random
import time
from pathlib import Path

import pytest
from harness import Hang, Target, run_case, run_target
from mutation import mutated
from targets import TARGETS

from whichlora.errors import ConfigError

CASES, BUDGET_S = 40, 4.0


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_a_stranger_wrote_ends_in_a_traceback_or_a_hang(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "case"
    failures, count = run_target(
        TARGETS[name], cases=CASES, seed=0, folder=folder, budget_s=BUDGET_S
    )
    assert count > 0
    assert not failures, "\n".join(f"{one.seed}: {one.where}: {one.fault}" for one in failures)


def outcome(run: object, *, limit_s: float = 5.0) -> str:
    """What the harness says of a target that does `run`."""
    target = Target(name="made", make=lambda rng: None, run=run)  # type: ignore[arg-type]
    failure = run_case(target, "made-0-0", Path(), limit_s=limit_s)
    return "" if failure is None else failure.fault


def test_the_fuzzer_sees_a_traceback_and_a_hang_and_takes_an_error_of_ours() -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("no such model")

    def fail(*_: object) -> None:
        raise KeyError("hidden_size")

    def hang(*_: object) -> None:
        while True:
            try:
                time.sleep(1)
            except Exception:
                pytest.fail("a hang was swallowed")

    assert outcome(refuse) == ""
    assert outcome(fail) == "KeyError: 'hidden_size'"
    assert outcome(hang, limit_s=0.05) == f"{Hang.__name__}: took longer than 0.05 s"


@pytest.mark.parametrize("name", TARGETS)
def test_a_case_is_made_again_from_its_seed(name: str) -> None:
    one, again, other = (TARGETS[name].make(random.Random(seed)) for seed in ("1", "1", "2"))
    assert json.dumps(one) == json.dumps(again) != json.dumps(other)


def test_a_mutation_leaves_the_honest_value_as_it_was() -> None:
    honest = {"a": [1, 2, {"b": None}], "c": "d"}
    copy = json.dumps(honest)
    changed = [mutated(random.Random(seed), honest) for seed in range(50)]
    assert json.dumps(honest) == copy
    assert sum(json.dumps(one) != copy for one in changed) > 40
