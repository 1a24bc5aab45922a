"""The runs of part a of the memory tables: drawn with a seed, from every family."""

import json
from dataclasses import replace

import memory_samples as samples

from whichlora import families
from whichlora.spec.run import RunConfig
from whichlora.tracer.extrapolate import TracedEvent


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
    newest = {samples.model_type(run) for run in samples.newest_runs()}
    assert newest == set(samples.NEWEST_TYPES)
    assert not newest & drawn
    latest = {samples.model_type(run) for run in samples.latest_runs()}
    assert latest == set(samples.LATEST_TYPES)
    assert {samples.model_type(run) for run in samples.led_runs()} == {"led"}
    of_t5 = {samples.model_type(run) for run in samples.t5_runs()}
    assert of_t5 == set(samples.T5_RUNS)
    known = (
        {"led"} | of_t5 | drawn | newest | latest | set(samples.FIRST_TYPES) | samples.NO_AUTO_CLASS
    )
    assert set(families.FAMILIES) <= known


def test_a_line_gives_its_run_back() -> None:
    for index in range(50):
        run = samples.draw(0, index)
        line = json.loads(json.dumps(samples.settings(run)))
        assert RunConfig.from_dict(line) == replace(run, serve="merged")


def test_moments_are_peaks_of_live_blocks() -> None:
    events = [
        TracedEvent(1, 1000, moment="load"),
        TracedEvent(2, 512, moment="forward"),
        TracedEvent(2, None, moment="forward"),
        TracedEvent(3, 100, moment="backward"),
    ]
    assert samples.moment_peaks(events) == {"load": 1024, "forward": 1536, "backward": 1536}
