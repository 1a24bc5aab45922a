"""The trainers: how they are found, also in another package, and what cannot be written for one."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from devices import A100
from written_job import train_script_of

from whichlora import trainers
from whichlora.calibration.load import load_calibration
from whichlora.config import load_plan
from whichlora.errors import ConfigError
from whichlora.exports import FORMATS
from whichlora.predict.predict import predict
from whichlora.spec import members
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model
from whichlora.trainers import Trainer, get_trainer, list_trainers
from whichlora.workflow.export import make_recipe

OUTSIDE = Path(__file__).parents[1] / "outside_trainers"
RUN = RunConfig(model="HuggingFaceTB/SmolLM2-135M", seq_len=256)
BARE = Trainer(name="bare", summary="a script", steps="nowhere:run")


@dataclass(frozen=True)
class Point:
    loaded: Any
    value: str = "package:TRAINER"

    def load(self) -> Any:
        return self.loaded


def test_the_trainer_of_transformers_is_the_default() -> None:
    assert next(iter(list_trainers())) == RUN.trainer == "transformers"


def test_a_trainer_of_another_package_predicts_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(OUTSIDE)
    monkeypatch.setattr(members, "entry_points", importlib.metadata.entry_points)
    model = find_model(RUN.model)
    assert model is not None
    calibration = load_calibration(A100)
    named, renamed = (
        predict(model, replace(RUN, trainer=name), A100, calibration)
        for name in ("transformers", "outside-trainer")
    )
    assert replace(renamed, run=named.run) == named


@pytest.mark.parametrize(
    ("loaded", "message"),
    [(object(), r"is not a whichlora\.trainers\.Trainer"), (get_trainer("transformers"), "exists")],
    ids=["no trainer", "its name is taken"],
)
def test_an_entry_point_that_cannot_be_one_is_refused(
    loaded: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "entry_points", lambda group: (Point(loaded),))
    with pytest.raises(ConfigError, match=message):
        list_trainers()


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match="trainer: 'loup' is not known; accepted are transformers"
    ):
        get_trainer("loup")


def test_a_plan_with_an_unknown_trainer_names_the_key(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("models: [HuggingFaceTB/SmolLM2-135M]\ntrainer: loup\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"trainer.*is not known.*transformers"):
        load_plan(path)


@pytest.mark.parametrize("tool", ["axolotl", "llamafactory", "transformers", "trl", "unsloth"])
def test_steps_that_are_not_the_trainer_s_are_not_exported(
    tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trainers.BUILT_IN, "bare", BARE)
    place = "train.py" if tool == "transformers" else f"--to {tool}"
    recipe = make_recipe(replace(RUN, trainer="bare"), "a100-sxm-80gb")
    with pytest.raises(ConfigError, match=f"{place}: .*trainer bare"):
        FORMATS[tool](recipe)


def test_train_py_writes_the_kind_of_checkpointing_where_it_is_not_the_usual_one() -> None:
    usual, unusual = (
        train_script_of(replace(RUN, use_reentrant=kind), target_modules="all-linear")
        for kind in (False, True)
    )
    assert "use_reentrant" not in usual
    assert 'f"{checkpointing}_kwargs": {"use_reentrant": True}' in unusual


@pytest.mark.parametrize(
    ("called", "own", "said"),
    [
        ("LLaMA-Factory", "transformers", "such as dtypes and checkpointing"),
        ("axolotl", "transformers", "such as dtypes and checkpointing"),
        ("lit-gpt", "litgpt", ""),
        ("GRPOTrainer", "grpo", ""),
        ("UnslothGRPOTrainer", "unsloth-grpo", ""),
        ("unsloth-dpo", "dpo", "without Unsloth's kernels"),
        ("trl", "sft", ""),
    ],
)
def test_a_tool_or_a_class_is_taken_as_the_trainer_whose_steps_it_has(
    called: str, own: str, said: str
) -> None:
    assert trainers.own_name(called) == own
    note = trainers.other_name_note(called)
    assert said in note
    assert note.startswith(f"{called}: taken as trainer {own}; ") is bool(said)
    assert trainers.with_trainer(replace(RUN, trainer=called)).trainer == own


def test_a_trainer_is_no_other_name_of_another() -> None:
    names = {trainers.own_name(name) for name in list_trainers()}
    assert names == set(list_trainers())
    assert not any(map(trainers.other_name_note, names))
