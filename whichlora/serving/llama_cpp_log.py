"""What llama-server prints of its start, and what its /metrics answers."""

from __future__ import annotations

from whichlora.serving.llama_cpp_entries import COMPUTE, KV_CACHE, LAYERS, OUTPUT
from whichlora.serving.log import NUMBER, EngineLog, LogLine, LogText
from whichlora.units import MiB

# Names of mixes, without "_" and in words. Source: llama.cpp 0c1e570
# src/llama-model-loader.cpp llama_ftype_name.
_SIZES = {"Small": "S", "Medium": "M", "Large": "L"}
_MIXES = {
    f"Q{bits}_K - {word}": f"Q{bits}_K_{letter}"
    for bits in range(2, 6)
    for word, letter in _SIZES.items()
} | {"Q2_K - Medium": "Q2_K", "all F32": "F32"}

_SLOTS = r"\b(?:n_seq_max|n_slots) *= *(\d+)"
# Of the server's answers, and of the library when a context is freed.
_DECODED = r"(?<!prompt )\beval time = +[\d.]+ ms / +"
# Source: llama.cpp 0c1e570 src/llama-model.cpp:1924-1930, llama-kv-cache.cpp:291-301,
# llama-context.cpp:308-320, :740, llama-model-loader.cpp:1805; tools/server/server-task.cpp:1574,
# server-context.cpp:613; llama-context.cpp:4434. Before n_ctx_seq there was n_ctx_per_seq, and
# before that only n_ctx, of all slots. Slots that share one cache may each have all of n_ctx.
LOG = EngineLog(
    lines=(
        LogLine(
            states="weights_bytes",
            pattern=rf"\bCUDA\d+ (?:model )?buffer size = +{NUMBER} MiB",
            unit=MiB,
            facts=(LAYERS, OUTPUT),
        ),
        LogLine(
            states="kv_cache_bytes",
            pattern=rf"\bCUDA\d+ KV buffer size = +{NUMBER} MiB",
            unit=MiB,
            adds_up=True,  # sliding layers have a cache of their own
            facts=(KV_CACHE,),
        ),
        LogLine(
            states="compute_bytes",
            pattern=rf"\bCUDA\d+ compute buffer size = +{NUMBER} MiB",
            unit=MiB,
            facts=(COMPUTE,),
        ),
        LogLine(states="context_tokens", pattern=r"\bn_ctx_(?:seq|per_seq|slot)\b *= *(\d+)"),
        LogLine(states="all_context_tokens", pattern=r"\bllama_\w+: n_ctx += (\d+)"),
        LogLine(states="num_slots", pattern=_SLOTS),
        LogLine(
            states="ttft_s", pattern=rf"prompt eval time = +{NUMBER} ms /", unit=1e-3, is_mean=True
        ),
        LogLine(
            states="mean_prompt_tokens",
            pattern=r"prompt eval time = +[\d.]+ ms / +(\d+) tokens",
            is_mean=True,
        ),
        LogLine(
            states="tpot_s",
            pattern=rf"{_DECODED}\d+ (?:tokens|runs) +\( *{NUMBER} ms per token",
            unit=1e-3,
            is_mean=True,
        ),
        LogLine(
            states="mean_output_tokens",
            pattern=rf"{_DECODED}(\d+) (?:tokens|runs)",
            is_mean=True,
        ),
        LogLine(
            states="output_tokens_per_s",
            pattern=rf"^llamacpp:predicted_tokens_seconds {NUMBER}",
        ),
    ),
    texts=(
        LogText(setting="model", pattern=r"\bgeneral\.name += (.+)"),
        LogText(setting="file_type", pattern=r"\bfile type += (.+)", words=_MIXES),
        LogText(setting="n_gpu_layers", pattern=r"\boffloaded (\d+)/\d+ layers to GPU"),
        LogText(setting="parallel", pattern=_SLOTS),
        LogText(setting="batch_size", pattern=r"\bn_batch += (\d+)"),
        LogText(setting="ubatch_size", pattern=r"\bn_ubatch += (\d+)"),
        LogText(
            setting="kv_unified", pattern=r"\bkv_unified += (true|false)", words={"true": "True"}
        ),
        LogText(setting="cache_type_k", pattern=r"\bK \((\w+)\): +[\d.]+ MiB"),
        LogText(setting="cache_type_v", pattern=r"\bV \((\w+)\): +[\d.]+ MiB"),
    ),
    shares={"context_tokens": ("all_context_tokens", "num_slots")},
    shared_where=("kv_unified", "True"),
    one_by_one=True,
    names={"model": "model"},
    refusals=(r"error loading model", r"failed to (?:create|initialize) .*context"),
)
