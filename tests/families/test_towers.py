"""How processors cut images, and which towers read them."""

from __future__ import annotations

import pytest

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.families.towers.qwen import qwen_grid, resized
from whichlora.spec.tower import ImageGrid, Tower

QWEN2 = {"patch": 14, "merge": 2, "values": 1176, "least": 3136, "most": 16384 * 784}


def tower(model_type: str, **vision: object) -> Tower:
    found = build({"model_type": model_type, "vision_config": vision}, name="m").tower
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("height", "width", "sides"),
    [
        (768, 1024, (756, 1036)),  # 27.4 and 36.6 patches of 28: rounded
        (20, 20, (56, 56)),  # too few pixels: grown to at least 56 x 56
        (8000, 8000, (3584, 3584)),  # too many: shrunk to at most 16384 of 28 x 28
    ],
)
def test_qwen_resizes_to_whole_patches(height: int, width: int, sides: tuple[int, int]) -> None:
    assert resized(height, width, factor=28, least=3136, most=16384 * 784) == sides


def test_four_patches_of_qwen_are_a_token() -> None:
    grid = qwen_grid(768, 1024, **QWEN2)
    assert grid == ImageGrid(
        crops=1, patches=54 * 74, tokens=27 * 37, pixels=(54 * 74, 1176), sides=(54, 74)
    )
    assert grid.num_pixels == 54 * 74 * 1176


def test_qwen_refuses_an_image_that_is_a_line() -> None:
    with pytest.raises(ConfigError, match="image_size: 2010x10 has a side more than 200 times"):
        qwen_grid(10, 2010, **QWEN2)


def test_gemma_3_has_256_tokens_of_every_image() -> None:
    grids = {
        tower("gemma3", image_size=896, patch_size=14).grid(*sides)
        for sides in ((10, 3000), (896, 896))
    }
    (grid,) = grids
    assert (grid.patches, grid.tokens, grid.pixels) == (64 * 64, 256, (1, 3, 896, 896))


def test_images_of_gemma_4_fill_280_tokens_at_most_and_are_padded_to_them() -> None:
    grid = tower("gemma4").grid
    screen, full, line = grid(768, 1024), grid(14, 20), grid(10, 30_000)
    assert (screen.sides, screen.tokens) == ((14 * 3, 19 * 3), 14 * 19)
    assert {each.patches for each in (screen, full, line)} == {2520}
    assert (screen.padding, full.padding) == (2520 - 9 * 266, 0)
    assert (line.tokens, line.markers, line.projected) == (280, 2, 280)  # of one row
    assert full.pixels == (1, 2520, 768)


@pytest.mark.parametrize(("asks", "masked"), [("vision", "windows"), (None, "")])
def test_images_of_gemma_4_are_whole_in_windows_where_the_config_asks(
    asks: str | None, masked: str
) -> None:
    text = {"use_bidirectional_attention": asks}
    config = {"model_type": "gemma4", "text_config": text, "vision_config": {}}
    found = build(config, name="m").tower
    assert found is not None
    assert found.masks_text == masked


LLAMA4 = {"hidden_size": 1408, "intermediate_size": 5632, "vision_output_dim": 4096}


def test_tiles_of_llama_4_have_144_tokens_and_a_separator_each() -> None:
    grid = tower("llama4", image_size=336, **LLAMA4).grid
    small, wide, large = grid(100, 336), grid(300, 1000), grid(3000, 3000)
    assert (small.crops, small.tokens, small.markers) == (1, 144, 3)
    assert (wide.crops, wide.tokens, wide.markers) == (4, 4 * 144, 3 + 3)
    assert (large.crops, large.pixels) == (17, (17, 3, 336, 336))
    assert small.patches == 577


def test_llama_4_refuses_vectors_that_its_matrix_cannot_read() -> None:
    with pytest.raises(ConfigError, match="intermediate_size 5600 must be 4 times hidden_size"):
        tower("llama4", **LLAMA4 | {"intermediate_size": 5600})


def test_llama_3_2_reads_all_tiles_that_an_image_could_have_and_one_token() -> None:
    grid = tower("mllama", image_size=560).grid
    small, tall = grid(100, 336), grid(3000, 700)
    assert (small.sides, tall.sides) == ((1, 1), (4, 1))
    assert (small.patches, small.attended, small.tokens, small.markers) == (6432, 6404, 1, 0)
    assert small._replace(sides=tall.sides) == tall
    assert tall.pixels == (1, 4, 3, 560, 560)


