"""SGLang: a pool of tokens that takes what a static share of the GPU leaves beside the weights.

Activations and CUDA graphs have the rest; how large it is, is a rule of the card and the chunk.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from whichlora.errors import ConfigError
from whichlora.memory import allocator
from whichlora.memory.entries import Entry, Fact
from whichlora.parallel.communicators import communicator_bytes
from whichlora.serving.base import Engine, Pool, Served, Start, Stepping
from whichlora.serving.block_groups import CachedLayers, cached_layers
from whichlora.serving.command import HEAD_NODE, NODES, nodes_note, shell_command
from whichlora.serving.drafts import (
    ACCEPTED,
    NOTE,
    UNTIMED,
    acceptance_option,
    accepted_tokens,
    check_drafts,
)
from whichlora.serving.expert_ranks import ExpertRanks, check_experts
from whichlora.serving.kernel_rates import EAGER_LAUNCH_S, FIRST_MARLIN_ROWS, TOKENIZED_S
from whichlora.serving.known_models import check_known, known_note, release_note
from whichlora.serving.other_flags import (
    ADAPTERS,
    ALL_TO_ALL,
    BESIDE_ENCODERS,
    CAPTURED_SIZES,
    DENSE_RANKS,
    HOST_WEIGHTS,
    OF_A_SERVER,
    OF_SGLANG,
    REDUNDANT_EXPERTS,
    REPLICAS,
)
from whichlora.serving.product_dtypes import (
    FLOAT16,
    NARROW,
    check_card_dtype,
    check_quant_dtype,
)
from whichlora.serving.profile_pass import layer_entry
from whichlora.serving.quant_cards import (
    AWQ_CAPABILITY,
    QuantCards,
    check_named_cache,
    check_quant_card,
)
from whichlora.serving.rank import (
    between_latents,
    beyond_positions,
    check_model,
    check_ranks,
    derived_context,
    held_entries,
    longest_context,
    oversized,
    positions_note,
    rank_model,
    weights_of,
    with_aligned_experts,
)
from whichlora.serving.segments import UNUSED_SEGMENTS, unused_bytes
from whichlora.serving.sglang_bitsandbytes import check as check_bitsandbytes
from whichlora.serving.sglang_bitsandbytes import flags as bitsandbytes_flags
from whichlora.serving.sglang_bitsandbytes import stored_dtypes
from whichlora.serving.sglang_drafts import (
    ALGORITHMS,
    CHOICES,
    DRAFTER,
    DRAFTS,
    QUERIES,
    STEPS,
    asked_drafts,
    check_choices,
    counts_drafts,
    drafter_of,
    has_drafts,
    pooled,
)
from whichlora.serving.sglang_drafts import held_entries as draft_weights
from whichlora.serving.sglang_log import LOG
from whichlora.serving.sglang_share import (
    COPIES,
    DIVIDES_COPIES,
    OLDER_COPIES,
    RANKS,
    STAGES,
    WHOLE_EXPERTS,
    chunked_prefill_size,
    copies,
    decode_graphs,
    mem_fraction_static,
    prompt_tokens,
)
from whichlora.serving.sglang_sparse import (
    PAGE_SIZE,
    as_cached,
    indexer_kernels,
    is_narrow,
    latent_share,
)
from whichlora.serving.sglang_sparse import check as check_sparse
from whichlora.serving.stages import check_stages, stage_notes, stages_of
from whichlora.serving.unified_memory import is_unified
from whichlora.serving.widths import check_widths
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import is_compressed, names_fp8_cache, stored_quant
from whichlora.spec.layer import Attention
from whichlora.spec.numeric import ceil_div
from whichlora.spec.options import Option
from whichlora.spec.run import ENGINE_QUANTS
from whichlora.timing.model import LAUNCH_S
from whichlora.units import MiB, format_bytes

FP8 = ("fp8_e5m2", "fp8_e4m3")
SLIDING_SHARE = "swa_full_tokens_ratio"  # fields/schedule.py:150
MOST_REQUESTS, LEAST_REQUESTS = 4096, 2048  # mem_cache/kv_cache_configurator.py:3123

# What the host does between two steps: the rest is done while the GPU computes. Kind: estimate.
HOST_S, SEQUENCE_S = 0.4e-3, 5e-6
# Of each answer, for which room is kept before a request begins; of a longer one no more.
# Kind: exact. Source: srt/environ.py:650 SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION.
RESERVED_TOKENS = 4096

FIRST_START = "0.1.17"  # of `benchmarks/serving_starts.csv`
COPIES_SINCE = "0.5.22"  # whose help has a flag for groups; srt/arg_groups/fields/parallel.py
GRAPH_FLAGS_SINCE = "0.5.16"  # whose help has a flag for graphs of each phase
MOST_TOKENS = "max_total_tokens"
UNCOUNTED = "what drafts takes memory beside the pool, which this release does not leave for it"
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"
DRAFTED_REQUESTS = 48  # that run at once beside drafts; srt/arg_groups/speculative_hook.py:1090

# The oldest cards that have kernels for quantised weights. Source: `get_min_capability` of SGLang
# 0.4.6 to 0.5.23 srt/layers/quantization/awq.py, fp8.py, mxfp4.py, modelopt_quant.py and of
# compressed_tensors/schemes/compressed_tensors_wNa16.py, compressed_tensors_w4a16_nvfp4.py.
# llm-compressor's nvfp4 has no fallback (compressed_tensors_w4a4_nvfp4.py, first read in 0.5.7).
# Fp8 is multiplied by Marlin's kernels below 8.9: vLLM's before 0.4, then only where
# SGLANG_FORCE_FP8_MARLIN asks, unasked since 0.5.1, and blocks, too. For experts there are none:
# Triton's do not compile there. Source: SGLang 0.4.0.post1 fp8.py:141, 0.4.9.post2 :209, 0.5.1
# fp8_utils.py:809, 0.5.23 fp8.py:516; issues 5871, 12887 and 38291, pull/8990.
QUANT_CARDS = QuantCards(
    weights={
        "awq-int4": (("0", AWQ_CAPABILITY),),
        "fp8": (("0", 8.0), ("0.4", 8.9), ("0.5.1", 8.0)),
        "w4a16": (("0", 8.0),),
        "mxfp4": (("0", 8.0),),
        "nvfp4": (("0.4.6", 10.0), ("0.5.13", 8.0)),
        "nvfp4a16": (("0.5.23", 8.0),),
        "mxfp8": (("0.5.13", 10.0),),
    },
    compressed={"fp8": (("0", 8.0),), "nvfp4": (("0.5.7", 10.0),)},
    blocks={"fp8": (("0", 8.9), ("0.5.1", 8.0))},
    experts={"fp8": (("0", 8.9),)},
)
# Whatever is asked for, cards without bf16 compute in float16. Source: SGLang 0.5.23
# srt/model_executor/model_runner_components/load_model_utils.py:80, 0.4.6 model_runner.py.
WITHOUT_BF16 = (FLOAT16,)
# Dtypes of products with quantised weights. Source: `get_supported_act_dtypes` of SGLang 0.5.23
# srt/layers/quantization/awq/awq.py, gptq/gptq.py, fp8.py and mxfp4.py, 0.4.6 gptq.py.
QUANT_DTYPES = dict.fromkeys(
    ("awq-int4", "gptq-int4", "gptq-int8", "fp8", "mxfp4", "nvfp4", "nvfp4a16"), (("0", NARROW),)
)

# What a host has of the memory that it shares with the GPU, before weights are loaded. Kind:
# estimate. Source: three public logs of a GB10 of 121.69 GiB, with 112.86, 111.97 and 111.73 free
# (Gemma 4 E4B, Qwen3.8 Flash and 27B, August and September 2026); median.
SYSTEM_BYTES = 9950 * MiB

RECURRENT_STATES = Fact(
    part="kv_cache",
    what="states of recurrent layers",
    shape="[max_mamba_cache_size + 1, convolution and recurrent elements of all layers]",
    dtype="16 bit; mamba_ssm_dtype",
    why="a pool of their own, which mamba_full_memory_ratio divides from that of keys and values",
    source="SGLang 0.5.23 srt/mem_cache/kv_cache_configurator.py:3229 _handle_max_mamba_cache",
)
ABSORBED = Fact(
    part="weights",
    what="matrices between heads and latents",
    shape="[heads, kv_lora_rank, qk_nope_head_dim + v_head_dim]",
    dtype="compute_bytes",
    count="1 for each layer",
    why="decoding multiplies queries, and what attention returns, by copies of them",
    source="SGLang 0.5.23 srt/models/deepseek_common/deepseek_weight_loader.py:762",
)
KV_POOL = Fact(
    part="kv_cache",
    what="pool of tokens",
    shape="[tokens, keys and values of all layers]",
    dtype="kv_cache_dtype",
    why="takes all that weights leave of the static share",
    source="SGLang 0.5.23 srt/mem_cache/kv_cache_configurator.py:2990 _profile_available_bytes",
)


def token_bytes(served: Served, rank: ModelSpec) -> int:
    """Bytes of keys and values per token, in all layers; sliding layers keep a part of the tokens.

    Kind: exact. Source: SGLang 0.5.23 srt/model_executor/pool_configurator.py:340, :786.
    """
    width = _cache_bytes(served)
    kinds = cached_layers(as_cached(served, rank.with_attentions(_with_own_keys)))
    is_mixed = len({kind.window is None for kind in kinds}) > 1
    sliding = served.options[SLIDING_SHARE]
    assert isinstance(sliding, float)
    shares = {True: sliding if is_mixed else 1.0, False: 1.0}
    return int(
        sum(
            shares[kind.window is not None] * kind.num_layers * kind.token_bytes(width)
            for kind in kinds
        )
    )


def _with_own_keys(attention: Attention) -> Attention:
    """Layers that borrow keys of another one have room for their own, too, which stays empty.

    Kind: exact. Source: SGLang 0.5.23 srt/configs/model_config.py `get_hybrid_layer_ids`, which
    lists all layers by their kind; logs of Gemma 4 E4B have 71,680 bytes for a token of its 35
    sliding layers (0.5.13), and 86,022 for one of all (0.5.20; ours 86,016).
    """
    if attention.projection != "borrowed":
        return attention
    return replace(attention, cache_elements=attention.k_width + attention.v_width)


def _reads_named_cache(served: Served) -> bool:
    config = served.model.config
    is_read = served.run.quant == stored_quant(config) and not is_compressed(config)
    return is_read and not served.libraries.older("sglang", "0.5.3")


def _names_fp8_cache(served: Served) -> bool:
    return _reads_named_cache(served) and names_fp8_cache(served.model.config)


def _cache_bytes(served: Served) -> int:
    """Bytes of one element of keys and values; "auto" is what a ModelOpt checkpoint names.

    Source: SGLang 0.5.3 srt/model_executor/model_runner.py:1399, 0.5.23
    srt/mem_cache/kv_cache_dtype.py:51.
    """
    dtype = served.options["kv_cache_dtype"]
    is_fp8 = dtype in FP8 or (dtype == "auto" and _names_fp8_cache(served))
    if served.model.chooses_keys:
        is_fp8 = is_narrow(served)
    return 1 if is_fp8 else served.dtypes.compute_bytes


def page_size(served: Served) -> int:
    """Tokens of a page; models with sparse attention have a fixed one."""
    return PAGE_SIZE if served.model.chooses_keys else served.count("page_size") or 1


def expert_ranks(served: Served) -> ExpertRanks:
    """How experts are divided: whole ones over `ep_size` groups of GPUs, their widths within each.

    With data parallel attention, groups gather the tokens of all before every MLP and the head,
    which all GPUs divide.
    Kind: exact. Source: SGLang 0.5.23 srt/models/deepseek_v2.py:3296, srt/layers/communicator.py,
    vocab_parallel_embedding.py:529.
    """
    ep_size, groups = served.count(WHOLE_EXPERTS) or 1, copies(served)
    return ExpertRanks(
        copies=groups,
        whole=ep_size,
        width=(served.count(RANKS) or 1) // ep_size,
        gathers_all=groups > 1,
    )


def _rank_of(served: Served, part: ModelSpec) -> ModelSpec:
    """What one GPU has of `part`."""
    return rank_model(part, _attention_ranks(served), expert_ranks(served))


def _attention_ranks(served: Served) -> int:
    """GPUs that share the matrices of attention."""
    return (served.count(RANKS) or 1) // copies(served)


def free_bytes(served: Served) -> int:
    """Memory that is free before weights are loaded, once the ranks are connected.

    Of a memory that the host shares, what its system and processes have is not free.

    Kind: estimate. Source: SGLang 0.5.23 srt/distributed/bootstrap.py:193; `SYSTEM_BYTES`.
    """
    host = SYSTEM_BYTES if is_unified(served.gpu) else 0
    communicator = communicator_bytes(served.count(RANKS) or 1, served.gpu)
    communicator += communicator_bytes(served.count(STAGES) or 1, served.gpu)
    return served.gpu.memory_bytes - allocator.idle_context_bytes(served.gpu) - communicator - host


def start(served: Served) -> Start:
    """What SGLang takes of one GPU: of equal ones that share the matrices, of the fullest stage.

    pool = free after loading − free before · (1 − mem_fraction_static)

    Every stage takes the least that is free on any of them, and the fewest tokens that result.
    Kind: exact for a given free memory; the context of the process is an estimate.
    Source: SGLang 0.5.23 `KVCacheConfigurator`: `_profile_available_bytes`,
    `_apply_token_constraints`; logs of 0.4 and 0.5.
    """
    served = pooled(served)
    page = page_size(served)
    free_before, share = free_bytes(served), mem_fraction_static(served)
    budget = int(share * free_before)
    keeps = _keeps_prefixes(served)
    stages = stages_of(served.model, stage_layers(served))
    ranks = [_rank_of(served, stage.part) for stage in stages]
    held = [_held(served, rank) for rank in ranks]
    states = [_state_bytes(served, rank) for rank in ranks]
    room_before = budget - max(sum(entry.num_bytes for entry in entries) for entries in held)
    num_states = _num_states(served, room_before, max(states))
    drafted = _drafted_states(served, num_states)
    for entries, state in zip(held, states, strict=True):
        entries += [Entry(RECURRENT_STATES, (num_states + 1 + drafted) * state)] if state else []
    taken = [sum(entry.num_bytes for entry in entries) for entries in held]
    blocks = [token_bytes(served, rank) * page for rank in ranks]
    room, widest = budget - max(taken), max(blocks)
    most = served.count(MOST_TOKENS)
    if most is not None:
        room = min(room, most // page * widest)
    num_blocks = max(0, room // widest)
    fullest = max(range(len(ranks)), key=lambda stage: taken[stage] + num_blocks * blocks[stage])
    is_widest = blocks[fullest] == widest
    pool = Pool(
        num_bytes=room if is_widest or room < 0 else num_blocks * blocks[fullest],
        block_bytes=blocks[fullest],
        blocks_of=lambda context: ceil_div(context, page),
        shared_of=lambda tokens: tokens // page if keeps else 0,
    )
    fault = ""
    if room < widest:
        fault = oversized(served, max(map(weights_of, held)), free_before) or (
            f"mem_fraction_static {share:g} of {format_bytes(free_before)} is "
            f"{format_bytes(budget)}, and weights take {format_bytes(max(taken))}: nothing is left "
            "for keys and values; give a larger one, or a smaller model"
        )
    tokens = num_blocks * page
    return Start(
        entries=tuple(held[fullest]),
        budget_bytes=budget,
        pool=pool,
        pool_fact=KV_POOL,
        max_num_seqs=lambda context: (
            min(_max_running_requests(served, tokens, context), num_states // _states_each(served))
            if max(states)
            else _max_running_requests(served, tokens, context)
        ),
        fault=fault,
        longest_context=None if _takes_longer(served) else longest_context(served),
        beyond=beyond_positions(served, f"set {LONGER}", longest_context(served)),
        copies=copies(served),
        untimed=_untimed(served),
        stage=fullest + 1 if len(ranks) > 1 else 0,
    )


def _takes_longer(served: Served) -> bool:
    """Whether it starts, with a warning, for a context beyond the positions of a model.

    Source: SGLang srt/configs/model_config.py, 0.3.4 to 0.5.23: `LONGER` was true by default from
    0.4.4 to 0.5.0.
    """
    older = served.libraries.older
    return older("sglang", "0.3.4") or (older("sglang", "0.5.1") and not older("sglang", "0.4.4"))


def _untimed(served: Served) -> str:
    """Why steps are not predicted; empty where they are."""
    if copies(served) > 1 and (served.count(STAGES) or 1) > 1:
        return f"steps of {COPIES} beside {STAGES} are not predicted"
    drafts = asked_drafts(served)
    return UNTIMED if drafts and not accepted_tokens(served, drafts) else ""


def stage_layers(served: Served) -> tuple[int, ...]:
    """Layers of each pipeline stage; the last stages have one more where they do not divide evenly.

    Kind: exact. Source: SGLang 0.5.23 `get_pp_indices`, srt/distributed/utils.py:110.
    """
    stages = served.count(STAGES) or 1
    layers, remainder = divmod(served.model.num_hidden_layers, stages)
    return tuple(layers + (place >= stages - remainder) for place in range(stages))


def _held(served: Served, rank: ModelSpec) -> list[Entry]:
    """Weights and rotary tables that one GPU holds."""
    is_packed = served.run.quant == "mxfp4"  # layers/quantization/mxfp4.py:545, of Triton's kernels
    stored = with_aligned_experts(rank, hidden=1, width=64) if is_packed else rank
    absorbed = between_latents(rank) * served.dtypes.compute_bytes
    dtypes = stored_dtypes(served)
    entries = held_entries(served, stored, rotary_element_bytes=4, dtypes=dtypes)
    unused = unused_bytes(stored, dtypes, expandable=served.run.expandable_segments)
    entries.append(Entry(UNUSED_SEGMENTS, unused))
    entries += draft_weights(served, _attention_ranks(served))
    return [*entries, Entry(ABSORBED, absorbed)] if absorbed else entries


def _state_bytes(served: Served, rank: ModelSpec) -> int:
    """Bytes of one sequence's states in all recurrent layers: fp32, but for convolution inputs.

    Kind: exact. Source: SGLang 0.5.23 srt/configs/mamba_utils.py:47 `mamba2_state_dtype`.
    """
    return sum(kind.num_layers * _kind_bytes(served, kind) for kind in cached_layers(rank))


def _kind_bytes(served: Served, kind: CachedLayers) -> int:
    """Bytes of one sequence's state in one layer; 0 for a layer with keys."""
    dtype = str(served.options["mamba_ssm_dtype"] or kind.recurrent_dtype)
    return replace(kind, recurrent_dtype=dtype).state_bytes(served.dtypes.compute_bytes, 4)


