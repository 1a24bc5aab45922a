"""torchtune: losses in parts, updates in the backward, and inputs of layers on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.memory.gradients import gradient_bytes
from whichlora.predict.counted import count_run
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

WORDS, WIDTH, LAYERS = 128_256, 3072, 28
TOKENS = 2 * 2048
RUN = RunConfig(
    model="meta-llama/Llama-3.2-3B",
    trainer="torchtune",
    method="full",
    precision="bf16-pure",
    optimizer="adamw_torch_fused",
    gradient_checkpointing=True,
    use_reentrant=False,
    batch_size=2,
    seq_len=2048,
)


def job(
    run: RunConfig = RUN, /, *, options: dict[str, Any] | None = None, **settings: Any
) -> ResolvedRun:
    stated = tuple(sorted((options or {}).items()))
    run = replace(run, trainer_options=stated, **settings)
    return resolve(load_model(run.model), run, A100)


def moment(found: ResolvedRun, name: str) -> int:
    return int(ledger(found).moment_bytes(name))


@pytest.mark.parametrize(
    ("options", "per_word"),
    [
        # the log-softmax, and two gradients of a part
        ({"loss": "CEWithChunkedOutputLoss"}, 4 + 8 / 8),
        ({"loss": "LinearCrossEntropyLoss"}, 4 + 8 / 8),
        # logits in 16 bit, and a part of their gradient
        ({"loss": "CEWithChunkedOutputLoss", "compile": True}, 2 + 2 / 8),
    ],
)
def test_a_loss_in_parts_keeps_what_its_backward_reads(
    options: dict[str, Any], per_word: float
) -> None:
    found = job(options=options, method="lora", target_modules=("q_proj",))
    without = moment(found, "layer_backward") - training_step(found).layer_backward_bytes
    of_loss = moment(found, "loss_backward") - without
    states = 2 * 2 * TOKENS * WIDTH  # that the head has read, and their gradient
    assert of_loss == pytest.approx(per_word * TOKENS * WORDS, abs=2 * states)


def test_nobody_holds_gradients_that_are_used_in_the_backward() -> None:
    usual, fused = job(), job(options={"optimizer_in_bwd": True})
    whole = gradient_bytes(training_step(usual).tensors)
    step = training_step(fused)
    assert (step.gradients.total, step.accumulates) == (0, False)
    table = WORDS * WIDTH * 2
    saved = moment(usual, "optimizer_step") - moment(fused, "optimizer_step")
    assert saved == whole - table
    assert ledger(fused).peak_allocated_bytes < ledger(usual).peak_allocated_bytes
    # the tied head waits for the table's part
    assert step.gradients.in_layers == table


def test_a_plain_optimizer_makes_lists_of_one_tensor_then() -> None:
    settings: dict[str, Any] = {"optimizer": "adamw_torch", "options": {"optimizer_in_bwd": True}}
    listed, fused = job(**settings), job(**settings | {"optimizer": "adamw_torch_fused"})
    lists = moment(listed, "optimizer_step") - moment(fused, "optimizer_step")
    assert lists == WORDS * WIDTH * 2


def test_inputs_of_layers_go_to_the_host() -> None:
    options = {"enable_activation_offloading": True}
    saved = moment(job(), "loss_backward") - moment(job(options=options), "loss_backward")
    assert saved == (LAYERS - 2) * TOKENS * WIDTH * 2  # those of the first and the last stay


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        ({"optimizer_in_bwd": True}, {"gradient_accumulation_steps": 2}, "steps 1, got 2"),
        ({"optimizer_in_bwd": True}, {"method": "lora"}, "is of method full, got lora"),
        (
            {"enable_activation_offloading": True},
            {"gradient_checkpointing": False},
            "needs gradient_checkpointing",
        ),
        ({}, {"precision": "bf16"}, "torchtune has bf16-pure and fp32, got bf16"),
        ({"loss": "DPOLoss"}, {}, "accepted are CrossEntropyLoss"),
    ],
)
def test_what_its_recipes_refuse_is_refused_in_one_line(
    options: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        count_run(job(options=options, **settings))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_nobody_s_settings_are_those_of_its_configurations(method: str) -> None:
    run = job(method=method, precision="auto", gradient_checkpointing=None).run
    assert (run.precision, run.gradient_checkpointing) == ("bf16-pure", True)
