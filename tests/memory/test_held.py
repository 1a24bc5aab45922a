"""What the variables of a plain loop hold: logits, the graph, and what goes with both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora.memory import held, kv_cache, loss
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


@pytest.mark.parametrize(("checkpoints", "size"), [(False, 2 * 1024 * 2), (True, 0)])
def test_a_loop_that_leaves_the_cache_on_holds_keys_and_values(
    checkpoints: bool, size: int
) -> None:
    """Llama 3.1 8B: 1,024 keys and as many values in each of 32 layers."""
    run = replace(
        LOOP,
        precision="bf16-pure",
        gradient_checkpointing=checkpoints,
        trainer_options=(("use_cache", True),),
    )
    entries = moments(run)
    for moment in ("layer_forward", "optimizer_step"):
        assert size_of(entries[moment], held.KEPT_CACHE) == 1000 * 32 * size
    if size:  # the first layer is not through
        assert size_of(entries["first_layer_backward"], held.KEPT_CACHE) == 1000 * 31 * size
    without = moments(replace(run, trainer_options=()))
    assert not size_of(without["optimizer_step"], held.KEPT_CACHE)


def test_a_loop_holds_fp32_keys_and_the_products_that_values_are_views_of() -> None:
    """Pythia with transformers 4.42: 16-bit queries, keys and values, and keys in fp32.

    Source: live tensors of such a loop on a CPU, by operator.
    """
    run = replace(
        LOOP,
        model="EleutherAI/pythia-410m",
        precision="fp16-pure",
        attn="sdpa",
        gradient_checkpointing=False,
        trainer_options=(("use_cache", True),),
        libraries=(("transformers", "4.42.4"),),
    )
    entries = moments(run)
    assert size_of(entries["optimizer_step"], held.KEPT_CACHE) == 1000 * 24 * 1024 * (6 + 4)
    # of the forward that runs, autograd saves 16-bit copies of these
    assert size_of(entries["loss_forward"], kv_cache.DECODER_CACHE) == 1000 * 24 * 1024 * 4


@pytest.mark.parametrize(
    ("attn", "precision", "per_token"),
    [
        # queries, keys and values are laid out head by head: the kernel's result is, and is copied
        ("sdpa", "fp16-pure", 2 * 2048),
        ("sdpa", "bf16-pure", 2 * 2048),
        # `maximum` saves the scores; the softmax of bf16 is in bf16, and was saved twice
        ("eager", "fp16-pure", 2 * 32 * 512),
        ("eager", "bf16-pure", -2 * 32 * 512),
    ],
)
def test_opt_saves_otherwise_before_it_takes_caches(
    attn: Any, precision: Any, per_token: int
) -> None:
    """Measured with transformers of that time: 36 runs of OPT-350m in fp16 to 0.2 %."""
    older, newer = (
        step_of(
            RunConfig(
                model="facebook/opt-1.3b",
                method="full",
                trainer="loop",
                precision=precision,
                attn=attn,
                gradient_checkpointing=False,
                batch_size=2,
                seq_len=512,
                libraries=(("transformers", release),),
            )
        )
        for release in ("4.48.3", "4.49.0")
    )
    saved = int(older.saved_in_layers.num_bytes) - int(newer.saved_in_layers.num_bytes)
    assert saved == 24 * 1024 * per_token
