"""The requests of a training run: each is freed once, and they add up to the ledger."""

from dataclasses import replace

import pytest

from tests.memory.test_reserved import MODEL, step_of
from whichlora.memory.allocator import kernel_workspace_bytes, workspace_bytes
from whichlora.memory.event_list import Chunk, EventList, asks_in_backward, asks_in_forward
from whichlora.memory.optimizer import state_blocks, state_bytes, temporary_blocks
from whichlora.memory.step_events import has_events, training_events
from whichlora.memory.weights import quantised_bytes, quantised_parts
from whichlora.spec.run import RunConfig
from whichlora.symbolic.graph import TapeEvent
from whichlora.symbolic.layer import BlockEvents
from whichlora.symbolic.linear_form import per_token
from whichlora.units import MiB

RUNS = [
    {},
    {"gradient_checkpointing": False},
    {"method": "qlora", "gradient_accumulation_steps": 4},
    {"method": "full", "gradient_accumulation_steps": 2},
    {"method": "full", "precision": "bf16-pure", "optimizer": "adafactor"},
    {"method": "dora", "use_reentrant": True, "loss_head": "raw"},
    {"quant": "int8", "gradient_checkpointing": False},
    {"trainer": "loop", "precision": "bf16-no-autocast"},
    {"trainer": "loop-function", "gradient_accumulation_steps": 2},
    {"trainer": "orpo", "gradient_checkpointing": False},
    {"trainer": "sft", "gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("settings", RUNS)
def test_every_storage_dies_once_after_its_birth_and_weights_stay(
    settings: dict[str, object],
) -> None:
    step = step_of(RunConfig(model=MODEL, batch_size=2, seq_len=1024, **settings))
    alive: dict[int, int] = {}
    for number, size in training_events(step).events:
        if size is None:
            del alive[number]
        else:
            assert number not in alive
            assert size > MiB
            alive[number] = size
    # what is left is loaded, or an optimizer's state
    left = sum(alive.values())
    static = sum(entry.num_bytes for entry in step.static)
    held = sum(size for size in alive.values() if size > 100 * MiB)
    assert left <= static + held
    assert left > 0.7 * static


@pytest.mark.parametrize(("trainer", "num_alone"), [("loop", 1), ("loop-function", 4)])
def test_a_function_frees_the_logits_before_those_of_its_next_call(
    trainer: str, num_alone: int
) -> None:
    run = RunConfig(
        model=MODEL,
        trainer=trainer,
        batch_size=2,
        seq_len=1024,
        precision="bf16-pure",
        gradient_accumulation_steps=2,
    )
    step = step_of(run)
    logits: set[int] = set()
    born_alone = 0
    for number, size in training_events(step).events:
        if size == step.loss.kept_logits_bytes:
            born_alone += not logits
            logits.add(number)
        elif size is None:
            logits.discard(number)
    assert born_alone == num_alone  # of two steps of two batches


def test_small_requests_are_added_up_and_large_ones_listed() -> None:
    requests = EventList()
    large, small = requests.born(2 * MiB), requests.born(1000)
    assert requests.events == [(large, 2 * MiB)]
    requests.die(small, large)
    requests.pass_by([512, 512])
    requests.stay([3 * MiB, 1])
    assert [size for _, size in requests.events] == [2 * MiB, None, 3 * MiB]
    assert requests.events[1][0] == large
    assert requests.small_peak_bytes == 1024
    assert requests.large_peak_bytes == 3 * MiB
    assert requests.peak_bytes == 3 * MiB + 512


def test_runs_with_the_same_large_requests_are_replayed_as_one() -> None:
    plain, alike, longer = (
        training_events(step_of(RunConfig(**{"model": MODEL, "seq_len": 1024} | settings)))
        for settings in ({}, {"optimizer": "adamw_8bit"}, {"seq_len": 1025})
    )
    assert plain == alike
    assert hash(plain) == hash(alike)
    assert plain != longer


def test_a_chunk_knows_the_most_that_is_alive_inside_it() -> None:
    chunk = Chunk([(0, 2 * MiB), (1, 1024), (0, -2 * MiB), (2, MiB), (1, -1024)])
    assert chunk.large == [(0, 2 * MiB), (0, None)]
    assert (chunk.change, chunk.small_change) == (MiB, MiB)
    assert (chunk.most, chunk.large_most) == (2 * MiB + 1024, 2 * MiB)
    assert chunk.small_most == MiB + 1024


@pytest.mark.parametrize("accumulated", [1, 2])
def test_each_thread_asks_for_one_workspace_when_it_multiplies_first(accumulated: int) -> None:
    run = RunConfig(model=MODEL, seq_len=1024, gradient_accumulation_steps=accumulated)
    step = step_of(run)
    workspace = kernel_workspace_bytes(step.gpu, step.dtypes)
    assert 2 * workspace == workspace_bytes(step.gpu, training=True)
    requests = training_events(step)
    assert requests.workspace_bytes == 2 * workspace
    traced = replace(step, dtypes=replace(step.dtypes, kernel_buffers=False))
    without = training_events(traced).events
    births = [size for _, size in requests.events if size]
    assert sorted(births) == sorted([*(size for _, size in without if size), *[workspace] * 2])


def test_a_workspace_follows_the_first_result_of_a_product() -> None:
    step = step_of(RunConfig(model=MODEL, seq_len=1024))
    sizes = [size for _, size in training_events(step).events]
    first = sizes.index(kernel_workspace_bytes(step.gpu, step.dtypes))
    query = step.tokens * step.model.hidden_size * step.dtypes.compute_bytes
    assert sizes[first - 1] == query
    events = BlockEvents(
        num_tensors=4,
        forward=(TapeEvent(1, per_token(8)), TapeEvent(2, per_token(4)), TapeEvent(1, None)),
        result=2,
        backward=(TapeEvent(-1, per_token(64)), TapeEvent(3, per_token(4))),
        product=2,
    )
    assert [tensor for tensor, _ in asks_in_forward(events).forward] == [1, 2, 4, 1]
    asked = asks_in_backward(events, logits_bytes=64)
    assert [tensor for tensor, _ in asked.backward] == [-1, 3, 4]


def test_layers_that_share_tensors_and_fused_losses_have_no_events() -> None:
    assert has_events(step_of(RunConfig(model=MODEL)))
    assert has_events(step_of(RunConfig(model="google-t5/t5-base", seq_len=128)))
    shared = RunConfig(model="albert/albert-base-v2", seq_len=128, gradient_checkpointing=False)
    assert not has_events(step_of(shared))
    assert has_events(step_of(RunConfig(model=MODEL, loss_head="liger")))
    assert not has_events(step_of(RunConfig(model=MODEL, loss_head="unsloth")))


@pytest.mark.parametrize("name", ["adamw_torch", "sgd", "lion", "adamw_8bit", "adafactor"])
def test_blocks_of_states_and_temporaries_add_up(name: str) -> None:
    (tensor, *_) = step_of(RunConfig(model=MODEL)).tensors
    blocks = state_blocks(tensor, optimizer=name, device_kind="cuda")
    whole = state_bytes([tensor], optimizer=name, device_kind="cuda") // tensor.count
    assert sum(blocks) == pytest.approx(whole, abs=2)
    lists = list(temporary_blocks([tensor], optimizer=name, foreach=True))
    assert bool(lists) == (name in ("adamw_torch", "adafactor"))


@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "int8", "gptq-int4"])
def test_parts_of_a_quantised_matrix_add_up_to_it(quant: str) -> None:
    parts = quantised_parts(2**20, quant, out_features=1024)
    assert sum(parts) == quantised_bytes(2**20, quant, out_features=1024)
    assert max(parts) == parts[0]
