"""vLLM: a pool of blocks that takes what a profile pass leaves of a share of the GPU.

Read in vLLM 0.33.0, and where a release is named in 0.6.6, 0.8.5, 0.11.0, 0.20.0 and 0.27.1.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.memory import allocator
from whichlora.memory.entries import Entry
from whichlora.memory.mxfp4 import BLOCK
from whichlora.parallel.communicators import communicator_bytes
from whichlora.serving.base import Engine, Pool, Served, Start, Stepping
from whichlora.serving.block_groups import Blocks, blocks, cached_layers
from whichlora.serving.command import shell_command
from whichlora.serving.drafts import NOTE, UNTIMED, check_drafts, joint_entry, with_draft_layers
from whichlora.serving.expert_ranks import ExpertRanks, check_experts
from whichlora.serving.kernel_rates import (
    FIRST_MARLIN_ROWS,
    TOKENIZED_S,
    UNPACKING_PRODUCTS,
    CodeBlocks,
)
from whichlora.serving.other_flags import (
    ALL_TO_ALL,
    CAPTURED_SIZES,
    DRAFT,
    HOST_WEIGHTS,
    IMAGES,
    NO_NUMBER,
    OF_A_SERVER,
    REPLICAS,
)
from whichlora.serving.profile_pass import (
    COUNTED_LOGIT_BITS,
    MASKED_LOGIT_BYTES,
    PLAIN_LOGIT_BYTES,
    SORTED_LOGIT_BYTES,
    WIDENED_LOGIT_BYTES,
    attention_entry,
    experts_bytes,
    layer_entry,
    sampler_entries,
)
from whichlora.serving.rank import (
    LORA_SLOTS,
    check_model,
    check_ranks,
    held_entries,
    positions_note,
    rank_model,
    slot_bytes,
    with_aligned_experts,
)
from whichlora.serving.stages import (
    RECEIVED,
    Stage,
    check_stages,
    fullest,
    received_bytes,
    stage_notes,
    stages_of,
)
from whichlora.serving.vllm_entries import (
    COMMUNICATOR,
    COUNTS,
    EXPANDED,
    GRAPHS,
    KEPT,
    KERNELS,
    KV_POOL,
    SWIZZLED_EXPONENTS,
)
from whichlora.serving.vllm_latents import ABSORBED, absorbed_bytes, as_cached
from whichlora.serving.vllm_log import LOG
from whichlora.serving.vllm_sparse import (
    BLOCK_SIZE,
    PACKED,
    SCORES,
    SCORES_BYTES,
    buffer_entries,
    cache_dtype,
    latent_share,
)
from whichlora.serving.vllm_sparse import check as check_sparse
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import ceil_div
from whichlora.spec.options import Option
from whichlora.spec.run import BNB_QUANTS, ENGINE_QUANTS, FOUR_BIT_BNB
from whichlora.timing.model import LAUNCH_S
from whichlora.timing.work import VLLM_CAPTURED_TOKENS
from whichlora.units import GiB, KiB, MiB, format_bytes

RANKS, STAGES = "tensor_parallel_size", "pipeline_parallel_size"
COPIES, WHOLE_EXPERTS = "data_parallel_size", "enable_expert_parallel"
REDUNDANT, DRAFTS = "num_redundant_experts", "speculative_config"
DRAFT_METHODS = ("mtp", "deepseek_mtp")
# Layers with a state share the pool of the V1 engine. Prefixes are kept of them in 0.28.0, and are
# not in 0.25.0. config/model.py.
STATES_SINCE, STATES_KEPT_SINCE = "0.11", "0.28"
LOADED_AS_NF4 = ("nf4", "nf4-dq")  # by bitsandbytes, of files of 16 bit
OLDER_UTILIZATION = 0.90  # of releases before 0.20; config/cache.py
# What the host does between two steps, before a release. Kind: fitted, to published speeds of one
# sequence on an A100 (Qwen2 under 0.4.2, Qwen2.5 under 0.6.3), and to four sequences of a 70B on
# two to eight H100 and H200 (0.11). What it does for each sequence: estimate.
HOST_S = (("0.6", 2.0e-3), ("0.8", 1.3e-3), ("", 0.8e-3))
OLDER_SEQUENCE_S, SEQUENCE_S = 20e-6, 5e-6
# Before 0.4.3 Ray schedules a task on every other rank for each step. Kind: measured, by a
# contributor: 2,000 tokens of Llama-2-7B on two A100 took 24.2 s, and 16.7 s without Ray and with
# one task for all steps. Source: github.com/vllm-project/vllm/pull/3763, merged as 4894.
SCHEDULED_RANKS_S = 3.75e-3
# What a kernel of a step that is too large for a graph costs the host, whose code is compiled.
# Kind: estimate: half of a launch from Python.
COMPILED_LAUNCH_S = LAUNCH_S / 2
# The same of its eager code, which calls more Python around each kernel than transformers does.
# Kind: fitted, to Qwen2 0.5B and 1.5B past the longest captured sequence of 0.4.2, beside
# `COPIED_TOKEN_S`.
EAGER_LAUNCH_S = 27e-6
# Before 0.5 its host makes lists and tensors of all tokens of the running sequences in every step,
# with or without penalties: 40 ns are `torch.tensor` of a list. Kind: measured, that code of 0.4.2
# under torch 2.3.0 on one core of an AMD EPYC. Source: vLLM 0.4.2 model_executor/
# sampling_metadata.py:388 and `from_lists`, transformers_utils/detokenizer.py
# `decode_sequence_inplace`, worker/model_runner.py `_prepare_decode`.
COPIED_TOKEN_S = 50e-9
# Before 0.4.3 every query head reads the keys and values of its group for itself, and multiplies
# them without matrix units. Kind: measured, by contributors on an A100 (19.5 TFLOP/s): 64 heads of
# 128 over 4,096 tokens take 52.9 µs, 17.6 of them `attention_s`. Source: vLLM 0.4.2
# attention/backends/flash_attn.py:256; github.com/vllm-project/vllm/issues/1880 (comment of
# 2024-01-22) and pull/2744, whose card it is.
HEAD_READS = 0.195
# AWQ's first kernel, before Marlin reads its codes, too. Kind: exact, but for the blocks resident,
# an estimate of 128 registers a thread, and `tile_s`: fitted, to Qwen2 1.5B and 7B under 0.4.2 with
# prompts of 1 and 6,144 tokens. Source: vLLM 0.4.2 csrc/quantization/awq/gemm_kernels.cu
# `gemm_forward_4bit_cuda_m16nXk32`; model_executor/layers/quantization/awq.py.
FIRST_AWQ = CodeBlocks(
    rows=16, outputs=128, splits=8, inputs=32, tile_s=1.5e-6, resident=8, expanded_rows=256
)
# That kernel divides a product into eight, which a second one adds up: it is launched from C++.
# Kind: estimate, of a launch without Python. Source: vLLM 0.4.2
# csrc/quantization/awq/gemm_kernels.cu awq_gemm, `_out_feats.sum(0)`.
SECOND_LAUNCH_S = 5e-6
# From a client to the scheduler and back: HTTP, tokens of a text and their text, two processes.
# Kind: estimate: by published runs of one client, prompts of one token wait 5.9 ms longer than a
# step for their first token (0.26 on an H100), and of 15 tokens 8.4 ms (0.12 on an AMD GPU).
# Source: `vllm bench serve` of Qwen3.5-122B-A10B (2026-08-25) and of gemma-3-4b-it.
FRONT_S = 6e-3
# Queries of a block of attention over a chunk of a prompt, whose keys lie in pages, before 0.8. A
# chunk of 512 has eight blocks a head: 128 of 16 heads, for 108 multiprocessors. Kind: exact.
# Source: FlashAttention 2.6 csrc/flash_attn/flash_api.cpp `mha_varlen_fwd`, which forces the kernel
# that could split keys and does not split them, src/flash_fwd_launch_template.h
# `run_mha_fwd_splitkv_dispatch`.
CHUNK_QUERY_TILE = 64
LONG_CONTEXT = 32 * 1024  # beyond which the first engine reads prompts in chunks
FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2", PACKED)  # config/cache.py CacheDType
TEXT_ALONE = "0.10.1"  # the first release that leaves towers on the disk; pull/22299
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # config/lora.py, MaxLoRARanks
# Model types whose class lists embeddings and head for adapters, and since which release.
# Source: `embedding_modules` of vLLM 0.6.6, 0.8.5, 0.11.0, 0.15.0, 0.20.0, 0.27.1 and 0.33.0.
TABLES_WITH_SLOTS = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "phi3", "internlm3", "mixtral"), "0"),
    **dict.fromkeys(("granite", "granitemoe", "nemotron", "phimoe"), "0"),
    "lfm2": "0.11",
    **dict.fromkeys(("qwen3", "qwen3_moe"), "0.20"),
    **dict.fromkeys(("cohere", "cohere2"), "0.28"),
}
# Model types that the newer model runner serves by default since 0.24; other dense models since
# 0.25, all since 0.29. Source: DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES of config/vllm.py in 0.24.0,
# and `_is_default_v2_model_runner_model` in 0.25.1 to 0.28.0, which 0.29.0 has no more.
NEWER_RUNNER_FIRST = ("qwen3", "deepseek_v2", "qwen2_moe", "granitemoe", "llama", "mistral")
# Bytes per logit in its profile, before a release. Source: `_dummy_sampler_run` of
# v1/worker/gpu/model_runner.py, and sample/sampler.py:157 (0.24.0), :159 (0.27.1), :218 (0.29.0);
# 0.26.0 changes logits in place.
NEWER_LOGIT_BYTES = (
    ("0.26", WIDENED_LOGIT_BYTES),
    ("0.27", PLAIN_LOGIT_BYTES),
    ("0.28", WIDENED_LOGIT_BYTES),
    ("0.33", PLAIN_LOGIT_BYTES),
    ("", MASKED_LOGIT_BYTES),
)
MOST_CAPTURED_TOKENS = 512  # config/vllm.py:2464; 1024 on compute capability 10
# Kernels that a first forward loads, and what libraries allocate by themselves. Kind: estimate.
# Source: nine published logs that state `non_torch_memory` of one GPU, 0.02 to 0.12 GiB; median.
KERNELS_BYTES = 72 * MiB
# What the driver keeps of one captured graph. Kind: estimate. Source: published logs of 0.67 GiB
# for 67 sizes of 33 pieces (0.10.2), 0.48 GiB for 51 sizes of 29 pieces (0.26).
GRAPH_BYTES = 300 * KiB

EXPONENT_TILE = 256  # outputs, of 8 warps; triton_kernels HopperMXScaleLayout.swizzle_data
# What the hidden size and the width of experts in mxfp4 are multiples of, from a compute capability
# on: Marlin's kernels, TensorRT-LLM's, Triton's, Marlin's.
_ALIGNED_EXPERTS = ((12.0, (256, 128)), (10.0, (256, 128)), (9.0, (1, 64)), (0.0, (256, 128)))


# --- what it is asked for ---------------------------------------------------------------------


def utilization(served: Served) -> float:
    """Its share of the GPU; a release before 0.20 has another default."""
    is_older = served.libraries.older("vllm", "0.20")
    if is_older and not served.is_asked("gpu_memory_utilization"):
        return OLDER_UTILIZATION
    value = served.options["gpu_memory_utilization"]
    assert isinstance(value, float)
    return value


def max_num_seqs(served: Served) -> int:
    """Sequences that may run at once.

    Kind: exact for `vllm serve`. Source: vLLM 0.33.0 engine/arg_utils.py:2973-3006; 0.7.2 :217.
    """
    is_first = served.libraries.older("vllm", "0.8")
    return served.count("max_num_seqs") or (1024 if _is_large(served) and not is_first else 256)


def max_num_batched_tokens(served: Served) -> int:
    """Tokens of one step at most.

    Kind: exact for `vllm serve`; `LLM()` has larger defaults. Source: as of `max_num_seqs`; 0.28.0
    is the first with 16,384; before 0.8 `SchedulerConfig` of config.py.
    """
    stated = served.count("max_num_batched_tokens")
    if stated is not None:
        return stated
    if served.libraries.older("vllm", "0.8"):
        return _older_chunk(served) or max(2048, served.context)
    if served.gpu.memory_bytes >= 160 * GiB and not served.libraries.older("vllm", "0.28"):
        return 16384
    return 8192 if _is_large(served) else 2048


def _is_large(served: Served) -> bool:
    """Whether a GPU has the defaults of an H100; an A100 of any size has not, nor a GB10 any more.

    Kind: exact. Source: vLLM 0.33.0 engine/arg_utils.py:2963-2987, 0.32.0 without `is_gb10`, 0.8.5
    :1596 with an A100 of 80 GB, 0.8.4 :1669 for the names of H100 and H200 alone.
    """
    gpu, libraries = served.gpu, served.libraries
    if libraries.older("vllm", "0.8.5"):
        return gpu.key.startswith(("h100", "h200"))
    is_gb10 = gpu.compute_capability == "12.1" and not libraries.older("vllm", "0.33")
    is_a100 = "a100" in gpu.key and not libraries.older("vllm", "0.9")
    return gpu.memory_bytes >= 70 * GiB and not is_a100 and not is_gb10


def has_newer_runner(served: Served) -> bool:
    """Whether the newer model runner is the default, which counts tokens of every sequence.

    Kind: exact, but for Qwen3, Llama and Mistral in 16 bit under 0.22 and 0.23.
    Source: `NEWER_RUNNER_FIRST`.
    """
    libraries, model = served.libraries, served.model
    if model.model_type in NEWER_RUNNER_FIRST:
        return not libraries.older("vllm", "0.24")
    return not libraries.older("vllm", "0.29" if model.has_experts else "0.25")


def keeps_prefixes(served: Served) -> bool:
    """Whether blocks of a common prefix are kept once: the default since the V1 engine.

    Of layers with a state it is since `STATES_KEPT_SINCE`.
    Source: vLLM 0.8.5 engine/arg_utils.py:1572, 0.33.0 config/cache.py:257; config/model.py
    `is_prefix_caching_supported`.
    """
    stated = served.options["enable_prefix_caching"]
    has_states = any(not kind.token_elements for kind in cached_layers(served.model))
    since = STATES_KEPT_SINCE if has_states else "0.8"
    return not served.libraries.older("vllm", since) if stated is None else bool(stated)


def lora_slots(served: Served) -> tuple[int, int]:
    """Slots for adapters, and their rank; (0, 0) where none is served."""
    if not served.targets and not served.options["enable_lora"]:
        return 0, 0
    rank = served.count("max_lora_rank") or 16
    if served.targets and not served.is_asked("max_lora_rank"):
        rank = min(each for each in LORA_RANKS if each >= served.run.r)
    return served.count("max_loras") or 1, rank


# --- what it takes ----------------------------------------------------------------------------


def start(served: Served) -> Start:
    """What vLLM takes of one GPU: of equal ones that share the matrices, of the fullest stage.

    pool = ceil(total · gpu_memory_utilization) − weights, slots and what stays − the larger part
    of the profile pass − graphs

    Kind: estimate: kernels and graphs are not derived; the rest is exact.
    Source: vLLM 0.33.0 `Worker.determine_available_memory`, v1/worker/gpu_worker.py:641;
    `request_memory`, v1/worker/utils.py:716.
    """
    served = with_draft_layers(served) if served.options[DRAFTS] else served
    stages = stages_of(served.model, stage_layers(served))
    return fullest([_start_of(served, stage) for stage in stages], STAGES)


def stage_layers(served: Served) -> tuple[int, ...]:
    """How many layers each stage of the pipeline has.

    Of what is left over the last one has nothing, and before 0.8 everything.
    Kind: exact. Source: vLLM 0.33.0 `get_pp_indices`, distributed/utils.py:198; 0.7.3 :62.
    """
    stages = served.count(STAGES) or 1
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


def _rank_of(served: Served, part: ModelSpec) -> ModelSpec:
    """What one GPU has of `part`."""
    return rank_model(part, served.count(RANKS) or 1, expert_ranks(served))


def _start_of(served: Served, stage: Stage) -> Start:
    """What one GPU of `stage` takes."""
    rank = _rank_of(served, stage.part)
    entries = _loaded(served, rank)
    entries += [joint_entry(served)] if served.options[DRAFTS] else []
    entries += _resident(served, stage)
    entries += _profiled(served, rank)
    graphs = Entry(GRAPHS, graph_bytes(served, rank))
    reserves_graphs = not served.libraries.older("vllm", "0.20")
    entries += [graphs] if reserves_graphs else []
    budget = math.ceil(served.gpu.memory_bytes * utilization(served))
    missed = _missed_bytes(served, entries)
    taken = sum(entry.num_bytes for entry in entries) - missed
    if _counts_context(served):
        taken += allocator.context_bytes(served.gpu)
    cut = pool_blocks(served, rank)
    pool = Pool(
        num_bytes=budget - taken,
        block_bytes=cut.block_bytes,
        blocks_of=cut.blocks_of,
        shared_of=cut.shared_of if keeps_prefixes(served) else lambda tokens: 0,
    )
    most = max_num_seqs(served)
    return Start(
        entries=tuple(entries),
        budget_bytes=budget,
        pool=pool,
        pool_fact=KV_POOL,
        max_num_seqs=lambda context: most,
        outside_bytes=missed + (0 if reserves_graphs else graphs.num_bytes),
        fault=_fault(served, pool, budget),
        counts_process=_counts_context(served),
        needs_context=True,
        copies=served.count(COPIES) or 1,
        untimed=_untimed(served),
    )


def _untimed(served: Served) -> str:
    """Why steps are not predicted; empty where they are."""
    if (served.count(COPIES) or 1) > 1 and (served.count(STAGES) or 1) > 1:
        return f"steps of {COPIES} beside {STAGES} are not predicted"
    return UNTIMED if served.options[DRAFTS] else ""


def _loaded(served: Served, rank: ModelSpec) -> list[Entry]:
    """Weights and rotary tables; experts in mxfp4 are padded for their kernels.

    Kind: exact. Source: vLLM 0.33.0 fused_moe/oracle/mxfp4.py:402, :837; logs of 65.97 GiB of
    gpt-oss-120b with the Marlin kernels, of 64.38 with Triton's and of 13.47 of gpt-oss-20b (0.02
    to 0.05 more than counted). Its tables are in fp32, models/gpt_oss.py.
    """
    if served.run.quant != "mxfp4":
        width = served.dtypes.compute_bytes
        entries = held_entries(served, rank, rotary_element_bytes=width, dtypes=_stored(served))
        absorbed = absorbed_bytes(served, rank)
        return [*entries, Entry(ABSORBED, absorbed)] if absorbed else entries
    capability = float(served.gpu.compute_capability or 8.0)
    hidden, width = next(sizes for least, sizes in _ALIGNED_EXPERTS if capability >= least)
    rank = with_aligned_experts(rank, hidden=hidden, width=width)
    entries = held_entries(served, rank, rotary_element_bytes=4, dtypes=_stored(served))
    if _multiplies_by_triton(served):
        entries.append(Entry(SWIZZLED_EXPONENTS, swizzled_bytes(served, rank)))
    return entries


def _multiplies_by_triton(served: Served) -> bool:
    """Whether experts in mxfp4 have OpenAI's Triton kernels: on compute capability 9.

    Kind: exact. Source: `get_mxfp4_backend` of vLLM 0.11.0 quantization/mxfp4.py; 0.33.0
    `_get_priority_backends_for_gpt_oss`.
    """
    capability = float(served.gpu.compute_capability or 8.0)
    return served.run.quant == "mxfp4" and 9.0 <= capability < 10.0


def swizzled_bytes(served: Served, rank: ModelSpec) -> int:
    """What the swizzled exponents of experts take beside those of the file, or more than them.

    Kind: exact. Source: `SWIZZLED_EXPONENTS`.
    """
    replaces = not served.libraries.older("vllm", "0.25")
    total = 0
    for layer, count in rank.layers():
        for linear in layer.moe.expert.linears if layer.moe else ():
            blocks = linear.count * ceil_div(linear.in_features, BLOCK)
            outputs = ceil_div(linear.out_features, EXPONENT_TILE) * EXPONENT_TILE
            total += count * blocks * (outputs - replaces * linear.out_features)
    return int(total)


def _stored(served: Served) -> Dtypes:
    """What weights are stored in.

    Biases of experts in mxfp4 are fp32 for Triton's kernels (0.11.0 quantization/mxfp4.py).
    Files of 16 bit become nf4 with quantised scales. Since the releases after 0.8.5 these scales
    are expanded to fp32 as they are loaded, and experts are in 4 bit, too.
    Kind: exact. Source: vLLM 0.8.5, and 0.27.1 model_loader/bitsandbytes_loader.py:433
    quantize_4bit, :579 `_dequantize_dq`; quantization/bitsandbytes.py `BitsAndBytesMoEMethod`.
    """
    if _multiplies_by_triton(served):
        return replace(served.dtypes, wide_expert_biases=True)
    if served.dtypes.quant not in FOUR_BIT_BNB:
        return served.dtypes
    is_older = served.libraries.older("vllm", "0.9")
    quant = served.dtypes.quant
    if quant in LOADED_AS_NF4:
        quant = "nf4-dq" if is_older else "nf4"
    return replace(served.dtypes, quant=quant, quantises_experts=not is_older)


def _has_table_slots(served: Served) -> bool:
    """Whether embeddings and head have slots for adapters."""
    since = TABLES_WITH_SLOTS.get(served.model.model_type)
    return since is not None and not served.libraries.older("vllm", since)


def _counts_context(served: Served) -> bool:
    """Whether all that is in use on the GPU counts, and not what came since the process began.

    It did before 0.6.5, and again in the first releases of the V1 engine, which needs compute
    capability 8.0. Source: vLLM 0.8.5 v1/worker/gpu_worker.py:200-207; `memory_profiling` of 0.6.5.
    """
    libraries, capability = served.libraries, float(served.gpu.compute_capability or 8.0)
    first_of_v1 = not libraries.older("vllm", "0.8") and libraries.older("vllm", "0.9.2")
    is_older = libraries.older("vllm", "0.6.5") and not _counts_tensors(served)
    return is_older or (first_of_v1 and capability >= 8.0)


def _counts_tensors(served: Served) -> bool:
    """Whether tensors of torch alone count, and neither the context nor NCCL: before 0.2.5.

    Source: github.com/vllm-project/vllm/pull/2031, `max_memory_allocated` before it.
    """
    return served.libraries.older("vllm", "0.2.5")


def _missed_bytes(served: Served, entries: list[Entry]) -> int:
    """What the profile does not see of `entries`: slots for adapters, from 0.6.5 to 0.7.3.

    Weights were measured before the slots were made, and the peak counted from after.
    Source: github.com/vllm-project/vllm/issues/14450, mended by pull request 14469 of 2025-03-08;
    `memory_profiling` is of 0.6.5.
    """
    libraries = served.libraries
    if libraries.older("vllm", "0.6.5") or not libraries.older("vllm", "0.8"):
        return 0
    return sum(entry.num_bytes for entry in entries if entry.fact == LORA_SLOTS)


def _kept_bytes(served: Served, stage: Stage) -> int:
    """What all-reduces returned and NCCL keeps until the profile pass ends: in 0.2.5.

    Kind: upper bound: the allocator frees them earlier where the GPU has no more.
    Source: `KEPT`; mended in 0.2.6 by TORCH_NCCL_AVOID_RECORD_STREAMS.
    """
    libraries = served.libraries
    if libraries.older("vllm", "0.2.5") or not libraries.older("vllm", "0.2.6"):
        return 0
    reduced = 2 * stage.part.num_hidden_layers + 1  # attention and MLP of a layer, the embedding
    width = served.model.hidden_size * served.dtypes.compute_bytes
    return reduced * max_num_batched_tokens(served) * width


def _resident(served: Served, stage: Stage) -> list[Entry]:
    """What stays beside weights."""
    ranks, stages = served.count(RANKS) or 1, served.count(STAGES) or 1
    num_slots, slot_rank = lora_slots(served)
    slots = num_slots * slot_bytes(
        stage.part, ranks, slot_rank, has_tables=_has_table_slots(served)
    )
    entries = [Entry(LORA_SLOTS, slots)] if slots else []
    if not _counts_context(served) and not _counts_tensors(served):  # a context has its kernels
        entries.append(Entry(KERNELS, KERNELS_BYTES))
    if ranks * stages > 1 and not _counts_tensors(served):
        buffers = communicator_bytes(ranks) + communicator_bytes(stages)
        entries.append(Entry(COMMUNICATOR, buffers))
    if ranks > 1 and (kept := _kept_bytes(served, stage)):
        entries.append(Entry(KEPT, kept))
    received = received_bytes(stage, max_num_batched_tokens(served), served.dtypes.compute_bytes)
    entries += [Entry(RECEIVED, received)] if received else []
    if has_newer_runner(served) and stage.is_last:
        logits = max_num_seqs(served) * served.model.vocab_size
        entries.append(Entry(COUNTS, logits * COUNTED_LOGIT_BITS // 8))
    return entries


def _profiled(served: Served, rank: ModelSpec) -> list[Entry]:
    """The larger part of the profile pass: a layer's forward, or the last stage's sampler."""
    tokens = max_num_batched_tokens(served)
    element_bytes = served.dtypes.compute_bytes
    copies = served.count(COPIES) or 1
    layer = layer_entry(rank, tokens=tokens, element_bytes=element_bytes, copies=copies)
    sampler = (
        ()
        if rank.head is None
        else sampler_entries(
            rank,
            vocab_size=served.model.vocab_size,
            tokens=tokens,
            sequences=min(max_num_seqs(served), tokens),
            logit_bytes=_logit_bytes(served),
            element_bytes=element_bytes,
        )
    )
    workspace = Entry(allocator.WORKSPACE, allocator.workspace_bytes(served.gpu, training=False))
    forward = [layer]
    experts = experts_bytes(rank, tokens=copies * tokens, element_bytes=element_bytes)
    kept = buffer_entries(served, rank, tokens=tokens, experts_bytes=experts)
    if kept:  # experts have their part of what is kept
        forward = [
            attention_entry(rank, tokens=tokens, element_bytes=element_bytes),
            Entry(SCORES, SCORES_BYTES),
        ]
    if served.dtypes.quant in FOUR_BIT_BNB:
        forward.append(Entry(EXPANDED, expanded_bytes(rank, element_bytes)))
    larger = max(forward, [*sampler], key=lambda part: sum(entry.num_bytes for entry in part))
    return [*larger, *kept, workspace]


def _logit_bytes(served: Served) -> int:
    """Of each logit while the profile samples.

    Source: vLLM 0.10.1 v1/sample/ops/topk_topp_sampler.py `TopKTopPSampler`; `NEWER_LOGIT_BYTES`.
    """
    libraries = served.libraries
    if has_newer_runner(served):
        return next(
            num_bytes
            for version, num_bytes in NEWER_LOGIT_BYTES
            if not version or libraries.older("vllm", version)
        )
    # FlashInfer's sampler masks, too, where it is installed
    sorts = libraries.older("vllm", "0.16") and libraries.older("flashinfer", "0.0.1")
    return SORTED_LOGIT_BYTES if sorts else MASKED_LOGIT_BYTES


def expanded_bytes(rank: ModelSpec, element_bytes: int) -> int:
    """The largest matrix of one layer in 16 bit; of experts all of a layer.

    Kind: exact. Source: `EXPANDED`.
    """
    sizes = []
    for layer, _ in rank.layers():
        sizes += [linear.num_weights // linear.count for linear in layer.linears]
        if layer.moe is not None:
            sizes.append(sum(linear.num_weights for linear in layer.moe.expert.linears))
    return max(sizes) * element_bytes


def graph_bytes(served: Served, rank: ModelSpec) -> int:
    """CUDA graphs: one for each piece between two attentions and each size of a batch.

    They share a pool that holds one layer's forward over the largest batch.
    Kind: estimate. Source: vLLM 0.33.0 config/vllm.py:2452-2590; `GRAPH_BYTES`.
    """
    if served.options["enforce_eager"]:
        return 0
    most = min(2 * max_num_seqs(served), MOST_CAPTURED_TOKENS, max_num_batched_tokens(served))
    sizes = captured_sizes(most, step_beyond=8 if served.libraries.older("vllm", "0.15") else 16)
    if lora_slots(served)[0] and not served.libraries.older("vllm", "0.15"):
        sizes *= 2  # with adapters and without; v1/cudagraph_dispatcher.py:110 _get_lora_cases
    pieces = rank.num_hidden_layers + 1
    layer = layer_entry(rank, tokens=most, element_bytes=served.dtypes.compute_bytes)
    shared: int = layer.num_bytes
    return shared + pieces * sizes * GRAPH_BYTES


def captured_sizes(most: int, *, step_beyond: int = 16) -> int:
    """How many sizes up to `most` tokens are captured. Kind: exact.

    Source: vLLM 0.33.0 `VllmConfig._set_cudagraph_sizes`, config/vllm.py:2579-2590.
    """
    sizes = [size for size in (1, 2, 4) if size <= most]
    sizes += range(8, min(most + 1, 256), 8)
    sizes += range(256, most + 1, step_beyond)
    return len(sizes)


def _cache_bytes(served: Served) -> int:
    """Of one element of keys and values."""
    is_fp8 = cache_dtype(served) in FP8_CACHES
    return 1 if is_fp8 else served.dtypes.compute_bytes


def _block_size(served: Served) -> int:
    """Tokens of a block: sparse attention has larger ones, where none is asked for."""
    if served.model.chooses_keys and not served.is_asked("block_size"):
        return BLOCK_SIZE
    return served.count("block_size") or 16


def pool_blocks(served: Served, rank: ModelSpec) -> Blocks:
    """How the pool of one rank is cut."""
    # asynchronous scheduling, the default since 0.14, has one step more in flight than there are
    # stages; the older runner has it without a pipeline only. config/vllm.py:588
    stages = served.count(STAGES) or 1
    is_ahead = not served.libraries.older("vllm", "0.14")
    steps = stages + (is_ahead and (stages == 1 or has_newer_runner(served)))
    whole = cached_layers(as_cached(served, _rank_of(served, served.model)))
    return blocks(
        whole,
        block_size=_block_size(served),
        element_bytes=_cache_bytes(served),
        tokens_in_flight=steps * max_num_batched_tokens(served),
        part=cached_layers(as_cached(served, rank)),
        state_bytes=served.dtypes.compute_bytes,
        states_kept=2 if keeps_prefixes(served) else 1,
    )


def _fault(served: Served, pool: Pool, budget: int) -> str:
    """Why vLLM does not start, however short its sequences are; empty where it does.

    Source: vLLM 0.33.0 `_check_enough_kv_cache_memory`, v1/core/kv_cache_planning.py:50;
    `request_memory`, v1/worker/utils.py:761.
    """
    total, share = served.gpu.memory_bytes, utilization(served)
    free = total - allocator.context_bytes(served.gpu)
    asked = f"gpu_memory_utilization {share:g} of {format_bytes(total)} is {format_bytes(budget)}"
    if free < budget:
        return f"{asked}, more than the {format_bytes(free)} that are free; give a smaller one"
    if pool.num_bytes < pool.block_bytes:
        return (
            f"{asked}, and weights, profile pass and graphs take "
            f"{format_bytes(budget - pool.num_bytes)} of it: nothing is left for keys and values; "
            "give a larger share, fewer max_num_seqs or max_num_batched_tokens, more GPUs, or a "
            "smaller model"
        )
    return ""


# --- how it steps -----------------------------------------------------------------------------


def stepping(served: Served) -> Stepping:
    """Requests come first, then prompts in chunks, in one step; before 0.8 whole prompts, alone.

    Since 0.14 a step is planned while the one before it runs, so that a request waits for both.
    Kind: exact; `HOST_S`, `FRONT_S` and `COMPILED_LAUNCH_S` are estimates.
    Source: vLLM 0.33.0 v1/core/sched/scheduler.py `Scheduler.schedule`, v1/engine/core.py
    `step_with_batch_queue`; 0.6.3 core/scheduler.py `_schedule_default`.
    """
    is_older = served.libraries.older("vllm", "0.8")
    chunk = _older_chunk(served) if is_older else max_num_batched_tokens(served)
    beyond = served.context > VLLM_CAPTURED_TOKENS and served.libraries.graphs_end_early
    is_eager = bool(served.options["enforce_eager"]) or beyond
    is_first_awq = served.run.quant == "awq-int4" and served.libraries.older("vllm", "0.5.4")
    step_s = next(
        seconds
        for version, seconds in HOST_S
        if not version or served.libraries.older("vllm", version)
    )
    ranks, layers = served.count(RANKS) or 1, stage_layers(served)
    if ranks > 1 and served.libraries.older("vllm", "0.4.3"):
        step_s += SCHEDULED_RANKS_S
    return Stepping(
        ranks=ranks,
        experts=expert_ranks(served),
        gathered_share=1 / served.dtypes.compute_bytes if served.run.quant == "fp8" else 1.0,
        step_s=step_s,
        sequence_s=OLDER_SEQUENCE_S if is_older else SEQUENCE_S,
        max_step_tokens=chunk or max(max_num_batched_tokens(served), served.context),
        mixes=chunk is not None,
        whole_prompts=chunk is None,
        captured_tokens=0 if is_eager else MOST_CAPTURED_TOKENS,
        launch_s=EAGER_LAUNCH_S if is_eager else COMPILED_LAUNCH_S,
        cache_bytes=latent_share(served) * _cache_bytes(served),
        head_reads=HEAD_READS if served.libraries.older("vllm", "0.4.3") else None,
        query_tile=CHUNK_QUERY_TILE if is_older and chunk is not None else None,
        copied_token_s=COPIED_TOKEN_S if served.libraries.older("vllm", "0.5") else 0.0,
        code_products=1.0 if served.libraries.older("vllm", "0.5") else UNPACKING_PRODUCTS,
        code_blocks=FIRST_AWQ if is_first_awq else None,
        code_launch_s=SECOND_LAUNCH_S if is_first_awq else 0.0,
        expert_rows=FIRST_MARLIN_ROWS if served.libraries.older("vllm", "0.7") else None,
        stage_layers=layers if len(layers) > 1 else (),
        keeps_blocks=keeps_prefixes(served),
        front_s=FRONT_S,
        tokenized_s=TOKENIZED_S,
        plans_ahead=not served.libraries.older("vllm", "0.14") and len(layers) == 1,
    )


def _older_chunk(served: Served) -> int | None:
    """Tokens of a step of the first engine, which reads long contexts in chunks; None elsewhere.

    Kind: exact. Source: vLLM 0.5.4 to 0.7.3 engine/arg_utils.py `use_long_context`, and
    `SchedulerConfig.__init__` of config.py, whose 512 became 2,048 with 0.6.5.
    """
    libraries = served.libraries
    slides = any(kind.window for kind in cached_layers(served.model))
    if slides or lora_slots(served)[0]:
        return None
    if served.context <= LONG_CONTEXT or libraries.older("vllm", "0.5.4"):
        return None
    chunk = 512 if libraries.older("vllm", "0.6.5") else 2048
    return served.count("max_num_batched_tokens") or chunk


# --- what it refuses --------------------------------------------------------------------------


def check(served: Served) -> None:
    """Refuse what vLLM cannot serve, and layers whose pool is not predicted.

    Raises:
        ConfigError: one line.
    """
    run = served.run
    check_model(served, keeps_states=not served.libraries.older("vllm", STATES_SINCE))
    check_sparse(served)
    _check_drafts(served)
    if served.model.unloaded_params and served.libraries.older("vllm", TEXT_ALONE):
        raise ConfigError(
            f"serving: vllm {served.libraries.vllm} loads what {served.model.name} sees with and "
            f"keeps room for its largest image, which is not predicted; give libraries "
            f"vllm={TEXT_ALONE} or a later release, which can serve its texts alone"
        )
    if run.quant in BNB_QUANTS and not served.libraries.older("vllm", "0.28"):
        raise ConfigError(
            f"serving: vllm {served.libraries.vllm} reads no bitsandbytes weights, got quant "
            f"{run.quant}; use awq-int4 or gptq-int4 of merged weights, or libraries vllm=0.27.1"
        )
    if served.targets:
        _check_adapters(served)
    check_ranks(served, RANKS, STAGES)
    check_stages(served, STAGES)
    _check_experts(served)


def _check_experts(served: Served) -> None:
    """Refuse copies and whole experts of models without, and what cannot be divided."""
    copies, name = served.count(COPIES) or 1, served.model.name
    redundant = served.count(REDUNDANT) or 0
    if not served.model.has_experts:
        if copies > 1:
            raise ConfigError(f"{COPIES}: {name} has no experts, so it {REPLICAS}")
        if served.options[WHOLE_EXPERTS]:
            raise ConfigError(f"{WHOLE_EXPERTS}: {name} has no experts; leave it out")
    if redundant and not served.options[WHOLE_EXPERTS]:
        raise ConfigError(f"{REDUNDANT}: {redundant} without {WHOLE_EXPERTS}; give both, or none")
    if served.targets and (copies > 1 or served.options[WHOLE_EXPERTS]):
        raise ConfigError(
            f"serving: vllm's unmerged adapters are not predicted beside {COPIES} or "
            f"{WHOLE_EXPERTS}; use serve merged"
        )
    check_experts(served.model, expert_ranks(served))


def _check_drafts(served: Served) -> None:
    """Refuse drafts but those of a layer of the model."""
    stated = served.options[DRAFTS]
    if stated is None:
        return
    try:
        asked = json.loads(str(stated))
    except ValueError:
        asked = None
    if not isinstance(asked, dict) or asked.get("method") not in DRAFT_METHODS:
        raise ConfigError(
            f"{DRAFTS}: {str(stated)!r} is not predicted; accepted is "
            '{"method": "mtp", "num_speculative_tokens": 1}, or leave it out'
        )
    check_drafts(served, DRAFTS, served.count(STAGES) or 1)


def _check_adapters(served: Served) -> None:
    """Source: vLLM 0.33.0 lora/peft_helper.py:63-70: LoRA without DoRA, bias or saved modules."""
    run, method = served.run, served.method
    config = method.peft_config(run)
    faults = (
        (method.peft_class != "peft.LoraConfig", f"adapters of {method.name}"),
        (bool(config.get("use_dora")), "DoRA's magnitudes"),
        (bool(run.modules_to_save), "modules_to_save beside adapters"),
        (run.bias != "none", "biases beside adapters"),
    )
    for is_wrong, what in faults:
        if is_wrong:
            raise ConfigError(f"serving: vllm cannot serve {what}; use serve merged")
    rank = served.count("max_lora_rank") or 0
    if served.is_asked("max_lora_rank") and rank < run.r:
        raise ConfigError(
            f"max_lora_rank: {rank} is less than the adapter's rank {run.r}; give {run.r} or more"
        )
    if run.r > LORA_RANKS[-1]:
        raise ConfigError(f"r: vllm serves adapters up to rank {LORA_RANKS[-1]}, got {run.r}")


def command(served: Served) -> str:
    """Source: vLLM 0.33.0 engine/arg_utils.py:977-1000, :1389, :1610.

    Without its flag a model that sees is started with the largest images and videos, which leave
    far less for keys and values: 5.3 GiB instead of 25.1 (github.com/vllm-project/vllm/pull/25631).
    """
    quant, flags = served.run.quant, list[str]()
    if quant in LOADED_AS_NF4:
        flags.append("--quantization bitsandbytes")
    elif quant in BNB_QUANTS:  # files of which kind, only the directory says
        return ""
    if served.model.unloaded_params:
        flags.append(_without_tower(served))
    if served.options["enable_prefix_caching"] is False:
        flags.append("--no-enable-prefix-caching")
    if served.targets:
        if not served.options["enable_lora"]:
            flags.append("--enable-lora")
        if not served.is_asked("max_lora_rank"):
            flags.append(f"--max-lora-rank {lora_slots(served)[1]}")
        flags.append(f"--lora-modules adapter={shlex.quote(served.adapter)}")
    return shell_command(
        served,
        "vllm serve",
        context="--max-model-len",
        flags=tuple(flags),
        num_redundant_experts="--enable-eplb --eplb-config.num_redundant_experts {}",
    )


def _without_tower(served: Served) -> str:
    """The flag that leaves out what a model sees with.

    Source: github.com/vllm-project/vllm/pull/22299 (0.10.1), pull/34120 (2026-02-09).
    """
    if served.libraries.older("vllm", "0.17"):
        return """--limit-mm-per-prompt '{"image": 0, "video": 0}'"""
    return "--language-model-only"


def notes(served: Served, start: Start) -> tuple[str, ...]:
    """What a user must know."""
    lines = [
        f"vllm {served.libraries.vllm} as `vllm serve` starts it: max_num_batched_tokens "
        f"{max_num_batched_tokens(served)}, max_num_seqs {max_num_seqs(served)}"
    ]
    if (ranks := served.count(RANKS) or 1) > 1:
        lines.append(f"{RANKS} {ranks}: bytes are of each GPU")
    if start.copies > 1:
        lines.append(
            f"{COPIES} {start.copies}: each engine has its own pool and up to "
            f"{max_num_seqs(served)} sequences; sequences and tokens are of all"
        )
    lines += [NOTE] if served.options[DRAFTS] else []
    if _multiplies_by_triton(served):
        lines.append(
            "experts in mxfp4 have Triton's kernels; without the package triton_kernels vllm takes "
            "Marlin's, whose layout is larger"
        )
    if served.model.unloaded_params:
        lines.append(
            f"started with {_without_tower(served)}: without it vllm loads the tower, keeps room "
            "for the largest image and video, and has a far smaller pool"
        )
    lines += positions_note(
        served,
        "vllm does not start without rope scaling in --hf-overrides, or "
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1",
    )
    lines += stage_notes(start, stage_layers(served), STAGES)
    return tuple(lines)


ENGINE = Engine(
    name="vllm",
    summary="vLLM: a pool of blocks for keys and values; what does not fit waits",
    library="vllm",
    version="0.33.0",
    options=(
        Option(
            name="gpu_memory_utilization",
            summary="share of the GPU for weights, activations, graphs and pool",
            default=0.92,
            is_share=True,
        ),
        Option(name="max_num_batched_tokens", summary="tokens of one step", default=None),
        Option(name="max_num_seqs", summary="sequences that run at once", default=None),
        Option(name="block_size", summary="tokens of a block", default=16),
        Option(
            name="kv_cache_dtype",
            summary="of keys and values: as the model's, or in 8 bits",
            default="auto",
            choices=("auto", "bfloat16", *FP8_CACHES),
        ),
        Option(
            name="enable_prefix_caching",
            summary="blocks of a common prefix are kept once",
            default=None,
            kind=bool,
        ),
        Option(name="enable_lora", summary="slots for adapters", default=False),
        Option(name="max_loras", summary="adapters in one batch", default=1),
        Option(name="max_lora_rank", summary="rank of a slot", default=16),
        Option(name=RANKS, summary="GPUs that share a matrix", default=1, other_names=("tp",)),
        Option(
            name=STAGES,
            summary="stages that have some of the layers each",
            default=1,
            other_names=("pp",),
        ),
        Option(
            name=COPIES,
            summary="engines with sequences of their own that share experts",
            default=1,
            other_names=("dp",),
        ),
        Option(
            name=WHOLE_EXPERTS,
            summary="experts are divided whole, not each by its width",
            default=False,
            other_names=("ep",),
        ),
        Option(
            name=REDUNDANT,
            summary="experts held twice, of --eplb-config",
            default=0,
            kind=int,
        ),
        Option(
            name=DRAFTS,
            summary='drafts by a layer of the model: {"method": "mtp", ...}',
            default=None,
            kind=str,
        ),
        Option(name="enforce_eager", summary="no CUDA graphs", default=False),
    ),
    shared_by=RANKS,
    staged_by=STAGES,
    copied_by=COPIES,
    least_capability=7.0,  # as `kv_cache: vllm`; vLLM's installation page
    start=start,
    stored_forms=ENGINE_QUANTS,
    loads_towers=False,
    stepping=stepping,
    check=check,
    command=command,
    notes=notes,
    log=LOG,
    elsewhere={
        "max_model_len": "context",
        "dtype": "precision",
        "quantization": "quant",
        "q": "quant",
    },
    refused=OF_A_SERVER
    | dict.fromkeys(("swap_space", "disable_log_requests", "disable_log_stats"), NO_NUMBER)
    | dict.fromkeys(("distributed_executor_backend", "enable_auto_tool_choice"), NO_NUMBER)
    | dict.fromkeys(("all2all_backend",), ALL_TO_ALL)
    | dict.fromkeys(("speculative_model", "num_speculative_tokens"), DRAFT)
    | dict.fromkeys(("limit_mm_per_prompt", "mm_processor_kwargs", "language_model_only"), IMAGES)
    | dict.fromkeys(("compilation_config", "cudagraph_capture_sizes"), CAPTURED_SIZES)
    | {"enable_chunked_prefill": "cuts prompts into steps; give their max_num_batched_tokens"}
    | {"cpu_offload_gb": HOST_WEIGHTS},
)
