"""What vLLM takes of a GPU: weights, a profile pass, graphs, and the pool that is left."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from whichlora.memory import allocator
from whichlora.memory.entries import Entry
from whichlora.memory.mxfp4 import BLOCK
from whichlora.parallel.communicators import communicator_bytes, is_joined
from whichlora.serving.base import Pool, Served, Start
from whichlora.serving.block_groups import Blocks, blocks, cached_layers
from whichlora.serving.drafts import UNTIMED, accepted_tokens, draft_entries, with_drafts
from whichlora.serving.marlin_scales import REPEATED_SCALES, repeated_bytes
from whichlora.serving.profile_pass import (
    COUNTED_LOGIT_BITS,
    MASKED_LOGIT_BYTES,
    NARROW_SORTED_LOGIT_BYTES,
    PLAIN_LOGIT_BYTES,
    SORTED_LOGIT_BYTES,
    WIDENED_LOGIT_BYTES,
    attention_entry,
    cutlass_bytes,
    cutlass_entry,
    experts_bytes,
    layer_entry,
    mask_buffer_entries,
    sampler_entries,
)
from whichlora.serving.rank import (
    LORA_SLOTS,
    beyond_positions,
    held_entries,
    longest_context,
    oversized,
    rank_model,
    slot_tensors,
    weights_of,
    with_aligned_experts,
)
from whichlora.serving.segments import UNUSED_SEGMENTS, unused_bytes
from whichlora.serving.stages import (
    RECEIVED,
    Stage,
    fullest,
    received_bytes,
    stages_of,
)
from whichlora.serving.unified_memory import is_unified
from whichlora.serving.vllm_caches import reads_by_flashinfer
from whichlora.serving.vllm_compiled import held_entries as held_table
from whichlora.serving.vllm_compiled import trial_entries
from whichlora.serving.vllm_entries import (
    COMMUNICATOR,
    COUNTS,
    DRAFT_BUFFERS,
    EXPANDED,
    GRAPHS,
    HOST,
    KEPT,
    KERNELS,
    KV_POOL,
    STATE_KERNELS,
    SWIZZLED_EXPONENTS,
    WORKSPACE,
)
from whichlora.serving.vllm_latents import ABSORBED, absorbed_bytes, as_cached
from whichlora.serving.vllm_reserved import UNUSED_PASS, reserved_bytes
from whichlora.serving.vllm_settings import (
    CAPTURED,
    COPIES,
    LOADED_AS_NF4,
    LONGER,
    MODE,
    MOST_CAPTURED_TOKENS,
    POOL_BLOCKS,
    POOL_BYTES,
    RANKS,
    SCALED_MODELS,
    SEQUENCES,
    STAGES,
    STATED_YARN_SINCE,
    asked_drafts,
    block_size_of,
    cache_bytes,
    capability,
    drafted_tokens,
    expert_ranks,
    has_newer_runner,
    has_states,
    keeps_prefixes,
    lora_slots,
    max_num_batched_tokens,
    max_num_seqs,
    multiplies_by_triton,
    plans_ahead,
    stage_layers,
    times_positions,
    utilization,
)
from whichlora.serving.vllm_sparse import (
    SCORES,
    SCORES_BYTES,
    buffer_entries,
)
from whichlora.serving.vllm_towers import tower_entries
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import ceil_div
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.units import KiB, MiB, format_bytes

# Model types whose class lists embeddings and head for adapters, and since which release.
# Source: `embedding_modules` of vLLM 0.6.6, 0.8.5, 0.11.0, 0.15.1, 0.16.0, 0.27.1 and 0.33.0.
TABLES_WITH_SLOTS = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "phi3", "internlm3", "mixtral"), "0"),
    **dict.fromkeys(("granite", "granitemoe", "nemotron", "phimoe"), "0"),
    "lfm2": "0.11",
    **dict.fromkeys(("qwen3", "qwen3_moe"), "0.16"),
    **dict.fromkeys(("cohere", "cohere2"), "0.28"),
}
# Model types whose head, where it is the table of embeddings itself, has a table's slots of its
# own, and before which release. Source: `Qwen3ForCausalLM.__init__` of 0.27.0 and 0.28.0, and
# `_create_lora_modules`, lora/model_manager.py:391, which visits the table under both names.
TWICE_IN_SLOTS = {"qwen3": "0.28"}
# Model types whose MLP drops its first product early. Source: models/llama.py and mistral.py.
DROPS_PRODUCT = frozenset({"llama", "mistral", "ministral3"})
# Bytes per logit in its profile. Source: `_dummy_sampler_run` of
# v1/worker/gpu/model_runner.py, and sample/sampler.py:157 (0.24.0), :159 (0.27.1), :218 (0.29.0);
# 0.26.0 changes logits in place.
NEWER_LOGIT_BYTES = (
    ("0", WIDENED_LOGIT_BYTES),
    ("0.26", PLAIN_LOGIT_BYTES),
    ("0.27", WIDENED_LOGIT_BYTES),
    ("0.28", PLAIN_LOGIT_BYTES),
    ("0.33", MASKED_LOGIT_BYTES),
)
# Bytes per logit of the older runner's profile where tokens are drafted: one draft and one more
# token of each sequence in 16 bit, the latter's once more, as fp32, and as fp32 that are kept;
# drafts' as fp32, a copy of them (0.16), what a sort makes of it (before 0.17), probabilities, and
# noise with its inverse (0.18). Kind: exact for the releases named; between them as of the earlier.
# Source: `RejectionSampler.forward` and `sample_recovered_tokens` of vLLM 0.13.0, 0.16.0, 0.18.0
# and 0.20.0 v1/sample/rejection_sampler.py, `_dummy_sampler_run` of v1/worker/gpu_model_runner.py.
DRAFTED_LOGIT_BYTES = (
    ("0", SORTED_LOGIT_BYTES),
    ("0.13", 4 + 2 + 4 + 4 + 32),
    ("0.16", 4 + 2 + 4 + 4 + 4 + 32),
    ("0.17", 4 + 2 + 4 + 4 + 4 + 4 + 4),
    ("0.18", 4 + 2 + 4 + 4 + 4 + 4 + 4 + 4),
)
# Kernels that a first forward loads, and what libraries allocate by themselves. Kind: estimate.
# Source: nine published logs that state `non_torch_memory` of one GPU, 0.02 to 0.12 GiB; median.
KERNELS_BYTES = 72 * MiB
# What the host's processes take between both looks at a memory that they share. Kind: estimate.
# Source: three published logs of a GB10, whose free memory is that of the system: 0.6 GiB
# (Nemotron-3-Nano-4B, 0.13.0), 1.3 (Qwen3-30B-A3B, 0.13.0) and 2.1 (Qwen3-0.6B, 0.27.1); median.
STARTING_HOST_BYTES = 1370 * MiB
# What the driver keeps of one captured graph. Kind: estimate. Source: published logs of 0.67 GiB
# for 67 sizes of 33 pieces (0.10.2), 0.48 GiB for 51 sizes of 29 pieces (0.26).
GRAPH_BYTES = 300 * KiB
# Of a graph of a whole step; and of the first one, where layers have a state. Kind: exact for the
# estimate that is reserved, whose least that is; estimate: logs of 0.36 GiB for one size of
# Qwen3.6-35B-A3B (0.20.0), and of 0.78 for 51 of Qwen3.5-9B (0.19.0), of which 0.25 and 0.23 more.
# Source: vLLM 0.20.0 v1/worker/gpu_model_runner.py:6010 `per_graph`.
WHOLE_GRAPH_BYTES, STATES_GRAPH_BYTES = MiB, 250 * MiB
MASKED_SINCE = "0.17"  # before which the older runner's sampler sorts
STEPS_COUNTED_SINCE = "0.26"  # before which a sliding layer keeps the keys of one step
WHOLE_GRAPHS_SINCE = "0.11"  # before which the default captures pieces alone
# Since when experts share a workspace that is never freed. Source: the storage's method in
# model_executor/layers of 0.13.0, 0.14.0, 0.20.0 and 0.25.0: whether it calls the modular kernel.
KEPT_EXPERTS_SINCE: dict[str, str] = {
    **dict.fromkeys(("none", "fp8", "nvfp4", "nvfp4a16"), "0.14"),
    **dict.fromkeys(("gptq-int4", "gptq-int8", "mxfp4", "mxfp8"), "0.20"),
    **dict.fromkeys(("awq-int4", "w4a16"), "0.25"),
}
# Storages of experts that FlashInfer has kernels for on compute capability 10 alone: on later ones
# they run on Triton's, or Marlin's. Source: vLLM 0.17.0, 0.20.0, 0.27.1 and 0.29.0 fused_moe:
# `_supports_current_device` and `_supports_quant_scheme` of FlashInfer's experts, oracle/fp8.py of
# blocks, oracle/int_wna16.py.
WITHOUT_LATER_KERNELS = ("fp8", "gptq-int4", "gptq-int8", "awq-int4", "w4a16")
EXPONENT_TILE = 256  # outputs, of 8 warps; triton_kernels HopperMXScaleLayout.swizzle_data
# What the hidden size and the width of experts in mxfp4 are multiples of: for Marlin's kernels and
# TensorRT-LLM's, and for Triton's.
_ALIGNED_EXPERTS, _ALIGNED_BY_TRITON = (256, 128), (1, 64)


def start(served: Served) -> Start:
    """What vLLM takes of one GPU: of equal ones that share the matrices, of the fullest stage.

    pool = ceil(total · gpu_memory_utilization) − weights, slots and what stays − the larger part
    of the profile pass − graphs

    Kind: estimate: kernels and graphs are not derived; the rest is exact.
    Source: vLLM 0.33.0 `Worker.determine_available_memory`, v1/worker/gpu_worker.py:641;
    `request_memory`, v1/worker/utils.py:716.
    """
    as_asked, served = served, with_drafts(served, asked_drafts(served))
    starts = starts_of_stages(served)
    started = _within_one_stage(served, starts, fullest(starts, STAGES))
    if not is_of_context(served):
        return started

    @cache
    def at_context(context: int) -> Start:
        return start(replace(as_asked, run=replace(as_asked.run, context=context)))

    return replace(started, at_context=at_context)


def starts_of_stages(served: Served) -> list[Start]:
    """The start of each pipeline stage, each on its own card where the cards differ."""
    stages = stages_of(served.model, stage_layers(served))
    cards = served.gpu.beside or (served.gpu,) * len(stages)
    return [
        start_of_stage(replace(served, gpu=card), stage)
        for stage, card in zip(stages, cards, strict=True)
    ]


def _within_one_stage(served: Served, starts: list[Start], started: Start) -> Start:
    """`started`, with a context that the smallest pool could hold for all layers of the model.

    From 0.14 to 0.16 a start needs that, although each stage has some of the layers alone.
    Kind: exact. Source: vLLM 0.14.1 and 0.16.0 v1/core/kv_cache_utils.py `get_kv_cache_configs`
    (`min(available_memory)`), 0.17.0 `_project_kv_cache_groups_to_worker`;
    github.com/vllm-project/vllm/issues/34076.
    """
    libraries = served.libraries
    if len(starts) == 1 or libraries.older("vllm", "0.14") or not libraries.older("vllm", "0.17"):
        return started
    cut = pool_blocks(served, _rank_of(served, served.model))
    least = min(start.pool.num_bytes for start in starts)
    pool = Pool(num_bytes=least, block_bytes=cut.block_bytes, blocks_of=cut.blocks_of)
    longest = pool.max_context(started.longest_context)
    if longest == started.longest_context:
        return started
    return replace(
        started,
        longest_context=longest,
        beyond=(
            f"the {longest} tokens whose keys and values of all {served.model.num_hidden_layers} "
            f"layers would fit one stage, which {served.release} asks for; give {longest} or less, "
            "or libraries vllm=0.17 or newer"
        ),
    )


def load_of_start(served: Served) -> int:
    """The context, where the start depends on it; else 0."""
    return served.context if is_of_context(served) else 0


def is_of_context(served: Served) -> bool:
    """Whether the bytes of the pool depend on the context.

    The profile pass of a release before 0.8 reads a whole prompt of it; sparse attention has
    workspaces for it. Source: `max_num_batched_tokens`, `buffer_entries`.
    """
    is_asked = served.is_asked("max_num_batched_tokens")
    return served.model.chooses_keys or (served.libraries.older("vllm", "0.8") and not is_asked)


def _rank_of(served: Served, part: ModelSpec) -> ModelSpec:
    """What one GPU has of `part`."""
    return rank_model(part, served.count(RANKS) or 1, expert_ranks(served))


def start_of_stage(served: Served, stage: Stage) -> Start:
    """What one GPU of a pipeline stage takes."""
    rank = _rank_of(served, stage.part)
    slots = _slots(served, stage.part)
    missed = sum(slots) if _misses_slots(served) else 0
    entries = _loaded(served, rank, () if missed else slots)
    if drafts := asked_drafts(served):
        entries += draft_entries(served, drafts, served.count(RANKS) or 1)
    entries += _resident(served, stage)
    passing, staying = _profiled(served, rank)
    entries += [*passing, *staying]
    graphs = Entry(GRAPHS, graph_bytes(served, rank))
    reserves_graphs = _reserves_graphs(served)
    entries += [graphs] if reserves_graphs else []
    budget = math.ceil(served.gpu.memory_bytes * utilization(served))
    taken = sum(entry.num_bytes for entry in entries) - missed
    if _counts_context(served):
        taken += allocator.idle_context_bytes(served.gpu)
    cut = pool_blocks(served, rank)
    stated = _stated_pool(served, cut)
    budget = taken + stated if stated else budget
    pool = Pool(
        num_bytes=budget - taken,
        block_bytes=cut.block_bytes,
        blocks_of=cut.blocks_of,
        shared_of=cut.shared_of if keeps_prefixes(served) else lambda tokens: 0,
    )
    most = max_num_seqs(served)
    scales_yarn = served.libraries.older("vllm", STATED_YARN_SINCE)
    longest = longest_context(served, scaled=SCALED_MODELS, scales_yarn=scales_yarn)
    return Start(
        entries=tuple(entries),
        budget_bytes=budget,
        pool=pool,
        pool_fact=KV_POOL,
        states_pool=stated > 0,
        max_num_seqs=lambda context: most,
        outside_bytes=missed
        + _connected_bytes(served)
        + (0 if reserves_graphs else graphs.num_bytes),
        passing_bytes=_bytes_of(passing),
        fault=_fault(served, pool, budget, weights_of(entries)),
        longest_context=longest,
        beyond=beyond_positions(served, LONGER, longest),
        counts_process=_counts_context(served),
        needs_context=True,
        least_blocks=most if _has_block_each(served) else 0,
        least_blocks_for=SEQUENCES,
        copies=served.count(COPIES) or 1,
        untimed=_untimed(served),
    )


def _has_block_each(served: Served) -> bool:
    """Whether every sequence that may run must have a block for its state before vLLM starts.

    Without graphs of whole steps it need not. Kind: exact. Source: vLLM 0.20.0 to 0.28.0
    `resolve_cudagraph_mode_and_sizes`, config/compilation.py:1427 of 0.20.0; 0.19.0 captured
    smaller sizes in place of that. An H100 has 856 of Qwen3.6-27B-FP8, 865 here
    (github.com/vllm-project/recipes/pull/551).
    """
    has_graphs = not served.options["enforce_eager"]
    return has_graphs and has_states(served) and not served.libraries.older("vllm", "0.20")


def _stated_pool(served: Served, cut: Blocks) -> int:
    """Bytes of a pool whose size is stated; 0 where the pool takes what is left.

    Kind: exact. Source: vLLM 0.33.0 v1/worker/gpu_worker.py:656, v1/core/kv_cache_utils.py
    `may_override_num_blocks`.
    """
    blocks = served.count(POOL_BLOCKS)
    if blocks is not None:
        return blocks * cut.block_bytes
    return served.count(POOL_BYTES) or 0


def _reserves_graphs(served: Served) -> bool:
    """Whether memory for graphs is estimated, and reserved before blocks are counted: since 0.20.

    The newer runner estimates none before 0.29. Kind: exact.
    Source: `VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS` of envs.py, off in 0.19.0 and on in 0.20.0;
    `profile_cudagraph_memory` of v1/worker/gpu/model_runner.py, which returns 0 up to 0.28.0.
    """
    since = "0.29" if has_newer_runner(served) else "0.20"
    return not served.libraries.older("vllm", since)


def _profiles_graphs(served: Served) -> bool:
    """Whether graphs are captured during the memory profile, reserved or not.

    Kind: exact. Source: vLLM 0.18.0 v1/worker/gpu_worker.py `determine_available_memory`.
    """
    is_older = served.libraries.older("vllm", "0.18") or has_newer_runner(served)
    return not (is_older or served.options["enforce_eager"])


def _untimed(served: Served) -> str:
    """Why steps are not predicted; empty where they are."""
    if (served.count(COPIES) or 1) > 1 and (served.count(STAGES) or 1) > 1:
        return f"steps of {COPIES} beside {STAGES} are not predicted"
    drafts = asked_drafts(served)
    return UNTIMED if drafts and not accepted_tokens(served, drafts) else ""


def _loaded(served: Served, rank: ModelSpec, slots: tuple[int, ...]) -> list[Entry]:
    """Weights and rotary tables; experts in mxfp4 are padded for their kernels.

    Kind: exact. Source: vLLM 0.33.0 fused_moe/oracle/mxfp4.py:402, :837; logs of 65.97 GiB of
    gpt-oss-120b with the Marlin kernels, of 64.38 with Triton's and of 13.47 of gpt-oss-20b (0.02
    to 0.05 more than counted). Its tables are in fp32, models/gpt_oss.py.
    """
    if served.run.quant != "mxfp4":
        width = served.dtypes.compute_bytes
        entries = held_entries(
            served,
            rank,
            rotary_element_bytes=width,
            dtypes=_stored(served),
            times_positions=times_positions(served),
        )
        entries.append(_unused_segments(served, rank, slots))
        repeated = repeated_bytes(served, rank)
        entries += [Entry(REPEATED_SCALES, repeated)] if repeated else []
        absorbed = absorbed_bytes(served, rank)
        return [*entries, Entry(ABSORBED, absorbed)] if absorbed else entries
    by_triton = multiplies_by_triton(served)
    hidden, width = _ALIGNED_BY_TRITON if by_triton else _ALIGNED_EXPERTS
    rank = with_aligned_experts(rank, hidden=hidden, width=width)
    entries = held_entries(served, rank, rotary_element_bytes=4, dtypes=_stored(served))
    entries.append(_unused_segments(served, rank, slots))
    if by_triton:
        entries.append(Entry(SWIZZLED_EXPONENTS, swizzled_bytes(served, rank)))
    return entries


def _unused_segments(served: Served, rank: ModelSpec, slots: tuple[int, ...]) -> Entry:
    unused = unused_bytes(
        rank,
        _stored(served),
        slots=slots,
        in_use=not _reads_free(served),
        expandable=served.run.expandable_segments,
    )
    return Entry(UNUSED_SEGMENTS, unused)


def swizzled_bytes(served: Served, rank: ModelSpec) -> int:
    """What swizzled exponents of experts take beyond, or beside, those of the checkpoint.

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
    """The dtypes in which weights are stored.

    Biases of experts in mxfp4 are fp32 for Triton's kernels (0.11.0 quantization/mxfp4.py).
    Files of 16 bit become nf4 with quantised scales. Since the releases after 0.8.5 these scales
    are expanded to fp32 as they are loaded, and experts are in 4 bit, too.
    Kind: exact. Source: vLLM 0.8.5, and 0.27.1 model_loader/bitsandbytes_loader.py:433
    quantize_4bit, :579 `_dequantize_dq`; quantization/bitsandbytes.py `BitsAndBytesMoEMethod`.
    """
    if multiplies_by_triton(served):
        return replace(served.dtypes, wide_expert_biases=True)
    if served.dtypes.quant not in FOUR_BIT_BNB:
        return served.dtypes
    is_older = served.libraries.older("vllm", "0.9")
    quant = served.dtypes.quant
    if quant in LOADED_AS_NF4:
        quant = "nf4-dq" if is_older else "nf4"
    return replace(served.dtypes, quant=quant, quantises_experts=not is_older)


