"""The largest batch or length that fits, and the order of accelerators."""

from dataclasses import replace
from functools import cache

import pytest
from devices import A100, CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import finetune_runs, inference_runs

from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.largest import (
    MAX_SIZE,
    Largest,
    Placement,
    largest_that_fits,
    last_that,
    place,
    smallest_first,
    with_size,
)
from whichlora.predict.predict import predict
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model
from whichlora.units import GiB


@cache
def model(name: str) -> ModelSpec:
    found = find_model(name)
    assert found is not None
    return found


def verdict(run: RunConfig, gpu: GpuSpec) -> str:
    return predict(model(run.model), run, gpu, prior_calibration(gpu)).verdict


CARDS = st.builds(
    lambda gpu, size: replace(gpu, memory_bytes=size),
    st.sampled_from((CPU, A100)),
    st.integers(GiB // 2, 80 * GiB),
)


@given(run=st.one_of(finetune_runs(), inference_runs()), gpu=CARDS)
@settings(max_examples=20)
def test_the_largest_batch_fits_and_one_more_does_not(run: RunConfig, gpu: GpuSpec) -> None:
    found = largest_that_fits(model(run.model), run, gpu, prior_calibration(gpu), "batch_size")
    assert verdict(replace(run, batch_size=found.value + 1), gpu) != "fits"
    if found.value:
        assert verdict(replace(run, batch_size=found.value), gpu) == "fits"
        assert found.lacks_bytes == 0
    else:
        assert found.lacks_bytes > 0
    assert verdict(replace(run, batch_size=found.possible + 1), gpu) == "fails"


@given(run=finetune_runs(), gpu=CARDS)
@settings(max_examples=20)
def test_the_longest_sequence_fits_and_one_token_more_does_not(
    run: RunConfig, gpu: GpuSpec
) -> None:
    spec = model(run.model)
    found = largest_that_fits(spec, run, gpu, prior_calibration(gpu), "seq_len")
    positions = spec.max_position_embeddings or MAX_SIZE
    assert found.value <= found.possible <= positions
    if found.value:
        assert verdict(with_size(run, "seq_len", found.value), gpu) == "fits"
    if found.value < positions:
        assert found.positions is None
        assert verdict(with_size(run, "seq_len", found.value + 1), gpu) != "fits"


@given(run=finetune_runs(), gpu=CARDS)
@settings(max_examples=20)
def test_no_larger_batch_fits_either(run: RunConfig, gpu: GpuSpec) -> None:
    calibration = prior_calibration(gpu)
    found = largest_that_fits(model(run.model), run, gpu, calibration, "batch_size")
    # what `possible` leaves out fails by its least bytes, which more of a batch never lowers
    last = min(found.possible + 1, found.value + 40)
    larger = (replace(run, batch_size=size) for size in range(found.value + 1, last + 1))
    assert all(verdict(one, gpu) != "fits" for one in larger)


@given(limit=st.integers(0, 1000), most=st.integers(1, 500))
def test_the_search_finds_the_last_value_in_few_questions(limit: int, most: int) -> None:
    asked: list[int] = []

    def holds(value: int) -> bool:
        asked.append(value)
        return value <= limit

    assert last_that(holds, most) == min(limit, most)
    assert all(1 <= value <= most for value in asked)
    assert len(asked) <= 21


@pytest.mark.parametrize(
    ("found", "note"),
    [
        (
            Largest(setting="batch_size", value=4, possible=4),
            "batch_size 4 is the largest whose upper bound fits",
        ),
        (
            Largest(setting="batch_size", value=4, possible=6),
            "batch_size 4 is the largest whose upper bound fits; "
            "up to 6 may fit, a profile decides",
        ),
        (
            Largest(setting="seq_len", value=1024, possible=1024, positions=1024),
            "seq_len 1024 fits; the model has no more positions",
        ),
        (
            Largest(setting="batch_size", value=0, possible=0, lacks_bytes=3 * GiB),
            "batch_size 1 lacks 3.00 GiB",
        ),
        (
            Largest(setting="batch_size", value=0, possible=1, lacks_bytes=GiB),
            "batch_size 1 lacks 1.00 GiB at the upper bound; up to 1 may fit, a profile decides",
        ),
    ],
)
def test_the_note_says_what_ended_the_search(found: Largest, note: str) -> None:
    assert found.note == note


def test_cards_that_fit_come_first_and_the_closest_of_the_others_next() -> None:
    run = RunConfig(
        model="meta-llama/Llama-3.1-8B", method="qlora", batch_size=4, optimizer="adamw_8bit"
    )

    def on(size: int, **changes: object) -> Placement:
        gpu = replace(A100, key=f"card-{size}", memory_bytes=size * GiB, **changes)
        return place(model(run.model), run, gpu, prior_calibration(gpu))

    cards = [on(16), on(80), on(29), on(8), on(48), on(40, kind="hpu")]
    ordered = [one.gpu.key for one in smallest_first(cards)]
    assert ordered == ["card-48", "card-80", "card-29", "card-16", "card-8", "card-40"]
    refused = cards[-1]
    assert (refused.prediction, refused.batch_size) == (None, 0)
    assert "bitsandbytes" in refused.refusal
