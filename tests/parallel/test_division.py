"""The model of one rank: what is divided, and what every rank has whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.parallel.division import COLUMNS, ROWS, divided_linear, divided_model
from whichlora.store.hub import load_model

MODEL = load_model("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_matrices_are_divided_and_norms_are_not(size: int) -> None:
    part = divided_model(MODEL, size)
    norms = 65 * MODEL.hidden_size
    assert (part.num_params - norms) * size == MODEL.num_params - norms
    assert part.vocab_size == MODEL.vocab_size
    (attention,) = part.groups[0].layer.attentions
    assert attention.num_key_value_heads == 8 // size


def test_a_leaf_of_no_plan_stays_whole() -> None:
    (linear, *_) = MODEL.groups[0].layer.linears
    assert linear.name in COLUMNS - ROWS
    assert divided_linear(linear, 4).num_weights * 4 == linear.num_weights
    whole = replace(linear, name="router")
    assert divided_linear(whole, 4) == whole
