"""GGUF mixes beside published sizes; every type beside `llama-quantize` in tests/benchmarks."""

from __future__ import annotations

import pytest

from whichlora.serving import gguf
from whichlora.serving.gguf import BLOCKS, Tensor, row_bytes, unknown_matrices
from whichlora.serving.gguf_architectures import architecture_of
from whichlora.spec.architecture import ModelSpec, layers_in_order
from whichlora.store.hub import load_model
from whichlora.units import GiB

LLAMA = "meta-llama/Llama-3.1-8B"
LLAMA_70B = "meta-llama/Llama-3.1-70B"


def tensors(model: ModelSpec, file_type: str) -> list[Tensor]:
    return gguf.tensors(model, file_type, architecture_of(model))


def size(model: str, file_type: str) -> int:
    return sum(tensor.num_bytes for tensor in tensors(load_model(model), file_type))


@pytest.mark.parametrize(
    ("file_type", "published_gib"),
    [  # llama.cpp 0c1e570 tools/quantize/README.md, Llama-3.1-8B
        ("IQ1_S", 1.87),
        ("IQ1_M", 2.01),
        ("IQ2_XXS", 2.23),
        ("IQ2_XS", 2.42),
        ("IQ2_S", 2.56),
        ("IQ2_M", 2.74),
        ("IQ3_XXS", 3.04),
        ("IQ3_XS", 3.27),
        ("IQ3_S", 3.42),
        ("IQ3_M", 3.52),
        ("Q2_K_S", 2.78),
        ("Q2_K", 2.95),
        ("Q3_K_S", 3.41),
        ("Q3_K_M", 3.74),
        ("Q3_K_L", 4.02),
        ("IQ4_XS", 4.17),
        ("IQ4_NL", 4.38),
        ("Q4_K_S", 4.36),
        ("Q4_K_M", 4.58),
        ("Q5_K_S", 5.21),
        ("Q5_K_M", 5.33),
        ("Q6_K", 6.14),
        ("Q8_0", 7.95),
        ("F16", 14.96),
    ],
)
def test_llama_has_the_published_sizes(file_type: str, published_gib: float) -> None:
    assert size(LLAMA, file_type) / GiB == pytest.approx(published_gib, abs=0.0051)


@pytest.mark.parametrize(
    ("file_type", "published_gb"),
    [  # bartowski's files, as https://ozeki.chat/p_8590-understanding-ai-model-files.html has them
        ("Q8_0", 74.98),
        ("Q6_K", 57.89),
        ("Q5_K_M", 49.95),
        ("Q5_K_S", 48.66),
        ("Q4_K_M", 42.52),
        ("Q4_K_S", 40.35),
        ("Q3_K_M", 34.27),
    ],
)
def test_the_70b_has_wider_values_and_the_published_sizes(
    file_type: str, published_gb: float
) -> None:
    assert size(LLAMA_70B, file_type) / 1e9 == pytest.approx(published_gb, rel=5e-4)


def test_half_of_the_values_and_down_projections_of_q4_k_m_are_in_six_bits() -> None:
    found = tensors(load_model(LLAMA), "Q4_K_M")
    for name in ("attn_v", "ffn_down"):
        types = [tensor.type for tensor in found if tensor.name == name]
        assert types.count("Q6_K") == 16
        assert types[:4] == types[-4:] == ["Q6_K"] * 4
    assert {tensor.type for tensor in found if tensor.name == "attn_q"} == {"Q4_K"}
    assert found[0].type == "Q4_K"  # token embeddings, which are not the output matrix
    assert found[1].type == "Q6_K"


def test_embeddings_that_are_the_head_are_as_wide_as_a_head() -> None:
    table = tensors(load_model("Qwen/Qwen3-0.6B"), "Q4_K_M")[0]
    assert (table.name, table.type) == ("token_embd", "Q6_K")


def test_rows_that_blocks_do_not_divide_take_another_type() -> None:
    narrow = tensors(load_model("Qwen/Qwen2.5-0.5B"), "Q4_K_M")  # 896 is no multiple of 256
    types = {tensor.name: tensor.type for tensor in narrow if tensor.suffix == ".weight"}
    assert types["attn_q"] == "Q5_0"
    assert types["token_embd"] == "Q8_0"
    assert types["ffn_down"] in ("Q4_K", "Q6_K")  # 4864 is


def test_norms_biases_and_routers_stay_in_fp32() -> None:
    found = tensors(load_model("Qwen/Qwen3-30B-A3B"), "Q4_0")
    assert {t.type for t in found if t.name == "ffn_gate_inp" or "norm" in t.name} == {"F32"}
    halves = [t for t in found if t.name in ("ffn_gate_exps", "ffn_up_exps")]
    assert {(t.count, t.num_rows, t.row) for t in halves} == {(128, 128 * 768, 2048)}


def test_layers_stand_as_they_do_in_the_model() -> None:
    layers = layers_in_order(load_model("google/gemma-3-12b-pt"))
    whole = [n for n, layer in enumerate(layers) if layer.attentions[0].sliding_window is None]
    assert whole == list(range(5, 48, 6))


def test_a_row_has_whole_blocks() -> None:
    assert row_bytes(128, "Q8_0") == 136
    assert row_bytes(128, "F16") == 256
    assert all(block > 0 and size > 0 for block, size in BLOCKS.values())


def test_a_matrix_without_a_name_in_a_file_is_told() -> None:
    llama = architecture_of(load_model(LLAMA))
    assert unknown_matrices(load_model(LLAMA), llama) == []
    assert unknown_matrices(load_model("EleutherAI/gpt-neox-20b"), llama) != []
