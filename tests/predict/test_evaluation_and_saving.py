"""Evaluations and checkpoints: how many, how long, how large, and that the total holds them."""

import math

import pytest

from whichlora.dataset import TokenLengths, evaluation_widths
from whichlora.errors import ConfigError
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.evaluation_and_saving import (
    besides,
    bytes_of_checkpoint,
    evaluation_peak_bytes,
    evaluation_seconds,
    num_checkpoints,
    num_evaluations,
)
from whichlora.predict.predict import predict
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.plan import Keeping
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

GPU = find_gpu("rtx-4090-24gb")
RUN = RunConfig(model="Qwen/Qwen2.5-7B", method="qlora", batch_size=4, seq_len=1024)


def job(**changes: object) -> ResolvedRun:
    run = RunConfig.from_dict(RUN.to_dict() | changes)
    return resolve(load_model(run.model), run, GPU)


@pytest.mark.parametrize(
    ("keeping", "evaluations", "checkpoints"),
    [
        (Keeping(), 3, 10),
        (Keeping(save_steps=0, eval_steps=0), 0, 0),
        (Keeping(save_steps=30, eval_steps=40), 3, 4),
        (Keeping(save_steps=500, eval_steps=500), 1, 1),
    ],
)
def test_the_end_of_a_training_is_evaluated_and_saved_too(
    keeping: Keeping, evaluations: int, checkpoints: int
) -> None:
    assert num_evaluations(keeping, num_steps=101, epochs=2.5) == evaluations
    assert num_checkpoints(keeping, num_steps=101) == checkpoints


@pytest.mark.parametrize(
    "settings", [{"save_steps": -1}, {"save_total_limit": 0}, {"eval_steps": True}]
)
def test_a_number_that_keeps_nothing_right_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number from"):
        Keeping(**settings)


def test_a_lora_checkpoint_is_fp32_adapters_and_two_states_of_each() -> None:
    trained = predict(load_model(RUN.model), RUN, GPU, prior_calibration(GPU))
    each = bytes_of_checkpoint(job())
    params = trained.num_trainable_params
    assert each.weights == pytest.approx(4 * params, rel=0.01)
    assert each.optimizer_states == pytest.approx(8 * params, rel=0.01)


def test_states_paged_from_the_device_are_written_to_disk() -> None:
    paged, plain = (
        bytes_of_checkpoint(job(optimizer=name)) for name in ("paged_adamw_8bit", "adamw_8bit")
    )
    assert paged == plain


def test_what_is_kept_at_once_is_no_more_than_what_is_written() -> None:
    calibration = prior_calibration(GPU)
    few = besides(job(), calibration, Keeping(save_steps=100), widths={}, num_steps=50, epochs=1.0)
    assert few.checkpoints == 1
    assert few.kept_bytes == few.checkpoint_weights_bytes + few.checkpoint_optimizer_bytes
    assert few.evaluation_peak_bytes is None
    assert few.evaluation_s == 0


def test_an_evaluation_takes_less_than_a_step_in_memory_and_time() -> None:
    calibration = prior_calibration(GPU)
    step = predict(load_model(RUN.model), RUN, GPU, calibration)
    assert evaluation_peak_bytes(job(), calibration, width=1024) < step.memory.device_used_bytes
    seconds = evaluation_seconds(job(), calibration, {1024: 1.0})
    assert step.time.step_s is not None
    assert step.time.step_s / 6 < seconds < step.time.step_s / 2


def lengths(*validation: int) -> TokenLengths:
    return TokenLengths(
        lengths={"train": (9,), "validation": validation}, max_length=100, method="test"
    )


@pytest.mark.parametrize(
    ("collator", "expected"),
    [
        ("longest", {7: 1.0, 20: 1.0, 3: 0.5}),
        ("grouped", {7: 1.0, 20: 1.0, 3: 0.5}),
        ("fixed", {64: 2.5}),
        ("packed", {}),
        ("packed-bfd", {37: 1.0}),  # the only batch counts whole
    ],
)
def test_validation_rows_are_batched_in_their_order(
    collator: str, expected: dict[int, float]
) -> None:
    counted = evaluation_widths(
        lengths(5, 7, 20, 2, 3),
        batch_size=2,
        collator=collator,  # type: ignore[arg-type]
        seq_len=64,
    )
    assert counted == expected


def test_without_validation_rows_nothing_is_evaluated() -> None:
    assert evaluation_widths(lengths(), batch_size=2, collator="longest", seq_len=64) == {}


def test_binned_batches_keep_their_tokens() -> None:
    many = tuple(1 + (13 * n) % 97 for n in range(200))
    counted = evaluation_widths(lengths(*many), batch_size=1, collator="longest", seq_len=100)
    assert len(counted) <= 17
    assert sum(counted.values()) == 200
    tokens = sum(width * count for width, count in counted.items())
    assert math.isclose(tokens, sum(many), rel_tol=0.02)
