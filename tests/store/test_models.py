from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora import families
from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.architecture import ModelSpec
from whichlora.store import models
from whichlora.store.hub import load_model
from whichlora.store.models import (
    add_model,
    find_copy,
    find_model,
    is_known_model,
    list_models,
    named_by_path,
    near_matches,
    resolve_name,
)
from whichlora.store.paths import data_folder

INDEX = json.loads((data_folder("models_db") / "index.json").read_text(encoding="utf-8"))


def entries() -> dict[str, dict[str, Any]]:
    files = data_folder("models_db").glob("*.json")
    return {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in files
        if file.stem != "index"
    }


def test_the_index_says_what_the_files_say() -> None:
    models = entries()
    assert set(models) == set(INDEX["models"])
    for stem, entry in models.items():
        assert stem == entry["hub_id"].replace("/", "--")
        listed = INDEX["models"][stem]
        assert listed["model_type"] == entry["config"]["model_type"]
        shared = set(listed) - {"model_type"}
        assert {key: listed[key] for key in shared} == {key: entry[key] for key in shared}
        for name in (entry["hub_id"], *entry["aliases"]):
            assert INDEX["names"][name.lower()] == stem
    names = {x.lower() for entry in models.values() for x in (entry["hub_id"], *entry["aliases"])}
    assert set(INDEX["names"]) == names


def test_no_file_says_what_is_loaded_of_its_towers() -> None:
    """A run decides that, and its notes say so: an engine may leave a tower on the disk."""
    assert not any("multimodal model (" in entry["note"] for entry in entries().values())


def test_no_file_claims_a_revision_that_nobody_recorded() -> None:
    assert not any("revision" in entry for entry in entries().values())


@pytest.mark.parametrize("stem", INDEX["models"])
def test_every_hub_id_and_alias_resolves_in_any_case(stem: str) -> None:
    record = INDEX["models"][stem]
    for name in (record["hub_id"], *record["aliases"]):
        for spelled in (name, name.upper()):
            spec = find_model(spelled)
            assert spec is not None
            assert (spec.name.lower(), spec.num_params) == (name.lower(), record["params"])


def test_a_short_name_resolves_where_only_one_architecture_has_it() -> None:
    spec = find_model("llama-3.1-8b")
    assert spec is not None
    assert spec.name == "meta-llama/Llama-3.1-8B"


def test_an_alias_says_whose_shapes_it_has() -> None:
    spec = find_model("meta-llama/Llama-3.1-8B-Instruct")
    assert spec is not None
    assert any(note.startswith("shapes of meta-llama/Llama-3.1-8B;") for note in spec.notes)


@pytest.mark.parametrize("name", ["", " ", "/", "nobody/nothing", "../index", "index"])
def test_a_name_of_nothing_finds_nothing(name: str) -> None:
    assert find_model(name) is None


def test_listing_has_every_model_once_with_its_size() -> None:
    listed = list_models()
    assert len(listed) == len(INDEX["models"])
    assert [x.hub_id.lower() for x in listed] == sorted(x.hub_id.lower() for x in listed)
    assert all(record.params > 0 for record in listed)


def test_a_misspelled_name_has_near_matches_best_first() -> None:
    near = near_matches("meta-lama/llama3.1-8b")
    assert near[0] == "meta-llama/Llama-3.1-8B"
    assert len(near) == 3
    assert near_matches("zzzzzzzz") == ()


