"""What vLLM is asked for: its settings, and their defaults by release."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from whichlora.errors import ConfigError
from whichlora.serving.base import Served
from whichlora.serving.block_groups import cached_layers
from whichlora.serving.drafted import DraftedBy, Drafts
from whichlora.serving.expert_ranks import ExpertRanks
from whichlora.serving.unified_memory import is_unified
from whichlora.serving.vllm_sparse import BLOCK_SIZE, PACKED, cache_dtype
from whichlora.units import GiB

RANKS, STAGES = "tensor_parallel_size", "pipeline_parallel_size"
SEQUENCES = "max_num_seqs"
COPIES, WHOLE_EXPERTS = "data_parallel_size", "enable_expert_parallel"
REDUNDANT, DRAFTS = "num_redundant_experts", "speculative_config"
CAPTURED, MODE, AHEAD = "max_cudagraph_capture_size", "performance_mode", "async_scheduling"
PARTITION = "VLLM_PP_LAYER_PARTITION"  # a variable of the shell
POOL_BYTES, POOL_BLOCKS = "kv_cache_memory_bytes", "num_gpu_blocks_override"
RESTARTED = "restarted"  # our own: no flag of vLLM says it
# Layers with a state share the pool of the V1 engine, their default since 0.10.2: its
# v1/core/kv_cache_utils.py and models/config.py size blocks as those of 0.11.0. Prefixes are kept
# of them in 0.26.0, and are not in 0.25.0. config/model.py.
STATES_SINCE, STATES_KEPT_SINCE = "0.10.2", "0.26"
OLDER_UTILIZATION = 0.90  # of releases before 0.20; config/cache.py
LOADED_AS_NF4 = ("nf4", "nf4-dq")  # by bitsandbytes, of files of 16 bit
MOST_CAPTURED_TOKENS = 512  # config/vllm.py:2464; 1024 on compute capability 10
LONG_CONTEXT = 32 * 1024  # beyond which the first engine reads prompts in chunks
# Model types whose positions are scaled, whatever their rotation says, and what accepts contexts
# beyond. Source: config/model.py:2592, :2672.
SCALED_MODELS = ("gemma3", "gemma3_text")
# The first release that takes the positions of a config with YaRN as they are stated; earlier ones
# multiply those it was trained with. Source: 0.29.0 config/model.py:2457, 0.30.0 :2475.
STATED_YARN_SINCE = "0.30"
LONGER = "rope scaling in --hf-overrides, or VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"
FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2", PACKED)  # config/cache.py CacheDType
CAPPED_SINCE = "0.9"  # before which the default of max_num_seqs is above max_num_batched_tokens
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # config/lora.py, MaxLoRARanks
# Methods of `speculative_config`: what drafts. Names before 0.12 and of one model are kept for mtp.
# Source: vLLM 0.33.0 config/speculative.py:40-87, :1318.
METHODS: dict[str, DraftedBy] = {
    **dict.fromkeys(("mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"), "layer"),
    **dict.fromkeys(("qwen3_next_mtp", "qwen3_5_mtp", "ernie_mtp"), "layer"),
    **dict.fromkeys(("ngram", "ngram_gpu", "suffix"), "text"),
    "eagle": "eagle",
    "eagle3": "eagle3",
    "draft_model": "model",
}
DRAFTS_EXAMPLE = '{"method": "mtp", "num_speculative_tokens": 1}'
# Since which release a step is planned ahead beside a method, never where none is named; else since
# 0.14. Source: config/vllm.py:809; of a draft model 0.16.0 config/vllm.py:621.
PLANNED_AHEAD_SINCE = {"ngram": "", "suffix": "", "draft_model": "0.16"}
# Model types that the newer model runner serves by default since 0.24; other dense models since
# 0.25, all since 0.29. Source: DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES of config/vllm.py in 0.24.0,
# and `_is_default_v2_model_runner_model` in 0.25.1 to 0.28.0, which 0.29.0 has no more.
NEWER_RUNNER_FIRST = ("qwen3", "deepseek_v2", "qwen2_moe", "granitemoe", "llama", "mistral")


def capability(served: Served) -> float:
    """Its GPU's compute capability; that of an A100 where none is known."""
    return float(served.gpu.compute_capability or 8.0)


