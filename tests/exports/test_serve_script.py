"""`serve.sh`: which weights the engine is started on."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from devices import A100

from whichlora.exports.serve_script import serve_script
from whichlora.predict.resolve import resolve
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


def test_quantised_weights_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text(script(replace(RUN, quant="awq-int4")))
    (tmp_path / "merged").mkdir()
    done = subprocess.run(["sh", str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "merged/ is to be stored as awq-int4 in quantised/ first\n"


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