# As typed in forums and chats: Ollama's library, hub ids without organisation, any separators.
AS_TYPED = {
    "llama 3.1 8b": "meta-llama/Llama-3.1-8B",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B",
    "llama3.1:8b": "meta-llama/Llama-3.1-8B",
    "llama3.1:70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-8b-bf16": "meta-llama/Llama-3.1-8B",
    "llama_3.1_8b": "meta-llama/Llama-3.1-8B",
    "llama_3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama3:8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "meta llama 3.1 8b instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/llama 3.1 8b": "meta-llama/Llama-3.1-8B",
    "llama 3.1 8b base": "meta-llama/Llama-3.1-8B",
    "unsloth llama 3.2 1b": "unsloth/Llama-3.2-1B",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B",
    "Llama 3.2 3B Instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "llama 3.3 70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama 2 7b": "meta-llama/Llama-2-7b-hf",
    "llama2:13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "codellama 7b": "codellama/CodeLlama-7b-hf",
    "code llama 34b": "codellama/CodeLlama-34b-hf",
    "tinyllama 1.1b chat": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "hermes 3 8b": "NousResearch/Hermes-3-Llama-3.1-8B",
    "vicuna 7b": "lmsys/vicuna-7b-v1.5",
    "gemma-3-27b": "google/gemma-3-27b-pt",
    "gemma3:4b": "google/gemma-3-4b-pt",
    "gemma 3 12b it": "google/gemma-3-12b-it",
    "Gemma 3 270M": "google/gemma-3-270m",
    "gemma2:9b": "google/gemma-2-9b",
    "gemma 2 2b it": "google/gemma-2-2b-it",
    "gemma:2b": "google/gemma-2b",
    "qwen2.5 7b instruct": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B",
    "qwen 2.5 14b": "Qwen/Qwen2.5-14B",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B",
    "qwen 2.5 coder 32b instruct": "Qwen/Qwen2.5-Coder-32B-Instruct",
    "qwen2 7b": "Qwen/Qwen2-7B",
    "qwen3 8b": "Qwen/Qwen3-8B",
    "qwen3:8b": "Qwen/Qwen3-8B",
    "qwen3-8b-base": "Qwen/Qwen3-8B-Base",
    "qwen3 8b instruct": "Qwen/Qwen3-8B",
    "qwen3:30b": "Qwen/Qwen3-30B-A3B",
    "qwen 3 0.6b": "Qwen/Qwen3-0.6B",
    "qwq": "Qwen/QwQ-32B",
    "qwen3.5:4b": "Qwen/Qwen3.5-4B",
    "qwen3.6 27b": "Qwen/Qwen3.6-27B",
    "llama 4 scout": "meta-llama/Llama-4-Scout-17B-16E",
    "gemma4:31b": "google/gemma-4-31B",
    "gemma 3n e4b": "google/gemma-3n-E4B",
    "glm-4.5-air": "zai-org/GLM-4.5-Air",
    "glm 4.6": "zai-org/GLM-4.6",
    "minimax-m2": "MiniMaxAI/MiniMax-M2",
    "nemotron 3 nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "granite 4.0 h tiny": "ibm-granite/granite-4.0-h-tiny",
    "seed oss": "ByteDance-Seed/Seed-OSS-36B-Base",
    "mistral 7b": "mistralai/Mistral-7B-v0.3",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "mistral:7b": "mistralai/Mistral-7B-v0.3",
    "mistral 7b instruct": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral 7b v0.2 instruct": "mistralai/Mistral-7B-Instruct-v0.2",
    "mistral_7b_v0.3": "mistralai/Mistral-7B-v0.3",
    "mistral-nemo": "mistralai/Mistral-Nemo-Base-2407",
    "mistral nemo 12b": "mistralai/Mistral-Nemo-Base-2407",
    "mistralnemo": "mistralai/Mistral-Nemo-Base-2407",
    "mistral small 24b": "mistralai/Mistral-Small-24B-Base-2501",
    "mistral-small:22b": "mistralai/Mistral-Small-Instruct-2409",
    "mixtral 8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral:8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "codestral": "mistralai/Codestral-22B-v0.1",
    "devstral": "mistralai/Devstral-Small-2505",
    "ministral 8b": "mistralai/Ministral-8B-Instruct-2410",
    "phi-4": "microsoft/phi-4",
    "phi4:14b": "microsoft/phi-4",
    "qwen3-next-80b": "Qwen/Qwen3-Next-80B-A3B-Instruct",  # and not Qwen3-Coder-Next, of 80B, too
    "phi 4 mini": "microsoft/Phi-4-mini-instruct",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi3:3.8b": "microsoft/Phi-3-mini-4k-instruct",
    "phi 3.5 mini": "microsoft/Phi-3.5-mini-instruct",
    "phi 1.5": "microsoft/phi-1_5",
    "deepseek-r1:7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "deepseek-r1:70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
    "deepseek coder 6.7b": "deepseek-ai/deepseek-coder-6.7b-base",
    "deepseek-coder-v2:16b": "deepseek-ai/DeepSeek-Coder-V2-Lite-Base",
    "yi:6b": "01-ai/Yi-6B",
    "yi 1.5 9b chat": "01-ai/Yi-1.5-9B-Chat",
    "falcon 7b": "tiiuae/falcon-7b",
    "falcon3 7b": "tiiuae/Falcon3-7B-Base",
    "gpt-2": "openai-community/gpt2",
    "gpt-oss:20b": "openai/gpt-oss-20b",
    "gptj": "EleutherAI/gpt-j-6b",
    "gpt neox 20b": "EleutherAI/gpt-neox-20b",
    "pythia 1.4b": "EleutherAI/pythia-1.4b",
    "opt 1.3b": "facebook/opt-1.3b",
    "bert base uncased": "google-bert/bert-base-uncased",
    "roberta large": "FacebookAI/roberta-large",
    "deberta v3 base": "microsoft/deberta-v3-base",
    "flan t5 xl": "google/flan-t5-xl",
    "t5 small": "google-t5/t5-small",
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M",
    "SmolLM2_135M": "HuggingFaceTB/SmolLM2-135M",
    "smol lm 2 360m": "HuggingFaceTB/SmolLM2-360M",
    "olmo2 7b": "allenai/OLMo-2-1124-7B",
    "starcoder2 3b": "bigcode/starcoder2-3b",
    "solar 10.7b": "upstage/SOLAR-10.7B-v1.0",
    "command-r:35b": "CohereForAI/c4ai-command-r-v01",
    "aya-expanse:8b": "CohereLabs/aya-expanse-8b",
    "stablelm 2 1.6b": "stabilityai/stablelm-2-1_6b",
    "all-MiniLM-L6-v2": "sentence-transformers/all-MiniLM-L6-v2",
    "all mpnet base v2": "sentence-transformers/all-mpnet-base-v2",
    "bge-m3": "BAAI/bge-m3",
    "bge small en v1.5": "BAAI/bge-small-en-v1.5",
    "embeddinggemma 300m": "google/embeddinggemma-300m",
    "multilingual-e5-small": "intfloat/multilingual-e5-small",
    "qwen3-reranker-0.6b": "Qwen/Qwen3-Reranker-0.6B",
}