def test_layers_of_llama_3_2_that_attend_to_images_stand_among_the_others() -> None:
    spec = build({"model_type": "mllama", "vision_config": {}}, name="m")
    assert spec.for_images is not None
    (own,), (between, crossed) = spec.groups, spec.for_images.groups
    assert (own.count, between.count, crossed.count) == (32, 32, 8)
    assert crossed.positions == (3, 8, 13, 18, 23, 28, 33, 38)
    assert spec.num_params == spec.for_images.num_params
    assert spec.for_images.unloaded_params == 0 < spec.unloaded_params
    assert spec.returns_wide_logits
    assert not spec.for_images.returns_wide_logits


def test_llama_3_2_refuses_a_width_that_its_states_do_not_have() -> None:
    with pytest.raises(ConfigError, match="vision_output_dim 7681 must be hidden_size 1280"):
        tower("mllama", vision_output_dim=7681)


@pytest.mark.parametrize(
    ("model_type", "tasks"),
    [
        ("llava", ()),  # llama has three
        ("mistral3", ()),
        ("gemma3", ("sequence-classification",)),
        ("qwen3_5", ("sequence-classification", "token-classification")),
    ],
)
def test_labels_are_given_by_classes_of_the_whole_model(
    model_type: str, tasks: tuple[str, ...]
) -> None:
    spec = build({"model_type": model_type, "vision_config": {}}, name="m")
    assert tuple(task for task, _ in spec.label_heads) == tasks


@pytest.mark.parametrize(
    "model_type",
    ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "mistral3", "llava", "llava_next"],
)
def test_a_tower_adds_up_to_the_parameters_beside_the_text(model_type: str) -> None:
    spec = build({"model_type": model_type, "vision_config": {}}, name="m")
    assert spec.tower is not None
    assert spec.tower.stack.num_params + spec.tower.idle_params == spec.other_params
    assert (*spec.tower.linears, *spec.tower.idle) == spec.idle_linears


def test_llava_reads_the_last_block_but_one_and_576_tokens_of_every_image() -> None:
    llava = tower("llava", num_hidden_layers=24, image_size=336, patch_size=14)
    assert [group.count for group in llava.stack.groups] == [23]
    (grid,) = {llava.grid(*sides) for sides in ((10, 3000), (336, 336))}
    assert (grid.patches, grid.tokens, grid.pixels) == (577, 576, (1, 3, 336, 336))


def test_llava_next_reads_an_image_as_a_whole_and_in_squares() -> None:
    grid = tower("llava_next", image_size=336, patch_size=14).grid(672, 672)
    assert (grid.crops, grid.patches, grid.tokens) == (5, 577, 576 + 48 * (48 + 1))
    assert grid.pixels == (1, 5, 3, 336, 336)


@pytest.mark.parametrize(
    "other", [{"vision_feature_layer": -1}, {"vision_feature_select_strategy": "full"}]
)
def test_llava_refuses_another_layer_or_strategy(other: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="accepted are clip_vision_model, -2 and default"):
        build({"model_type": "llava", "vision_config": {}} | other, name="m")


def test_llava_refuses_another_tower() -> None:
    with pytest.raises(ConfigError, match="vision tower siglip_vision_model"):
        build(
            {"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model"}},
            name="m",
        )


def test_most_blocks_of_qwen2_5_see_a_window_of_64_patches() -> None:
    groups = tower("qwen2_5_vl").stack.groups
    assert [(g.layer.attentions[0].segment, g.count) for g in groups] == [(64, 28), (0, 4)]


def test_a_clip_has_a_token_for_each_forty_milliseconds() -> None:
    config = {"model_type": "qwen2_audio", "audio_config": {}, "text_config": {}}
    tower = build(config, name="qwen2_audio").tower
    assert tower is not None
    assert tower.hears
    assert tower.reads == "audio"
    assert tower.window_s == 30.0
    grids = {seconds: tower.grid(1, round(16_000 * seconds)) for seconds in (1, 12.3, 30, 60)}
    assert [grid.tokens for grid in grids.values()] == [25, 307, 750, 750]
    assert [grid.padding for grid in grids.values()] == [1450, 885, 0, 0]
    assert {(grid.patches, grid.projected, grid.markers) for grid in grids.values()} == {
        (1500, 750, 2)
    }
