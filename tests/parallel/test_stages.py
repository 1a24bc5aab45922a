"""Parts of a model: what each has, and that together they are the whole."""

from __future__ import annotations

import pytest

from whichlora.errors import ConfigError
from whichlora.parallel.stages import check_can_be_parted, part_of_model, placed_groups
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

MODEL = load_model("meta-llama/Llama-3.1-8B")


def test_parts_add_up_to_the_model() -> None:
    first = part_of_model(MODEL, range(10), embeds=True, ends=False, scores=False)
    last = part_of_model(MODEL, range(10, 32), embeds=False, ends=True, scores=True)
    assert first.num_params + last.num_params == MODEL.num_params
    assert (first.num_hidden_layers, last.num_hidden_layers) == (10, 22)
    assert (first.continues, last.continues) == (False, True)


def test_places_count_from_the_first_layer_of_a_part() -> None:
    gemma = load_model("google/gemma-2-2b")
    part = part_of_model(gemma, range(3, 8), embeds=False, ends=False, scores=False)
    assert sorted(place for _, places in placed_groups(part) for place in places) == [*range(5)]


def test_a_part_without_layers_has_a_group_of_none() -> None:
    head = part_of_model(MODEL, range(32, 32), embeds=False, ends=True, scores=True)
    assert head.num_hidden_layers == 0
    assert head.num_params == 128_256 * 4096 + 4096


def test_what_stands_in_no_row_is_refused() -> None:
    model = load_model("google-t5/t5-small")
    run = RunConfig(model=model.name, method="lora", seq_len=64)
    step = training_step(resolve(model, run, find_gpu("a100-sxm-80gb")))
    with pytest.raises(ConfigError, match="parallel: pp is modelled for decoders whose layers"):
        check_can_be_parted(step, "pp")
