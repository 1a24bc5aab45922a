"""`serve.sh` merges with PEFT and starts the engine, on a tiny model of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from devices import A100

from whichlora.exports.serve_script import serve_script
from whichlora.exports.train_script import class_of
from whichlora.predict.resolve import resolve
from whichlora.spec.data_format import DataFormat
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def tiny_model(folder: Path) -> Any:
    """A Llama with an adapter whose B is not zero, beside its base and its tokenizer."""
    from oracle_tokenizer import byte_tokenizer

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    base.save_pretrained(folder / "base")
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(base, lora)
    adapted.save_pretrained(folder / "output")
    byte_tokenizer().save_pretrained(folder / "output")
    return adapted


def test_the_engine_is_started_on_the_merged_weights(tmp_path: Path) -> None:
    adapted = tiny_model(tmp_path)
    model = load_model(str(tmp_path / "base"))
    run = RunConfig(
        model=model.name, phase="inference", serving="vllm", context=256, serve="merged"
    )
    job = resolve(model, run, A100)
    path = tmp_path / "serve.sh"
    path.write_text(serve_script(job, "lora", form="merged 16-bit", concurrency=8))
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python").symlink_to(sys.executable)
    (bin_folder / "vllm").write_text('#!/bin/sh\necho started "$@"\n')
    (bin_folder / "vllm").chmod(0o755)
    environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["sh", str(path), "--port", "8001"],
        capture_output=True, text=True, env=environment, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command = "vllm serve ./merged --max-model-len 256 --dtype bfloat16 --port 8001"
    assert done.stdout.splitlines()[-1] == command.replace("vllm", "started", 1)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = adapted.merge_and_unload().state_dict()
    found = merged.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "merged" / "tokenizer_config.json").is_file()
    # the second start does not merge again
    (tmp_path / "output").rename(tmp_path / "moved")
    again = subprocess.run(["sh", str(path)], capture_output=True, text=True, env=environment)
    assert again.returncode == 0


def test_a_model_that_sees_is_merged_with_its_tower_and_its_processor(tmp_path: Path) -> None:
    from oracle_tokenizer import byte_tokenizer

    text = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=2)
    base = transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(), tokenizer=byte_tokenizer(), patch_size=14
    )
    processor.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, lora)
    adapted.save_pretrained(tmp_path / "output")
    byte_tokenizer().save_pretrained(tmp_path / "output")  # rows of texts alone
    model = load_model(str(tmp_path / "base"))
    run = RunConfig(
        model=model.name, phase="inference", serving="vllm", context=256, serve="merged"
    )
    rows = DataFormat(kind="text")
    text_of_script = serve_script(
        resolve(model, run, A100), "lora", form="merged 16-bit", concurrency=8,
        model_class=class_of(None, model.config, rows),
    )  # fmt: skip
    (tmp_path / "serve.sh").write_text(text_of_script.replace("exec vllm", "exec true"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        ["sh", str(tmp_path / "serve.sh")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    merged = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    expected = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(merged.state_dict()[name], value) for name, value in expected.items())
    reread = transformers.AutoProcessor.from_pretrained(tmp_path / "merged")
    assert reread.image_processor is not None
