"""The usual learning rate of a method under a trainer, and where a job has it from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from written_job import train_script_of

from whichlora.cli import main
from whichlora.exports.recipe import Recipe
from whichlora.methods import list_methods, usual_learning_rate
from whichlora.spec.run import RunConfig
from whichlora.trainers import list_trainers

RUN = RunConfig(model="Qwen/Qwen3-0.6B")


# TRL 1.16's configs, and the rates for adapters of docs/source/{sft,dpo,reward}_trainer.md: about
# 1e-4, 1e-5 and 1e-3
@pytest.mark.parametrize(
    ("method", "trainer", "rate"),
    [
        ("full", "transformers", 2e-5),
        ("full", "sft", 2e-5),
        ("lora", "sft", 2e-4),
        ("qdora", "transformers", 2e-4),
        ("full", "dpo", 1e-6),
        ("lora", "dpo", 1e-5),
        ("qlora", "orpo", 1e-5),
        ("lora", "reward", 1e-3),
        ("lora", "llamafactory-dpo", 5e-6),
        ("vera", "sft", 1e-3),
    ],
)
def test_a_rate_is_of_the_method_and_the_trainer(method: str, trainer: str, rate: float) -> None:
    run = RunConfig(model="any", method=method, trainer=trainer)
    assert usual_learning_rate(run)[0] == pytest.approx(rate)


def test_every_rate_can_be_trained_with_and_has_a_source() -> None:
    for method in list_methods():
        for trainer in list_trainers():
            run = RunConfig(model="any", method=method, trainer=trainer)
            rate, source = usual_learning_rate(run)
            assert 0 < rate <= 1
            assert source.isprintable()
            assert source


def test_a_script_names_the_source_of_a_rate_that_nobody_states() -> None:
    script = train_script_of(RunConfig(model="any", method="full"), target_modules=[])
    assert "# usual: TRL's SFTConfig\nLEARNING_RATE = 2e-05\n" in script
    stated = train_script_of(
        RunConfig(model="any", method="full"), target_modules=[], learning_rate=3e-5
    )
    assert "LEARNING_RATE = 3e-05\n" in stated
    assert "# usual:" not in stated


def test_a_recipe_keeps_a_stated_rate_and_says_where_another_is_from() -> None:
    recipe = Recipe(run=RUN, gpu="l4-24gb", target_modules="all-linear")
    assert (recipe.learning_rate, bool(recipe.rate_source)) == (2e-4, True)
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())), where="recipe.json")
    assert again == recipe
    stated = Recipe(run=RUN, gpu="l4-24gb", target_modules="all-linear", learning_rate=2e-4)
    assert (stated.learning_rate, stated.rate_source, stated.rate_notes) == (2e-4, "", ())


@pytest.mark.parametrize(
    ("words", "written", "told"),
    [
        (("--trainer", "dpo"), "learning_rate: 1.0e-5", "TRL's DPOConfig"),
        (("--method", "full"), "learning_rate: 2.0e-5", "TRL's SFTConfig"),
        (("--method", "full", "--learning-rate", "0.0004"), "learning_rate: 0.0004", ""),
    ],
)
def test_an_export_has_the_rate_of_its_job(
    words: tuple[str, ...], written: str, told: str, tmp_path: Path
) -> None:
    asked = ["export", RUN.model, "--to", "llamafactory", "--gpu", "h100", *words]
    result = CliRunner().invoke(main, [*asked, "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "llamafactory.yaml").read_text()
    assert written in text
    above = text.partition("learning_rate:")[0].splitlines()[-1]
    assert (above.startswith("# usual: ") and told in above) is bool(told)
    output = " ".join(result.output.split())
    assert told in output
    assert ("is the usual one of" in output) is bool(told)
