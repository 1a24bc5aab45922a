"""How images are cut, against the processors of transformers."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from whichlora.families import build
from whichlora.families.multimodal import TOWERS, is_audio_class, is_image_class
from whichlora.spec.tower import Tower

pytestmark = pytest.mark.oracle

NUM_DRAWN = 200
NUM_PICTURES = 4  # that pass the real processor, which resizes them
# class of the processor, and the sizes that published checkpoints give it
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        {"min_pixels": 3136, "max_pixels": 12845056},
    ),
    "qwen2_5_vl": (
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        {"min_pixels": 3136, "max_pixels": 12845056},
    ),
    "qwen3_vl": (
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        {"min_pixels": 65_536, "max_pixels": 16_777_216, "patch_size": 16},
    ),
    "qwen3_5": (
        "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
        {"min_pixels": 65_536, "max_pixels": 16_777_216, "patch_size": 16},
    ),
    "glm4v": ("glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil", {}),
    "glm4v_moe": ("glm4v.image_processing_pil_glm4v.Glm4vImageProcessorPil", {}),
    "llava": (
        "clip.image_processing_pil_clip.CLIPImageProcessorPil",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "llava_next": (
        "llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil",
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
    "smolvlm": (
        "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
        {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
    ),
    "idefics3": (
        "idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    ),
    "internvl": (
        "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        {"size": {"height": 448, "width": 448}, "crop_to_patches": True},
    ),
    "mllama": (
        "mllama.image_processing_pil_mllama.MllamaImageProcessorPil",
        {"size": {"height": 560, "width": 560}},
    ),
    "gemma4": ("gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil", {}),
    "gemma3": (
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        {"size": {"height": 896, "width": 896}},
    ),
}


def tower(model_type: str) -> Tower:
    sides = {"gemma3": 896, "llama4": 336, "llava": 336, "llava_next": 336, "internvl": 448}
    sides |= {"smolvlm": 384, "idefics3": 512, "mllama": 560}
    vision = {"image_size": sides[model_type], "patch_size": 14} if model_type in sides else {}
    if model_type == "llama4":
        vision |= {"hidden_size": 1408, "intermediate_size": 5632, "vision_output_dim": 4096}
    found = build({"model_type": model_type, "vision_config": vision}, name="m").tower
    assert found is not None
    return found


def processor(model_type: str) -> Any:
    pytest.importorskip("PIL")
    dotted, settings = PROCESSORS[model_type]
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(f"transformers.models.{module}"), name)(**settings)


def drawn(model_type: str, count: int) -> list[tuple[int, int]]:
    rng = random.Random(model_type)
    return [(rng.randint(8, 5000), rng.randint(30, 5000)) for _ in range(count)]


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_patches_and_tokens_are_the_processors(model_type: str) -> None:
    real, grid = processor(model_type), tower(model_type).grid
    for height, width in drawn(model_type, NUM_DRAWN):
        if max(height, width) > 200 * min(height, width):
            continue
        patches = real.get_number_of_image_patches(height, width)
        ours = grid(height, width)
        assert (ours.patches, ours.tokens) == (patches, patches // real.merge_size**2)


@pytest.mark.parametrize("model_type", ["smolvlm", "idefics3"])
def test_squares_and_marks_are_those_of_the_processor_of(model_type: str) -> None:
    real, grid = processor(model_type), tower(model_type).grid
    counts = import_module("transformers.models.smolvlm.processing_smolvlm")
    side = real.max_image_size["longest_edge"]
    for height, width in drawn(model_type, 10 * NUM_DRAWN):
        high, wide = _resized_by(real, height, width)
        rows, columns = (high // side, wide // side) if max(high, wide) > side else (0, 0)
        ours = grid(height, width)
        assert ours.crops == rows * columns + 1
        text = counts.get_image_prompt_string(rows, columns, 1, "<f>", "<i>", "<g>")
        assert text.count("<i>") == ours.crops
        marks = text.count("<f>") + text.count("<row") + text.count("<g>")
        breaks = text.count("\n") - (rows > 0)  # two in a row are one token
        assert ours.markers == marks + breaks


def _resized_by(real: Any, height: int, width: int) -> tuple[int, int]:
    """Sides of an image after both resizes of the processor."""
    sides: list[tuple[int, int]] = []

    def noting(image: Any, size: Any, *_: Any, **__: Any) -> Any:
        sides.append((size.height, size.width))
        return np.zeros((1, *sides[-1]), dtype=np.uint8)

    bare = SimpleNamespace(shape=(1, height, width))
    module = import_module(type(real).__module__)
    first = module.get_resize_output_image_size(bare, real.size["longest_edge"])
    stand_in = SimpleNamespace(resize=noting)
    type(real).resize_for_vision_encoder(
        stand_in, SimpleNamespace(shape=(1, *first)), real.max_image_size["longest_edge"]
    )
    return sides[-1]


def _functions_of(name: str, module: str) -> dict[str, Any]:
    """The functions of a module of transformers that only torchvision lets import."""
    path = Path(find_spec("transformers").origin).parent / "models" / name / module  # type: ignore[union-attr,arg-type]
    made = {"torch": import_module("torch"), "lru_cache": lambda **_: lambda function: function}
    made |= {"defaultdict": defaultdict, "SizeDict": Any}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            exec(compile(ast.Module([node], []), str(path), "exec"), made)
    return made


def test_tiles_and_separators_are_those_of_the_processor_of_llama_4() -> None:
    real = _functions_of("llama4", "image_processing_llama4.py")
    counts = import_module("transformers.models.llama4.processing_llama4").Llama4Processor
    sizes = real["find_supported_resolutions"](16, SimpleNamespace(height=336, width=336))
    possible, grid = import_module("torch").tensor(sizes), tower("llama4").grid
    for height, width in drawn("llama4", 10 * NUM_DRAWN):
        fit = real["get_best_fit"]((height, width), possible)
        rows, columns = (int(length) // 336 for length in fit)
        text = counts._prompt_split_image(None, (rows, columns), 144)
        ours = grid(height, width)
        assert ours.crops == rows * columns + (rows * columns > 1)
        assert (ours.tokens, ours.markers) == (
            text.count("<|patch|>"),
            text.count("<|") - text.count("<|patch|>"),
        )


def test_tiles_are_those_of_the_processor_of_llama_3_2() -> None:
    module = import_module("transformers.models.mllama.image_processing_pil_mllama")
    grid = tower("mllama").grid
    for height, width in drawn("mllama", 10 * NUM_DRAWN):
        canvas = module.get_optimal_tiled_canvas(height, width, 4, 560)
        assert tuple(560 * side for side in grid(height, width).sides) == canvas


def test_rows_and_columns_are_those_of_the_processor_of_gemma_4() -> None:
    module = import_module("transformers.models.gemma4.image_processing_pil_gemma4")
    grid = tower("gemma4").grid
    for height, width in drawn("gemma4", 10 * NUM_DRAWN):
        sides = module.get_aspect_ratio_preserving_size(height, width, 16, 2520, 3)
        assert tuple(16 * side for side in grid(height, width).sides) == sides


def test_squares_are_those_of_the_processor_of_internvl() -> None:
    real, grid = processor("internvl"), tower("internvl").grid
    for height, width in drawn("internvl", 10 * NUM_DRAWN):
        ours = grid(height, width)
        squares = real.get_number_of_image_patches(height, width)
        assert (ours.crops, ours.tokens, ours.patches) == (squares, 256 * squares, 1025)


def test_tokens_of_squares_and_of_ends_of_rows_are_those_of_llava_next() -> None:
    module = import_module("transformers.models.llava_next.processing_llava_next")
    counts = module.LlavaNextProcessor
    # the one additional token, of the whole image, is taken off by the strategy "default"
    stand_in = SimpleNamespace(
        image_processor=processor("llava_next"), patch_size=14, num_additional_image_tokens=0
    )
    stand_in._get_unpadded_features = partial(counts._get_unpadded_features, stand_in)
    grid = tower("llava_next").grid
    for height, width in drawn("llava_next", 10 * NUM_DRAWN):
        tokens = counts._get_number_of_features(stand_in, height, width, 336, 336)
        assert grid(height, width).tokens == tokens


@pytest.mark.parametrize("model_type", sorted(PROCESSORS))
def test_pixels_of_a_picture_are_the_processors(model_type: str) -> None:
    real, grid = processor(model_type), tower(model_type).grid
    from PIL import Image

    for height, width in drawn(model_type, NUM_PICTURES):
        size = (1 + width // 4, 1 + height // 4)
        made = real(images=[Image.new("RGB", size)], return_tensors="pt")
        ours = grid(size[1], size[0])
        rows = (1,) if tower(model_type).stacks_rows else ()
        assert tuple(made["pixel_values"].shape) == rows + ours.pixels
        if "pixel_attention_mask" in made:
            assert made["pixel_attention_mask"].numel() == ours.masked
            assert made["pixel_attention_mask"].all()
        if "aspect_ratio_mask" in made:
            assert made["aspect_ratio_mask"].numel() + made["aspect_ratio_ids"].numel() == (
                ours.masked
            )
            assert made["aspect_ratio_mask"].sum() == ours.sides[0] * ours.sides[1]
        if "image_sizes" in made:
            assert made["image_sizes"].tolist() == [[*ours.sides]]
        if "image_position_ids" in made:
            places = made["image_position_ids"].numpy()
            assert places.size == ours.masked
            assert (places[0, :, 0] == -1).sum() == ours.padding
            assert tuple(1 + places[0].max(axis=0)) == ours.sides[::-1]
        if "image_grid_thw" in made:
            assert made["image_grid_thw"].tolist() == [[1, *ours.sides]]


def test_tokens_of_a_clip_are_those_of_the_processor_of_qwen2_audio() -> None:
    transformers = import_module("transformers")
    extract = transformers.WhisperFeatureExtractor(feature_size=128)
    config = {"model_type": "qwen2_audio", "audio_config": {}, "text_config": {}}
    tower = build(config, name="m").tower
    assert tower is not None
    rng = random.Random(0)
    drawn = [rng.randint(400, 520_000) for _ in range(6)]
    for samples in (*drawn, 160 * 1000, 160 * 1000 + 1, 480_000):
        made = transformers.Qwen2AudioProcessor._process_audio(
            SimpleNamespace(
                feature_extractor=extract,
                replace_audio_token=lambda *_, **__: "",
            ),
            [np.zeros(samples, dtype=np.float32)],
            sampling_rate=16_000,
            return_tensors="np",
        )[0]
        ours = tower.grid(1, samples)
        assert made["num_audio_tokens"] == [ours.tokens]
        assert made["input_features"].shape == ours.pixels
        assert made["feature_attention_mask"].size == ours.masked
        assert made["feature_attention_mask"].sum() == ours.sides[1]


@pytest.mark.parametrize("model_type", sorted(TOWERS))
def test_the_class_that_loads_a_model_is_the_one_that_transformers_has(model_type: str) -> None:
    auto = import_module("transformers.models.auto.modeling_auto")
    config = {"model_type": model_type}
    if TOWERS[model_type].reads == "audio":
        assert model_type in auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        assert model_type not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        assert is_audio_class(config)
        assert not is_image_class(config, images=True)
        return
    knows = model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert is_image_class(config) is not knows
    assert is_image_class(config, images=True)
    assert model_type in auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
