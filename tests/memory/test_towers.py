"""The sizes of a tower without a graph."""

from __future__ import annotations

from dataclasses import replace

import image_traces

from whichlora.memory.towers import TowerForward, grid_of, layer_norm_bytes, tower_dtypes
from whichlora.predict.quantities import generation
from whichlora.spec.run import RunConfig


def forward(model_type: str, **settings: object) -> TowerForward:
    run = RunConfig(
        model="m", phase="inference", prompt_len=4096, images=2, image_size=(640, 480), **settings
    )
    line = {"type": model_type, "layers": 2, "blocks": 4, "vocab": 0, "run": run.to_dict()}
    tower = generation(image_traces.job_of(line)).tower
    assert tower is not None
    return tower


def test_autocast_widens_what_a_norm_returns_but_on_a_cpu() -> None:
    plain = forward("qwen2_5_vl").dtypes
    under = replace(plain, under_autocast=True)
    on_cpu = replace(under, device_kind="cpu")
    assert [layer_norm_bytes(dtypes) for dtypes in (plain, under, on_cpu)] == [2, 4, 2]


def test_grid_of_a_run_takes_width_before_height() -> None:
    tower = forward("qwen2_5_vl")
    grid = grid_of(tower.tower, tower.run)
    assert grid.sides == (34, 46)  # 17 x 23 of 28 pixels
    assert (tower.num_patches, tower.num_vectors) == (2 * 34 * 46, 2 * 17 * 23)


def test_what_a_tower_works_with_grows_with_its_images() -> None:
    tower = forward("qwen2_5_vl")
    assert replace(tower, num_images=4).working == 2 * tower.working


def test_a_quantised_embedding_leaves_the_stream_of_gemma_4_as_wide_as_its_pixels() -> None:
    plain, quantised = forward("gemma4"), forward("gemma4", quant="nf4")
    assert (plain.dtypes.stream_bytes, quantised.dtypes.stream_bytes) == (2, 4)
    assert quantised.state_bytes == 2 * plain.state_bytes
    other = forward("qwen2_5_vl", quant="nf4")
    assert tower_dtypes(other.tower, other.run, other.dtypes) == other.dtypes


def test_padding_masks_the_patches_of_gemma_4() -> None:
    tower = forward("gemma4")
    full = replace(tower.run, image_size=(2000, 1400))  # of 20 x 14 tokens
    assert tower.dtypes.padded
    assert not tower_dtypes(tower.tower, full, tower.dtypes).padded
