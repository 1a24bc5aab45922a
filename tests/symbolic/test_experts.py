"""Experts and latent attention on the tape: what a layer keeps and where it is worst."""

from __future__ import annotations

import pytest
from written_layers import points_of

from whichlora.spec.run import RunConfig
from whichlora.symbolic.layer import LayerPoints
from whichlora.symbolic.linear_form import evaluate, most

SIZES = {"tokens": 2048, "span": 2048, "r": 16}


def last_layer_points(model: str, *, checkpointed: bool = False, **settings: object) -> LayerPoints:
    run = RunConfig(model=model, **settings)  # type: ignore[arg-type]
    return points_of(run, group=-1, checkpointed=checkpointed)


def test_adapted_experts_keep_a_second_copy_of_themselves_and_a_gradient_of_one() -> None:
    model = "mistralai/Mixtral-8x7B-v0.1"
    plain = last_layer_points(model, target_modules=("attention",))
    adapted = last_layer_points(model)
    hidden, width = 4096, 14336
    up, down = 8 * 2 * width * hidden, 8 * width * hidden
    factors = 8 * 16 * (2 * (hidden + 2 * width) + (width + hidden))  # A and B in 16 bit
    rows = 2 * 2048 * (hidden + width)  # what the two products read
    more = evaluate(adapted.saved, **SIZES) - evaluate(plain.saved, **SIZES)
    assert more == pytest.approx(2 * (up + down + factors + rows), rel=0.01)
    recomputed = last_layer_points(model, checkpointed=True).backward
    assert most(recomputed, **SIZES) > 2 * (up + down + down)


def test_gpt_oss_keeps_every_factor_of_its_gate_and_a_column_more_of_its_softmax() -> None:
    kept = last_layer_points("openai/gpt-oss-20b", target_modules=("attention",)).saved_tensors
    gates = [one.form.per_token for one in kept if one.what.startswith("experts: ")]
    width = 2 * 4 * 2880  # of 16-bit rows of four experts
    assert gates.count(width) >= 3  # gathered or clamped rows, the sigmoid, outputs
    (softmax,) = (one.form for one in kept if one.what == "softmax")
    assert softmax[:2] == (2 * 64, 2 * 64)