@pytest.mark.parametrize(("typed", "hub_id"), AS_TYPED.items())
def test_a_name_as_people_type_it_is_taken_as_a_model_and_says_so(typed: str, hub_id: str) -> None:
    assert resolve_name(typed) == (hub_id, f"{typed}: taken as {hub_id}")


@pytest.mark.parametrize(
    ("typed", "models"),
    [
        ("llama 8b", "meta-llama/Llama-3.1-8B, meta-llama/Meta-Llama-3-8B"),
        ("llama3.2", "meta-llama/Llama-3.2-1B, meta-llama/Llama-3.2-3B"),
        ("qwen 7b", "Qwen/Qwen1.5-7B, Qwen/Qwen2.5-7B"),
        (
            "llama 4",  # no model of HuggingFaceM4
            "meta-llama/Llama-4-Maverick-17B-128E-Instruct, "
            "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        ),
        (
            "deepseek-r1:8b",
            "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B, deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        ),
        (
            "mistral-small",
            "mistralai/Mistral-Small-24B-Base-2501, mistralai/Mistral-Small-Instruct-2409",
        ),
    ],
)
def test_a_name_of_several_models_lists_them(typed: str, models: str) -> None:
    with pytest.raises(ConfigError, match=f"^model: .*ambiguous: it may be {models}; give one"):
        resolve_name(typed)


def test_a_name_of_many_models_lists_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_name("qwen")
    assert str(caught.value).count("Qwen/") == 8
    assert " more; give one of these" in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "base", "stored"),
    [
        ("Llama-3.1-8B-Instruct-AWQ", "meta-llama/Llama-3.1-8B-Instruct", "awq 4"),
        ("llama-2-7b-gptq", "meta-llama/Llama-2-7b-hf", "gptq 4"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "Qwen/Qwen2.5-72B-Instruct", "gptq 8"),
        ("TheBloke/Llama 2 7B-GPTQ-4bit-32g", "meta-llama/Llama-2-7b-hf", "gptq 4 32"),
        ("unsloth/llama-3.1-8b-unsloth-bnb-4bit", "meta-llama/Llama-3.1-8B", "bitsandbytes"),
        ("Llama-3.1-8B-bnb-8bit", "meta-llama/Llama-3.1-8B", "bitsandbytes"),
        ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B", "fp8"),
        ("/hub/mirror__Qwen3-32B-AWQ", "Qwen/Qwen3-32B", "awq 4"),
        ("RedHatAI/Qwen3-32B-quantized.w4a16", "Qwen/Qwen3-32B", "compressed-tensors"),
        ("Intel/Qwen3-32B-int4-AutoRound", "Qwen/Qwen3-32B", "auto-round 4"),
        ("RedHatAI/Qwen3-32B-NVFP4", "Qwen/Qwen3-32B", "compressed-tensors"),
        ("RedHatAI/Qwen3-32B-NVFP4A16", "Qwen/Qwen3-32B", "compressed-tensors"),
        ("nvidia/Qwen3-32B-FP4", "Qwen/Qwen3-32B", "modelopt"),
        ("Qwen3-32B-MXFP8", "Qwen/Qwen3-32B", "modelopt"),
        ("RedHatAI/Qwen3-32B-W4A16-G128", "Qwen/Qwen3-32B", "compressed-tensors"),
        ("llama3.1:8b-instruct-q4_K_M", "meta-llama/Llama-3.1-8B-Instruct", "gguf Q4_K_M"),
        (
            "Mistral-7B-Instruct-v0.2.Q5_K_M.gguf",
            "mistralai/Mistral-7B-Instruct-v0.2",
            "gguf Q5_K_M",
        ),
        ("Mistral-7B-Instruct-v0.2-GGUF", "mistralai/Mistral-7B-Instruct-v0.2", "gguf"),
        (
            "/data/DeepSeek-R1-UD-IQ1_S-00001-of-00003.gguf",
            "deepseek-ai/DeepSeek-R1",
            "gguf UD-IQ1_S",
        ),
        ("gpt-oss-120b-mxfp4-00001-of-00003.gguf", "openai/gpt-oss-120b", "gguf MXFP4_MOE"),
    ],
)
def test_a_quantised_copy_has_the_shapes_of_its_base(typed: str, base: str, stored: str) -> None:
    copy, model = find_copy(typed), find_model(base)
    assert copy is not None
    assert model is not None
    assert (copy.name, copy.num_params) == (typed, model.num_params)
    assert any(f"{typed}: taken as {base}, stored as its name says" in note for note in copy.notes)
    config = copy.config["quantization_config"]
    named = ("quant_method", "bits", "group_size", "file_type")
    assert " ".join(str(config[name]) for name in named if name in config) == stored


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("llama-2-7b-exl2", r"\(EXL2\), .* meta-llama/Llama-2-7b-hf with method qlora for 4 bits"),
        ("mlx-community/llama 3.1 8b-mlx-4bit", "meta-llama/Llama-3.1-8B with method qlora"),
        ("Qwen2.5-32B-Instruct-INT8-W8A16", r"\(W8A16\), .* with quant gptq-int8, whose weights"),
        ("llama 3.2 3b-quantized.w8a8", r"\(W8A8\), .* meta-llama/Llama-3.2-3B with quant fp8, wh"),
        ("my own model-GPTQ", "the model it was made from with quant gptq-int4"),
        ("my own model q4_K_M", "the model it was made from with --serving llama-cpp, or with"),
    ],
)
def test_a_copy_that_is_not_known_is_refused_with_its_base(typed: str, instead: str) -> None:
    assert find_copy(typed) is None
    with pytest.raises(ConfigError, match=f"is a quantised copy .*{instead}"):
        resolve_name(typed)


