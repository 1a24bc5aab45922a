"""Which matrices of a model get an adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.families.experts import with_named_experts
from whichlora.predict.resolve import resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.spec.targets import (
    adapted,
    adapted_linears,
    asked_names,
    resolve_targets,
    unmatched_targets,
)
from whichlora.store.gpus import find_gpu
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
    with pytest.raises(
        ConfigError, match=r"'c_attn' is no linear layer of .*down_proj, embed_tokens"
    ):
        resolve_targets(model(), ("c_attn",))


def test_names_that_no_layer_has_are_passed_over_beside_others() -> None:
    names = ("q_proj", "k_proj", "o_proj")  # GLM's latent attention has the last alone
    spec = model("zai-org/GLM-4.7-Flash")
    assert resolve_targets(spec, names) == ("o_proj",)
    assert unmatched_targets(spec, names) == ("q_proj", "k_proj")
    assert unmatched_targets(spec, ("all-linear", "attention", "default", "o_proj")) == ()
    with pytest.raises(ConfigError, match=r"'q_proj', 'k_proj' are no linear layers of .*all-lin"):
        resolve_targets(spec, names[:2])


def test_a_name_may_end_in_one_that_layers_have() -> None:
    assert resolve_targets(model(), ("self_attn.q_proj", "mlp.up_proj")) == ("q_proj", "up_proj")
    bert = model("google-bert/bert-base-uncased")
    for name in ("self.query", "attention.self.query"):
        assert resolve_targets(bert, (name,)) == ("query",)
    assert unmatched_targets(model(), ("self_attn.q_proj", "self_attn.c_attn")) == (
        "self_attn.c_attn",
    )


@pytest.mark.parametrize("name", ["mlp.q_proj", "self_attn.up_proj", "foo.c_attn", "q_proj.x"])
def test_a_module_that_is_not_around_a_matrix_has_no_match(name: str) -> None:
    with pytest.raises(ConfigError, match="is no linear layer"):
        resolve_targets(model(), (name,))


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("meta-llama/Meta-Llama-3-8B", "attn.q_proj", "self_attn.q_proj"),
        ("meta-llama/Meta-Llama-3-8B", "mamba.q_proj", "self_attn.q_proj"),
        ("meta-llama/Meta-Llama-3-8B", "ffn.up_proj", "mlp.up_proj"),
        ("EleutherAI/pythia-160m", "self_attn.query_key_value", "attention.query_key_value"),
        ("openai-community/gpt2", "self_attn.c_attn", "attn.c_attn"),
        ("google-bert/bert-base-uncased", "attention.query", "attention.self.query"),
    ],
)
def test_a_module_of_another_type_of_model_has_no_match(name: str, wrong: str, right: str) -> None:
    spec = model(name)
    assert resolve_targets(spec, (right,)) == (right.rpartition(".")[2],)
    assert unmatched_targets(spec, (wrong, right)) == (wrong,)
    with pytest.raises(ConfigError, match="is no linear layer"):
        resolve_targets(spec, (wrong,))


def test_a_module_that_is_not_known_is_refused_of_types_whose_paths_are_not() -> None:
    unknown = replace(model(), model_type="new_type")
    with pytest.raises(ConfigError, match="whether foo is around q_proj is not known; give 'q_pr"):
        resolve_targets(unknown, ("foo.q_proj", "v_proj"))
    assert resolve_targets(model(), ("foo.q_proj", "v_proj")) == ("v_proj",)
    with pytest.raises(ConfigError, match="names of a new_type are not known"):
        resolve_targets(unknown, (r"re:.*q_proj",))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (r".*\.(q_proj|v_proj)", ("q_proj", "v_proj")),
        (r"model\.layers\.\d+\.mlp\..*", ("down_proj", "gate_proj", "up_proj")),
        (r"(?!.*vision).*self_attn\.(q|k|v|o)_proj$", ("k_proj", "o_proj", "q_proj", "v_proj")),
        (r"(\w+\.)*mlp\.(up|down)_proj", ("down_proj", "up_proj")),
    ],
)
def test_a_pattern_is_of_whole_names(pattern: str, names: tuple[str, ...]) -> None:
    assert resolve_targets(model(), (f"re:{pattern}",)) == names
    assert unmatched_targets(model(), (f"re:{pattern}",)) == ()


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        (r".*\.layers\.[01]\..*q_proj", r"is a part of the layers called 'q_proj'"),
        (r"q_proj", "is no linear layer"),  # of a whole name
        (r".*(q_proj", "can't be read: a group has no end; name layers"),
        (".*" * 25 + "~", "is no linear layer"),  # `re` never ends
    ],
)
def test_what_a_pattern_can_not_mean_is_refused(pattern: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve_targets(model(), (f"re:{pattern}",))


@pytest.mark.parametrize(
    ("name", "part", "whole"),
    [
        (
            "Qwen/Qwen3-8B",
            r"layers\.(0|1|2|7|10|35)\..*q_proj",
            r"layers\.([0-9]|[123]\d)\..*q_proj",
        ),
        # layers 3, 7 and so on attend
        (
            "Qwen/Qwen3.5-9B",
            r"layers\.([01]?[0-9]|2[0-3])\..*q_proj",
            r"layers\.(3|7|11|15|19|23|27|31)\..*q_proj",
        ),
        ("Qwen/Qwen3.5-9B", r"layers\.([0-9]|[12]\d|30)\..*up_proj", r"layers\.\d+\..*up_proj"),
        ("facebook/bart-base", r"layers\.[0-4]\..*q_proj", r"layers\.[0-5]\..*q_proj"),
        (
            "openai/whisper-large-v3",
            r"layers\.([0-9]|[12]\d|30)\.fc1",
            r"layers\.([0-9]|[12]\d|3[01])\.fc1",
        ),
        ("google-t5/t5-small", r"block\.[0-4]\..*\.q", r"block\.[0-5]\..*\.q"),
        (
            "Qwen/Qwen2.5-VL-7B-Instruct",
            r"blocks\.([0-9]|[12]\d|30)\..*qkv",
            r"blocks\.([0-9]|[12]\d|3[01])\..*qkv",
        ),
    ],
)
def test_a_pattern_is_asked_for_every_layer_that_has_a_name(
    name: str, part: str, whole: str
) -> None:
    leaf = whole.rpartition(".")[2].removeprefix("*")
    assert resolve_targets(model(name), (f"re:.*{whole}",)) == (leaf,)
    with pytest.raises(ConfigError, match=f"is a part of the layers called '{leaf}', which is not"):
        resolve_targets(model(name), (f"re:.*{part}",))


def test_the_head_of_an_encoder_is_not_passed_over() -> None:
    with pytest.raises(ConfigError, match="an adapter of 'decoder' is not predicted"):
        resolve_targets(model("google-bert/bert-base-uncased"), ("query", "decoder"))


def test_modules_of_recurrent_layers_are_around_their_matrices() -> None:
    spec = model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert resolve_targets(spec, ("linear_attn.in_proj_ba", "linear_attn.out_proj")) == (
        "in_proj_ba",
        "out_proj",
    )


def test_a_part_of_the_layers_of_a_name_is_not_predicted() -> None:
    with pytest.raises(ConfigError, match=r"is of one layer, which is not.*; give 'q_proj'"):
        resolve_targets(model(), ("layers.0.self_attn.q_proj",))
    with pytest.raises(
        ConfigError, match=r"is a part of the layers called 'q_proj'.*give 'q_proj'"
    ):
        resolve_targets(model("facebook/bart-base"), ("self_attn.q_proj",))


def test_names_that_parts_of_experts_had_mean_their_parameters() -> None:
    """peft 0.21.2 `_convert_peft_config_moe`."""
    spec = model("Qwen/Qwen3-30B-A3B")
    names = (*ATTENTION, *MLP)
    targets = resolve_targets(spec, names)
    assert targets == tuple(sorted((*ATTENTION, "down_proj", "gate_up_proj")))
    assert asked_names(spec, targets) == tuple(sorted(names))
    assert unmatched_targets(spec, names) == ()
    mixtral = model("mistralai/Mixtral-8x7B-v0.1")
    assert resolve_targets(mixtral, ("w1", "w2", "w3")) == ("down_proj", "gate_up_proj")
    assert asked_names(mixtral, ("gate_up_proj", "q_proj")) == ("q_proj", "w1", "w3")
    assert unmatched_targets(mixtral, ("q_proj", *MLP)) == ("down_proj", "gate_proj", "up_proj")
    with pytest.raises(ConfigError, match="PEFT refuses 'up_proj' without gate_proj"):
        resolve_targets(model("Qwen/Qwen3-Next-80B-A3B-Instruct"), ("up_proj", "q_proj"))


def test_one_projection_is_enough_for_unsloth() -> None:
    spec = with_named_experts(model("Qwen/Qwen3-30B-A3B"))
    assert resolve_targets(spec, ("up_proj", "q_proj")) == ("gate_up_proj", "q_proj")
    assert asked_names(spec, ("gate_up_proj",)) == ("gate_proj", "up_proj")


def test_the_token_table_is_a_target_where_its_name_is_given() -> None:
    assert resolve_targets(model(), ("q_proj", "embed_tokens")) == ("embed_tokens", "q_proj")
    assert "embed_tokens" not in resolve_targets(model(), ("all-linear",))
    ((table, count),) = adapted_linears(model(), ("embed_tokens",))
    assert (table.in_features, table.out_features, count) == (128256, 4096, 1)
    assert not table.is_stored_in("nf4")


def test_an_adapter_of_the_token_table_is_refused_where_nobody_has_looked() -> None:
    config = RunConfig(model="meta-llama/Meta-Llama-3-8B", target_modules=("embed_tokens",))
    refused: dict[str, dict[str, Any]] = {
        "method dora; use method lora": {"method": "dora"},
        "modules_to_save of its name; use one": {"modules_to_save": ("embed_tokens",)},
        "serve as-trained; use merged": {"phase": "inference", "serve": "as-trained"},
        "method options; leave them out": {"method_options": (("init_lora_weights", "pissa"),)},
        "what divides the model": {"parallel": ParallelConfig(gpus=2, strategy="fsdp")},
    }
    for reason, settings in refused.items():
        with pytest.raises(ConfigError, match=f"'embed_tokens' is not predicted with {reason}"):
            resolve(model(), replace(config, **settings), find_gpu("a100-sxm-80gb"))


def test_the_head_is_a_target_where_its_name_is_given() -> None:
    assert resolve_targets(model(), ("q_proj", "lm_head")) == ("lm_head", "q_proj")
    assert "lm_head" in resolve_targets(model(), ("re:.*",))
    assert "lm_head" not in resolve_targets(model(), ("all-linear",))
    head = model().head
    assert head is not None
    ((adapted_head, count),) = adapted_linears(model(), ("lm_head",))
    assert (adapted_head.out_features, count) == (head.out_features, 1)
    assert not adapted_head.is_stored_in("nf4")  # bitsandbytes leaves it


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"method": "hra"}, "method hra; use method lora"),
        ({"trainer": "sft"}, "loss_head trl-fused; use trainer transformers or loop"),
        ({"modules_to_save": ("lm_head",)}, "modules_to_save of its name"),
        ({"phase": "inference", "serve": "as-trained"}, "serve as-trained; use merged"),
    ],
)
def test_an_adapted_head_is_refused_where_nobody_has_looked(
    settings: dict[str, Any], complaint: str
) -> None:
    run = RunConfig(**{"model": model().name, "target_modules": ("q_proj", "lm_head"), **settings})
    with pytest.raises(ConfigError, match=f"adapter of 'lm_head' is not predicted .*{complaint}"):
        resolve(model(), run, find_gpu("a100-sxm-80gb"))


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
@pytest.mark.parametrize("names", [("q_proj", *MLP), ("q_proj", "w1", "w2", "w3"), ("q_proj",)])
@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1"])
def test_names_of_experts_reach_what_peft_adapts(name: str, names: tuple[str, ...]) -> None:
    import peft
    import torch
    import transformers

    spec = model(name)
    config = transformers.AutoConfig.for_model(**{**spec.config, "num_hidden_layers": 1})
    with torch.device("meta"):
        base = transformers.AutoModelForCausalLM.from_config(config)
    wanted = peft.LoraConfig(r=8, target_modules=list(names))
    adapted_model = peft.get_peft_model(base, wanted, low_cpu_mem_usage=True)
    real = sum(x.numel() for n, x in adapted_model.named_parameters() if "lora_" in n)
    linears = adapted_linears(spec, resolve_targets(spec, names))
    ranks = sum(
        linear.count * linear.rank_multiple * (linear.in_features + linear.out_features) * layers
        for linear, layers in linears
    )
    assert 8 * ranks == real * spec.config["num_hidden_layers"]


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
