"""The requests of a vision tower in a training step."""

from __future__ import annotations

import dataclasses
import itertools
from statistics import median
from typing import Any

import image_traces
import memory_samples
import pytest
import reserved_accuracy

from whichlora.memory import step_events
from whichlora.memory.step import TrainingStep
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig

LINES = [
    line
    for line in image_traces.records()
    if "reserved" in line and "images" in line["run"] and line["run"]["phase"] == "finetune"
]


def step_of(line: dict[str, Any]) -> TrainingStep:
    run = RunConfig.from_dict(line["run"])
    model = image_traces.families.build(image_traces.config_of(line), name=line["type"])
    return training_step(memory_samples.as_traced(resolve(model, run, image_traces.GPU)))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("index", range(len(LINES)))
def test_a_step_leaves_nothing_of_its_images_behind(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    for steps in (2, 3):
        monkeypatch.setattr(step_events, "_STEPS", steps)
        alive: dict[int, int] = {}
        for number, size in step_events.training_events(step_of(LINES[index])).events:
            if size is None:
                del alive[number]
            else:
                assert number not in alive
                alive[number] = size
        left.append(sum(alive.values()))
    assert left[0] == left[1] > 0


def test_what_training_with_images_reserves_is_that_of_traced_requests() -> None:
    found = list(itertools.islice(reserved_accuracy.compared_images(), 0, 125, 6))
    replayed = [one for one in found if one.is_replayed]
    assert len(replayed) > 0.8 * len(found)
    assert median(abs(one.answer) for one in replayed) < 0.01
    assert median(abs(one.estimate) for one in replayed) > 0.02  # without the tower's requests
    assert max(one.excess for one in found) < 0.03


def test_what_a_prompt_with_images_reserves_is_that_of_traced_requests() -> None:
    found = list(reserved_accuracy.compared_images("inference"))
    replayed = [one for one in found if one.is_replayed]
    assert len(replayed) > 0.7 * len(found)
    assert median(abs(one.answer) for one in replayed) < 0.013
    assert max(abs(one.answer) for one in replayed) < 0.09
    assert median(abs(one.estimate) for one in replayed) > 0.05  # without the tower's requests


@pytest.mark.parametrize(("num_embedded", "num_alive"), [(0, 0), (1, 1), (2, 2)])
def test_embedded_patches_live_while_the_blocks_run(num_embedded: int, num_alive: int) -> None:
    line = next(line for line in LINES if line["type"] == "smolvlm")
    events = step_events.StepEvents(step_of(line))
    assert events.tower is not None
    forward = events.tower.forward
    tower = dataclasses.replace(forward.tower, num_embedded=num_embedded)
    forward = dataclasses.replace(forward, tower=tower)
    stream = events.list.numbers(1)
    events._start(stream, forward.state_bytes)
    named = events._name_embedded(forward, stream)
    events._let_go(stream)  # the first block has read it
    births = [size is not None for _, size in events.list.events]
    assert 2 * sum(births) - len(births) == num_alive
    events._let_go_of(named)
    births = [size is not None for _, size in events.list.events]
    assert 2 * sum(births) == len(births)


def test_the_next_pixels_are_there_before_the_last_ones_go() -> None:
    events = step_events.StepEvents(step_of(LINES[0]))
    assert events.tower is not None
    pixels, _ = events.tower.forward.pixel_tensors
    for _ in range(3):
        events._read_pixels(1)
    births = [size is not None for _, size in events.list.events]
    assert births == [True, True, False, True, False]
    assert events.list.large_peak_bytes == pytest.approx(2 * pixels, rel=0.01)


def test_what_trl_reserves_is_that_of_traced_requests() -> None:
    found = list(reserved_accuracy.compared_sft())
    replayed = [one for one in found if one.is_replayed]
    assert len(replayed) > 0.8 * len(found)
    assert median(abs(one.answer) for one in replayed) < 0.01
    assert median(abs(one.estimate) for one in replayed) > 0.02  # without the fused head's requests
    assert max(one.excess for one in found) < 0.03
