"""What vLLM prints: its releases from 0.2 to 0.33, and its Prometheus metrics."""

from __future__ import annotations

from whichlora.memory import allocator
from whichlora.memory.weights import WEIGHTS
from whichlora.serving.log import NUMBER, EngineLog, LogLine, LogText, label
from whichlora.serving.profile_pass import (
    ATTENTION_PASS,
    EXPERTS_PASS,
    LAST_STATES,
    MLP_PASS,
    SAMPLER_PASS,
)
from whichlora.serving.rank import LORA_SLOTS, ROTARY_TABLES
from whichlora.serving.vllm_compiled import TRIED_MLP, TRIED_TABLE
from whichlora.serving.vllm_entries import (
    COMMUNICATOR,
    GRAPHS,
    HOST,
    KERNELS,
    SWIZZLED_EXPONENTS,
    WORKSPACE,
)
from whichlora.serving.vllm_towers import (
    TOWER_INPUTS,
    TOWER_PASS,
    TOWER_PIXELS,
    TOWER_VECTORS,
)
from whichlora.units import GiB

_LOADED = (*WEIGHTS.values(), ROTARY_TABLES, LORA_SLOTS, SWIZZLED_EXPONENTS)
_TOWER = (TOWER_PIXELS, TOWER_PASS, TOWER_VECTORS, TOWER_INPUTS)
_LAYERS = (MLP_PASS, ATTENTION_PASS, EXPERTS_PASS, SAMPLER_PASS, LAST_STATES)
_ACTIVATIONS = (*_LAYERS, *_TOWER, TRIED_TABLE, TRIED_MLP)

# Blocks to 0.6.2 and in V1 0.7; four terms from 0.6.5; tokens from V1 0.7.3; free bytes from 0.9.
# Source: worker/worker.py of 0.6.6 and 0.8.5; v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py
# and v1/metrics/loggers.py of 0.8.5, 0.11.0, 0.15.0, 0.20.0, 0.27.1 and 0.33.0.
LOG = EngineLog(
    lines=(
        LogLine(
            states="weights_bytes",
            pattern=rf"(?:Model loading|Loading model weights) took {NUMBER} Gi?B",
            unit=GiB,
            facts=_LOADED,
        ),
        LogLine(
            states="weights_bytes",
            pattern=rf"model weights take {NUMBER}\s?GiB",
            unit=GiB,
            facts=_LOADED,
        ),
        LogLine(
            states="activation_bytes",
            pattern=rf"PyTorch activation peak memory takes {NUMBER}\s?GiB",
            unit=GiB,
            facts=(*_ACTIVATIONS, WORKSPACE, allocator.WORKSPACE),
        ),
        LogLine(
            states="non_torch_bytes",
            pattern=rf"non_torch_memory takes {NUMBER}\s?GiB",
            unit=GiB,
            is_difference=True,
            facts=(KERNELS, COMMUNICATOR, HOST),
        ),
        LogLine(
            states="total_bytes",
            pattern=rf"total_gpu_memory \({NUMBER}\s?GiB\)",
            unit=GiB,
            least=True,
        ),
        LogLine(
            states="total_bytes",
            pattern=rf"Free memory on device[^(]*\([\d.]+/{NUMBER} GiB\)",
            unit=GiB,
            least=True,
        ),
        LogLine(
            states="kv_pool_bytes",
            pattern=rf"(?:Available KV cache memory: |reserved for KV Cache is ){NUMBER}\s?GiB",
            unit=GiB,
            least=True,
        ),
        LogLine(
            states="kv_pool_bytes",
            pattern=rf"the available KV cache\s+memory \({NUMBER} GiB\)",
            unit=GiB,
            least=True,
        ),
        LogLine(
            states="num_blocks",
            pattern=rf"# (?:GPU|cuda) blocks: {NUMBER}",
            least=True,
        ),
        LogLine(states="num_blocks", pattern=r'\bnum_gpu_blocks="(\d+)"', least=True),
        LogLine(
            states="kv_pool_tokens",
            pattern=rf"KV cache size: {NUMBER} tokens",
            least=True,
        ),
        LogLine(
            states="max_concurrency",
            pattern=rf"Maximum concurrency for [\d,]+ tokens per request: {NUMBER}x",
            least=True,
        ),
        LogLine(
            states="context_tokens",
            pattern=rf"Maximum concurrency for {NUMBER} tokens per request",
        ),
        LogLine(
            states="graphs_bytes",
            pattern=rf"Graph capturing finished in \d+ secs, took {NUMBER} GiB",
            unit=GiB,
            is_difference=True,
            facts=(GRAPHS,),
        ),
        LogLine(
            states="output_tokens_per_s",
            pattern=rf"Avg generation throughput: {NUMBER} tokens/s",
        ),
        LogLine(states="num_running", pattern=r"\bRunning: (\d+) reqs"),
    ),
    texts=(LogText(setting="model_name", pattern=label("vllm", "model_name"), of_all=True),),
    settings=r"Initializing an? (?:V\d )?LLM engine|\bargs: |cache_config_info\{",
    names={
        "model": "model",
        "model_tag": "model",
        "model_name": "model",  # the label of metrics, by which it is served
        "max_seq_len": "context",
        "max_model_len": "context",
        "dtype": "dtype",
        "quantization": "quantization",
    },
    version=r"(?:API server version|LLM engine) \(?v?(\d+(?:\.\d+)+)",
    refusals=(
        r"is larger than the (?:available KV cache|maximum number of tokens that can be stored)",
        r"No available memory for the cache blocks",
        r"is less than desired GPU memory utilization",
    ),
    histograms={
        "vllm:time_to_first_token_seconds": "ttft_s",
        "vllm:time_per_output_token_seconds": "tpot_s",
        "vllm:request_time_per_output_token_seconds": "tpot_s",
        "vllm:inter_token_latency_seconds": "tpot_s",
    },
    means={
        "vllm:request_prompt_tokens": "mean_prompt_tokens",
        "vllm:request_generation_tokens": "mean_output_tokens",
    },
)