@pytest.mark.parametrize(
    "name", ["google/gemma-3-27b", "llama 3.1 9b", "lama 3.1 8b", "my-model", "./llama3.1"]
)
def test_a_name_that_means_no_known_model_stays_as_it_is(name: str) -> None:
    assert resolve_name(name) == (name, "")


@given(name=st.text())
def test_no_text_whatever_gives_another_error(name: str) -> None:
    with contextlib.suppress(ConfigError):
        resolve_name(name)


@pytest.mark.parametrize("names", ["gpt2,gpt2-medium", "Qwen/Qwen2.5-7B,Qwen/Qwen2.5-14B"])
def test_several_names_in_one_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match=f"^model: '{names}' are several names; give one"):
        resolve_name(names)


def test_a_folder_that_is_there_wins_over_a_likely_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3.1:8b").mkdir()
    assert resolve_name("llama3.1:8b") == ("llama3.1:8b", "")


@pytest.mark.parametrize("stem", INDEX["models"])
def test_an_exact_name_means_itself_without_a_word(stem: str) -> None:
    for name in (INDEX["models"][stem]["hub_id"], *INDEX["models"][stem]["aliases"]):
        resolved, note = resolve_name(name.lower())
        assert (resolved.lower(), note) == (name.lower(), "")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("lama 3.1 8b", "meta-llama/Llama-3.1-8B"),
        ("qwen2.5 7b instuct", "Qwen/Qwen2.5-7B-Instruct"),
        ("gema 3 4b", "google/gemma-3-4b-pt"),
        ("google/gemma-3-27b", "google/gemma-3-27b-pt"),
    ],
)
def test_a_typing_error_has_the_model_it_meant_first(typed: str, nearest: str) -> None:
    near = near_matches(typed)
    assert near[0] == nearest
    assert len(near) == 3


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("Qwen/Qwen2.5-7B", 131072),
        ("Qwen/Qwen2.5-7B-Instruct", 32768),
        ("qwen/qwen2.5-72b-instruct", 32768),
        ("Qwen/Qwen2-57B-A14B-Instruct", 32768),
        ("Qwen/Qwen2.5-Math-7B", 4096),
    ],
)
def test_an_alias_has_its_own_positions_where_they_are_known(name: str, positions: int) -> None:
    model = find_model(name)
    assert model is not None
    assert model.max_position_embeddings == positions
    assert not model.shapes_of
    assert all("context length" not in note for note in model.notes)


