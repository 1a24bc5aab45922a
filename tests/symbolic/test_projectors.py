"""What stands between a tower and the language model, on a tape."""

from __future__ import annotations

import image_traces
import pytest

from whichlora.memory.images import TowerStep
from whichlora.predict.quantities import training_step
from whichlora.spec.run import RunConfig
from whichlora.symbolic.linear_form import NOTHING, most
from whichlora.symbolic.projectors import PROJECTORS, projector_points, projector_working_points


def tower_step(model_type: str, **settings: object) -> TowerStep:
    shared = {"seq_len": 4096, "images": 1, "image_size": (640, 480), "precision": "bf16-pure"}
    if model_type == "whisper":
        shared |= {"seq_len": 448, "images": 0}
    if model_type == "qwen2_audio":
        shared |= {"images": 0, "audios": 1, "audio_seconds": 12.0}
    run = RunConfig(model="m", **(shared | settings))
    line = {"type": model_type, "layers": 2, "blocks": 4, "vocab": 0, "run": run.to_dict()}
    step = training_step(image_traces.job_of(line))
    assert step.model.tower is not None
    return TowerStep.of(step, step.model.tower)


def test_a_frozen_merger_keeps_what_its_norm_and_activation_read() -> None:
    step = tower_step("qwen2_5_vl", freeze_vision_tower=True, gradient_checkpointing=True)
    points = projector_points(
        step.tower,
        (),
        step.dtypes,
        step.method,
        needs_grad=True,
        accumulated=False,
        stream=2,
    )
    merged = 4 * 1280
    # of each token: the fp32 states of four patches, a deviation of each, what GELU read
    assert points.saved.per_token == 4 * merged + 4 * 4 + 2 * merged


def test_a_convolution_keeps_what_it_merges_though_it_is_frozen() -> None:
    step = tower_step("glm4v", freeze_vision_tower=True, gradient_checkpointing=True)
    settings = {"needs_grad": True, "accumulated": False, "stream": 2}
    points = projector_points(step.tower, (), step.dtypes, step.method, **settings)
    merged, out, wide = 4 * 1536, 2048, 13696
    of_norms = 4 * merged + 4 * 4 + 2 * out + 2 * 4
    of_activations = 2 * out + 2 * wide + 2 * 2 * wide  # two activations, two factors
    assert points.saved.per_token == of_norms + 2 * merged + of_activations


def test_states_that_are_joined_get_one_gradient_and_lose_what_fills_tiles_up() -> None:
    step = tower_step("mllama", gradient_checkpointing=False, target_modules=("q_proj", "fc1"))
    width, filled, kept, hidden = 1280, 4 * 1032, 4 * 1025, 2048
    assert step.projected.saved == NOTHING  # a frozen matrix keeps nothing of what it reads
    sizes = {"tokens": filled, "span": filled, "r": 16}
    # two states, and the three of which the last are joined
    forward = 2 * (2 * filled * width + 3 * kept * width)
    assert most(step.projected.forward, **sizes) == forward
    # that of the joined ones, as it is cut into those of all patches
    backward = 2 * (3 * kept * width + 2 * filled * width + filled * width)
    assert most(step.projected.backward, **sizes) == backward
    assert backward > 2 * kept * (hidden + 3 * width)


def test_nothing_is_kept_where_nothing_is_trained() -> None:
    step = tower_step("qwen2_5_vl", freeze_vision_tower=True, gradient_checkpointing=False)
    assert step.projected.saved == NOTHING
    assert step.projected.backward == (NOTHING,)


@pytest.mark.parametrize("model_type", sorted(image_traces.CONFIGS))
def test_every_projector_works_with_less_where_it_keeps_nothing(model_type: str) -> None:
    named = {"target_modules": ("qkv",)} if model_type in image_traces.EXPERTS_ADAPTED else {}
    step = tower_step(model_type, gradient_checkpointing=False, **named)
    points = projector_working_points(
        step.tower, step.targets, step.dtypes, step.method, stream=step.forward.stream
    )
    sizes = {"tokens": 100, "span": 1, "r": 16}
    assert 0 < most(points, **sizes) <= most(step.projected.forward, **sizes)
    assert step.tower.projector in PROJECTORS
