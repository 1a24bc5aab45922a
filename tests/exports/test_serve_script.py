"""`serve.sh`: which weights the engine is started on."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from devices import A100

from whichlora.exports.serve_script import serve_script
from whichlora.exports.train_script import class_of
from whichlora.predict.resolve import resolve
from whichlora.spec.data_format import DataFormat
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

QWEN = "Qwen/Qwen3-0.6B"
RUN = RunConfig(model=QWEN, phase="inference", serving="vllm", context=4096, serve="merged")


def script(run: RunConfig = RUN, method: str = "lora") -> str:
    job = resolve(load_model(QWEN), run, A100)
    return serve_script(job, method, form="merged 16-bit", concurrency=8)


@pytest.mark.parametrize(
    ("changed", "method", "model", "merges"),
    [
        ({}, "lora", "./merged", True),
        ({}, "full", "./output", False),
        ({"quant": "awq-int4"}, "lora", "./quantised", True),
        ({"quant": "nf4", "libraries": (("vllm", "0.27.1"),)}, "lora", "./merged", True),
        ({"serve": "as-trained"}, "lora", QWEN, False),
    ],
)
def test_each_form_has_its_weights(
    changed: dict[str, object], method: str, model: str, merges: bool
) -> None:
    text = script(replace(RUN, **changed), method)
    assert f"exec vllm serve {model} --max-model-len 4096 " in text
    assert ("merge_and_unload" in text) == merges


@pytest.mark.parametrize(
    ("name", "media", "expected", "reads_images"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "", "AutoModelForImageTextToText", True),
        ("llava-hf/llava-v1.6-mistral-7b-hf", "", "AutoModelForImageTextToText", True),
        ("google/gemma-3-4b-it", "", "AutoModelForCausalLM", True),
        ("google/gemma-3-4b-it", "images", "AutoModelForImageTextToText", True),
        (QWEN, "", "AutoModelForCausalLM", False),
    ],
)
def test_the_merge_takes_the_class_that_trains_and_what_reads_images(
    name: str, media: str, expected: str, reads_images: bool
) -> None:
    model = load_model(name)
    rows = DataFormat(kind="messages", conversational=True, images=media == "images")
    model_class = class_of(None, model.config, rows)
    job = resolve(model, replace(RUN, model=name), A100)
    settings = {"form": "merged 16-bit", "concurrency": 8, "model_class": model_class}
    merged = serve_script(job, "lora", **settings)
    assert f"base = {expected}.from_pretrained('{name}'" in merged
    processor = f"AutoProcessor.from_pretrained('{name}').save_pretrained("
    assert (f'{processor}"merged.partial")' in merged) == reads_images
    whole = serve_script(job, "full", **settings)
    assert (f'{processor}"output")' in whole) == reads_images


@pytest.mark.parametrize(
    ("there", "calls"),
    [("", "python vllm"), ("processor_config.json", "vllm"), ("preprocessor_config.json", "vllm")],
)
def test_a_whole_model_gets_a_processor_where_it_has_none(
    tmp_path: Path, there: str, calls: str
) -> None:
    model = load_model("google/gemma-3-4b-it")
    job = resolve(model, replace(RUN, model=model.name), A100)
    path = tmp_path / "serve.sh"
    path.write_text(serve_script(job, "full", form="merged 16-bit", concurrency=8))
    (tmp_path / "output").mkdir()
    if there:
        (tmp_path / "output" / there).write_text("{}")
    for name in ("python", "vllm"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", str(path)], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout.split()) == (0, calls.split())


def test_quantised_weights_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text(script(replace(RUN, quant="awq-int4")))
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "tokenizer_config.json").write_text("{}")
    done = subprocess.run(["sh", str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "merged/ is to be stored as awq-int4 in quantised/ first\n"
    path.write_text(script(replace(RUN, quant="awq-int4"), "full"))
    done = subprocess.run(["sh", str(path)], capture_output=True, text=True)
    assert done.stderr == "output/ is to be stored as awq-int4 in quantised/ first\n"
    (tmp_path / "output").mkdir()
    (tmp_path / "quantised").mkdir()
    (tmp_path / "output" / "config.json").write_text("{}")
    os.utime(tmp_path / "quantised", (1, 1))  # of an earlier training
    done = subprocess.run(["sh", str(path)], capture_output=True, text=True)
    assert done.returncode == 1


def test_an_adapter_is_merged_again_after_a_new_training_and_after_a_stopped_merge(
    tmp_path: Path,
) -> None:
    programs = {
        "python": """mkdir merged.partial
echo "$FILES" > merged.partial/config.json
[ $ENDS = 0 ] && touch merged.partial/tokenizer_config.json""",
        "vllm": "cat merged/config.json",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "serve.sh").write_text(script())
    (tmp_path / "output").mkdir()
    adapter = tmp_path / "output" / "adapter_model.safetensors"
    adapter.write_text("first")
    (tmp_path / "merged").mkdir()  # what an older serve.sh left when it was stopped
    (tmp_path / "merged" / "config.json").write_text("partial")

    def served(content: str, *, ends: int = 0) -> str:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FILES": content, "ENDS": str(ends)}
        done = subprocess.run(
            ["sh", str(tmp_path / "serve.sh")], capture_output=True, text=True, env=env
        )
        return done.stdout.strip()

    assert served("stopped", ends=1) == ""
    assert served("first") == "first"
    assert served("again") == "first"
    adapter.write_text("second")
    os.utime(adapter, (2**32, 2**32))
    assert served("stopped", ends=1) == ""
    assert served("second") == "second"


def test_a_gguf_file_is_made_of_the_merged_weights() -> None:
    run = replace(RUN, serving="llama-cpp", serving_options=(("file_type", "Q4_K_M"),))
    text = script(run)
    convert = 'convert_hf_to_gguf.py" ./merged --outtype bf16 --outfile ./merged/model-BF16.gguf'
    assert convert in text
    assert "llama-quantize ./merged/model-BF16.gguf ./merged/model-Q4_K_M.gguf Q4_K_M" in text
    assert text.index("merge_and_unload") < text.index(convert) < text.index("exec llama-server")
    plain = script(replace(run, serving_options=()))
    assert "llama-quantize" not in plain
    assert "exec llama-server -m ./merged/model-BF16.gguf " in plain


def test_what_the_engine_has_no_command_for_has_no_script() -> None:
    assert script(replace(RUN, quant="int8", libraries=(("vllm", "0.27.1"),))) == ""