def utilization(served: Served) -> float:
    """Its share of the GPU; a release before 0.20 has another default."""
    is_older = served.libraries.older("vllm", "0.20")
    if is_older and not served.is_asked("gpu_memory_utilization"):
        return OLDER_UTILIZATION
    value = served.options["gpu_memory_utilization"]
    assert isinstance(value, float)
    return value


def max_num_seqs(served: Served) -> int:
    """Sequences that may run at once: by default no more than tokens of a step that are asked for.

    Kind: exact for `vllm serve`. Source: vLLM 0.33.0 engine/arg_utils.py:2973-3006, 0.11.0
    `EngineArgs._set_default_args`; 0.8.3 :1669, whose V1 engine has one default for all cards;
    0.7.2 :217.
    """
    stated, libraries = served.count(SEQUENCES), served.libraries
    if stated is not None or libraries.older("vllm", "0.8"):
        return stated or 256
    is_large = _is_large(served)
    if libraries.older("vllm", "0.8.4"):
        is_large |= capability(served) >= 8.0
    usual = (1024 if is_large else 256) * _mode_factor(served)
    if libraries.older("vllm", CAPPED_SINCE):
        return usual
    return min(usual, served.count("max_num_batched_tokens") or usual)


def max_num_batched_tokens(served: Served) -> int:
    """Tokens of one step at most.

    Kind: exact for `vllm serve`; `LLM()` has larger defaults. Source: as of `max_num_seqs`; 0.28.0
    is the first with 16,384; before 0.8 `SchedulerConfig` of config.py.
    """
    stated = served.count("max_num_batched_tokens")
    if stated is not None:
        return stated
    if served.libraries.older("vllm", "0.8"):
        return older_chunk(served) or max(2048, served.context)
    factor = _mode_factor(served)
    if served.gpu.memory_bytes >= 160 * GiB and not served.libraries.older("vllm", "0.28"):
        return factor * 16384
    return factor * (8192 if _is_large(served) else 2048)


def _mode_factor(served: Served) -> int:
    """What `performance_mode` multiplies both defaults by.

    Kind: exact. Source: vLLM 0.33.0 engine/arg_utils.py:3184, 0.17.0.
    """
    return 2 if served.options[MODE] == "throughput" else 1


def plans_ahead(served: Served) -> bool:
    """Whether a step is planned while another runs: the default since 0.14, but for some drafts.

    Kind: exact. Source: `PLANNED_AHEAD_SINCE`.
    """
    stated, asked = served.options[AHEAD], served.options[DRAFTS]
    if stated is not None:
        return bool(stated)
    method = draft_settings(str(asked)).get("method") if asked else None
    since = PLANNED_AHEAD_SINCE.get(str(method), "0.14")
    return bool(since) and not served.libraries.older("vllm", since)


@lru_cache(maxsize=64)
def draft_settings(stated: str) -> dict[str, Any]:
    """`speculative_config` as it was given, with its method.

    Without one a model's name tells it. Source: vLLM 0.33.0 config/speculative.py:1418-1424.

    Raises:
        ConfigError: one line.
    """
    try:
        asked = json.loads(stated)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise ConfigError(f"{DRAFTS}: {stated!r} is no JSON object; give {DRAFTS_EXAMPLE}")
    name = str(asked.get("model", "")).lower()
    if "method" not in asked and name:
        by_name = {"eagle3": "eagle3", "eagle-": "eagle"}
        asked["method"] = next((by_name[each] for each in by_name if each in name), "draft_model")
    return asked


def asked_drafts(served: Served) -> Drafts | None:
    """How tokens are drafted; None where they are not.

    Kind: exact. Source: vLLM 0.33.0 config/speculative.py:1584-1620.

    Raises:
        ConfigError: one line.
    """
    stated = served.options[DRAFTS]
    return None if stated is None else _drafts(str(stated))


