"""Real steps and generations of small models that see, on this CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from oracle_memory import IMAGE_CONFIGS, Case, audio_case, case, image_case, peak, sound_case
from small_models import MLLAMA

pytestmark = pytest.mark.oracle
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "checkpointing": {"gradient_checkpointing": True},
    "full": {"method": "full"},
    "frozen": {"freeze_vision_tower": True},
    "text alone": {"target_modules": ("q_proj", "v_proj")},
    "qlora": {"method": "qlora"},
    "inference": {"phase": "inference"},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(set(SETTINGS) - {"frozen"}))
def test_the_peak_with_sound_is_the_predicted_one(name: str) -> None:
    measured, predicted = peak(sound_case(**SETTINGS[name]))
    assert predicted == pytest.approx(measured, rel=0.015)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_the_peak_with_clips_is_the_predicted_one(name: str) -> None:
    measured, predicted = peak(audio_case(**SETTINGS[name]))
    assert predicted == pytest.approx(measured, rel=0.015)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", sorted(IMAGE_CONFIGS))
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_peak_with_images_is_the_predicted_one(family: str, settings: dict[str, Any]) -> None:
    measured, predicted = peak(image_case(family, **settings))
    assert predicted == pytest.approx(measured, rel=0.015)


@pytest.mark.parametrize("name", ["lora", "checkpointing", "full", "qlora", "inference"])
def test_texts_skip_the_layers_that_read_images_alone(name: str) -> None:
    run = case("llama", **SETTINGS[name]).run
    measured, predicted = peak(Case("mllama", run, MLLAMA))
    assert predicted == pytest.approx(measured, rel=0.01)
