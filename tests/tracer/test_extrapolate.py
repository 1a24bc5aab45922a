from collections.abc import Iterator

import pytest
from traced import live_bytes

from whichlora.memory.allocator_simulator import replay
from whichlora.tracer.extrapolate import (
    DoesNotRepeatError,
    TracedEvent,
    at_peak,
    check_growth,
    shallow,
    stretch,
    with_warm_up,
)


def step(num_layers: int, *, saved: int = 100, odd: int | None = None) -> list[TracedEvent]:
    """Weights, a forward that keeps a tensor per layer, a loss, and a backward that frees it."""
    return list(_step(num_layers, saved=saved, odd=odd))


def _step(num_layers: int, *, saved: int, odd: int | None) -> Iterator[TracedEvent]:
    yield TracedEvent(1, 1000, None, moment="load")
    for layer in range(num_layers):
        yield TracedEvent(10 + layer, 50, layer, moment="load")
    yield TracedEvent(2, 8, None, moment="forward")
    for layer in range(num_layers):
        size = saved + (layer == odd)
        yield TracedEvent(100 + layer, size, layer, True, "forward")
        yield TracedEvent(200 + layer, 30, layer, True, "forward")
        if layer:  # the output of the layer before is read
            yield TracedEvent(200 + layer - 1, None, layer, True, "forward")
    yield TracedEvent(3, 700, None, moment="forward")
    for layer in reversed(range(num_layers)):
        yield TracedEvent(300 + layer, 30, layer, True, "backward")
        yield TracedEvent(100 + layer, None, layer, True, "backward")
        if layer < num_layers - 1:
            yield TracedEvent(300 + layer + 1, None, layer, True, "backward")
    yield TracedEvent(3, None, None, moment="forward")


@pytest.mark.parametrize("num_layers", [4, 5, 6, 33])
def test_four_layers_stretched_are_what_all_layers_trace(num_layers: int) -> None:
    stretched = stretch(step(4), num_layers=num_layers)
    real = step(num_layers)
    assert [event.num_bytes for event in stretched] == [event.num_bytes for event in real]
    assert [event.layer for event in stretched] == [event.layer for event in real]
    assert replay(event.event for event in stretched) == replay(event.event for event in real)


def test_deaths_outside_the_layers_may_come_in_any_order() -> None:
    events = step(4)
    births = [TracedEvent(500 + layer, 16, layer, moment="optimizer") for layer in range(4)]
    deaths = [TracedEvent(500 + layer, None, layer, moment="optimizer") for layer in (2, 0, 3, 1)]
    stretched = stretch([*events, *births, *deaths], num_layers=12)
    assert sum(event.num_bytes == 16 for event in stretched) == 12
    replay(event.event for event in stretched)  # raises where a death has no birth before it


def test_a_layer_that_frees_what_its_neighbour_never_made_is_refused() -> None:
    events = step(4)
    del events[events.index(TracedEvent(102, 100, 2, True, "forward"))]
    del events[events.index(TracedEvent(102, None, 2, True, "backward"))]
    with pytest.raises(DoesNotRepeatError):
        stretch(events, num_layers=8)


def test_a_tensor_that_one_middle_layer_keeps_is_refused() -> None:
    events = [event for event in step(4) if (event.storage, event.num_bytes) != (101, None)]
    with pytest.raises(DoesNotRepeatError):
        stretch(events, num_layers=8)


def test_a_layer_that_a_forward_passes_over_is_refused() -> None:
    events = [event for event in step(4) if event.layer != 3 or not event.inside]
    with pytest.raises(DoesNotRepeatError, match="passed over"):
        stretch(events, num_layers=8)


def test_growth_from_two_to_four_layers_must_be_that_of_the_repeated_layer() -> None:
    stretched = stretch(step(4), num_layers=40)
    check_growth(step(2), step(4), stretched, num_layers=40)
    with pytest.raises(DoesNotRepeatError, match="two more layers"):
        check_growth(step(2, saved=90), step(4), stretched, num_layers=40)


def test_the_warm_up_block_has_the_bytes_of_the_weights_that_stay() -> None:
    events = [TracedEvent(5, 999, moment="load"), TracedEvent(5, None, moment="load"), *step(4)]
    birth, death, *after = with_warm_up(events)
    assert (birth.num_bytes, death.num_bytes) == (1000 + 4 * 50, None)
    assert after == events


def test_the_parts_at_the_peak_add_up_to_it() -> None:
    events = step(4)
    moment, parts = at_peak(events)
    assert moment == "backward"
    assert sum(parts.values()) == max(total for _, total in live_bytes(events))
    assert parts["weights"] == 1200


def test_a_shallow_model_has_the_first_layers_and_what_is_said_of_them() -> None:
    kinds = ["mamba", "moe", "attention", "moe"]
    assert shallow({"layers_block_type": kinds}, 2) == {"layers_block_type": kinds[:2]}
    shared = {"num_hidden_layers": 10, "num_kv_shared_layers": 4}
    # the last ones read keys of earlier layers
    assert shallow(shared, 8) == {"num_hidden_layers": 8, "num_kv_shared_layers": 2}
    assert shallow(shared, 5) == {"num_hidden_layers": 5, "num_kv_shared_layers": 0}
