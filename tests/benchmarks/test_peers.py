"""What other estimators are asked: our settings in their words, with none of them installed."""

from dataclasses import replace

import peer_answers
import peers
import pytest
from peer_adapters import ADAPTERS, size_in_bytes
from peer_requests import (
    REQUESTS,
    NoArgumentError,
    canifinetune,
    config_of,
    fitcheck_llm,
    fitscout,
    fm_training_estimator,
    ftuneai,
    scope_of,
    shape_of,
)
from published import model_of

from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu

GPU = find_gpu("a100-sxm-80gb")
RUN = RunConfig(
    model="mistralai/Mistral-7B-v0.1",
    method="qlora",
    quant="nf4-dq",
    r=8,
    batch_size=3,
    seq_len=640,
    target_modules=("q_proj", "v_proj"),
    optimizer="adamw_torch",
    attn="flash_attention_2",
    gradient_checkpointing=False,
)


def known(name: str) -> ModelSpec:
    spec = model_of(name)
    assert spec is not None
    return spec


MISTRAL = known("mistralai/Mistral-7B-v0.1")
MIXTRAL = known("mistralai/Mixtral-8x7B-v0.1")
SANTACODER = known("bigcode/gpt_bigcode-santacoder")


def test_canifinetune_is_told_every_setting_it_has_an_argument_for() -> None:
    asked = canifinetune(MISTRAL, RUN, GPU)
    assert asked | {"override": None} == {
        "model_id": "mistralai/Mistral-7B-v0.1",
        "override": None,
        "method": "qlora",
        "gpu_vram_gb": GPU.memory_bytes / 2**30,
        "seq_len": 640,
        "micro_batch_size": 3,
        "gradient_accumulation_steps": 1,
        "base_dtype": "bf16",
        "quantization": "nf4_double_quant",
        "lora_rank": 8,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
        "lora_target_scope": "conservative",
        "optimizer": "adamw_torch",
        "gradient_checkpointing": False,
        "attention_implementation": "flash_attention_2",
        "loss_backend": "stock",
    }
    assert asked["override"]["total_params"] == MISTRAL.num_params == 7_241_732_096


