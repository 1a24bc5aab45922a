"""Methods of another package, registered through their entry points: VeRA, and LoRA renamed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from devices import A100
from written_job import train_script_of

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.exports import FORMATS
from whichlora.methods import BUILT_IN, get_method, list_methods
from whichlora.predict.explain import explain
from whichlora.predict.predict import predict
from whichlora.spec import members
from whichlora.spec.run import RunConfig
from whichlora.spec.targets import all_linears
from whichlora.store.models import find_model
from whichlora.workflow.export import make_recipe

OUTSIDE = Path(__file__).parents[1] / "outside_methods"
RUN = RunConfig(model="HuggingFaceTB/SmolLM2-135M", method="outside-vera", r=64, seq_len=256)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.syspath_prepend(OUTSIDE)
        patch.setattr(members, "entry_points", importlib.metadata.entry_points)  # not hidden here
        yield


def test_its_entry_points_register_them() -> None:
    assert list(list_methods()) == [*BUILT_IN, "outside-vera", "outside-lora"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": False, "lora_dropout": 0.1},
        {"quant": "nf4-dq"},
        {"phase": "inference", "serve": "as-trained"},
    ],
    ids=str,
)
def test_lora_under_another_name_predicts_its_bytes_and_its_time(
    settings: dict[str, Any],
) -> None:
    model = find_model(RUN.model)
    assert model is not None
    calibration = load_calibration(A100)
    named, renamed = (
        predict(model, replace(RUN, method=name, **settings), A100, calibration)
        for name in ("lora", "outside-lora")
    )
    assert replace(renamed, run=named.run) == named


def test_explain_lists_the_matrices_that_all_targets_share() -> None:
    model = find_model(RUN.model)
    assert model is not None
    explained = explain(model, RUN, A100, load_calibration(A100))
    (shared,) = [line for line in explained.lines if line.what == "frozen matrices of the adapters"]
    widest, tallest = (
        max(getattr(linear, name) for linear in all_linears(model))
        for name in ("in_features", "out_features")
    )
    sizes = {line.what: line.num_bytes for line in shared.members}
    assert sizes == {"vera_A": 4 * 64 * widest, "vera_B": 4 * 64 * tallest}
    assert "outside-vera" in [one.name for one in explained.methods]


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory", "trl", "unsloth"])
def test_an_export_that_cannot_write_it_refuses_in_one_line(tool: str) -> None:
    recipe = make_recipe(RUN, "a100-sxm-80gb")
    with pytest.raises(ConfigError) as caught:
        FORMATS[tool](recipe)
    assert str(caught.value) == (
        f"--to {tool}: method outside-vera needs peft.VeraConfig, which {tool} can't write; "
        "it writes peft.LoraConfig; use --to transformers"
    )


def test_a_key_that_no_tool_has_words_for_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import outside_lora

    def started_elsewhere(run: RunConfig) -> dict[str, object]:
        return {**get_method("lora").peft_config(run), "init_lora_weights": "pissa"}

    changed = replace(outside_lora.METHOD, peft_config=started_elsewhere)
    monkeypatch.setattr(outside_lora, "METHOD", changed)
    recipe = make_recipe(replace(RUN, method="outside-lora"), "a100-sxm-80gb")
    with pytest.raises(ConfigError, match=r"sets init_lora_weights of peft\.LoraConfig, which trl"):
        FORMATS["trl"](recipe)


def test_train_py_builds_its_own_config_class() -> None:
    script = train_script_of(RUN, target_modules="all-linear")
    assert "from peft import VeraConfig, get_peft_model" in script
    assert 'VeraConfig(r=64, vera_dropout=0.0, target_modules="all-linear")' in script


def test_experts_that_are_bare_parameters_are_left_out_where_it_cannot_adapt_them() -> None:
    model = find_model("Qwen/Qwen3-30B-A3B")
    assert model is not None
    calibration = load_calibration(A100)
    run = replace(RUN, model=model.name)
    bare = {
        linear.name
        for linear in all_linears(model)
        if linear.rank_multiple and not linear.is_module
    }
    adapted = predict(model, run, A100, calibration)
    assert bare
    assert adapted.num_trainable_params < 1e7  # those of experts would be 80 million
    with pytest.raises(ConfigError, match="is no linear layer of"):
        predict(model, replace(run, target_modules=(bare.pop(),)), A100, calibration)