def _slots(served: Served, part: ModelSpec) -> tuple[int, ...]:
    """Bytes of the tensors of all slots for adapters on one GPU that has `part` of the model."""
    number, rank = lora_slots(served)
    if not number:
        return ()
    libraries, model = served.libraries, served.model
    tables = int(libraries.reaches("vllm", TABLES_WITH_SLOTS.get(model.model_type)))
    before = TWICE_IN_SLOTS.get(model.model_type)
    if tables and model.head_tied and before and libraries.older("vllm", before):
        tables += 1
    ranks = served.count(RANKS) or 1
    return tuple(number * each for each in slot_tensors(part, ranks, rank, tables=tables))


def _counts_context(served: Served) -> bool:
    """Whether all memory in use on the GPU counts, not only what came since the process began.

    It did before 0.3.1, in 0.6.4, and again in the first releases of the V1 engine, which needs
    compute capability 8.0. Between, what was free once CUDA had begun is the start.
    Source: vLLM 0.3.0 worker/worker.py:122, 0.3.1 :89 `init_gpu_memory`, 0.6.3 :228, 0.6.4
    `total_allocated_bytes`, `memory_profiling` of 0.6.5; 0.8.5 v1/worker/gpu_worker.py:200-207.
    """
    libraries = served.libraries
    first_of_v1 = not libraries.older("vllm", "0.8") and libraries.older("vllm", "0.9.2")
    is_first = libraries.older("vllm", "0.3.1") and not _counts_tensors(served)
    is_between = not libraries.older("vllm", "0.6.4") and libraries.older("vllm", "0.6.5")
    return is_first or is_between or (first_of_v1 and capability(served) >= 8.0)


