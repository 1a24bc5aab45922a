"""The command that an answer hands out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devices import A100

from whichlora.calibration.load import load_calibration
from whichlora.predict.predict import predict
from whichlora.spec.options import OptionValue
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

QWEN = "Qwen/Qwen3-0.6B"
RUN = RunConfig(model=QWEN, phase="inference", serving="vllm", context=8192)


def command(run: RunConfig = RUN, **options: OptionValue) -> str:
    run = replace(run, serving_options=tuple(sorted(options.items())))
    served = predict(load_model(run.model), run, A100, load_calibration(A100)).serving
    assert served
    return served.command


def test_vllm_is_started_with_what_the_run_states() -> None:
    assert command() == f"vllm serve {QWEN} --max-model-len 8192 --dtype bfloat16"
    asked = command(replace(RUN, precision="fp16"), gpu_memory_utilization=0.9, enforce_eager=True)
    assert asked.endswith("--dtype float16 --enforce-eager --gpu-memory-utilization 0.9")
    assert "eager" not in command(enforce_eager=False)


def test_vllm_has_slots_for_an_adapter_that_is_not_merged() -> None:
    run = replace(RUN, serve="as-trained", method="lora", r=24)
    slots = " --enable-lora --max-lora-rank 32 --lora-modules adapter=ADAPTER"
    assert command(run).endswith(slots)
    assert command(run, enable_lora=True, max_lora_rank=64).endswith(
        "--enable-lora --max-lora-rank 64 --lora-modules adapter=ADAPTER"
    )


def test_vllm_quantises_16_bit_files_as_it_loads_them() -> None:
    older = replace(RUN, quant="nf4", libraries=(("vllm", "0.27.1"),))
    assert command(older).endswith("--dtype bfloat16 --quantization bitsandbytes")
    assert command(replace(older, quant="int8")) == ""  # its files are made before


def test_prefix_caching_is_turned_off_where_the_run_says_so() -> None:
    assert command(enable_prefix_caching=False).endswith(" --no-enable-prefix-caching")


def test_an_older_vllm_leaves_a_tower_out_by_a_limit_on_images() -> None:
    run = replace(RUN, model="Qwen/Qwen2.5-VL-7B-Instruct", libraries=(("vllm", "0.11.0"),))
    assert command(run).endswith(""" --limit-mm-per-prompt '{"image": 0, "video": 0}'""")


def test_vllm_serves_the_texts_of_a_model_that_sees_without_its_tower() -> None:
    sees, reads = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-7B"
    assert command(replace(RUN, model=sees)).endswith(" --language-model-only")
    assert "--language-model-only" not in command(replace(RUN, model=sees, serving="sglang"))
    texts = [
        predict(load_model(name), replace(RUN, model=name), A100, load_calibration(A100))
        for name in (sees, reads)
    ]
    weights = [text.memory.breakdown["weights"] for text in texts]
    assert weights[0] == pytest.approx(weights[1], rel=1e-4)  # positions differ


def test_sglang_has_other_flags() -> None:
    assert command(replace(RUN, serving="sglang"), disable_cuda_graph=True) == (
        f"python -m sglang.launch_server --model-path {QWEN} --context-length 8192 "
        "--dtype bfloat16 --disable-prefill-cuda-graph --disable-decode-cuda-graph"
    )


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("0.4.6", "--disable-cuda-graph"),
        ("0.5.10", "--disable-cuda-graph"),
        ("0.5.16", "--disable-prefill-cuda-graph --disable-decode-cuda-graph"),
    ],
)
def test_an_older_sglang_has_one_flag_for_graphs(version: str, flags: str) -> None:
    run = replace(RUN, serving="sglang", libraries=(("sglang", version),))
    assert command(run, disable_cuda_graph=True).endswith(f" --dtype bfloat16 {flags}")


def test_what_does_not_start_has_no_command() -> None:
    assert command(gpu_memory_utilization=0.01) == ""