def _states_each(served: Served) -> int:
    """States per running sequence; the radix tree may keep two more for each.

    Kind: exact for its default strategy. Source: SGLang 0.5.23
    srt/mem_cache/kv_cache_configurator.py:3062 `_calculate_mamba_ratio`.
    """
    return 1 if served.options["disable_radix_cache"] else 3


def _drafted_states(served: Served, num_states: int) -> int:
    """States of tokens that a step verifies: so many for each sequence that runs, and for padding.

    Kind: exact since 0.5.14; before, of all that may run. Source: SGLang 0.5.23
    srt/mem_cache/kv_cache_configurator.py:3319, 0.5.8
    srt/model_executor/model_runner_kv_cache_mixin.py `handle_max_mamba_cache`; a log of 0.5.17 has
    30 for 43 states and 6 tokens.
    """
    drafts = asked_drafts(served)
    if drafts is None:
        return 0
    running = (served.count("max_running_requests") or DRAFTED_REQUESTS) // copies(served)
    if counts_drafts(served):
        return drafts.queries * (min(max(1, running), num_states // _states_each(served)) + 1)
    return drafts.queries * running


def _num_states(served: Served, room: int, state_bytes: int) -> int:
    """How many sequences have a state; one more state is padding.

    Kind: exact. Source: SGLang 0.5.23 srt/mem_cache/kv_cache_configurator.py:3229
    `_handle_max_mamba_cache`.
    """
    if not state_bytes:
        return 0
    stated = served.count("max_mamba_cache_size")
    if stated is None and served.options["disable_radix_cache"]:
        stated = served.count("max_running_requests")
    if stated is not None:
        return stated
    ratio = served.options["mamba_full_memory_ratio"]
    assert isinstance(ratio, float)
    of_states, drafts = int(room * ratio / (1 + ratio)), asked_drafts(served)
    if drafts and counts_drafts(served):  # those of drafts are among them
        of_states -= state_bytes * (1 + drafts.queries)
        return max(0, int(of_states // (state_bytes * (1 + drafts.queries / _states_each(served)))))
    if drafts:
        of_states = int((room - _drafted_states(served, 0) * state_bytes) * ratio / (1 + ratio))
    return max(0, of_states // state_bytes - 1)


def _keeps_prefixes(served: Served) -> bool:
    """Whether the radix tree stores a common prefix once; sliding layers do not share it.

    Kind: lower bound where layers slide. Source: SGLang 0.5.23 srt/mem_cache/radix_cache.py.
    """
    slides = any(kind.window for kind in cached_layers(served.model))
    return not (slides or served.options["disable_radix_cache"])


def _max_running_requests(served: Served, tokens: int, context: int) -> int:
    """Source: SGLang 0.5.23 srt/mem_cache/kv_cache_configurator.py:3119 resolve_max_num_reqs."""
    by_context = int(tokens / context * 512)
    usual = max(min(by_context, MOST_REQUESTS), LEAST_REQUESTS)
    stated = served.count("max_running_requests")
    if stated is None and served.options[DRAFTS]:
        stated = DRAFTED_REQUESTS
    return min(usual if stated is None else max(1, stated // copies(served)), tokens // 2)


def stepping(served: Served) -> Stepping:
    """Prompts first, in chunks and alone; the host prepares a step while the GPU runs the last one.

    Kind: exact; `HOST_S` and `EAGER_LAUNCH_S` are estimates, the latter of vLLM's host. Source:
    SGLang 0.5.23 srt/managers/scheduler.py `get_next_batch_to_run`, `event_loop_overlap`; 0.4.6
    layers/quantization/gptq.py, which takes vLLM's kernel for experts.
    """
    is_eager, drafts = bool(served.options["disable_cuda_graph"]), asked_drafts(served)
    return Stepping(
        ranks=_attention_ranks(served),
        experts=expert_ranks(served),
        elsewhere=0.0,  # srt/layers/moe/moe_runner/triton_utils/fused_moe.py:144 filter_expert
        caches_prompts=not served.options["disable_radix_cache"],
        step_s=HOST_S,
        sequence_s=SEQUENCE_S,
        max_step_tokens=prompt_tokens(served),
        mixes=False,
        captured_tokens=0 if is_eager else decode_graphs(served),
        launch_s=EAGER_LAUNCH_S if is_eager else LAUNCH_S,
        indexer_kernels=indexer_kernels(served),
        cache_bytes=_cache_bytes(served) * latent_share(served),
        state_bytes=partial(_kind_bytes, served),
        reserved_tokens=RESERVED_TOKENS,
        tokenized_s=TOKENIZED_S,
        expert_rows=FIRST_MARLIN_ROWS if served.libraries.older("sglang", "0.4.7") else None,
        stage_layers=stage_layers(served) if (served.count(STAGES) or 1) > 1 else (),
        drafts=drafts,
        accepted=accepted_tokens(served, drafts) or 1.0,
    )


def check(served: Served) -> None:
    """Refuse what SGLang cannot serve, and what is not predicted of it.

    Raises:
        ConfigError: one line.
    """
    check_model(served, keeps_states=not served.libraries.older("sglang", "0.5.3"))
    check_known(served)
    check_quant_card(served, QUANT_CARDS)
    check_card_dtype(served, WITHOUT_BF16)
    check_quant_dtype(served, QUANT_DTYPES)
    check_bitsandbytes(served, served.count(RANKS) or 1)
    if served.targets:
        raise ConfigError("serving: sglang's unmerged adapters are not predicted; use serve merged")
    if _reads_named_cache(served):
        check_named_cache(served)
    check_sparse(served)
    _check_pages(served)
    check_drafts(served, DRAFTS, asked_drafts(served), served.count(STAGES) or 1)
    check_choices(served)
    _check_experts(served)
    check_ranks(served, RANKS, STAGES, ranks=_attention_ranks(served))
    check_stages(served, STAGES)
    check_widths(
        served,
        RANKS,
        STAGES,
        ranks_of=_attention_ranks,
        experts_of=expert_ranks,
        whole=(WHOLE_EXPERTS, served.count(RANKS) or 1),
    )


def _check_pages(served: Served) -> None:
    """Refuse a page size that does not divide the prompt chunk.

    Source: SGLang 0.5.23 `check_server_args`: "chunked_prefill_size must be divisible by
    page_size", of which each group with attention of its own has its share.
    """
    chunk, page = chunked_prefill_size(served) // copies(served), page_size(served)
    if chunk % page:
        raise ConfigError(
            f"page_size: {page} does not divide a chunk of {chunk} tokens (chunked_prefill_size); "
            f"give {math.gcd(chunk, page)}, or another chunk"
        )


def _check_experts(served: Served) -> None:
    """Refuse data and expert parallelism of models without experts, and GPUs that do not divide."""
    ranks, groups, ep_size = served.count(RANKS) or 1, copies(served), served.count(WHOLE_EXPERTS)
    name = served.model.name
    if (served.count(OLDER_COPIES) or 1) > 1 and not served.options[DIVIDES_COPIES]:
        raise ConfigError(f"{OLDER_COPIES}: without {DIVIDES_COPIES} it {REPLICAS}")
    if not served.model.has_experts and (groups > 1 or (ep_size or 1) > 1):
        raise ConfigError(
            f"serving: {COPIES} and {WHOLE_EXPERTS} are predicted for models with experts, {name} "
            "has none; leave them out"
        )
    for option, number in ((COPIES, groups), (WHOLE_EXPERTS, ep_size or 1)):
        if ranks % number:
            raise ConfigError(
                f"{option}: {number} is no divisor of {RANKS} {ranks}, the number of GPUs; give one"
            )
    check_experts(served.model, expert_ranks(served))


def command(served: Served) -> str:
    """Source: SGLang 0.5.23 srt/arg_groups/fields/model.py:51, :110, exec_.py:662-670.

    Graphs of prompts and answers have a flag each since github.com/sgl-project/sglang/pull/23906;
    the one of both before it is known to releases until then.
    """
    graphs = "--disable-prefill-cuda-graph --disable-decode-cuda-graph"
    if served.libraries.older("sglang", GRAPH_FLAGS_SINCE):
        graphs = "--disable-cuda-graph"
    groups = "--attn-dp-size {}"
    if served.libraries.older("sglang", COPIES_SINCE):
        groups = "--dp-size {} --enable-dp-attention"
    flags = bitsandbytes_flags(served)
    if served.nodes > 1:
        flags += (f"--nnodes {served.nodes} --node-rank 0 --dist-init-addr {HEAD_NODE}:5000",)
    return shell_command(
        served,
        "python -m sglang.launch_server --model-path",
        context="--context-length",
        flags=flags,
        disable_cuda_graph=graphs,
        attn_dp_size=groups,
        **{ACCEPTED: ""},
    )


def notes(served: Served, start: Start) -> tuple[str, ...]:
    """What a user must know."""
    chunk = chunked_prefill_size(served)
    rank = _rank_of(served, served.model)
    free = free_bytes(served) - start.budget_bytes
    tokens = chunk or prompt_tokens(served)
    needed = layer_entry(rank, tokens=tokens, element_bytes=served.dtypes.compute_bytes).num_bytes
    lines = [
        f"{served.release}: mem_fraction_static {mem_fraction_static(served):g}, "
        f"chunked_prefill_size {chunk or -1}; activations and graphs have {format_bytes(free)} "
        "beside it"
    ]
    longest = start.pool.max_context(served.context)
    if not start.fault and longest < served.context:
        lines.append(f"it starts, and refuses sequences of more than {longest} tokens")
    if needed > free:
        lines.append(
            f"a layer over {tokens} tokens takes {format_bytes(needed)}, more than that: it can "
            "run out of memory; give a smaller mem_fraction_static"
        )
    if start.longest_context is None:
        warns = f"sglang may not start without {LONGER}"
        lines += positions_note(served, "sglang warns" if _takes_longer(served) else warns)
    lines += stage_notes(start, stage_layers(served), STAGES)
    lines += [nodes_note(served, "", "--node-rank")] if served.nodes > 1 else []
    if (drafts := asked_drafts(served)) and drafts.passes:
        lines.append(NOTE if counts_drafts(served) else UNCOUNTED)
    lines += known_note(served)
    lines += release_note(served, first_start=FIRST_START)
    if start.copies == 1 and (ranks := served.count(RANKS) or 1) > 1:
        lines.append(f"{RANKS} {ranks}: bytes are of each GPU")
    if start.copies > 1:
        lines.append(
            f"{COPIES} {start.copies}: each group has its own pool, and bytes are of each GPU; "
            "sequences and tokens are of all"
        )
    return tuple(lines)


ENGINE = Engine(
    name="sglang",
    summary="SGLang: a pool of tokens beside the weights; what does not fit waits",
    library="sglang",
    version="0.5.23",
    options=(
        Option(
            name="mem_fraction_static",
            summary="share of the free memory for weights and pool",
            default=None,
            kind=float,
            is_share=True,
            other_names=("mem_fraction",),  # as argparse takes the start of a flag
        ),
        Option(
            name=MOST_TOKENS,
            summary="tokens of the pool at most, however many would fit",
            default=None,
            since="0.2",
        ),
        Option(
            name="chunked_prefill_size",
            summary="tokens of a prompt in a step; -1: prompts are not cut",
            default=None,
            least=-1,
        ),
        Option(name="max_running_requests", summary="sequences that run at once", default=None),
        Option(name="page_size", summary="tokens of a page", default=1, since="0.4.4"),
        Option(
            name="kv_cache_dtype",
            summary="of keys and values: as the model's, or in 8 bits",
            default="auto",
            choices=("auto", "bf16", "bfloat16", *FP8),
        ),
        Option(
            name=RANKS,
            summary="GPUs that share a matrix",
            default=1,
            other_names=("tp", "tensor_parallel_size"),
        ),
        Option(
            name=STAGES,
            summary="stages that have some of the layers each",
            default=1,
            other_names=("pp", "pipeline_parallel_size"),
            since="0.4.6",
        ),
        Option(
            name=WHOLE_EXPERTS,
            summary="GPUs among which experts are divided whole",
            default=1,
            other_names=("ep", "expert_parallel_size"),
            since="0.4",
        ),
        Option(
            name=COPIES,
            summary="groups of GPUs whose attention has its own sequences",
            default=1,
        ),
        Option(
            name=OLDER_COPIES,
            summary=f"the same, with {DIVIDES_COPIES}",
            default=1,
            other_names=("dp", "data_parallel_size"),
        ),
        Option(
            name=DIVIDES_COPIES, summary=f"{OLDER_COPIES} is {COPIES}", default=False, since="0.3.6"
        ),
        Option(
            name=SLIDING_SHARE,
            summary="tokens of sliding layers over those of the others",
            default=0.8,
            since="0.4.9",
            is_share=True,
        ),
        Option(
            name="mamba_full_memory_ratio",
            summary="memory of recurrent states over that of keys and values",
            default=0.9,
            kind=float,
            since="0.5.3",
        ),
        Option(
            name="max_mamba_cache_size",
            summary="recurrent states that it keeps",
            default=None,
            since="0.5.2",
        ),
        Option(
            name="mamba_ssm_dtype",
            summary="of recurrent states; else the config's, or float32",
            default=None,
            kind=str,
            since="0.5.2",
            choices=("float32", "bfloat16", "float16"),
        ),
        Option(
            name=DRAFTS,
            summary="drafts, by a layer of the model or another one",
            default=None,
            kind=str,
            choices=ALGORITHMS,
            choices_since={"STANDALONE": "0.5.3", "NGRAM": "0.5.4"},
        ),
        Option(
            name=DRAFTER,
            summary="another model that drafts",
            default=None,
            kind=str,
            other_names=("speculative_draft_model",),
        ),
        Option(name=STEPS, summary="passes of what drafts for one step", default=None),
        Option(name=CHOICES, summary="branches of a draft", default=None),
        Option(name=QUERIES, summary="tokens of a sequence that a step verifies", default=None),
        acceptance_option(),
        Option(name="disable_radix_cache", summary="no prefix is kept", default=False),
        Option(name="disable_cuda_graph", summary="no CUDA graphs", default=False),
        Option(
            name=NODES, summary="machines, equally many GPUs on each; else the fewest", default=None
        ),
    ),
    spread_by=NODES,
    drafted_by=DRAFTS,
    has_drafts=has_drafts,
    drafter_of=drafter_of,
    drafting=(DRAFTER, STEPS, CHOICES, QUERIES, ACCEPTED),
    shared_by=RANKS,
    staged_by=STAGES,
    least_capability=7.5,  # srt/model_executor/model_runner_components/load_model_utils.py:91
    start=start,
    stored_forms=ENGINE_QUANTS,
    usual_quants=("none", "fp8", "awq-int4"),
    starts_tower=lambda run, model: True,
    stepping=stepping,
    check=check,
    command=command,
    notes=notes,
    log=LOG,
    programs=("sglang.launch_server", "sglang serve"),
    images=("lmsysorg/sglang",),
    takes_beginnings=True,
    model_flags=("model_path", "model"),
    own_context=lambda model, libraries: derived_context(model),
    elsewhere={"context_length": "context", "dtype": "precision", "quantization": "quant"},
    refused=OF_A_SERVER
    | OF_SGLANG
    | dict.fromkeys(("moe_a2a_backend", "deepep_mode"), ALL_TO_ALL)
    | dict.fromkeys(("moe_dense_tp_size", "enable_dp_lm_head", "moe_dp_size"), DENSE_RANKS)
    | dict.fromkeys(("ep_num_redundant_experts", "enable_eplb"), REDUNDANT_EXPERTS)
    | dict.fromkeys(("language_only", "encoder_urls"), BESIDE_ENCODERS)
    | dict.fromkeys(("cuda_graph_max_bs", "cuda_graph_bs"), CAPTURED_SIZES)
    | dict.fromkeys(("enable_lora", "lora_paths"), ADAPTERS)
    | {"cpu_offload_gb": HOST_WEIGHTS},
    set_aside=frozenset(("moe_a2a_backend", "deepep_mode", "cuda_graph_max_bs", "cuda_graph_bs")),
)