def _counts_tensors(served: Served) -> bool:
    """Whether only torch's tensors count, and neither the CUDA context nor NCCL: before 0.2.5.

    Source: github.com/vllm-project/vllm/pull/2031, `max_memory_allocated` before it.
    """
    return served.libraries.older("vllm", "0.2.5")


def _reads_free(served: Served) -> bool:
    """Whether free memory is read: 0.2.5 to 0.6.3, and since 0.27.

    Then whole segments count, and what is allocated between loading and the profile, which other
    releases take for used before: they add what loading takes to the peak of the profile alone.
    Source: vLLM 0.2.5 worker/worker.py:91, 0.6.3 worker/worker.py:228; 0.27.0 utils/mem_utils.py
    `total_consumed`, where 0.26.0 has `allocated_bytes.all.peak`.
    """
    libraries = served.libraries
    is_older = libraries.older("vllm", "0.6.4") and not _counts_tensors(served)
    return is_older or not libraries.older("vllm", "0.27")


def _connected_bytes(served: Served) -> int:
    """All-reduce buffers that exist before the profile starts, and so are outside of its share.

    Since 0.11 ranks add up a tensor before what is in use is read. That connects them over PCIe;
    over NVLink larger tensors take other algorithms, which NCCL connects when it first needs them.
    Kind: estimate. Source: vLLM 0.11.0 v1/worker/gpu_worker.py:167, 0.10.1 :174; a log of 0.18.1 on
    four RTX 3090 has no room for them, those of 0.11.0 on two H100 have 0.41 GiB.
    """
    if served.libraries.older("vllm", "0.11") or is_joined(served.gpu):
        return 0
    return communicator_bytes(served.count(RANKS) or 1, served.gpu)


