from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.run import Quant, RunConfig
from whichlora.store.hub import load_model
from whichlora.store.online import why_offline
from whichlora.workflow import estimates

TINY = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_the_database_answers_first_and_without_the_hub() -> None:
    assert load_model("gpt2").num_params == 124439808


def test_a_folder_and_its_config_keep_the_name_they_were_given_by(folder: Path) -> None:
    for name in (str(folder), str(folder / "config.json")):
        assert load_model(name).name == name


def test_a_missing_path_is_not_looked_up_on_the_hub() -> None:
    with pytest.raises(ConfigError, match=r"\./nothing/here: no such file or folder"):
        load_model("./nothing/here")


def test_a_missing_path_that_is_called_like_a_model_is_answered_with_it() -> None:
    fault = r"no such file or folder; check the path, or .*: Qwen/Qwen2-7B-Instruct, "
    with pytest.raises(ConfigError, match=fault):
        load_model("/mnt/raid0/Qwen2-7B-Instruct")


def test_the_page_of_a_model_is_answered_with_its_hub_id() -> None:
    with pytest.raises(ConfigError, match=r"is a page; give the hub id, 'Qwen/Qwen2\.5-7B'"):
        load_model("https://huggingface.co/Qwen/Qwen2.5-7B")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json; give the folder"):
        load_model(str(tmp_path))


def test_an_adapter_is_answered_with_its_base_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(
        ConfigError, match="is an adapter, not a model; give its base model, 'org/b"
    ):
        load_model(str(tmp_path))


