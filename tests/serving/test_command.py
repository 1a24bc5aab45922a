"""The command that an answer hands out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devices import A100

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError
from whichlora.predict.predict import predict
from whichlora.spec.options import OptionValue
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
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
    assert command(async_scheduling=False).endswith(" --no-async-scheduling")


def test_vllm_serves_the_texts_of_a_model_that_sees_without_its_tower_where_asked() -> None:
    sees, reads = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-7B"
    texts_alone = replace(RUN, model=sees, serving_options=(("language_model_only", True),))
    assert " --language-model-only" in command(replace(RUN, model=sees), language_model_only=True)
    assert "--language-model-only" not in command(replace(RUN, model=sees))
    weights = [
        predict(load_model(run.model), run, A100, load_calibration(A100)).memory.breakdown[
            "weights"
        ]
        for run in (texts_alone, replace(RUN, model=reads), replace(RUN, model=sees))
    ]
    assert weights[0] == pytest.approx(weights[1], rel=0.01)  # positions differ
    assert weights[2] - weights[0] == 2 * 676_550_144


def test_a_limit_of_no_images_is_in_the_command_as_it_was_asked() -> None:
    limits = '{"image": 0, "video": 0}'
    run = replace(RUN, model="Qwen/Qwen2.5-VL-7B-Instruct")
    assert f"--limit-mm-per-prompt '{limits}'" in command(run, limit_mm_per_prompt=limits)


@pytest.mark.parametrize(
    ("version", "start"),
    [
        ("0.3.3", "python -m vllm.entrypoints.openai.api_server --model"),
        ("0.5.1", "python -m vllm.entrypoints.openai.api_server --model"),
        ("0.5.2", "vllm serve"),
    ],
)
def test_releases_before_its_command_have_a_module_to_run(version: str, start: str) -> None:
    model = "Qwen/Qwen1.5-7B"
    run = replace(RUN, model=model, libraries=(("vllm", version),))
    assert command(run).startswith(f"{start} {model} --max-model-len 8192 --dtype bfloat16")


def test_older_releases_have_other_flags() -> None:
    loads = replace(RUN, model="Qwen/Qwen2.5-0.5B", quant="nf4", libraries=(("vllm", "0.7.3"),))
    assert command(loads).endswith("--quantization bitsandbytes --load-format bitsandbytes")
    keeps = replace(RUN, model="Qwen/Qwen2.5-0.5B", libraries=(("vllm", "0.7.3"),))
    assert "prefix" not in command(keeps, enable_prefix_caching=False)  # its default
    experts = {"enable_expert_parallel": True, "num_redundant_experts": 2}
    run = replace(RUN, model="Qwen/Qwen3-30B-A3B", libraries=(("vllm", "0.10.1"),))
    ranks = {"tensor_parallel_size": 2}
    assert "--enable-eplb --num-redundant-experts 2" in command(run, **experts, **ranks)
    run = replace(RUN, model="Qwen/Qwen3-30B-A3B", serving="sglang")
    older = replace(run, libraries=(("sglang", "0.5.21"),))
    groups = {"tp_size": 2, "attn_dp_size": 2}
    assert "--dp-size 2 --enable-dp-attention" in command(older, **groups)
    assert "--attn-dp-size 2" in command(run, **groups)


@pytest.mark.parametrize(
    ("engine", "version", "option", "value", "since"),
    [
        ("vllm", "0.7.3", "enable_expert_parallel", True, "0.8"),
        ("vllm", "0.8.2", "data_parallel_size", 2, "0.8.3"),
        ("vllm", "0.9.1", "num_redundant_experts", 2, "0.9.2"),
        ("vllm", "0.8.1", "speculative_config", "{}", "0.8.2"),
        ("vllm", "0.5.0", "pipeline_parallel_size", 2, "0.5.1"),
        ("sglang", "0.4.5", "pp_size", 2, "0.4.6"),
        ("sglang", "0.4.3", "page_size", 16, "0.4.4"),
    ],
)
def test_a_flag_that_a_release_lacks_is_refused(
    engine: str, version: str, option: str, value: OptionValue, since: str
) -> None:
    model = "mistralai/Mixtral-8x7B-v0.1"
    run = replace(RUN, model=model, serving=engine, libraries=((engine, version),))
    with pytest.raises(ConfigError) as error:
        command(run, **{option: value})
    assert str(error.value) == (
        f"{option}: {engine} {version} has no such option, {since} or newer has; leave it out, or "
        f"give libraries {engine}={since}"
    )


@pytest.mark.parametrize(
    ("version", "value", "since"),
    [("0.10.2", "bfloat16", "0.11"), ("0.4.2", "fp8_e4m3", "0.4.3"), ("0.3.3", "fp8", "0.4.1")],
)
def test_a_value_that_a_release_lacks_is_refused(version: str, value: str, since: str) -> None:
    run = replace(RUN, model="mistralai/Mistral-7B-v0.1", libraries=(("vllm", version),))
    with pytest.raises(ConfigError, match=f"vllm {version} has no {value}, {since} or newer has"):
        command(run, kv_cache_dtype=value)
    later = replace(run, libraries=(("vllm", f"{since}.0"),))
    assert f"--kv-cache-dtype {value}" in command(later, kv_cache_dtype=value)


def on_16(engine: str, version: str = "", **options: OptionValue) -> tuple[str, str]:
    """The command on 16 H100, and what the notes say of their machines."""
    h100, model = find_gpu("h100-sxm-80gb"), "meta-llama/Llama-3.1-405B"
    run = replace(
        RUN,
        model=model,
        serving=engine,
        serving_options=tuple(sorted(options.items())),
        libraries=((engine, version),) if version else (),
    )
    answer = predict(load_model(model), run, h100, load_calibration(h100))
    assert answer.serving
    told = [note for note in answer.notes if "HEAD_NODE" in note]
    return answer.serving.command, "".join(told)


def test_a_release_of_vllm_that_spans_machines_is_told_which_one_it_is_on() -> None:
    head = "--nnodes 2 --node-rank 0 --master-addr HEAD_NODE"
    ranks, told = on_16("vllm", tensor_parallel_size=16)
    assert ranks.endswith(f"--tensor-parallel-size 16 {head}")
    assert told.endswith("the others run the same with --node-rank 1 and --headless")
    stages, _ = on_16("vllm", tensor_parallel_size=8, pipeline_parallel_size=2)
    assert stages.endswith(head)
    assert on_16("vllm", "0.11.1", tensor_parallel_size=16)[0].endswith(head)


def test_an_older_vllm_spans_machines_by_ray() -> None:
    ranks, told = on_16("vllm", "0.11.0", tensor_parallel_size=16)
    assert ranks.endswith("--tensor-parallel-size 16")
    assert "`ray start --address=HEAD_NODE:6379` on the others" in told


def test_sglang_spans_machines() -> None:
    ranks, told = on_16("sglang", tp_size=16)
    assert ranks.endswith("--tp-size 16 --nnodes 2 --node-rank 0 --dist-init-addr HEAD_NODE:5000")
    assert told.endswith("the others run the same with --node-rank 1")


def test_one_machine_has_no_other() -> None:
    alone = {"tensor_parallel_size": 8, "gpu_memory_utilization": 0.98}
    assert on_16("vllm", **alone) == on_16("vllm", "0.33.0", **alone)
    assert "HEAD_NODE" not in "".join(on_16("vllm", **alone))


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


def test_numbers_with_suffixes_are_whole_ones_in_the_command() -> None:
    asked = command(kv_cache_memory_bytes="10G", max_num_batched_tokens="8k")
    assert asked.endswith("--kv-cache-memory-bytes 10737418240 --max-num-batched-tokens 8000")
    with pytest.raises(ConfigError, match="'64k' is not a whole number"):
        command(max_num_seqs="64k")


def test_no_graphs_are_asked_for_by_another_option() -> None:
    with pytest.raises(ConfigError, match="leave it out, and give enforce_eager=true"):
        command(max_cudagraph_capture_size=0)


def test_what_does_not_start_has_no_command() -> None:
    assert command(gpu_memory_utilization=0.01) == ""
