from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.errors import ConfigError
from whichlora.families import build, known_types
from whichlora.families.experts import with_routed_rows
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import ALL_LINEAR
from whichlora.spec.targets import resolve_targets
from whichlora.store.paths import data_folder

FILES = sorted(x for x in data_folder("models_db").glob("*.json") if x.stem != "index")


def read(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return value


def model(stem: str) -> ModelSpec:
    entry = read(data_folder("models_db") / f"{stem}.json")
    return build(entry["config"], name=entry["hub_id"])


def names(spec: ModelSpec) -> set[str]:
    """What `target_modules="all-linear"` would reach in the layers."""
    return {x.name for layer, _ in spec.layers() for x in layer.linears if x.is_module}


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_parameter_count_equals_that_of_transformers_to_the_unit(file: Path) -> None:
    entry = read(file)
    assert build(entry["config"], name=entry["hub_id"]).num_params == entry["params"]


@pytest.mark.parametrize(
    ("stem", "num_layers", "linears"),
    [
        (
            "meta-llama--Llama-3.1-8B",
            32,
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
        (
            "microsoft--Phi-3-mini-4k-instruct",
            32,
            {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
        ),
        ("openai-community--gpt2", 12, {"c_attn", "c_proj", "c_fc"}),
        (
            "EleutherAI--pythia-70m",
            6,
            {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
        ),
        ("mistralai--Mixtral-8x7B-v0.1", 32, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("google-t5--t5-small", 12, {"q", "k", "v", "o", "wi", "wo"}),
        ("google-bert--bert-base-uncased", 12, {"query", "key", "value", "dense"}),
        (
            "deepseek-ai--DeepSeek-V3",
            61,
            {
                *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
                *("gate_proj", "up_proj", "down_proj"),
            },
        ),
    ],
)
def test_layers_and_module_names_are_those_of_transformers(
    stem: str, num_layers: int, linears: set[str]
) -> None:
    spec = model(stem)
    assert spec.num_hidden_layers == num_layers
    assert names(spec) == linears


def test_projections_of_one_input_share_a_label() -> None:
    (layer, _), *_ = build(LLAMA, name="tiny").layers()
    reads = {x.name: x.reads for x in layer.linears}
    assert reads["q_proj"] == reads["k_proj"] == reads["v_proj"] == "attn_in"
    assert reads["gate_proj"] == reads["up_proj"] == "mlp_in"
    assert (reads["o_proj"], reads["down_proj"]) == ("attn_out", "mlp_act")


@pytest.mark.parametrize(
    ("stem", "elements"),
    [
        ("meta-llama--Llama-3.1-8B", 2 * 8 * 128),
        ("tiiuae--falcon-7b", 2 * 64),  # one key and one value head
        ("tiiuae--falcon-40b", 2 * 8192),  # grouped, but copied to every head before the cache
        ("bigcode--starcoder", 2 * 128),
        ("deepseek-ai--DeepSeek-V3", 512 + 64),  # the latent and the rotated key
        ("google-bert--bert-base-uncased", 0),
    ],
)
def test_the_cache_holds_what_transformers_keeps_per_token(stem: str, elements: int) -> None:
    sizes = {a.cache_elements for layer, _ in model(stem).layers() for a in layer.attentions}
    assert sizes == {elements}


def test_gemma_3_attends_to_everything_in_every_sixth_layer() -> None:
    spec = model("google--gemma-3-27b-pt")
    windows = {layer.attentions[0].sliding_window: count for layer, count in spec.layers()}
    assert windows == {1024: 52, None: 10}


def test_a_null_window_means_no_window_and_a_missing_one_the_default() -> None:
    mistral = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
    missing = build(mistral, name="tiny")
    null = build({**mistral, "sliding_window": None}, name="tiny")
    assert missing.groups[0].layer.attentions[0].sliding_window == 4096
    assert null.groups[0].layer.attentions[0].sliding_window is None


def test_experts_are_no_modules_and_say_how_many_a_token_passes() -> None:
    layer = model("mistralai--Mixtral-8x7B-v0.1").groups[0].layer
    assert layer.moe is not None
    assert all(not x.is_module for x in layer.moe.expert.linears)
    assert {(x.count, x.active) for x in layer.moe.expert.linears} == {(8, 2)}


def test_albert_runs_one_set_of_weights_twelve_times() -> None:
    (group,) = model("albert--albert-base-v2").groups
    assert (group.count, group.shared) == (12, True)
    assert group.num_params == group.layer.num_params


def test_a_vision_tower_counts_and_is_named_in_a_note() -> None:
    spec = model("Qwen--Qwen3.5-9B")
    assert spec.other_params > 0
    assert any("vision tower" in note for note in spec.notes)


def test_t5_with_its_own_head_says_how_much_a_checkpoint_holds_more() -> None:
    spec = model("google--flan-t5-small")
    assert spec.head_tied
    assert any(f"{32128 * 512} more parameters" in note for note in spec.notes)


LLAMA4 = {"model_type": "llama4_text", "num_hidden_layers": 4, "interleave_moe_layer_step": 2}


def test_every_expert_of_llama_4_computes_each_token_and_those_of_an_engine_their_own() -> None:
    spec = build(LLAMA4, name="llama4")
    sparse = [layer.moe for layer, _ in with_routed_rows(spec).layers() if layer.moe]
    assert {moe.rows_per_token for layer, _ in spec.layers() if (moe := layer.moe)} == {16}
    assert {moe.rows_per_token for moe in sparse} == {1}
    assert {linear.active for moe in sparse for linear in moe.expert.linears} == {1}
    assert with_routed_rows(spec).num_params == spec.num_params


def test_llama_4_rotates_in_chunks_and_attends_to_everything_in_every_fourth_layer() -> None:
    attentions = [layer.attentions[0] for layer, _ in build(LLAMA4, name="llama4").layers()]
    assert {(each.rotary_dim, each.sliding_window) for each in attentions} == {
        (128, 8192),
        (0, None),
    }


def test_a_pattern_of_nemotron_h_names_each_block() -> None:
    spec = build({"model_type": "nemotron_h", "hybrid_override_pattern": "MM-*"}, name="blocks")
    assert [(bool(layer.attentions), bool(layer.mlp)) for layer, _ in spec.layers()] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    with pytest.raises(ConfigError, match="'X' is no kind of block of nemotron_h"):
        build({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, name="blocks")


def test_a_gated_norm_of_falcon_h1_is_refused() -> None:
    with pytest.raises(ConfigError, match="mamba_rms_norm is true"):
        build({"model_type": "falcon_h1", "mamba_rms_norm": True}, name="falcon")


def test_what_peft_refuses_in_a_mamba_is_no_target() -> None:
    spec = build({"model_type": "mamba2"}, name="mamba")
    assert resolve_targets(spec, (ALL_LINEAR,)) == ("in_proj",)
    with pytest.raises(ConfigError, match="'out_proj' is no linear layer"):
        resolve_targets(spec, ("out_proj",))


def test_an_unknown_type_is_refused_with_what_traces_it() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^x: model_type 'rwkv9' is not known to the formulas; 'whichlora estimate' traces",
    ):
        build({"model_type": "rwkv9"}, name="x")
    with pytest.raises(ConfigError, match="model_type None is not known"):
        build({}, name="x")


@pytest.mark.parametrize("value", [0, -4, "4096", 1.5, True, []])
def test_a_size_that_is_no_size_names_its_key(value: object) -> None:
    with pytest.raises(ConfigError, match=r"tiny: hidden_size is .*, not a whole number"):
        build({**LLAMA, "hidden_size": value}, name="tiny")


def test_a_list_of_the_wrong_length_names_its_key() -> None:
    config = {**LLAMA, "model_type": "olmo3", "layer_types": ["full_attention"]}
    with pytest.raises(ConfigError, match="tiny: layer_types"):
        build(config, name="tiny")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "llama", "num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"model_type": "phi", "partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({"model_type": "phi", "partial_rotary_factor": float("nan")}, "partial_rotary_factor"),
        ({"model_type": "phi", "rope_parameters": {"partial_rotary_factor": 7}}, "partial_rotary"),
        ({"model_type": "gpt_neo", "attention_types": [["global"]]}, "attention_types"),
        ({"model_type": "gpt_neo", "attention_types": [[["local"], 1]]}, "attention_types"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": ["all"]}, "mlp_only_layers"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": "3"}, "first_k_dense_replace"),
        ({"model_type": "gemma3", "text_config": "small"}, "text_config"),
    ],
)
def test_any_other_wrong_value_names_its_key(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"tiny: {key}"):
        build(config, name="tiny")


NO_DEFAULT: dict[str, dict[str, int]] = {  # in the order in which they are asked for
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("model_type", known_types())
def test_a_bare_type_has_the_defaults_of_its_class(model_type: str) -> None:
    config: dict[str, Any] = {"model_type": model_type}
    needed = NO_DEFAULT.get(model_type, {})
    for key, value in needed.items():
        with pytest.raises(ConfigError, match=f"bare: {key} is missing"):
            build(config, name="bare")
        config[key] = value
    assert build(config, name="bare").num_params > 0


@given(
    heads=st.integers(1, 8),
    head_dim=st.integers(1, 16),
    width=st.integers(1, 64),
    layers=st.integers(1, 6),
    tied=st.booleans(),
)
def test_parts_sum_to_the_total(
    heads: int, head_dim: int, width: int, layers: int, tied: bool
) -> None:
    hidden = heads * head_dim
    spec = build(
        {
            **LLAMA,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": width,
            "num_hidden_layers": layers,
            "tie_word_embeddings": tied,
        },
        name="tiny",
    )
    per_layer = 4 * hidden**2 + 3 * hidden * width + 2 * hidden
    tables = 100 * hidden * (1 if tied else 2)
    assert spec.num_params == layers * per_layer + tables + hidden


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_layers_that_read_keys_of_earlier_ones_leave_some(model_type: str) -> None:
    config = {"model_type": model_type, "num_hidden_layers": 8, "num_kv_shared_layers": 8}
    with pytest.raises(ConfigError, match="num_kv_shared_layers is 8 of 8 layers"):
        build(config, name="m")


def test_exaone_names_its_pattern_in_letters_beside_the_types_of_its_layers() -> None:
    config: dict[str, Any] = {
        "model_type": "exaone4",
        "num_hidden_layers": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }
    groups = build(config, name="x").layers()
    assert [(count, layer.attentions[0].sliding_window) for layer, count in groups] == [
        (3, 4096),
        (1, None),
    ]
    del config["layer_types"]
    with pytest.raises(ConfigError, match="sliding_window_pattern is 'LLLG', not a whole number"):
        build(config, name="x")


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "bert", "opt"])
def test_heads_that_transformers_refuses_are_refused(model_type: str) -> None:
    config = {"model_type": model_type, "hidden_size": 4096, "num_attention_heads": 30}
    with pytest.raises(
        ConfigError, match="4096 is not a multiple of num_attention_heads 30, which"
    ):
        build(config, name="odd")
    build({**config, "model_type": "qwen2", "num_key_value_heads": 30}, name="cut")


def test_embeddinggemma_reads_both_ways_through_a_mask_and_gemma_3_does_not() -> None:
    config: dict[str, Any] = {"model_type": "gemma3_text", "sliding_window": 512}
    both_ways = build(config | {"use_bidirectional_attention": True}, name="e")
    for model, is_causal in ((both_ways, False), (build(config, name="g"), True)):
        attentions = [each for layer, _ in model.layers() for each in layer.attentions]
        assert {each.causal for each in attentions} == {is_causal}
        assert {each.always_masked for each in attentions} == {not is_causal}
        assert {each.sliding_window for each in attentions} == {512, None}
