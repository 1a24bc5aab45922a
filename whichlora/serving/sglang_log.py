"""What SGLang prints, from 0.4 to 0.5.23; its GB are GiB."""

from __future__ import annotations

from whichlora.memory.weights import WEIGHTS
from whichlora.serving.log import NUMBER, SAMPLE, EngineLog, LogLine, LogText, label
from whichlora.serving.rank import ROTARY_TABLES
from whichlora.units import GiB

# Source: SGLang 0.5.23 srt/model_executor/model_runner.py:1372, model_runner_components/
# cuda_graph_setup.py:696, srt/managers/scheduler.py:1268; "KV Cache is allocated" of 0.4 and 0.5;
# srt/metrics/collector.py.
LOG = EngineLog(
    lines=(
        LogLine(
            states="weights_bytes",
            pattern=rf"Load weight end\..*mem usage={NUMBER} GB",
            unit=GiB,
            facts=(*WEIGHTS.values(), ROTARY_TABLES),
        ),
        LogLine(
            states="free_before_bytes",
            pattern=rf"Load weight begin\..*avail mem={NUMBER} GB",
            unit=GiB,
            least=True,
        ),
        LogLine(
            states="keys_bytes",
            pattern=rf"KV Cache is allocated\..*\bK size: {NUMBER} GB",
            unit=GiB,
            least=True,
        ),
        LogLine(
            states="values_bytes",
            pattern=rf"KV Cache is allocated\..*\bV size: {NUMBER} GB",
            unit=GiB,
            least=True,
        ),
        LogLine(
            states="kv_pool_tokens",
            pattern=r"(?:KV Cache is allocated\..*#tokens: |\bmax_total_num_tokens=)([\d,]+)",
            least=True,
        ),
        LogLine(
            states="kv_pool_tokens",
            pattern=rf"^sglang:max_total_num_tokens{SAMPLE}",
            least=True,
        ),
        LogLine(
            states="context_tokens",
            pattern=r"max_total_num_tokens=.*\bcontext_len=([\d,]+)",
        ),
        LogLine(
            states="graphs_bytes",
            pattern=rf"Capture .*graph.* end\..*mem usage={NUMBER} GB",
            unit=GiB,
            is_difference=True,
        ),
        LogLine(
            states="output_tokens_per_s",
            pattern=rf"gen throughput \(token/s\): {NUMBER}",
        ),
        LogLine(states="num_running", pattern=r"#running-req: (\d+)"),
    ),
    texts=(LogText(setting="model_name", pattern=label("sglang", "model_name"), of_all=True),),
    settings=r"server_args=|\bmax_total_num_tokens=",
    names={
        "model_path": "model",
        "model_name": "model",  # the label of metrics, by which it is served
        "context_len": "context",
        "context_length": "context",
        "dtype": "dtype",
        "quantization": "quantization",
    },
    version=r"(?i)sglang[- ]v?(\d+(?:\.\d+)+)",
    refusals=(r"Not enough memory", r"Loading the model\b.*out of memory"),
    histograms={
        "sglang:time_to_first_token_seconds": "ttft_s",
        "sglang:time_per_output_token_seconds": "tpot_s",
        "sglang:inter_token_latency_seconds": "tpot_s",
    },
    means={
        "sglang:prompt_tokens_histogram": "mean_prompt_tokens",
        "sglang:generation_tokens_histogram": "mean_output_tokens",
    },
)
