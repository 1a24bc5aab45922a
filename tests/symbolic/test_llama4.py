"""Llama 4 on the tape: every expert has a row of each token."""

from __future__ import annotations

from typing import Any

import pytest
from written_layers import points_of_layer

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu

SIZES: dict[str, Any] = {
    "model_type": "llama4_text",
    "hidden_size": 512,
    "intermediate_size": 640,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
}


def kept_by_experts(num_experts: int, *, chosen: int) -> int:
    config = SIZES | {"num_local_experts": num_experts, "num_experts_per_tok": chosen}
    run = RunConfig(model="tiny", precision="bf16-pure", target_modules=("attention",))
    job = resolve(build(config, name="tiny"), run, find_gpu("h100-sxm-80gb"))
    return points_of_layer(job.model.groups[0].layer, job).saved.per_token


def test_experts_in_bitsandbytes_are_refused() -> None:
    run = RunConfig(model="tiny", method="qlora")
    job = resolve(build(SIZES, name="tiny"), run, find_gpu("h100-sxm-80gb"))
    with pytest.raises(ConfigError, match="experts of Llama 4 in nf4-dq are not predicted"):
        points_of_layer(job.model.groups[0].layer, job)


def test_what_is_kept_grows_with_all_experts_and_not_with_those_that_are_chosen() -> None:
    rows = 2 * 512 + 6 * 640  # the input, gate and up, the activated gate
    scores = 2 + 4  # of an expert's score: as it multiplies, and the sigmoid in fp32
    more = kept_by_experts(16, chosen=1) - kept_by_experts(8, chosen=1)
    assert more == 8 * (rows + scores)
    indices = 2 * 8  # of the chosen, saved by `topk` and by `scatter`
    assert kept_by_experts(16, chosen=2) - kept_by_experts(16, chosen=1) <= indices