@lru_cache(maxsize=64)
def _drafts(stated: str) -> Drafts:
    asked = draft_settings(stated)
    method, tokens = asked.get("method"), asked.get("num_speculative_tokens")
    if method not in METHODS:
        raise ConfigError(
            f"{DRAFTS}: {stated!r} is not predicted; accepted are the methods mtp, eagle3, eagle, "
            f"draft_model, ngram and suffix, such as {DRAFTS_EXAMPLE}"
        )
    by = METHODS[str(method)]
    if tokens is None and by == "layer":
        tokens = 1  # as many as layers, of which each model that is predicted has one
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(
            f"{DRAFTS}: num_speculative_tokens is {tokens!r}; give a whole number of 1 or more"
        )
    if asked.get("parallel_drafting"):
        raise ConfigError(f"{DRAFTS}: parallel_drafting is not predicted; leave it out")
    return Drafts(by=by, tokens=tokens, passes=0 if by == "text" else tokens, queries=tokens + 1)


def drafted_tokens(served: Served) -> int:
    """Tokens that are drafted for a sequence; 0 where none are."""
    drafts = asked_drafts(served)
    return drafts.tokens if drafts else 0


def _is_large(served: Served) -> bool:
    """Whether a GPU has the defaults of an H100; an A100 of any size has not, nor a GB10.

    NVML tells no total of a memory that the processor shares, so that it counts as 0.
    Kind: exact. Source: vLLM 0.33.0 engine/arg_utils.py:2958-2987, 0.8.5 :1596 with an A100 of
    80 GB, 0.8.4 :1669 for the names of H100 and H200 alone; github.com/vllm-project/vllm/pull/57378
    (a GB10 has 2,048 and 256), logs of 0.13.0 and 0.18.1.
    """
    gpu, libraries = served.gpu, served.libraries
    if libraries.older("vllm", "0.8.5"):
        return gpu.key.startswith(("h100", "h200"))
    is_a100 = "a100" in gpu.key and not libraries.older("vllm", "0.9")
    return gpu.memory_bytes >= 70 * GiB and not is_a100 and not is_unified(served.gpu)


def older_chunk(served: Served) -> int | None:
    """Tokens of a step of the first engine, which reads long contexts in chunks; None elsewhere.

    Kind: exact. Source: vLLM 0.5.3 to 0.7.3 engine/arg_utils.py `use_long_context`, and
    `SchedulerConfig.__init__` of config.py, whose 512 became 2,048 with 0.6.5.
    """
    libraries = served.libraries
    slides = any(kind.window for kind in cached_layers(served.model))
    if slides or lora_slots(served)[0]:
        return None
    if served.context <= LONG_CONTEXT or libraries.older("vllm", "0.5.3"):
        return None
    chunk = 512 if libraries.older("vllm", "0.6.5") else 2048
    return served.count("max_num_batched_tokens") or chunk


def has_newer_runner(served: Served) -> bool:
    """Whether the newer model runner is the default, which counts tokens of every sequence.

    Kind: exact, but for Qwen3, Llama and Mistral in 16 bit under 0.22 and 0.23.
    Source: `NEWER_RUNNER_FIRST`; `is_hybrid` in that function of 0.25.1, and 0.27.1.
    """
    libraries, model = served.libraries, served.model
    if model.model_type in NEWER_RUNNER_FIRST:
        return not libraries.older("vllm", "0.24")
    is_late = model.has_experts or has_states(served)
    return not libraries.older("vllm", "0.29" if is_late else "0.25")


def has_states(served: Served) -> bool:
    """Whether some layer has a state in place of keys and values."""
    return any(not kind.token_elements for kind in cached_layers(served.model))


