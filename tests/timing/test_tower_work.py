"""The work of a vision tower, by hand."""

from __future__ import annotations

from typing import Any

import image_traces
import pytest

from whichlora.memory.images import TowerStep
from whichlora.predict.quantities import training_step
from whichlora.spec.run import RunConfig
from whichlora.timing.running import RunningModel
from whichlora.timing.tower_work import tower_forward_work, tower_step_work
from whichlora.timing.training_work import trained_layers


def step(**settings: Any) -> TowerStep:
    run = RunConfig(
        model="m", method="lora", images=1, image_size=(1024, 768), seq_len=2048, **settings
    )
    line = {"type": "qwen2_5_vl", "layers": 2, "blocks": 8, "vocab": 0, "run": run.to_dict()}
    whole = training_step(image_traces.job_of(line))
    assert whole.model.tower is not None
    return TowerStep.of(whole, whole.model.tower)


def test_products_of_a_forward_are_those_of_its_matrices() -> None:
    tower = step(freeze_vision_tower=True, gradient_checkpointing=False)
    per_patch = 1280 * (3 * 1280 + 1280 + 3 * 3420)
    merged = 4 * 1280
    done = tower_forward_work(tower.forward)
    blocks = 2 * 8 * 3996 * per_patch
    around = 2 * (3996 * 1176 * 1280 + 999 * (merged * merged + merged * 2048))
    assert done.product_flops == blocks + around


def test_one_call_of_the_attention_for_each_window() -> None:
    tower = step(freeze_vision_tower=True, gradient_checkpointing=False)
    one_image = tower_forward_work(tower.forward).launches
    # 63 windows of 64 patches in 7 of 8 blocks
    assert one_image > 7 * 62 * 4


def test_a_frozen_tower_without_a_graph_goes_forward_once() -> None:
    frozen = step(freeze_vision_tower=True, gradient_checkpointing=False)
    once = tower_forward_work(frozen.forward)
    assert tower_step_work(frozen, text_tokens=2048).product_flops == once.product_flops


def test_cross_attention_projects_every_position_whatever_the_length_of_the_text() -> None:
    run = RunConfig(model="m", method="full", seq_len=64, gradient_checkpointing=False)
    line = {"type": "whisper", "layers": 3, "blocks": 2, "vocab": 0, "run": run.to_dict()}
    whole = training_step(image_traces.job_of(line))
    assert whole.model.tower is not None
    layer, width = whole.model.groups[0].layer, 768
    work = trained_layers(
        layer,
        3,
        RunningModel(model=whole.model, run=run, dtypes=whole.dtypes, method=whole.method),
        tokens=2 * 64,
        seq_len=64,
    )
    of_text = 2 * 64 * (6 * width**2 + 8 * width**2)
    of_encoder = 2 * 1500 * 2 * width**2
    tower = tower_forward_work(TowerStep.of(whole, whole.model.tower).forward)
    convolutions = 3000 * 3 * 80 * width + 1500 * 3 * width**2
    assert tower.product_flops == 2 * (convolutions + 1500 * 2 * 12 * width**2)
    assert work.product_flops == 3 * 3 * 2 * (of_text + of_encoder)


def test_a_tower_of_tiles_reads_all_of_them_and_projects_joined_states() -> None:
    run = RunConfig(model="m", images=2, method="full", gradient_checkpointing=True)
    line = {"type": "mllama", "layers": 5, "blocks": 4, "vocab": 0, "run": run.to_dict()}
    whole = training_step(image_traces.job_of(line))
    assert whole.model.tower is not None
    tower, width = TowerStep.of(whole, whole.model.tower), 1280
    done = tower_forward_work(tower.forward).product_flops
    blocks = (4 + 2) * 12 * width**2 * 4 * 1032
    embedded = 4 * 3 * 448**2 * width
    assert done == 2 * 2 * (blocks + embedded + 4 * 1025 * 3 * width * 2048)
    # it is not checkpointed, so that no forward is repeated
    trained = tower_step_work(tower, text_tokens=whole.tokens).product_flops
    assert trained == 3 * done


@pytest.mark.parametrize("micro_steps", [1, 3])
def test_a_checkpointed_tower_goes_forward_twice_and_backward(micro_steps: int) -> None:
    settings = {"freeze_vision_tower": True, "gradient_accumulation_steps": micro_steps}
    hooked = step(gradient_checkpointing=True, **settings)
    blocks = 2 * 8 * 3996 * 1280 * (3 * 1280 + 1280 + 3 * 3420)
    done = tower_step_work(hooked, text_tokens=2048).product_flops
    assert 3 * blocks * micro_steps < done < 3.4 * blocks * micro_steps
