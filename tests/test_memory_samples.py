"""The runs of part a of the memory tables: drawn with a seed, from every family."""

import json
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import memory_accuracy
import memory_samples as samples

from whichlora import families
from whichlora.memory.stretch import TracedEvent
from whichlora.specs import RunConfig


def test_a_run_depends_on_the_seed_and_its_number_only() -> None:
    drawn = [samples.draw(0, index) for index in range(20)]
    assert samples.draw(0, 7) == drawn[7]
    assert samples.draw(1, 7) != drawn[7]
    assert len(set(drawn)) == 20


def test_families_take_turns() -> None:
    types = samples.FIRST_TYPES
    drawn = {samples.model_type(samples.draw(0, index)) for index in range(len(types))}
    assert drawn == set(types)


def test_types_that_came_later_have_runs_of_their_own() -> None:
    drawn = {samples.model_type(run) for run in samples.later_runs()}
    assert drawn == set(samples.later_types())
    assert not drawn & set(samples.FIRST_TYPES)
    known = drawn | set(samples.FIRST_TYPES) | samples.NO_AUTO_CLASS
    assert set(families.FAMILIES) <= known


def test_a_line_gives_its_run_back() -> None:
    for index in range(50):
        run = samples.draw(0, index)
        line = json.loads(json.dumps(samples.settings(run)))
        assert RunConfig.from_dict(line) == run


def test_moments_are_peaks_of_live_blocks() -> None:
    events = [
        TracedEvent(1, 1000, moment="load"),
        TracedEvent(2, 512, moment="forward"),
        TracedEvent(2, None, moment="forward"),
        TracedEvent(3, 100, moment="backward"),
    ]
    assert samples.moment_peaks(events) == {"load": 1024, "forward": 1536, "backward": 1536}


def test_the_ledger_stays_as_near_to_the_kept_traces_as_now() -> None:
    errors = []
    for line in samples.read_lines():
        if "refused" not in line:
            found = samples.predicted(RunConfig.from_dict(line["run"]))
            errors.append(abs(found["peak_allocated_bytes"] / line["peak_allocated_bytes"] - 1))
    assert len(errors) > 250
    assert median(errors) < 0.0015  # a little above what holds


def test_the_ledger_stays_near_to_the_traces_of_types_that_came_later() -> None:
    # prompts that the ledger misses by more than the others: +9.3 % and -2.7 %
    missed_prompts = {"cohere2_moe", "solar_open"}
    errors, missed = [], []
    for line in samples.read_lines(samples.LATER_TRACES):
        if "refused" not in line:
            run = RunConfig.from_dict(line["run"])
            found = samples.predicted(run)["peak_allocated_bytes"]
            is_missed = run.phase == "inference" and samples.model_type(run) in missed_prompts
            (missed if is_missed else errors).append(found / line["peak_allocated_bytes"] - 1)
    assert len(errors) > 60
    assert median(map(abs, errors)) < 0.003
    assert -0.015 < min(errors) < max(errors) < 0.04
    assert len(missed) == 2
    assert max(map(abs, missed)) < 0.1


def test_a_table_counts_what_was_refused_by_reason() -> None:
    lines = [{"run": {}, "refused": "no kernel"}, {"run": {}, "refused": "no kernel"}, {"run": {}}]
    assert "| 2 | no kernel |" in memory_accuracy.left_out(lines)
