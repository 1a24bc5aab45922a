"""Experts in one parameter, stored in 4 bit and expanded when they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.memory.weights import quantised_matrices, quantised_parts
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.notes import notes_on
from whichlora.predict.predict import predict
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

NAME = "Qwen/Qwen3-30B-A3B"
MODEL = load_model(NAME)
QLORA = RunConfig(model=NAME, method="qlora", seq_len=2048, quantize_moe_experts=True)


def peak(**changes: Any) -> int:
    return int(ledger(resolve(MODEL, replace(QLORA, **changes), A100)).peak_allocated_bytes)


def test_thirty_billion_fit_a_card_of_24_gib_only_with_experts_in_four_bits() -> None:
    """Published: 116 to 130 GiB as transformers stores them, 17 to 24 in Axolotl."""
    assert 110 * 2**30 < peak(quantize_moe_experts=False) < 135 * 2**30
    assert 17 * 2**30 < peak(seq_len=512) < peak() < 24 * 2**30


def test_a_layer_s_experts_are_expanded_at_a_time_with_checkpoints_and_all_without() -> None:
    experts = sum(
        group.count * linear.num_weights
        for group in MODEL.groups
        for linear in group.layer.linears
        if linear.count > 1
    )
    kept = peak(gradient_checkpointing=False, seq_len=16) - peak(seq_len=16)
    assert kept == pytest.approx(2 * experts, rel=0.1)


def test_experts_are_one_tensor_with_its_own_scales() -> None:
    expert = next(each for each in MODEL.groups[0].layer.linears if each.count > 1)
    matrices, rows, num_weights = quantised_matrices(expert)
    assert (matrices, num_weights) == (1, expert.num_weights)
    assert rows == expert.count * expert.out_features
    codes, *_ = quantised_parts(num_weights, "nf4-dq", out_features=rows)
    assert codes == num_weights // 2


def test_expanding_all_experts_takes_time_whoever_is_chosen() -> None:
    calibration = prior_calibration(A100)
    times = [
        predict(MODEL, replace(QLORA, seq_len=length), A100, calibration).time.breakdown["dequant"]
        for length in (4096, 8192)
    ]
    assert times[0] == pytest.approx(times[1], rel=0.05)


def test_a_note_says_which_stack_stores_them_so() -> None:
    for is_stored, told in ((False, "--quantize-moe-experts"), (True, "as Axolotl's")):
        job = resolve(MODEL, replace(QLORA, quantize_moe_experts=is_stored), A100)
        assert any(told in note for note in notes_on(job))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "lora"}, "is for 4-bit weights, got quant none"),
        ({"quant": "int8"}, "is for 4-bit weights, got quant int8"),
        ({"model": "HuggingFaceTB/SmolLM2-135M"}, "has no experts in one parameter"),
    ],
)
def test_where_it_means_nothing_it_is_refused(changes: dict[str, Any], message: str) -> None:
    run = replace(QLORA, **changes)
    with pytest.raises(ConfigError, match=f"quantize_moe_experts: .*{message}"):
        resolve(load_model(run.model), run, A100)


def test_on_several_gpus_no_matrix_of_it_is_cut() -> None:
    whole, halves = (
        peak(parallel=ParallelConfig(strategy=name, gpus=2)) for name in ("ddp", "device-map")
    )
    assert peak() < whole < 1.1 * peak()
    assert halves < 0.65 * whole
    with pytest.raises(ConfigError, match=r"^parallel: quantize_moe_experts .*ddp, device-map"):
        peak(parallel=ParallelConfig(strategy="fsdp", gpus=2))