def _misses_slots(served: Served) -> bool:
    """Whether the profile misses slots for adapters: from 0.6.5 to 0.7.3.

    Weights were measured before the slots were made, and the peak counted from after.
    Source: github.com/vllm-project/vllm/issues/14450, mended by pull request 14469 of 2025-03-08;
    `memory_profiling` is of 0.6.5.
    """
    libraries = served.libraries
    return not libraries.older("vllm", "0.6.5") and libraries.older("vllm", "0.8")


def _kept_bytes(served: Served, stage: Stage) -> int:
    """Results of all-reduces that NCCL keeps until the profile pass ends: in 0.2.5.

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
    """What stays allocated beside weights and pool."""
    ranks, stages = served.count(RANKS) or 1, served.count(STAGES) or 1
    slots = sum(_slots(served, stage.part))
    entries = [Entry(LORA_SLOTS, slots)] if slots else []
    if not _counts_tensors(served):
        entries.append(Entry(KERNELS, KERNELS_BYTES))
    if is_unified(served.gpu):
        entries.append(Entry(HOST, STARTING_HOST_BYTES))
    if ranks * stages > 1 and not _counts_tensors(served):
        buffers = communicator_bytes(stages, served.gpu) + communicator_bytes(ranks, served.gpu)
        buffers -= _connected_bytes(served)
        entries += [Entry(COMMUNICATOR, buffers)] if buffers else []
    if ranks > 1 and (kept_bytes := _kept_bytes(served, stage)):
        entries.append(Entry(KEPT, kept_bytes))
    drafts = asked_drafts(served)
    if drafts and drafts.passes and _reads_free(served):
        states = max_num_batched_tokens(served) * served.model.hidden_size
        entries.append(Entry(DRAFT_BUFFERS, 2 * states * served.dtypes.compute_bytes))
    received = received_bytes(stage, max_num_batched_tokens(served), served.dtypes.compute_bytes)
    entries += [Entry(RECEIVED, received)] if received else []
    is_profiled = _profiles_graphs(served) and captures_steps(served)
    if has_states(served) and is_profiled and capability(served) >= 10.0:
        entries.append(Entry(STATE_KERNELS, STATES_GRAPH_BYTES))
    if has_newer_runner(served) and stage.is_last and _reads_free(served):
        logits = max_num_seqs(served) * served.model.vocab_size
        entries.append(Entry(COUNTS, logits * COUNTED_LOGIT_BITS // 8))
    return entries


def _profiled(served: Served, rank: ModelSpec) -> tuple[list[Entry], list[Entry]]:
    """The largest part of the profile pass: a layer's forward, the sampler, or a kernel's trial.

    What is free again after it stands apart from what stays.
    """
    tokens = max_num_batched_tokens(served)
    element_bytes = served.dtypes.compute_bytes
    copies = served.count(COPIES) or 1
    keeps, by_cutlass = experts_are_kept(served), multiplies_by_cutlass(served)
    layer = layer_entry(
        rank,
        tokens=tokens,
        element_bytes=element_bytes,
        copies=copies,
        held_states=_held_states(served),
        keeps_experts=keeps or by_cutlass,
    )
    sampler = _sampler(served, rank)
    unused = _unused_of_pass(served, rank, max(layer.num_bytes, _bytes_of(sampler)))
    workspace = Entry(allocator.WORKSPACE, allocator.workspace_bytes(served.gpu, training=False))
    experts = experts_bytes(rank, tokens=copies * tokens, element_bytes=element_bytes)
    buffers = buffer_entries(served, rank, tokens=tokens, experts_bytes=experts)
    if by_cutlass:
        experts = cutlass_bytes(rank, tokens=copies * tokens, element_bytes=element_bytes)
        of_experts = cutlass_entry(rank, tokens=copies * tokens, element_bytes=element_bytes)
        layer = max(layer, of_experts, key=lambda entry: entry.num_bytes)
    if not buffers and (keeps or by_cutlass) and experts:
        buffers = [Entry(WORKSPACE, experts)]
    forward = [layer]
    if rank.chooses_keys:  # experts have their part of what is kept
        forward = [
            attention_entry(rank, tokens=tokens, element_bytes=element_bytes),
            Entry(SCORES, SCORES_BYTES),
        ]
    if served.dtypes.quant in FOUR_BIT_BNB:
        forward.append(Entry(EXPANDED, expanded_bytes(rank, element_bytes)))
    held, running, always = tower_entries(served)
    larger = max(forward, sampler, *trial_entries(served, rank), key=_bytes_of)
    kept = always if _reads_free(served) else ()
    staying = [*kept, workspace, *held_table(served, rank)]
    # the tower runs first, before experts allocate what they keep
    if _bytes_of(running) > _bytes_of([*larger, *held, *buffers]):
        return [*running, *unused], staying
    return [*larger, *unused], [*held, *buffers, *staying]


def _sampler(served: Served, rank: ModelSpec) -> list[Entry]:
    """What the profile samples with; nothing where the stage has no head.

    Kind, source: as of `sampler_entries` and `mask_buffer_entries`.
    """
    if rank.head is None:
        return []
    tokens, vocab_size = max_num_batched_tokens(served), served.model.vocab_size
    sequences = min(max_num_seqs(served), tokens)
    entries = sampler_entries(
        rank,
        vocab_size=vocab_size,
        tokens=tokens,
        sequences=sequences,
        logit_bytes=_logit_bytes(served),
        element_bytes=served.dtypes.compute_bytes,
    )
    if has_newer_runner(served) or served.libraries.older("vllm", MASKED_SINCE):
        return [*entries]
    processors = served.gpu.num_multiprocessors
    buffer = mask_buffer_entries(vocab_size=vocab_size, sequences=sequences, processors=processors)
    return [*entries, *buffer]


def multiplies_by_cutlass(served: Served) -> bool:
    """Whether vLLM's own kernels multiply experts in NVFP4, which `moe_backend=cutlass` asks for.

    Kind: exact. Source: vLLM 0.20.0 fused_moe/oracle/nvfp4.py `map_nvfp4_backend`.
    """
    asked = dict(served.run.serving_options).get("moe_backend")
    return asked == "cutlass" and served.dtypes.quant == "nvfp4" and served.model.has_experts


def _held_states(served: Served) -> int:
    """Hidden states that the frames of eager code hold while an MLP adds up its result.

    The model's loop holds what it gave the layer, and an all-reduce returns another tensor. Where
    the MLP drops its product before it is narrowed, neither is at the peak.
    Kind: exact. Source: vLLM 0.22.0 models/qwen2.py `Qwen2MLP`, `Qwen2Model.forward`, and
    models/llama.py `LlamaMLP`; pynccl.py:166; 77,000 bytes per token in two logs of Qwen3-8B.
    """
    is_compiled = not (served.options["enforce_eager"] or served.libraries.older("vllm", "0.8"))
    if is_compiled or served.model.model_type in DROPS_PRODUCT:
        return 0
    return 1 + ((served.count(RANKS) or 1) > 1)


def _unused_of_pass(served: Served, rank: ModelSpec, alive_bytes: int) -> list[Entry]:
    """Unused memory of the segments of the profile pass, from 0.3.1 to 0.6.3.

    Kind, source: as of `reserved_bytes`.
    """
    libraries = served.libraries
    if libraries.older("vllm", "0.3.1") or not libraries.older("vllm", "0.6.4"):
        return []
    if served.run.expandable_segments:  # whose blocks lie side by side
        return []
    tokens, width = max_num_batched_tokens(served), served.dtypes.compute_bytes
    reserved = reserved_bytes(
        rank,
        vocab_size=served.model.vocab_size,
        tokens=tokens,
        sequences=min(max_num_seqs(served), tokens),
        element_bytes=width,
        sorted_bytes=width if _sorts_narrow(served) else 4,
    )
    return [Entry(UNUSED_PASS, reserved - alive_bytes)] if reserved > alive_bytes else []


def _sorts_narrow(served: Served) -> bool:
    """Whether the sampler sorts logits in their own dtype: before 0.5.5, which widens them first.

    Source: vLLM 0.5.4 and 0.5.5 model_executor/layers/sampler.py.
    """
    return served.libraries.older("vllm", "0.5.5")


def _bytes_of(entries: list[Entry]) -> int:
    return sum(entry.num_bytes for entry in entries)


def experts_are_kept(served: Served) -> bool:
    """Whether the workspace of experts outlives the pass: since `KEPT_EXPERTS_SINCE`.

    FlashInfer's kernels since 0.17 (compute capability 10; 12 but for `WITHOUT_LATER_KERNELS`) and
    Triton's of mxfp4 have buffers of their own. Kind: exact for the defaults.
    Source: vLLM 0.14.0 to 0.33.0 fused_moe/modular_kernel.py `_allocate_buffers`; fused_moe/oracle
    `_get_priority_backends` of each storage.
    """
    since = KEPT_EXPERTS_SINCE.get(served.run.quant or "none")
    if not served.libraries.reaches("vllm", since) or multiplies_by_triton(served):
        return False
    last = 11.0 if served.run.quant in WITHOUT_LATER_KERNELS else math.inf
    is_own = 10.0 <= capability(served) < last and not served.libraries.older("vllm", "0.17")
    return not is_own


def _logit_bytes(served: Served) -> int:
    """Bytes per logit while the profile pass samples.

    Source: vLLM 0.10.1 and 0.16.0 v1/sample/ops/topk_topp_sampler.py `TopKTopPSampler`, 0.17.0
    `apply_top_k_top_p_triton`; `NEWER_LOGIT_BYTES`.
    """
    libraries = served.libraries
    if has_newer_runner(served):
        return libraries.value_of("vllm", NEWER_LOGIT_BYTES)
    if _sorts_narrow(served):
        return NARROW_SORTED_LOGIT_BYTES
    # FlashInfer's sampler masks, too, where it is installed
    if asked_drafts(served):
        return libraries.value_of("vllm", DRAFTED_LOGIT_BYTES)
    sorts = libraries.older("vllm", MASKED_SINCE) and libraries.older("flashinfer", "0.0.1")
    return SORTED_LOGIT_BYTES if sorts else MASKED_LOGIT_BYTES


def expanded_bytes(rank: ModelSpec, element_bytes: int) -> int:
    """Bytes of a layer's largest matrix in 16 bit; all experts of a layer count as one.

    Kind: exact. Source: `EXPANDED`.
    """
    sizes = []
    for layer, _ in rank.layers():
        sizes += [linear.num_weights // linear.count for linear in layer.linears]
        if layer.moe is not None:
            sizes.append(sum(linear.num_weights for linear in layer.moe.expert.linears))
    return max(sizes) * element_bytes


def graph_bytes(served: Served, rank: ModelSpec) -> int:
    """CUDA graphs: for each size of a batch, one for each piece between two attentions.

    They share a pool that holds one layer's forward over the largest batch. Steps that only decode
    have full graphs, too.
    Kind: estimate. Source: vLLM 0.33.0 config/vllm.py:2452-2590; `GRAPH_BYTES`.
    """
    if served.options["enforce_eager"]:
        return 0
    libraries = served.libraries
    running = max_num_seqs(served) * (1 + drafted_tokens(served))  # tokens of a step
    most = served.count(CAPTURED) or min(2 * running, MOST_CAPTURED_TOKENS)
    most = min(most, max_num_batched_tokens(served))
    step = 8 if libraries.older("vllm", "0.15") else 16
    piecewise_sizes = captured_sizes(most, step_beyond=step)
    if served.options[MODE] == "interactivity":  # each size up to 32; config/vllm.py:2573
        fine = min(most, 32)
        piecewise_sizes += fine - captured_sizes(fine)
    full_graphs = captured_sizes(min(most, running), step_beyond=step)
    if lora_slots(served)[0] and not libraries.older("vllm", "0.15"):
        # with adapters and without; v1/cudagraph_dispatcher.py:110 _get_lora_cases
        piecewise_sizes *= 2
        full_graphs *= 2
    pieces = rank.num_hidden_layers + 1
    layer = layer_entry(rank, tokens=most, element_bytes=served.dtypes.compute_bytes)
    shared: int = layer.num_bytes + pieces * piecewise_sizes * GRAPH_BYTES
    if not captures_steps(served):
        return shared
    return shared + has_states(served) * STATES_GRAPH_BYTES + full_graphs * WHOLE_GRAPH_BYTES


def captures_steps(served: Served) -> bool:
    """Whether whole steps that only decode are captured, beside the pieces between attentions.

    FlashInfer's own kernels have no graph of a step that verifies drafts: logs that say so reserve
    0.08 to 0.13 GiB for four sizes of Qwen3.6-27B.
    Kind: exact. Source: vLLM 0.27.0 config/compilation.py:1433,
    v1/attention/backends/flashinfer.py:895 `get_cudagraph_support`, the same in 0.11.0.
    """
    if served.libraries.older("vllm", WHOLE_GRAPHS_SINCE):
        return False
    return not (drafted_tokens(served) and reads_by_flashinfer(served))


def captured_sizes(most: int, *, step_beyond: int = 16) -> int:
    """How many sizes up to `most` tokens are captured. Kind: exact.

    Source: vLLM 0.33.0 `VllmConfig._set_cudagraph_sizes`, config/vllm.py:2579-2590.
    """
    sizes = [size for size in (1, 2, 4) if size <= most]
    sizes += range(8, min(most + 1, 256), 8)
    sizes += range(256, most + 1, step_beyond)
    return len(sizes)


def pool_blocks(served: Served, rank: ModelSpec) -> Blocks:
    """How the pool of one rank is divided into blocks."""
    drafted = drafted_tokens(served)
    whole_model = cached_layers(as_cached(served, _rank_of(served, served.model)), drafted)
    return blocks(
        whole_model,
        block_size=block_size_of(served),
        element_bytes=cache_bytes(served),
        tokens_in_flight=_steps_in_flight(served) * max_num_batched_tokens(served),
        part=cached_layers(as_cached(served, rank), drafted),
        state_bytes=served.dtypes.compute_bytes,
        states_kept=(2 if keeps_prefixes(served) else 1) + drafted,
    )


def _steps_in_flight(served: Served) -> int:
    """How many steps a sliding layer keeps keys of: one before `STEPS_COUNTED_SINCE`.

    Asynchronous scheduling has one more in flight than there are stages; the older runner has it
    without a pipeline only.
    Kind: exact. Source: vLLM 0.26.0 `VllmConfig.max_in_flight_tokens`, config/vllm.py:525; 0.25.0
    `SlidingWindowSpec.max_memory_usage_bytes`, v1/kv_cache_interface.py:573.
    """
    if served.libraries.older("vllm", STEPS_COUNTED_SINCE):
        return 1
    stages = served.count(STAGES) or 1
    return stages + (plans_ahead(served) and (stages == 1 or has_newer_runner(served)))


def _fault(served: Served, pool: Pool, budget: int, weights_bytes: int) -> str:
    """Why vLLM does not start, however short its sequences are; empty where it does.

    Source: vLLM 0.33.0 `_check_enough_kv_cache_memory`, v1/core/kv_cache_planning.py:50;
    `request_memory`, v1/worker/utils.py:761.
    """
    total, share = served.gpu.memory_bytes, utilization(served)
    free = total - allocator.idle_context_bytes(served.gpu) - _connected_bytes(served)
    if fault := oversized(served, weights_bytes, free):
        return fault
    request = f"gpu_memory_utilization {share:g} of {format_bytes(total)} is {format_bytes(budget)}"
    if served.count(POOL_BYTES) or served.count(POOL_BLOCKS):
        request = f"a pool of {format_bytes(pool.num_bytes)} and all else is {format_bytes(budget)}"
    if free < budget:
        return f"{request}, more than the {format_bytes(free)} that are free; give a smaller one"
    if pool.num_bytes < pool.block_bytes:
        return (
            f"{request}, and weights, profile pass and graphs take "
            f"{format_bytes(budget - pool.num_bytes)} of it: nothing is left for keys and values; "
            "give a larger share, fewer max_num_seqs or max_num_batched_tokens, more GPUs, or a "
            "smaller model"
        )
    return ""