def times_positions(served: Served) -> int:
    """Rows of rotary tables over the positions of a model: four, where those are of videos, too.

    Kind: exact. Source: vLLM 0.11.0 and 0.28.0 rotary_embedding/mrope.py `MRotaryEmbedding`
    (`cache_max_position_num`); logs of 21.86 GiB of Qwen3.6-35B-A3B-NVFP4, 21.77 without, and of
    14.77 of Qwen3-VL-30B-A3B, 14.56 without. Our copies of the latter's config do not say it.
    """
    config = served.model.config
    if served.model.model_type == "qwen3_vl_moe":
        return 4
    text = config.get("text_config") or config
    rotation = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return 4 if "mrope_section" in rotation else 1


def keeps_prefixes(served: Served) -> bool:
    """Whether blocks of a common prefix are kept once: the default since the V1 engine.

    Of layers with a state it is since `STATES_KEPT_SINCE`.
    Source: vLLM 0.8.5 engine/arg_utils.py:1572, 0.33.0 config/cache.py:257; config/model.py
    `is_prefix_caching_supported`.
    """
    stated = served.options["enable_prefix_caching"]
    since = STATES_KEPT_SINCE if has_states(served) else "0.8"
    return not served.libraries.older("vllm", since) if stated is None else bool(stated)


def lora_slots(served: Served) -> tuple[int, int]:
    """Slots for adapters, and their rank; (0, 0) where none is served."""
    if not served.targets and not served.options["enable_lora"]:
        return 0, 0
    rank = served.count("max_lora_rank") or 16
    if served.targets and not served.is_asked("max_lora_rank"):
        rank = min(each for each in LORA_RANKS if each >= served.run.r)
    return served.count("max_loras") or 1, rank


def stage_layers(served: Served) -> tuple[int, ...]:
    """How many layers each stage of the pipeline has.

    Of what is left over the last one has nothing, and before 0.8 everything.
    Kind: exact. Source: vLLM 0.33.0 `get_pp_indices`, distributed/utils.py:198; 0.7.3 :62.
    """
    stages = served.count(STAGES) or 1
    if (stated := served.options[PARTITION]) is not None:
        return tuple(int(layers) for layers in str(stated).split(","))
    each, left = divmod(served.model.num_hidden_layers, stages)
    if served.libraries.older("vllm", "0.8"):
        return (*([each] * (stages - 1)), each + left)
    return tuple(each + (stages - 1 - left <= place < stages - 1) for place in range(stages))


def expert_ranks(served: Served) -> ExpertRanks:
    """How routed experts are divided: among the GPUs of all engines, by their widths or whole.

    Kind: exact. Source: vLLM 0.33.0 fused_moe/config.py:1117 `FusedMoEParallelConfig.make`.
    """
    copies = served.count(COPIES) or 1
    gpus = copies * (served.count(RANKS) or 1)
    if not served.options[WHOLE_EXPERTS]:
        return ExpertRanks(copies=copies, width=gpus)
    return ExpertRanks(copies=copies, whole=gpus, redundant=served.count(REDUNDANT) or 0)


def multiplies_by_triton(served: Served) -> bool:
    """Whether experts in mxfp4 have OpenAI's Triton kernels: on compute capability 9.

    Wheels have them since 0.12; before, images do, and an installation of its own may not.
    Kind: exact. Source: `get_mxfp4_backend` of vLLM 0.11.0 quantization/mxfp4.py; the wheels of
    0.11.1 and 0.12.0, third_party/triton_kernels; 0.33.0 `_get_priority_backends_for_gpt_oss`.
    """
    libraries = served.libraries
    lacks = libraries.older("vllm", "0.12") and libraries.older("triton_kernels", "0.0.1")
    is_hopper = 9.0 <= capability(served) < 10.0
    return served.run.quant == "mxfp4" and is_hopper and not lacks


def cache_bytes(served: Served) -> int:
    """Of one element of keys and values."""
    is_fp8 = cache_dtype(served) in FP8_CACHES
    return 1 if is_fp8 else served.dtypes.compute_bytes


def block_size_of(served: Served) -> int:
    """Tokens of a block: sparse attention has larger ones, where none is asked for."""
    if served.model.chooses_keys and not served.is_asked("block_size"):
        return BLOCK_SIZE
    return served.count("block_size") or 16
