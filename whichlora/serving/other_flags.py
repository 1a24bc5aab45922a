"""Flags of engines that people paste with the others, and why none of them is an option here."""

from __future__ import annotations

NO_SAY = "no say in what is predicted"
KERNEL_CHOICE = "times are those of the default kernels"
NO_NUMBER = "changes nothing that is predicted; leave it out"
REPLICAS = "makes engines of their own: give the GPUs of one, and its share of concurrency"
BESIDE_ENCODERS = (  # SGLang 0.5.10 server_args.py:3280
    "is of a server whose images other servers encode, which is not predicted; leave it out: the "
    "tower is loaded"
)
ALL_TO_ALL = "sets how states are exchanged; the default is predicted, which gathers; leave it out"
DENSE_RANKS = "divides dense matrices in another way, which is not predicted; leave it out"
REDUNDANT_EXPERTS = "holds experts twice, which is not predicted for this engine; leave it out"
HOST_WEIGHTS = "keeps weights on the host, which is not predicted; give more gpus or another quant"
DRAFT = "drafts tokens, which is not predicted; leave it out"
IMAGES = "sets how images are cut, which is not predicted; leave it out"
CHUNKS = "sets how long prompts are cut, which is not predicted; leave it out"
KEPT_STATES = "sets how states are kept for prefixes, which is not predicted; leave it out"
ADAPTERS = "keeps adapters beside the model, which is not predicted for this engine; merge one"
CAPTURED_SIZES = "sets which sizes are captured, which is not predicted; leave it out"

# Of several engines. None of them has a say in memory of the GPU or in a step.
OF_A_SERVER = dict.fromkeys(
    (
        "host",
        "port",
        "api_key",
        "served_model_name",
        "trust_remote_code",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "tokenizer",
        "tokenizer_mode",
        "download_dir",
        "seed",
        "log_level",
    ),
    NO_NUMBER,
)

# Further ones of `vllm serve --help`, 0.10 to 0.33, of a server, its logs and its files.
OF_VLLM = dict.fromkeys(
    (
        *("allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins"),
        *("allowed_local_media_path", "allowed_media_domains", "api_server_count"),
        *("calculate_kv_scales", "chat_template_content_format", "code_revision"),
        *("config_format", "default_chat_template_kwargs", "disable_access_log_for_endpoints"),
        *("device", "enable_reasoning"),  # of 0.7 to 0.9
        *("disable_fastapi_docs", "disable_frontend_multiprocessing", "disable_log_requests"),
        *("disable_log_stats", "disable_uvicorn_access_log", "distributed_executor_backend"),
        *("enable_auto_tool_choice", "enable_force_include_usage", "enable_log_outputs"),
        *("enable_log_requests", "enable_prompt_tokens_details", "enable_request_id_headers"),
        *("enable_server_load_tracking", "generation_config", "guided_decoding_backend"),
        *("hf_token", "ignore_patterns", "load_format", "logprobs_mode", "max_log_len"),
        *("max_logprobs", "media_io_kwargs", "middleware", "mm_processor_cache_gb"),
        *("mm_processor_cache_type", "otlp_traces_endpoint", "override_generation_config"),
        *("prefix_caching_hash_algo", "response_role", "return_tokens_as_token_ids", "revision"),
        *("root_path", "safetensors_load_strategy", "show_hidden_metrics_for_version"),
        *("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "structured_outputs_config"),
        *("swap_space", "tokenizer_revision", "tool_parser_plugin", "uvicorn_log_level"),
    ),
    NO_SAY,
)
# Further ones of `sglang.launch_server --help`, 0.4 to 0.5, of kernels and of files.
OF_SGLANG = dict.fromkeys(
    (
        *("attention_backend", "decode_attention_backend", "disable_custom_all_reduce"),
        *("disable_shared_experts_fusion", "dist_init_addr", "enable_cache_report"),
        *("enable_metrics", "node_rank", "nccl_init_addr", "enable_p2p_check"),
        *("fp4_gemm_backend", "fp8_gemm_backend", "grammar_backend"),
        *("load_format", "mamba_backend", "mm_attention_backend", "moe_runner_backend"),
        *("prefill_attention_backend", "random_seed", "revision", "sampling_backend"),
        *("schedule_conservativeness", "schedule_policy", "stream_interval", "watchdog_timeout"),
    ),
    NO_NUMBER,
)
KERNELS_OF_VLLM = dict.fromkeys(
    (
        *("attention_backend", "disable_custom_all_reduce", "linear_backend"),
        *("mm_encoder_attn_backend", "moe_backend"),
    ),
    KERNEL_CHOICE,
)

# The first release that has each of them and the first that does not, where not all do; empty: none
# is known. Source: arg_utils.py and cli_args.py of vLLM 0.5.4 to 0.33.0, of which 41 releases were
# read: a first one may be some patch releases late, so that a flag is left out which it would take.
RELEASES_OF_VLLM = {
    "allowed_local_media_path": ("0.6.6", ""),
    "allowed_media_domains": ("0.11", ""),
    "api_server_count": ("0.9.1", ""),
    "attention_backend": ("0.13", ""),
    "calculate_kv_scales": ("0.7", "0.28"),
    "chat_template_content_format": ("0.6.6", ""),
    "config_format": ("0.6.3", ""),
    "default_chat_template_kwargs": ("0.14", ""),
    "disable_access_log_for_endpoints": ("0.16", ""),
    "disable_fastapi_docs": ("0.6.3", ""),
    "disable_frontend_multiprocessing": ("", "0.19"),
    "disable_log_requests": ("", "0.17"),
    "disable_uvicorn_access_log": ("0.8.2", ""),
    "enable_auto_tool_choice": ("0.6", ""),
    "enable_force_include_usage": ("0.9.2", ""),
    "enable_log_outputs": ("0.10.1", ""),
    "enable_log_requests": ("0.10.1", ""),
    "enable_prompt_tokens_details": ("0.6.6", ""),
    "enable_request_id_headers": ("0.6.6", ""),
    "enable_server_load_tracking": ("0.8", ""),
    "generation_config": ("0.6.6", ""),
    "guided_decoding_backend": ("", "0.12"),
    "hf_token": ("0.8.4", ""),
    "linear_backend": ("0.22", ""),
    "log_level": ("0.31", ""),
    "logprobs_mode": ("0.10", ""),
    "media_io_kwargs": ("0.9.2", ""),
    "mm_encoder_attn_backend": ("0.11.1", ""),
    "mm_processor_cache_gb": ("0.10.1", ""),
    "mm_processor_cache_type": ("0.11", ""),
    "moe_backend": ("0.17", ""),
    "override_generation_config": ("0.7.3", ""),
    "prefix_caching_hash_algo": ("0.8.3", ""),
    "reasoning_parser": ("0.7.3", ""),
    "safetensors_load_strategy": ("0.10.2", ""),
    "show_hidden_metrics_for_version": ("0.8", ""),
    "structured_outputs_config": ("0.11", ""),
    "swap_space": ("", "0.18"),
    "tool_call_parser": ("0.6", ""),
    "tool_parser_plugin": ("0.6.3", ""),
}
