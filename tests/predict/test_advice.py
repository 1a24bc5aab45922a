"""Rules of papers for the adapter of one run: only those that concern it."""

from __future__ import annotations

from dataclasses import replace

from whichlora.predict.advice import advice
from whichlora.spec.run import RunConfig

RUN = RunConfig(model="Qwen/Qwen3-8B", method="qlora")


def settings(run: RunConfig) -> list[str]:
    return [rule.setting for rule in advice(run, 10**6)]


def test_each_rule_names_its_evidence() -> None:
    for rule in advice(replace(RUN, r=64), 10**6):
        assert "arXiv:" in rule.source
        assert rule.in_words.startswith(f"{rule.setting}: ")


def test_a_method_that_is_no_lora_and_an_inference_get_none() -> None:
    assert advice(replace(RUN, method="full"), 10**9) == ()
    assert advice(replace(RUN, method="vera"), 10**5) == ()
    assert advice(replace(RUN, phase="inference"), 10**9) == ()


def test_the_data_is_compared_with_what_the_adapter_can_memorise() -> None:
    few, many, unsaid = (advice(RUN, 10**6, tokens)[0].text for tokens in (2e6, 2.1e6, None))
    assert "can memorise about 2M tokens" in few
    assert "a higher rank need not help" in few
    assert "compare a higher rank" in many
    assert "only where the data has more" in unsaid


def test_a_high_rank_is_told_of_its_scale_unless_it_has_it() -> None:
    assert settings(RUN) == ["rank", "targets", "learning rate"]
    assert settings(replace(RUN, r=64)) == ["rank", "scale", "targets", "learning rate"]
    assert settings(replace(RUN, r=64, use_rslora=True)) == ["rank", "targets", "learning rate"]


def test_targets_that_leave_layers_out_are_told_so() -> None:
    (targets,) = (
        rule
        for rule in advice(replace(RUN, target_modules=("q_proj", "v_proj")), 10**6)
        if rule.setting == "targets"
    )
    assert targets.text.startswith("take all linear layers")
