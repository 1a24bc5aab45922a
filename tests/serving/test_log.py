"""Numbers and settings in the lines that engines print."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.serving import get_engine
from whichlora.serving.log import LogReading, read_log
from whichlora.units import GiB


def read(engine: str, *lines: str) -> LogReading:
    log = get_engine(engine).log
    assert log is not None
    return read_log(log, lines)


@pytest.mark.parametrize(
    ("engine", "line", "values"),
    [
        # vLLM 0.6.3 and older
        ("vllm", "# GPU blocks: 7351, # CPU blocks: 512", {"num_blocks": 7351}),
        (
            "vllm",
            "INFO 12-14 model_runner.py:1099] Loading model weights took 14.9595 GB",
            {"weights_bytes": 14.9595 * GiB},
        ),
        # 0.6.5 to 0.8 of V0; PR 10511 published these numbers of an H100
        (
            "vllm",
            "INFO worker.py:267] model weights take 14.96GiB; non_torch_memory takes 0.12GiB; "
            "PyTorch activation peak memory takes 1.26GiB; the rest of the memory reserved for KV "
            "Cache is 53.29GiB.",
            {
                "weights_bytes": 14.96 * GiB,
                "non_torch_bytes": 0.12 * GiB,
                "activation_bytes": 1.26 * GiB,
                "kv_pool_bytes": 53.29 * GiB,
            },
        ),
        (
            "vllm",
            "the current vLLM instance can use total_gpu_memory (79.22GiB) x "
            "gpu_memory_utilization (0.90) = 71.30GiB",
            {"total_bytes": 79.22 * GiB},
        ),
        (
            "vllm",
            "INFO executor_base.py:111] # cuda blocks: 29547, # CPU blocks: 3276",
            {"num_blocks": 29547},
        ),
        # V1
        (
            "vllm",
            "INFO [gpu_model_runner.py:1975] Model loading took 7.6785 GiB and 2.19 seconds",
            {"weights_bytes": 7.6785 * GiB},
        ),
        (
            "vllm",
            "(Worker_TP0 pid=154) INFO [gpu_worker.py:276] Available KV cache memory: 18.38 GiB",
            {"kv_pool_bytes": 18.38 * GiB},
        ),
        (
            "vllm",
            "INFO [kv_cache_utils.py:634] GPU KV cache size: 366,528 tokens",
            {"kv_pool_tokens": 366_528},
        ),
        (
            "vllm",
            "GPU KV cache size: 366,528 tokens, Maximum concurrency for 40,960 tokens per "
            "request: 8.95x",  # 0.33, in one line
            {"kv_pool_tokens": 366_528, "context_tokens": 40_960, "max_concurrency": 8.95},
        ),
        (
            "vllm",
            "Graph capturing finished in 21 secs, took 0.67 GiB",
            {"graphs_bytes": 0.67 * GiB},
        ),
        (
            "vllm",
            "Engine 000: Avg prompt throughput: 120.3 tokens/s, Avg generation throughput: 512.5 "
            "tokens/s, Running: 9 reqs, Waiting: 0 reqs",
            {"output_tokens_per_s": 512.5, "num_running": 9},
        ),
        (
            "sglang",
            "Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.72 GB, mem "
            "usage=15.09 GB.",
            {"weights_bytes": 15.09 * GiB},
        ),
        (
            "sglang",
            "KV Cache is allocated. #tokens: 444500, K size: 27.13 GB, V size: 27.13 GB",
            {
                "kv_pool_tokens": 444_500,
                "keys_bytes": 27.13 * GiB,
                "values_bytes": 27.13 * GiB,
            },
        ),
        (
            "sglang",
            "max_total_num_tokens=444500, chunked_prefill_size=8192, max_prefill_tokens=16384, "
            "max_running_requests=2048, context_len=131072",
            {"kv_pool_tokens": 444_500, "context_tokens": 131_072},
        ),
        (
            "sglang",
            "Capture cuda graph end. Time elapsed: 5.71 s. mem usage=1.02 GB. avail mem=8.1 GB.",
            {"graphs_bytes": 1.02 * GiB},
        ),
    ],
)
def test_the_numbers_of_each_release_are_read(
    engine: str, line: str, values: dict[str, float]
) -> None:
    reading = read(engine, line)
    assert reading.values == pytest.approx(values)
    assert reading.num_read == reading.num_lines == 1


def test_the_rank_with_the_least_decides_the_pool_and_the_fullest_the_weights() -> None:
    reading = read(
        "vllm",
        "Available KV cache memory: 36.63 GiB",
        "Available KV cache memory: 36.07 GiB",
        "Model loading took 32.95 GiB and 9 seconds",
        "Model loading took 32.90 GiB and 9 seconds",
    )
    assert reading.values["kv_pool_bytes"] == 36.07 * GiB
    assert reading.values["weights_bytes"] == 32.95 * GiB


def test_settings_and_release_are_read_from_each_way_to_list_them() -> None:
    reading = read(
        "vllm",
        "INFO 11-03 api_server.py:528] vLLM API server version 0.6.3.post1",
        "INFO api_server.py:529] args: Namespace(model='org/a b', max_model_len=8192, "
        "gpu_memory_utilization=0.8, quantization=None)",
        "INFO core.py:58] Initializing a V1 LLM engine (v0.6.3) with config: model='org/a b', "
        "dtype=torch.bfloat16, max_seq_len=8192, enforce_eager=False",
        "INFO utils.py:233] non-default args: {'max_num_seqs': 16, 'kv_cache_dtype': 'fp8'}",
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="12345"} 1.0',
    )
    assert reading.version == "0.6.3"
    settings = reading.settings
    assert settings["model"] == "org/a b"
    assert settings["gpu_memory_utilization"] == "0.8"
    assert settings["dtype"] == "torch.bfloat16"
    assert (settings["max_num_seqs"], settings["kv_cache_dtype"]) == ("16", "fp8")
    assert settings["block_size"] == "16"
    assert reading.values == {"num_blocks": 12345}


def test_metrics_give_quantiles_as_prometheus_does() -> None:
    name = "vllm:time_to_first_token_seconds"
    labels = 'engine="0",model_name="m"'
    reading = read(
        "vllm",
        f"# HELP {name} Histogram of time to first token in seconds.",
        f'{name}_bucket{{{labels},le="0.1"}} 10.0',
        f'{name}_bucket{{{labels},le="0.2"}} 90.0',
        f'{name}_bucket{{{labels},le="+Inf"}} 100.0',
        f"{name}_sum{{{labels}}} 16.0",
        f"{name}_count{{{labels}}} 100.0",
        'vllm:request_prompt_tokens_sum{model_name="m"} 51200.0',
        'vllm:request_prompt_tokens_count{model_name="m"} 100.0',
        'vllm:request_generation_tokens_sum{model_name="m"} NaN',
    )
    # half of 100 is the 40th of 80 between 0.1 and 0.2; beyond the last edge nobody knows more
    assert reading.values == pytest.approx(
        {"ttft_s": 0.15, "ttft_p95_s": 0.2, "mean_prompt_tokens": 512.0}
    )


def test_the_lines_on_memory_that_are_not_understood_are_named() -> None:
    reading = read(
        "vllm",
        "INFO started",
        "INFO the memory of the host is 64 GiB",
        "Available KV cache memory: -1.05 GiB",
        "INFO 12 blocks were swapped",
    )
    assert reading.not_understood == (2, 4)
    assert reading.values == {"kv_pool_bytes": -1.05 * GiB}


def test_a_refusal_to_start_is_kept() -> None:
    line = (
        "ValueError: To serve at least one request with the models's max seq len (32000), (7.81 "
        "GiB KV cache is needed, which is larger than the available KV cache memory (4.45 GiB)."
    )
    reading = read("vllm", line)
    assert reading.refusal == line
    assert reading.values["kv_pool_bytes"] == 4.45 * GiB


@given(text=st.text(max_size=300), engine=st.sampled_from(["vllm", "sglang"]))
def test_any_text_is_read_without_an_error(text: str, engine: str) -> None:
    reading = read(engine, text, f"Available KV cache memory: {text} GiB", f"args: {text}")
    assert all(math.isfinite(value) for value in reading.values.values())


def test_what_no_card_has_is_not_taken() -> None:
    huge = "9" * 400
    for number in (huge, "1e5", "nan", "0x10", "--1"):
        assert read("vllm", f"Available KV cache memory: {number} GiB").values == {}
    assert read("vllm", "a" * 10**6 + "Available KV cache memory: 1.0 GiB").values == {}
