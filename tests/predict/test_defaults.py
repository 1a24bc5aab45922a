"""What a run does where its user does not say: by WhichLoRA, and by a stated release of TRL."""

from __future__ import annotations

from typing import Any

import pytest

from whichlora.predict.defaults import own_settings, with_open_settings
from whichlora.spec.run import RunConfig, usual_optimizer
from whichlora.spec.versions import Libraries
from whichlora.store.hub import load_model
from whichlora.trainers import get_trainer, list_trainers

OPEN: dict[str, Any] = {"precision": "auto", "gradient_checkpointing": None, "method": "full"}
FP32 = {"precision": "fp32", "gradient_checkpointing": False}


def own(trainer: str, model: str = "Qwen/Qwen3-0.6B", **settings: Any) -> dict[str, Any]:
    run = RunConfig(model=model, trainer=trainer, **{**OPEN, **settings})
    return own_settings(load_model(model), run)


@pytest.mark.parametrize(
    ("release", "settings"),
    [
        ("0.17", FP32),
        ("0.19", {"base_dtype": "float32", "gradient_checkpointing": False}),
        ("0.22", {"base_dtype": "float32", "gradient_checkpointing": True}),
        ("0.26", {"base_dtype": "float32", "gradient_checkpointing": True}),
        ("1.16", {"base_dtype": "float32", "gradient_checkpointing": True}),
    ],
)
def test_a_stated_release_of_trl_decides(release: str, settings: dict[str, Any]) -> None:
    libraries = (("trl", release),)
    assert own("grpo", libraries=libraries) == settings
    run = RunConfig(model="Qwen/Qwen3-0.6B", trainer="grpo", libraries=libraries, **OPEN)
    resolved = with_open_settings(load_model(run.model), run)
    assert {name: getattr(resolved, name) for name in settings} == settings


def test_without_a_release_runs_have_the_settings_that_fit() -> None:
    for trainer in list_trainers():
        if get_trainer(trainer).has_one_way:
            continue
        run = RunConfig(model="Qwen/Qwen3-0.6B", trainer=trainer, **OPEN)
        resolved = with_open_settings(load_model(run.model), run)
        assert (resolved.precision, resolved.base_dtype) == ("auto", "auto")
        assert resolved.gradient_checkpointing


@pytest.mark.parametrize(
    ("trainer", "settings"),
    [
        ("litgpt", {"base_dtype": "float32", "gradient_checkpointing": False}),
        ("torchtune", {"precision": "bf16-pure", "gradient_checkpointing": True}),
    ],
)
def test_a_trainer_of_one_way_has_it_without_a_release(
    trainer: str, settings: dict[str, Any]
) -> None:
    run = RunConfig(model="Qwen/Qwen3-0.6B", trainer=trainer, **OPEN)
    resolved = with_open_settings(load_model(run.model), run)
    assert {name: getattr(resolved, name) for name in settings} == settings


def test_from_pretrained_keeps_the_dtype_of_a_checkpoint_since_transformers_5() -> None:
    assert own("transformers") == {"precision": "bf16-pure", "gradient_checkpointing": False}
    assert own("transformers", method="lora")["precision"] == "bf16-no-autocast"
    assert own("transformers", model="google-bert/bert-base-uncased") == FP32
    assert own("transformers", libraries=(("transformers", "4.50.0"),)) == FP32
    # a quantised base computes in 16 bit, and what is stated stays
    assert own("transformers", method="qlora") == {"gradient_checkpointing": False}
    assert own("transformers", gradient_checkpointing=True, precision="bf16") == {}


def test_the_optimizer_of_training_arguments_is_fused_in_later_releases() -> None:
    assert usual_optimizer(Libraries()) == "adamw_torch_fused"
    assert usual_optimizer(Libraries(transformers="4.53.3")) == "adamw_torch"
    assert usual_optimizer(Libraries(torch="2.7.1")) == "adamw_torch"