def test_a_config_that_is_no_object_is_a_broken_file(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    with pytest.raises(DataFileError, match=r"config\.json: must hold a JSON object"):
        load_model(str(folder))


@pytest.mark.parametrize("trust", [False, True])
def test_remote_code_is_never_run(folder: Path, trust: bool) -> None:
    config = {"model_type": "novel", "auto_map": {"AutoConfig": "evil.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ConfigError, match="needs code from its repository, which whichlora never"):
        load_model(str(folder), trust_remote_code=trust)
    assert "evil" not in sys.modules


def test_an_unknown_name_offline_says_what_comes_near(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []

    def download(*args: object, **options: object) -> str:
        calls.append(options)
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ConfigError, match=r"'qwen/qwen2\.5-7' .* switched off; .*Qwen/Qwen2\.5-7B"):
        load_model("qwen/qwen2.5-7", offline=True)
    assert [options["local_files_only"] for options in calls] == [True]


def test_an_unreachable_hub_is_asked_once_and_then_its_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls: list[str] = []

    class Unreachable:
        def head(self, url: str, **_: object) -> None:
            urls.append(url)
            raise TimeoutError

    def download(*_: object, local_files_only: bool) -> str:
        assert local_files_only
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", Unreachable)
    why_offline.cache_clear()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"the hub can't be reached \(TimeoutError\)"):
            load_model("org/new-model")
    why_offline.cache_clear()
    assert len(urls) == 1


def test_a_config_in_the_hub_s_cache_is_found_offline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_, **__: str(folder / "config.json")
    )
    assert load_model("org/new-model", offline=True).name == "org/new-model"


NESTED = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FLOATS = {"weights": {"type": "float", "num_bits": 8}}


def keep(folder: Path, stored: dict[str, object]) -> None:
    """Say in the config of `folder` how its checkpoint is stored."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))


@pytest.mark.parametrize(
    ("stored", "asked", "quant", "note"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, None, "gptq-int4", ""),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq-int8", "gptq-int8", ""),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, None, "awq-int4", ""),
        (BNB, None, "nf4", ""),
        (BNB | NESTED, "int8", "nf4-dq", ""),  # transformers takes the checkpoint's
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None, "int8", ""),
        ({"quant_method": "fp8"}, None, "none", "stored in fp8, counted is 16-bit"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": FLOATS}},
            "nf4",
            "nf4",
            "stored in fp8, counted is nf4; transformers refuses bitsandbytes beside it: convert "
            "it to 16 bit first",
        ),
        (
            {"quant_method": "hqq"},
            None,
            "none",
            "stored as hqq, which is not modelled: counted as 16-bit",
        ),
    ],
)
def test_a_quantised_checkpoint_is_counted_as_it_is_stored(
    folder: Path, stored: dict[str, object], asked: Quant | None, quant: Quant, note: str
) -> None:
    keep(folder, stored)
    run = RunConfig(model=str(folder), phase="inference", quant=asked)
    (estimate,) = estimates.estimate([run], ["rtx-4090-24gb"])
    size = stored.get("group_size", 128)
    assert estimate.run.quant == quant
    assert estimate.run.quant_group_size == (size if size != -1 else 128)
    assert [note for note in estimate.notes if "checkpoint" in note] == (
        [f"the checkpoint is {note}"] if note else []
    )


def test_the_adapters_of_a_quantised_checkpoint_are_trained_beside_its_codes(folder: Path) -> None:
    run = RunConfig(model=str(folder), method="lora", batch_size=2, seq_len=256)
    (stated,) = estimates.estimate([replace(run, quant="gptq-int4")], ["rtx-4090-24gb"])
    keep(folder, {"quant_method": "gptq", "bits": 4, "group_size": 128})
    stored, by_method = estimates.estimate([run, replace(run, method="qlora")], ["rtx-4090-24gb"])
    assert stored.memory == stated.memory == by_method.memory


@pytest.mark.parametrize(
    ("stored", "settings", "fault"),
    [
        (
            {"quant_method": "awq", "bits": 4},
            {"quant": "nf4"},
            "quant: .* is stored in awq-int4, and is loaded so, got nf4; leave quant out, or name",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            {"method": "full"},
            "'awq-int4' weights cannot be trained; .*, or a 16-bit copy of the model for full",
        ),
    ],
)
def test_what_a_quantised_checkpoint_cannot_do_is_refused(
    folder: Path, stored: dict[str, object], settings: dict[str, Any], fault: str
) -> None:
    keep(folder, stored)
    with pytest.raises(ConfigError, match=fault):
        estimates.estimate([RunConfig(model=str(folder), **settings)], ["rtx-4090-24gb"])


def served(model: str, engine: str, **options: str) -> RunConfig:
    stated = tuple(options.items())
    run = RunConfig(model=model, phase="inference", serving=engine, serving_options=stated)
    (estimate,) = estimates.estimate([run], ["rtx-4090-24gb"])
    return estimate.run


def test_a_copy_is_served_as_its_name_says() -> None:
    assert served("Qwen/Qwen2.5-7B-Instruct-AWQ", "vllm").quant == "awq-int4"
    assert served("RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic", "sglang").quant == "fp8"
    tag = served("llama3.1:8b-instruct-q4_K_M", "llama-cpp")
    assert dict(tag.serving_options)["file_type"] == "Q4_K_M"
    chosen = served("bartowski/Qwen2.5-7B-Instruct-GGUF", "llama-cpp", file_type="Q8_0")
    assert dict(chosen.serving_options)["file_type"] == "Q8_0"


@pytest.mark.parametrize(
    ("name", "settings", "fault"),
    [
        ("bartowski/Qwen2.5-7B-GGUF", {"phase": "inference"}, "is a GGUF file, which llama.cpp"),
        ("qwen2.5:7b-q8_0", {}, "is a GGUF file, which llama.cpp serves and nothing trains"),
    ],
)
def test_a_file_that_nothing_trains_is_refused(
    name: str, settings: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        estimates.estimate([RunConfig(model=name, **settings)], ["rtx-4090-24gb"])


def test_the_hub_s_config_of_a_copy_counts_before_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(folder, {"quant_method": "gptq", "bits": 8, "group_size": 32})
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_, **__: str(folder / "config.json")
    )
    copy = load_model("TheBloke/Llama-2-7B-GPTQ", offline=True)
    assert copy.config["quantization_config"]["group_size"] == 32
