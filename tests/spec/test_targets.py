"""Which matrices of a model get an adapter."""

from __future__ import annotations

import pytest

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.targets import adapted, resolve_targets
from whichlora.store.models import find_model, list_models

ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
MLP = ("down_proj", "gate_proj", "up_proj")


def model(name: str = "meta-llama/Meta-Llama-3-8B") -> ModelSpec:
    spec = find_model(name)
    assert spec is not None
    return spec


def test_all_linear_is_every_matrix_of_the_layers_without_the_head() -> None:
    assert resolve_targets(model(), ("all-linear",)) == tuple(sorted(ATTENTION + MLP))


def test_attention_is_its_projections() -> None:
    assert resolve_targets(model(), ("attention",)) == ATTENTION


def test_names_are_sorted_and_counted_once() -> None:
    assert resolve_targets(model(), ("v_proj", "q_proj", "v_proj")) == ("q_proj", "v_proj")


def test_groups_and_names_add_up() -> None:
    targets = resolve_targets(model(), ("attention", "up_proj"))
    assert set(targets) == {*ATTENTION, "up_proj"}


def test_a_name_that_no_layer_has_lists_those_it_has() -> None:
    with pytest.raises(ConfigError, match=r"'c_attn' is no linear layer of .*down_proj, gate_proj"):
        resolve_targets(model(), ("c_attn",))


def test_the_head_and_the_embedding_are_no_targets_and_the_answer_says_what_is() -> None:
    for name in ("lm_head", "embed_tokens"):
        with pytest.raises(ConfigError, match=f"{name}' is not predicted; .* modules_to_save"):
            resolve_targets(model(), ("q_proj", name))


def test_one_name_can_mean_matrices_of_different_shape() -> None:
    spec = model("openai-community/gpt2")
    found = adapted(spec.groups[0].layer, resolve_targets(spec, ("c_proj",)))
    assert [(x.in_features, x.out_features) for x in found] == [(768, 768), (3072, 768)]


def test_only_the_named_matrices_are_adapted() -> None:
    spec = adapted(model().groups[0].layer, ("q_proj",))
    assert [x.name for x in spec] == ["q_proj"]


def test_default_is_what_peft_adapts() -> None:
    assert resolve_targets(model(), ("default",)) == ("q_proj", "v_proj")
    assert resolve_targets(model("google-bert/bert-base-uncased"), ("default",)) == (
        "query",
        "value",
    )
    with pytest.raises(ConfigError, match="PEFT has no default for models of type qwen3_moe"):
        resolve_targets(model("Qwen/Qwen3-30B-A3B"), ("default",))


@pytest.mark.oracle
def test_defaults_are_those_of_peft() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    of_peft = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    for record in list_models():
        spec = model(record.hub_id)
        try:
            names = resolve_targets(spec, ("default",))
        except ConfigError:
            assert spec.model_type not in of_peft or spec.model_type == "gemma4"  # a pattern
        else:
            assert set(names) == set(of_peft[spec.model_type])
