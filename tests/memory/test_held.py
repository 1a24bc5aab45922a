"""What the variables of a plain loop hold: logits, the graph, and what goes with both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora.memory import held, loss
from whichlora.memory.entries import Entry
from whichlora.memory.step import TrainingStep
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model

LOOP = RunConfig(model="meta-llama/Llama-3.1-8B", trainer="loop", seq_len=1000)
LOGITS = 1000 * 128_256


def step_of(run: RunConfig) -> TrainingStep:
    model = find_model(run.model)
    assert model is not None
    return training_step(resolve(model, run, A100))


def moments(run: RunConfig) -> dict[str, tuple[Entry, ...]]:
    model = find_model(run.model)
    assert model is not None
    return ledger(resolve(model, run, A100)).moments


def size_of(entries: tuple[Entry, ...], fact: Any) -> int:
    return sum(int(entry.num_bytes) for entry in entries if entry.fact is fact)


@pytest.mark.parametrize(
    ("precision", "width"),
    [("bf16", 2), ("bf16-no-autocast", 2), ("fp16-no-autocast", 2), ("fp32", 4)],
)
def test_a_loop_holds_its_logits_in_every_moment_and_nobody_widens_them(
    precision: Any, width: int
) -> None:
    run = replace(LOOP, precision=precision)
    by_moment = {
        moment: size_of(entries, loss.KEPT_LOGITS) for moment, entries in moments(run).items()
    }
    assert by_moment == dict.fromkeys(by_moment, width * LOGITS)
    assert {"layer_forward", "loss_forward", "loss_backward", "optimizer_step"} <= by_moment.keys()


def test_a_step_that_is_a_function_leaves_nothing_to_the_next_forward() -> None:
    run = replace(LOOP, trainer="loop-function")
    after_return, before = ("layer_forward", "loss_forward"), ("loss_backward", "optimizer_step")
    entries = moments(run)
    for fact in (loss.KEPT_LOGITS, held.GRAPH_LEAVES):
        assert not any(size_of(entries[moment], fact) for moment in after_return)
    assert all(size_of(entries[moment], loss.KEPT_LOGITS) == 2 * LOGITS for moment in before)
    assert size_of(entries["optimizer_step"], held.GRAPH_LEAVES) == 1000 * 2 * 2 * 4096
    assert held.held_in_update(step_of(run)) == held.held_in_update(step_of(LOOP))
    assert held.held_between_steps(step_of(run)) == ()


def test_the_trainer_of_transformers_drops_them_before_the_backward() -> None:
    run = replace(LOOP, trainer="transformers")
    assert not any(size_of(entries, loss.KEPT_LOGITS) for entries in moments(run).values())
    assert held.held_between_steps(step_of(run)) == ()
    assert held.held_outputs(step_of(run)).num_bytes == 0


@pytest.mark.parametrize("loss_head", ["liger", "trl-fused"])
def test_a_fused_loss_leaves_no_logits_to_hold(loss_head: Any) -> None:
    step = step_of(replace(LOOP, loss_head=loss_head))
    assert held.held_outputs(step).num_bytes == 0


@pytest.mark.parametrize(
    ("settings", "per_token"),
    [
        ({}, 2 * 2 * 4096),  # the hook that asks for a gradient makes the embeddings a leaf
        ({"gradient_checkpointing": False}, 0),
        ({"method": "full"}, 0),
        ({"modules_to_save": ("embed_tokens",)}, 0),
    ],
    ids=str,
)
def test_the_graph_holds_embeddings_that_are_its_leaf(
    settings: dict[str, Any], per_token: int
) -> None:
    entries = moments(replace(LOOP, **settings))
    for moment in ("layer_forward", "optimizer_step"):
        assert size_of(entries[moment], held.GRAPH_LEAVES) == 1000 * per_token
    assert size_of(entries["loss_backward"], held.GRAPH_LEAVES) == 0


def test_inputs_of_8_bit_matrices_go_with_the_graph() -> None:
    run = replace(LOOP, quant="int8", gradient_checkpointing=False)
    of_loop = moments(run)["optimizer_step"]
    of_trainer = moments(replace(run, trainer="transformers"))["optimizer_step"]
    in_layers = size_of(moments(run)["first_layer_backward"], held.HELD_INPUTS)
    assert size_of(of_loop, held.HELD_INPUTS) == in_layers * 32 // 31
    assert size_of(of_trainer, held.HELD_INPUTS) == 0


def test_an_encoder_decoder_returns_the_output_of_its_encoder_too() -> None:
    run = RunConfig(model="google-t5/t5-small", trainer="loop", seq_len=100)
    step = step_of(run)
    width = step.dtypes.stream_bytes
    assert size_of(held.held_between_steps(step), held.ENCODER_STATES) == 100 * 512 * width


def test_a_loop_leaves_8_bit_states_of_embeddings_narrow() -> None:
    run = replace(LOOP, optimizer="adamw_8bit", modules_to_save=("embed_tokens",))
    by_loop, by_trainer = (
        step_of(replace(run, trainer=name)).static[-1].num_bytes
        for name in ("loop", "transformers")
    )
    elements = 128_256 * 4096
    assert by_trainer - by_loop == 8 * elements - (2 * elements + 2 * 4 * elements // 256)