def test_an_alias_of_unknown_positions_says_whose_it_has() -> None:
    model = find_model("meta-llama/Llama-3.1-8B-Instruct")
    assert model is not None
    assert model.shapes_of == "meta-llama/Llama-3.1-8B"
    copy = find_copy("Qwen/Qwen2.5-7B-Instruct-AWQ")
    assert copy is not None
    assert copy.max_position_embeddings == 32768


def test_positions_are_of_aliases_and_have_a_source() -> None:
    for path in data_folder("models_db").glob("*--*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        positions = record.get("positions", {})
        assert set(positions) <= set(record["aliases"])
        assert bool(positions) == bool(record.get("positions_from"))
        rewritten = record.get("rewritten", {})
        assert set(rewritten) <= set(record["aliases"])
        assert bool(rewritten) == bool(record.get("rewritten_from"))


def test_an_alias_may_be_written_anew_in_the_code_of_another_type() -> None:
    original, upload = find_model("microsoft/phi-4"), find_model("unsloth/phi-4")
    assert original is not None
    assert upload is not None
    assert (original.model_type, upload.model_type) == ("phi3", "llama")
    assert original.num_params == upload.num_params
    copy = find_copy("unsloth/phi-4-bnb-4bit")
    assert copy is not None
    assert copy.model_type == "llama"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of two models that share a short name."""
    record = {
        "aliases": [],
        "model_type": "llama",
        "params": 1,
        "check": "exact",
        "license": "mit",
        "gated": None,
        "release_year": 2024,
    }
    index = {
        "schema_version": 1,
        "names": {"a/tiny": "a--tiny", "b/tiny": "b--tiny"},
        "models": {"a--tiny": {"hub_id": "a/tiny", **record}, "b--tiny": {"hub_id": "b/tiny"}},
    }
    (tmp_path / "index.json").write_text(json.dumps(index))
    monkeypatch.setattr(models, "data_folder", lambda _: tmp_path)
    return tmp_path


def test_an_ambiguous_short_name_is_refused_with_its_meanings(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'tiny' is ambiguous: a/tiny, b/tiny; give one"):
        find_model("tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"schema_version": 2}', "schema_version is 2, this release reads 1 to 1"),
        ('{"schema_version": 1}', "config: must be an object, got NoneType"),
        (
            '{"schema_version": 1, "config": {"model_type": "no"}}',
            "config: a/tiny: model_type 'no'",
        ),
        (
            '{"schema_version": 1, "config": {"model_type": "llama", "vocab_size": "x"}}',
            "config: a/tiny: vocab_size is 'x'",
        ),
    ],
)
def test_a_broken_file_is_named_with_its_key(folder: Path, text: str, message: str) -> None:
    (folder / "a--tiny.json").write_text(text)
    with pytest.raises(DataFileError, match=f"a--tiny.json: .*{message}"):
        find_model("a/tiny")


def test_a_missing_file_and_a_broken_record_are_named(folder: Path) -> None:
    with pytest.raises(DataFileError, match=r"a--tiny.json: can't be read"):
        find_model("a/tiny")
    with pytest.raises(DataFileError, match=r"index.json: models.b--tiny: "):
        list_models()


# --- models that the user added


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHICHLORA_MODELS", str(tmp_path / "own"))
    return tmp_path / "own"


def small_qwen() -> ModelSpec:
    packaged = find_model("Qwen/Qwen3-8B")
    assert packaged is not None
    return families.build({**packaged.config, "num_hidden_layers": 3}, name="My-Org/Small-Qwen")


def test_an_added_model_is_found_listed_and_suggested(own: Path) -> None:
    assert find_model("my-org/small-qwen") is None
    path = add_model(small_qwen(), check="module", source="config.json")
    assert path == own / "My-Org--Small-Qwen.json"
    found = find_model("my-org/small-qwen")
    assert found == small_qwen()
    assert find_model("small-qwen") == found
    assert [one.hub_id for one in list_models() if one.check == "module"] == ["My-Org/Small-Qwen"]
    assert near_matches("my-org/smal-qwen")[0] == "My-Org/Small-Qwen"


def test_a_record_of_an_added_model_carries_its_config(own: Path) -> None:
    add_model(small_qwen(), check="none", source="config.json")
    assert not is_known_model("My-Org/Small-Qwen")
    assert is_known_model("Qwen/Qwen3-8B")


def test_an_added_file_does_not_hide_a_packaged_model(own: Path) -> None:
    path = add_model(small_qwen(), check="none", source="config.json")
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "hub_id": "Qwen/Qwen3-8B"}))
    found = find_model("Qwen/Qwen3-8B")
    assert found is not None
    assert found.num_params > 8e9


def test_a_broken_file_of_the_user_is_named(own: Path) -> None:
    own.mkdir()
    (own / "a--b.json").write_text('{"schema_version": 1, "hub_id": "a/b", "config": {}}')
    with pytest.raises(DataFileError, match=r"a--b\.json: aliases: missing; 'whichlora models add"):
        find_model("a/b")


@pytest.mark.parametrize(
    ("path", "hub_id"),
    [
        ("/data/models/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("/data/models/Qwen2.5-7B-Instruct/", "Qwen/Qwen2.5-7B-Instruct"),
        ("C:\\models\\Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("/root/data3/Qwen.Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("~/.cache/modelscope/hub/Qwen/Qwen2___5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("/hub/models--Qwen--Qwen2.5-7B/snapshots/1a2b3c", "Qwen/Qwen2.5-7B"),
        ("/hub/Qwen__Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("/rl/models/Qwen2__5_32B_Instruct", "Qwen/Qwen2.5-32B-Instruct"),
        ("/rl/models/Qwen2_5_14B", "Qwen/Qwen2.5-14B"),
        ("/data/models/Qwen2.5-7B-Instruct-merged", "Qwen/Qwen2.5-7B-Instruct"),
        ("/data/models/Qwen2.5-VL-7B-sft", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("/data/models/llama-3-8b-vision-tuned", ""),  # a word of other models
        ("/data/models/Qwen2.5-7B-Instruct-AWQ", ""),
        ("/data/models/my-qwen2.5-7b-sft", ""),
        ("/data/models/qwen", ""),
        ("/", ""),
    ],
)
def test_a_path_may_end_in_the_name_of_a_model(path: str, hub_id: str) -> None:
    assert named_by_path(path) == hub_id


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("Qwen/Qwen3-Coder-Next-Base", "Qwen/Qwen3-Coder-Next"),
        ("Qwen/Qwen3-8B-Instruct", "Qwen/Qwen3-8B"),
        ("google/gemma-3-4b", "google/gemma-3-4b-pt"),
    ],
)
def test_a_hub_id_that_nobody_can_look_up_is_its_sibling(name: str, hub_id: str) -> None:
    model, sibling = load_model(name, offline=True), find_model(hub_id)
    assert sibling is not None
    assert (model.name, model.num_params) == (name, sibling.num_params)
    assert f"{name}: is not known by this name; taken as {hub_id}" in model.notes


@pytest.mark.parametrize("name", ["someone/Qwen3-8B", "mistralai/Mistral-7B-v0.5", "Qwen/Qwen9-8B"])
def test_a_hub_id_of_another_owner_or_release_is_no_sibling(name: str) -> None:
    with pytest.raises(ConfigError, match="is not in the database"):
        load_model(name, offline=True)


def test_models_that_others_upload_again_are_those_that_they_name() -> None:
    for name, base in (
        ("NousResearch/Llama-2-70b-chat-hf", "meta-llama/Llama-2-70b-chat-hf"),
        ("casperhansen/llama-3-70b-fp16", "meta-llama/Meta-Llama-3-70B"),
    ):
        copy = find_copy(name)
        assert copy is not None
        assert f"{name}: taken as {base}, uploaded again" in copy.notes
    assert find_copy("NousResearch/Nous-Hermes-Llama2-13b") is None
