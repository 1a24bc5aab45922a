"""`device_map="auto"`: the rule's caps, and kept answers of the library."""

from __future__ import annotations

import device_map_cases
import pytest

from whichlora.parallel.placement import Module, balanced_caps, modules_of, placed
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

BLOCKS = (
    Module("model", 100, tuple(Module(f"layer {i}", 20) for i in range(5))),
    Module("head", 30),
)


def test_every_gpu_but_the_last_gets_an_equal_share_and_a_buffer() -> None:
    caps = balanced_caps(BLOCKS, [1000.0, 1000.0], quantised=False)
    assert caps == [130 // 2 + int(1.25 * 30), 1000]
    assert balanced_caps(BLOCKS, [1000.0, 1000.0], quantised=True)[1] == 900


def test_the_first_gpu_keeps_room_for_the_largest_block() -> None:
    places = placed(BLOCKS, [80.0, 1000.0])
    assert places is not None
    assert [places[f"layer {i}"] for i in range(5)] == [0, 0, 1, 1, 1]
    assert placed(BLOCKS, [20.0, 40.0]) is None


def test_modules_have_the_bytes_of_the_model() -> None:
    model = load_model("meta-llama/Llama-3.1-8B")
    run = RunConfig(model=model.name, method="lora", precision="bf16-pure")
    job = resolve(model, run, find_gpu("a100-sxm-80gb"))
    rotary = 2 * 2 * 128
    stored = sum(module.num_bytes for module in modules_of(model, job.dtypes, 2))
    assert stored == 2 * model.num_params + rotary


def test_kept_answers_of_transformers_are_met_exactly() -> None:
    assert sum(1 for _ in device_map_cases.records(device_map_cases.PLACEMENTS)) >= 400
    assert device_map_cases.places_differ() == []


@pytest.mark.oracle
@pytest.mark.parametrize("number", [0, 19, 130])
def test_transformers_places_layers_where_the_rule_says(number: int) -> None:
    pytest.importorskip("torch")
    line = [*device_map_cases.drawn_places()][number]
    places = device_map_cases.library_places(line)
    assert device_map_cases.formula_places(line) == (None if "disk" in places else places)
