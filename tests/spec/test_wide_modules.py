"""What a checkpoint of bitsandbytes leaves in 16 bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whichlora.memory.weights import weight_bytes
from whichlora.predict.resolve import resolve
from whichlora.spec.dtypes import is_quantised
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

H200 = find_gpu("h200-sxm-141gb")


def _in_bitsandbytes(*skipped: str) -> dict[str, Any]:
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return {"quantization_config": stored | {"llm_int8_skip_modules": ["lm_head", *skipped]}}


@pytest.mark.parametrize(
    ("skipped", "wide"),
    [
        ((), {}),
        # the list of DeepSeek-R1-Distill-Llama-8B-unsloth-bnb-4bit (vLLM, pull 12974)
        (("multi_modal_projector", "merger", "model.layers.1.mlp"), {1: 3}),
        (("model.layers.1.mlp.down_proj", "model.layers.2.self_attn.q_proj"), {1: 1, 2: 1}),
        (("model.layers.0",), {0: 7}),
        (("model.layers.1", "model.layers.11.mlp.up_proj"), {1: 7, 11: 1}),
        (("down_proj",), dict.fromkeys(range(30), 1)),
        (("model.visual.layers.3.mlp",), {}),
    ],
)
def test_modules_that_a_copy_in_4_bit_leaves_in_16(
    skipped: tuple[str, ...], wide: dict[int, int]
) -> None:
    base = load_model("HuggingFaceTB/SmolLM2-135M")
    plain, kept = (
        resolve(
            replace(base, config={**base.config, **_in_bitsandbytes(*names)}),
            RunConfig(model=base.name, method="qlora", prepare_kbit=False),
            H200,
        )
        for names in ((), skipped)
    )
    found = {
        place: sum(not is_quantised(linear, kept.dtypes) for linear in group.layer.linears)
        for group in kept.model.groups
        for place in group.positions or range(group.count)
    }
    assert {place: number for place, number in found.items() if number} == wide
    assert sum(group.count for group in kept.model.groups) == 30
    more = sum(weight_bytes(kept.model, kept.dtypes).values())
    more -= sum(weight_bytes(plain.model, plain.dtypes).values())
    linears = {linear.name: linear for linear in base.groups[0].layer.linears}
    if wide == {1: 3}:
        params = 3 * linears["down_proj"].num_params
        assert more == pytest.approx(params * (2 - 0.5 - 4 / 64), rel=3e-3)
    assert (more > 0) == bool(wide)
    assert any("matrices of layers stay in 16 bit" in n for n in kept.model.notes) == bool(wide)