def test_fitcheck_is_told_every_setting_it_has_an_argument_for() -> None:
    asked = fitcheck_llm(MISTRAL, RUN, find_gpu("t4"))
    assert asked["gpu"] == {"name": "t4"}
    assert asked["num_params"] == MISTRAL.num_params
    assert asked["settings"] == {
        "precision": "bf16",
        "quantization": "nf4",
        "double_quant": True,
        "optimizer": "adamw",
        "optimizer_dtype": "fp32",
        "batch_size": 3,
        "seq_len": 640,
        "lora_rank": 8,
        "lora_targets": ["q_proj", "v_proj"],
        "grad_checkpoint": False,
        "flash_attn": True,
        "grad_accum_steps": 1,
    }
    full = fitcheck_llm(MISTRAL, replace(RUN, method="full", quant="none"), GPU)
    assert full["settings"]["lora_rank"] is None
    assert full["settings"]["optimizer_dtype"] == "bf16"
    assert full["gpu"] == {"vram_mib": GPU.memory_bytes // 2**20}
    with pytest.raises(NoArgumentError, match="gptq-int4"):
        fitcheck_llm(MISTRAL, replace(RUN, quant="gptq-int4"), GPU)


def test_fitscout_is_told_every_setting_it_has_an_argument_for() -> None:
    run = replace(RUN, optimizer="paged_adamw_8bit")
    assert fitscout(MISTRAL, run, GPU)["settings"] == {
        "method": "qlora",
        "micro_batch": 3,
        "seq_len": 640,
        "grad_ckpt": False,
        "opt_8bit": True,
        "lora_rank": 8,
    }


def test_fm_training_estimator_is_told_every_setting_it_has_an_argument_for() -> None:
    asked = fm_training_estimator(MISTRAL, RUN, GPU)
    assert asked["training"]["per_device_train_batch_size"] == 3
    assert asked["training"]["gradient_checkpointing"] is False
    assert asked["fm"]["technique"] == "qlora"
    assert asked["fm"]["block_size"] == 640
    assert asked["fm"]["torch_dtype"] == "bfloat16"
    assert asked["lora"]["target_modules"] == ["q_proj", "v_proj"]
    assert asked["qlora"]["use_double_quant"] is True


def test_ftuneai_is_told_every_setting_it_has_an_argument_for() -> None:
    assert ftuneai(MISTRAL, RUN, GPU)["settings"] == {
        "method": "qlora",
        "quantization": "4bit",
        "batch_size": 3,
        "seq_length": 640,
        "gradient_checkpointing": False,
        "optimizer": "adamw",
        "lora_rank": 8,
        "lora_alpha": 32,
        "lora_target": "attention",
        "flash_attention": True,
    }


@pytest.mark.parametrize("tool", REQUESTS)
def test_no_tool_is_asked_about_dora_or_about_inference(tool: str) -> None:
    for run in (replace(RUN, method="dora", quant="none"), replace(RUN, phase="inference")):
        with pytest.raises(NoArgumentError):
            REQUESTS[tool](MISTRAL, run, GPU)


def test_accelerate_is_asked_only_about_training_the_whole_model() -> None:
    with pytest.raises(NoArgumentError, match="whole model"):
        REQUESTS["accelerate"](MISTRAL, RUN, GPU)
    full = replace(RUN, method="full", quant="none")
    assert REQUESTS["accelerate"](MISTRAL, full, GPU)["dtype"] == "float16"


def test_canifinetune_learns_that_a_checkpoint_is_quantised_already() -> None:
    asked = canifinetune(MISTRAL, replace(RUN, quant="gptq-int4"), GPU)
    assert asked["override"]["quantization_config"] == {"quant_method": "gptq"}
    assert asked["model_id"] != MISTRAL.name  # its own table has the checkpoint that is not


@pytest.mark.parametrize(
    ("model", "family"),
    [(MISTRAL, "mistral"), (known("ibm/PowerLM-3b"), "llama"), (SANTACODER, "gpt2")],
)
def test_canifinetune_gets_the_family_whose_layers_have_the_same_names(
    model: ModelSpec, family: str
) -> None:
    full = replace(RUN, method="full", quant="none")
    asked = canifinetune(model, replace(full, target_modules=("all-linear",)), GPU)
    assert asked["override"]["family"] == family


def test_sets_of_target_modules_are_recognised_and_others_refused() -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp = ("gate_proj", "up_proj", "down_proj")
    assert scope_of(MISTRAL, replace(RUN, target_modules=names)) == "attention"
    assert scope_of(MISTRAL, replace(RUN, target_modules=names + mlp)) == "all"
    assert scope_of(MISTRAL, replace(RUN, target_modules=("all-linear",))) == "all"
    assert scope_of(SANTACODER, replace(RUN, target_modules=("c_attn",))) == "qv"
    with pytest.raises(NoArgumentError, match="target_modules down_proj, q_proj"):
        scope_of(MISTRAL, replace(RUN, target_modules=("q_proj", "down_proj")))


def test_a_mixture_is_described_by_all_of_its_experts_and_those_a_token_sees() -> None:
    shape = shape_of(MIXTRAL)
    assert (shape.num_experts, shape.experts_per_token) == (8, 2)
    assert shape.intermediate_size == 14336
    assert ftuneai(MIXTRAL, RUN, GPU)["model"]["is_moe"] is True
    assert shape_of(SANTACODER).num_key_value_heads == 1


def test_every_tool_learns_of_fp32_weights_under_16_bit_autocast() -> None:
    run = replace(RUN, method="full", quant="none", base_dtype="float32")
    assert canifinetune(MISTRAL, run, GPU)["base_dtype"] == "fp32"
    assert fitscout(MISTRAL, run, GPU)["profile"]["dtype_bytes"] == 4
    assert fm_training_estimator(MISTRAL, run, GPU)["fm"]["torch_dtype"] == "float32"
    assert ftuneai(MISTRAL, run, GPU)["model"]["default_dtype"] == "float32"


def test_a_config_without_a_limit_allows_the_length_that_was_trained() -> None:
    bare = replace(MISTRAL, config={"model_type": "granite"})
    assert config_of(bare, RUN)["max_position_embeddings"] == 640
    assert config_of(MISTRAL, RUN)["max_position_embeddings"] == 32768
    assert "max_position_embeddings" not in config_of(SANTACODER, RUN)


def test_a_printed_size_is_read_back() -> None:
    assert size_in_bytes("61.1 GiB") == 61.1 * 2**30
    assert size_in_bytes("512.0 B") == 512


def test_every_tool_has_a_request_an_adapter_and_facts() -> None:
    assert set(REQUESTS) == set(ADAPTERS) == set(peers.TOOLS)


@pytest.mark.parametrize("tool", REQUESTS)
def test_every_kept_answer_is_to_a_question_of_today(tool: str) -> None:
    kept = {asked for name, asked in peer_answers.kept_answers() if name == tool}
    assert kept
    assert kept <= set(peer_answers.requests(tool)), "ask again: benchmarks/peers.py --python PATH"


def test_rows_that_were_never_asked_about_are_left_out() -> None:
    asked = peer_answers.rows()
    assert len(asked) > 700
    for tool in REQUESTS:
        assert len(peer_answers.theirs(tool)) == len(asked)


def test_only_runs_of_the_libraries_own_kernels_are_stock() -> None:
    stock = [one for one in peer_answers.rows() if peer_answers.is_stock(one)]
    assert {one.run.loss_head for one in stock} == {"hf", "raw"}
    assert not [one for one in stock if "foak" in one.stack]


def test_a_tool_is_compared_with_a_counter_that_it_may_mean() -> None:
    for tool, facts in peers.TOOLS.items():
        assert peers.best_counter(tool) in facts.counters


def test_the_readme_shows_the_first_table_of_the_document() -> None:
    shown = peers.README.read_text(encoding="utf-8").partition(peers.START)[2]
    table = shown.partition(peers.END)[0]
    assert table.count("\n") == 2 + len(peers.STATED) + len(peers.TOOLS)
    assert table in peers.DOCUMENT.read_text(encoding="utf-8")
