"""vLLM: a pool of blocks that takes what a profile pass leaves of a share of the GPU.

Read in vLLM 0.33.0, and where a release is named in 0.6.6, 0.8.5, 0.11.0, 0.20.0 and 0.27.1.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.serving.base import Engine, Served, Start, Stepping
from whichlora.serving.command import HEAD_NODE, NODES, nodes_note, shell_command
from whichlora.serving.drafted import BY_A_DRAFTER
from whichlora.serving.drafts import (
    ACCEPTED,
    NOTE,
    acceptance_option,
    accepted_tokens,
    check_drafts,
    has_draft_layer,
)
from whichlora.serving.expert_ranks import check_experts
from whichlora.serving.kernel_rates import (
    EAGER_LAUNCH_S,
    FIRST_MARLIN_ROWS,
    SKIPPED_ELSEWHERE,
    TOKENIZED_S,
    TRITON_BLOCKS,
    UNPACKING_PRODUCTS,
    ZEROED_READS,
    CodeBlocks,
)
from whichlora.serving.known_models import check_known, known_note, release_note
from whichlora.serving.other_flags import (
    ALL_TO_ALL,
    CAPTURED_SIZES,
    CHUNKS,
    DRAFT,
    HOST_WEIGHTS,
    IMAGES,
    KEPT_STATES,
    KERNELS_OF_VLLM,
    NO_SAY,
    OF_A_SERVER,
    OF_VLLM,
    RELEASES_OF_VLLM,
    REPLICAS,
)
from whichlora.serving.product_dtypes import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NARROW,
    check_card_dtype,
    check_model_dtype,
    check_quant_dtype,
)
from whichlora.serving.quant_cards import AWQ_CAPABILITY, QuantCards, check_quant_card
from whichlora.serving.rank import check_model, check_ranks, derived_context, positions_note
from whichlora.serving.stages import check_stages, stage_notes
from whichlora.serving.vllm_caches import check as check_cache
from whichlora.serving.vllm_log import LOG
from whichlora.serving.vllm_memory import load_of_start, start, starts_of_stages
from whichlora.serving.vllm_settings import (
    AHEAD,
    CAPTURED,
    COPIES,
    DRAFTS,
    FP8_CACHES,
    LOADED_AS_NF4,
    LONGER,
    LORA_RANKS,
    METHODS,
    MODE,
    MOST_CAPTURED_TOKENS,
    PARTITION,
    POOL_BLOCKS,
    POOL_BYTES,
    RANKS,
    REDUNDANT,
    RESTARTED,
    SCALED_MODELS,
    SEQUENCES,
    STAGES,
    STATED_YARN_SINCE,
    STATES_SINCE,
    WHOLE_EXPERTS,
    asked_drafts,
    block_size_of,
    cache_bytes,
    capability,
    draft_settings,
    expert_ranks,
    keeps_prefixes,
    lora_slots,
    max_num_batched_tokens,
    max_num_seqs,
    multiplies_by_triton,
    older_chunk,
    plans_ahead,
    stage_layers,
)
from whichlora.serving.vllm_sparse import PACKED, latent_share
from whichlora.serving.vllm_sparse import SINCE as SPARSE_SINCE
from whichlora.serving.vllm_sparse import check as check_sparse
from whichlora.serving.vllm_towers import (
    LIMITS,
    TEXT_OPTION,
    UNPROFILED,
    has_tower,
    starts_tower,
    text_options,
    tower_notes,
)
from whichlora.serving.vllm_towers import check as check_limits
from whichlora.serving.widths import check_widths
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import has_fp8_blocks
from whichlora.spec.numeric import ceil_div
from whichlora.spec.options import Option, OptionValue
from whichlora.spec.run import BNB_QUANTS, ENGINE_QUANTS
from whichlora.spec.versions import Libraries
from whichlora.spec.words import alternatives
from whichlora.timing.model import LAUNCH_S
from whichlora.timing.serving_work import VLLM_CAPTURED_TOKENS
from whichlora.units import format_bytes

# What the host does between two steps. Kind: fitted, to published speeds of one
# sequence on an A100 (Qwen2 under 0.4.2, Qwen2.5 under 0.6.3), and to four sequences of a 70B on
# two to eight H100 and H200 (0.11). What it does for each sequence: estimate; before 0.6, which
# makes texts while the GPU waits, fitted to 3,355 tokens a second of 256 sequences of
# Llama-3.1-8B under 0.5.4 on an A100 of 40 GB.
HOST_S = (("0", 2.0e-3), ("0.6", 1.3e-3), ("0.8", 0.8e-3))
SEQUENCE_S = (("0", 130e-6), ("0.6", 20e-6), ("0.8", 5e-6))
# Before 0.4.3 Ray schedules a task on every other rank for each step. Kind: measured, by a
# contributor: 2,000 tokens of Llama-2-7B on two A100 took 24.2 s, and 16.7 s without Ray and with
# one task for all steps. Source: github.com/vllm-project/vllm/pull/3763, merged as 4894.
SCHEDULED_RANKS_S = 3.75e-3
# What a kernel of a step that is too large for a graph costs the host, whose code is compiled.
# Kind: estimate: half of a launch from Python.
COMPILED_LAUNCH_S = LAUNCH_S / 2
# The same of its eager code before 0.5, whose operators are pybind's. Kind: fitted, to Qwen2 0.5B
# and 1.5B past the longest captured sequence of 0.4.2, beside `COPIED_TOKEN_S`.
FIRST_EAGER_LAUNCH_S = 27e-6
# What a product of stored codes costs that host beyond `F.linear`. From 0.5.4 to 0.6.3 its type is
# a script object, for which torch's dispatcher walks all arguments in Python: those layers take
# 10 ms with GPTQ's codes, 38 us more for each of 112 products. With a number in its place, as since
# 0.6.4, it is 9. Kind: measured, and scaled as `EAGER_LAUNCH_S`. Source: vLLM 0.6.2 _core_ext.py
# `ScalarType`, 0.6.4 scalar_type.py; torch 2.4 _ops.py `_must_dispatch_in_python`.
SCRIPTED_TYPE_S, WRAPPED_PRODUCT_S = 60e-6, 15e-6
CODE_PRODUCT_S = (("0", 0.0), ("0.5.4", SCRIPTED_TYPE_S), ("0.6.4", WRAPPED_PRODUCT_S))
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
# The release whose wheels dropped Volta, and what they need; the last release before it.
CARD_SINCE, BEFORE_CARD = ("0.20", 7.5), "0.19.0"
# The release whose wheels are the first for CUDA 12.8 and PyTorch 2.7, and the oldest cards that no
# earlier one has kernels for; the first with kernels for 12.0.
BLACKWELL_SINCE, FIRST_BLACKWELL = ("0.9", 10.0), "0.9.2"
# The oldest cards that have kernels for quantised weights, since when. Source: `get_min_capability`
# of vLLM 0.5.0 to 0.33.0 quantization/awq.py (0.33.0: auto_awq.py), fp8.py, mxfp4.py and of
# modelopt.py (0.8.0, 0.9.0, 0.16.0), and of compressed_tensors/schemes/compressed_tensors_wNa16.py,
# compressed_tensors_w4a4_nvfp4.py, compressed_tensors_w8a8_mxfp8.py (0.20.0). Below 10.0 Marlin's
# kernels unpack nvfp4. Before 0.9 they read no fp8 in blocks, nor experts in fp8; Triton's do not
# compile below 8.9 (0.8.5 fp8.py:180, 0.9.0 :179, :443; issues 17581 and 18182).
FP8_SINCE_MARLIN = {"fp8": (("0", 8.9), ("0.9", 8.0), ("0.14", 7.5))}
QUANT_CARDS = QuantCards(
    weights={
        "awq-int4": (("0", AWQ_CAPABILITY),),
        "fp8": (("0", 8.9), ("0.5.1", 8.0), ("0.14", 7.5)),
        "w4a16": (("0", 8.0), ("0.12", 7.5)),
        "mxfp4": (("0", 8.0),),
        "nvfp4": (("0.8", 10.0), ("0.9", 8.0), ("0.16", 7.5)),
        "nvfp4a16": (("0.9", 8.0), ("0.16", 7.5)),
        "mxfp8": (("0.16", 10.0), ("0.20", 8.0)),
    },
    blocks=FP8_SINCE_MARLIN,
    experts=FP8_SINCE_MARLIN,
)
# Model types that are refused in float16, since when. Source: `_FLOAT16_NOT_SUPPORTED_MODELS`,
# vLLM 0.9.1 config.py, 0.10.2 config/__init__.py, 0.33.0 config/model.py:2398; none in 0.9.0.
FLOAT16_REFUSED = {"gemma2": "0.9.1", "gemma3": "0.9.1", "gemma3_text": "0.10.2", "glm4": "0.9.1"}
# Dtypes of a card without bf16. Source: `check_if_supports_dtype`, vLLM 0.33.0
# platforms/cuda.py:652, 0.11.0 :511; `_check_if_gpu_supports_dtype`, 0.3.3 worker/worker.py:302.
WITHOUT_BF16 = (FLOAT16, FLOAT32)
# Dtypes of products with quantised weights, since when. Marlin's kernels brought bf16. Source:
# `get_supported_act_dtypes` of vLLM 0.4.2 to 0.33.0 quantization/gptq_marlin.py (0.33.0:
# auto_gptq.py), awq_marlin.py (auto_awq.py), fp8.py, mxfp4.py and modelopt.py.
QUANT_DTYPES = {
    "awq-int4": (("0", (FLOAT16,)), ("0.5.3", NARROW)),
    "gptq-int4": (("0", (FLOAT16,)), ("0.4.3", NARROW)),
    "gptq-int8": (("0", (FLOAT16,)), ("0.4.3", NARROW)),
    "fp8": (("0", NARROW),),
    "mxfp4": (("0", (BFLOAT16,)),),
    "nvfp4": (("0", NARROW),),
    "nvfp4a16": (("0", NARROW),),
    "mxfp8": (("0", (BFLOAT16,)),),
}
# Model types whose routers have fp32 weights, by which their inputs are widened. Source: vLLM
# 0.20.0 models/minimax_m2.py:115, ernie45_moe.py, step3p5.py, minimax_text_01.py; 0.33.0 the same
# for more than 32 tokens (router/gate_linear.py).
WIDE_ROUTERS = ("minimax_m2", "minimax", "ernie4_5_moe", "step3p5")
BLOCK_STEP = 16  # tokens, of which a block of the V1 engine is a multiple
# AWQ's first kernel, before Marlin reads its codes, too. Kind: exact, but for the blocks resident,
# an estimate of 128 registers a thread, and `tile_s`: fitted, to Qwen2 1.5B and 7B under 0.4.2 with
# prompts of 1 and 6,144 tokens. Source: vLLM 0.4.2 csrc/quantization/awq/gemm_kernels.cu
# `gemm_forward_4bit_cuda_m16nXk32`; model_executor/layers/quantization/awq.py.
FIRST_AWQ = CodeBlocks(
    rows=16, outputs=128, splits=8, inputs=32, tile_s=1.5e-6, resident=8, expanded_rows=256
)
# Since 0.9 zeros are multiplied by their scales before, and subtracted as those are multiplied: no
# more work than for GPTQ. Source: github.com/vllm-project/vllm/pull/16850.
ZEROED_READS_SINCE = (("0", ZEROED_READS), ("0.9", 1.0))
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
# The first release with `vllm serve`, and what starts the server of earlier ones; the first that
# finds the loader of bitsandbytes by itself. Source: setup.py; `create_model_config`.
SERVE_SINCE, OLDER_SERVER = "0.5.2", "python -m vllm.entrypoints.openai.api_server --model"
LOADER_SINCE, REDUNDANT_FLAG = "0.8.2", "eplb-config.num_redundant_experts"
FIRST_START = "0.2.4"  # of `benchmarks/serving_starts.csv`
NODES_SINCE = "0.11.1"  # the first release whose own processes span machines
# What a step with slots for adapters takes beside one by what is predicted, at most: published
# runs before 0.8 reached 0.84 (0.5.0), 0.66 (0.6.5) and 0.5 of the throughput without (0.6), with
# CUDA graphs; the second engine 0.96. Kind: estimate, of the slow end alone. Source:
# github.com/vllm-project/vllm/issues/9452, pull/11267, issues/10062, pull/11613.
SLOTS_SLOWEST = 2.0
TEXT_ALONE = "0.10.1"  # the first release that leaves towers on the disk; pull/22299


# --- how it steps -----------------------------------------------------------------------------


def stepping(served: Served) -> Stepping:
    """Requests come first, then prompts in chunks, in one step; before 0.8 whole prompts, alone.

    Since 0.14 a step is planned while the one before it runs, so that a request waits for both.
    Kind: exact; `HOST_S`, `FRONT_S` and `COMPILED_LAUNCH_S` are estimates.
    Source: vLLM 0.33.0 v1/core/sched/scheduler.py `Scheduler.schedule`, v1/engine/core.py
    `step_with_batch_queue`; 0.6.3 core/scheduler.py `_schedule_default`.
    """
    is_older = served.libraries.older("vllm", "0.8")
    chunk = older_chunk(served) if is_older else max_num_batched_tokens(served)
    beyond = served.context > VLLM_CAPTURED_TOKENS and served.libraries.graphs_end_early
    is_eager = bool(served.options["enforce_eager"]) or beyond
    is_first_awq = served.run.quant == "awq-int4" and served.libraries.older("vllm", "0.5.4")
    step_s = served.libraries.value_of("vllm", HOST_S)
    ranks, layers, drafts = served.count(RANKS) or 1, stage_layers(served), asked_drafts(served)
    if ranks > 1 and served.libraries.older("vllm", "0.4.3"):
        step_s += SCHEDULED_RANKS_S
    return Stepping(
        ranks=ranks,
        experts=expert_ranks(served),
        elsewhere=SKIPPED_ELSEWHERE if _skips_elsewhere(served) else 1.0,
        wide_routers=served.model.model_type in WIDE_ROUTERS,
        gathered_share=1 / served.dtypes.compute_bytes if served.run.quant == "fp8" else 1.0,
        step_s=step_s,
        sequence_s=served.libraries.value_of("vllm", SEQUENCE_S),
        max_step_tokens=chunk or max(max_num_batched_tokens(served), served.context),
        mixes=chunk is not None,
        whole_prompts=chunk is None,
        captured_tokens=0 if is_eager else MOST_CAPTURED_TOKENS,
        launch_s=_eager_launch_s(served) if is_eager else COMPILED_LAUNCH_S,
        cache_bytes=latent_share(served) * cache_bytes(served),
        head_reads=HEAD_READS if served.libraries.older("vllm", "0.4.3") else None,
        query_tile=CHUNK_QUERY_TILE if is_older and chunk is not None else None,
        copied_token_s=COPIED_TOKEN_S if served.libraries.older("vllm", "0.5") else 0.0,
        code_products=1.0 if served.libraries.older("vllm", "0.5") else UNPACKING_PRODUCTS,
        zeroed_reads=served.libraries.value_of("vllm", ZEROED_READS_SINCE),
        code_blocks=FIRST_AWQ if is_first_awq else None,
        narrow_blocks=TRITON_BLOCKS if _multiplies_blocks_by_triton(served) else None,
        code_launch_s=_code_launch_s(served, is_eager=is_eager, is_first_awq=is_first_awq),
        expert_rows=FIRST_MARLIN_ROWS if served.libraries.older("vllm", "0.7") else None,
        stage_layers=layers if len(layers) > 1 else (),
        stage_cards=tuple(range(len(layers))) if served.gpu.beside else (),
        keeps_blocks=keeps_prefixes(served),
        caches_prompts=keeps_prefixes(served),
        front_s=FRONT_S,
        tokenized_s=TOKENIZED_S,
        plans_ahead=plans_ahead(served) and len(layers) == 1,
        drafts=drafts,
        accepted=accepted_tokens(served, drafts) or 1.0,
        slowest=SLOTS_SLOWEST if _has_first_kernels(served) else 1.0,
    )


def _has_first_kernels(served: Served) -> bool:
    """Whether adapters have the first engine's kernels: one for each part of a joined matrix.

    Source: vLLM 0.7.3 lora/punica_wrapper/punica_gpu.py `add_shrink`, `add_expand`;
    github.com/vllm-project/vllm/pull/13096, which brings those of the second one.
    """
    return bool(lora_slots(served)[0]) and served.libraries.older("vllm", "0.8")


def _skips_elsewhere(served: Served) -> bool:
    """Whether kernels of whole experts skip the rows of other GPUs' ones.

    FlashInfer's CUTLASS kernels do, which Hopper has for fp8 in blocks; Triton's do not.
    Kind: exact. Source: vLLM 0.17.0 and 0.20.0 fused_moe/oracle/fp8.py:85 `_get_priority_backends`,
    0.16.0 without it; 0.33.0 fused_moe/experts/triton_moe.py:347, whose caches have all rows.
    """
    is_hopper = 9.0 <= capability(served) < 10.0
    return is_hopper and served.run.quant == "fp8" and not served.libraries.older("vllm", "0.17")


def _multiplies_blocks_by_triton(served: Served) -> bool:
    """Whether fp8 in blocks has Triton's kernel, as configured for no card: on Ada.

    CUTLASS and DeepGEMM need a Hopper. The L20 has configs of its own, and the L40S of four shapes
    in 0.33.0, which multiplies by Marlin there.
    Kind: exact for 0.10.2 to 0.25.0; between, and the first one with Marlin, are not read.
    Source: vLLM 0.10.2 quantization/utils/fp8_utils.py `apply_w8a8_block_fp8_linear`,
    `get_w8a8_block_fp8_configs`; 0.25.0 kernels/linear/scaled_mm/marlin.py:46, 0.33.0 :35.
    """
    is_ada = capability(served) == 8.9 and not served.gpu.key.startswith("l20-")
    in_blocks = served.run.quant == "fp8" and has_fp8_blocks(served.model.config)
    return is_ada and in_blocks and served.libraries.older("vllm", "0.33")


def _eager_launch_s(served: Served) -> float:
    return FIRST_EAGER_LAUNCH_S if served.libraries.older("vllm", "0.5") else EAGER_LAUNCH_S


def _code_launch_s(served: Served, *, is_eager: bool, is_first_awq: bool) -> float:
    """What a product of codes costs the host beyond one of 16 bit, beside its launch."""
    if is_first_awq:
        return SECOND_LAUNCH_S
    return served.libraries.value_of("vllm", CODE_PRODUCT_S) if is_eager else 0.0


# --- what it refuses --------------------------------------------------------------------------


def check(served: Served) -> None:
    """Refuse what vLLM cannot serve, and layers whose pool is not predicted.

    Raises:
        ConfigError: one line.
    """
    run = served.run
    _check_partition(served)
    for card in served.gpu.beside or (served.gpu,):
        _check_card(replace(served, gpu=card))
        check_quant_card(replace(served, gpu=card), QUANT_CARDS)
    check_model(served, keeps_states=not served.libraries.older("vllm", STATES_SINCE))
    check_known(served, predicted_since=TEXT_ALONE if _sees(served) else "0")
    check_card_dtype(served, WITHOUT_BF16)
    check_model_dtype(served, FLOAT16_REFUSED)
    check_quant_dtype(served, QUANT_DTYPES)
    check_sparse(served)
    check_cache(served)
    _check_drafts(served)
    _check_tower(served)
    if run.quant in BNB_QUANTS and not served.libraries.older("vllm", "0.28"):
        raise ConfigError(
            f"serving: {served.release} reads no bitsandbytes weights, got quant "
            f"{run.quant}; use awq-int4 or gptq-int4 of merged weights, or libraries vllm=0.27.1"
        )
    _check_values(served)
    if served.targets:
        _check_adapters(served)
    check_ranks(served, RANKS, STAGES)
    check_stages(served, STAGES)
    _check_experts(served)
    check_widths(
        served,
        RANKS,
        STAGES,
        ranks_of=lambda asked: asked.count(RANKS) or 1,
        experts_of=expert_ranks,
        whole=(WHOLE_EXPERTS, True),
    )


def _check_partition(served: Served) -> None:
    """Refuse layers of stages that are none.

    Source: vLLM 0.28.0 `get_pp_indices`, distributed/utils.py, whose errors these are.
    """
    stated = served.options[PARTITION]
    if stated is None:
        return
    stages, layers = served.count(STAGES) or 1, served.model.num_hidden_layers
    parts = str(stated).split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"{PARTITION}: {stated} are no numbers of layers; give one for each stage, such as "
            f"{layers // 2},{layers - layers // 2}"
        )
    if len(parts) != stages:
        raise ConfigError(
            f"{PARTITION}: {stated} are {len(parts)} stages, and {STAGES} is {stages}; give "
            f"{STAGES}={len(parts)}"
        )
    if (total := sum(map(int, parts))) != layers:
        raise ConfigError(
            f"{PARTITION}: {stated} are {total} layers, and {served.model.name} has {layers}; give "
            f"numbers that add up to {layers}"
        )


def _stage_pools(served: Served) -> list[str]:
    """What each of unequal cards has for keys and values; none of equal ones."""
    cards = served.gpu.beside
    starts = starts_of_stages(served) if cards else []
    return [
        f"{format_bytes(max(0, start.pool.num_bytes))} on {card.key}"
        for start, card in zip(starts, cards, strict=True)
    ]


def _sees(served: Served) -> bool:
    return has_tower(served.model) or bool(served.model.unloaded_params)


def _check_tower(served: Served) -> None:
    """Refuse towers under old releases, and beside a pipeline."""
    model, stages = served.model, served.count(STAGES) or 1
    if _sees(served) and served.libraries.older("vllm", TEXT_ALONE):
        raise ConfigError(
            f"serving: {served.release} loads what {model.name} sees with and keeps "
            f"room for its largest image, which is not predicted before {TEXT_ALONE}; give "
            f"libraries vllm={TEXT_ALONE} or a later release"
        )
    if has_tower(model) and stages > 1:
        raise ConfigError(
            f"{STAGES}: not predicted for {model.name} with what it sees with; give "
            f"{TEXT_OPTION}=true, or 1"
        )
    check_limits(served)


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


def _check_card(served: Served) -> None:
    """Refuse a Volta that a release leaves out, and a Blackwell under an older one.

    Wheels before 0.9 are for CUDA 12.4 or 12.1 and PyTorch 2.6 or older, without kernels for 10.0
    and 12.0. Those of 0.9.0 and 0.9.1 have none for 12.0 of their own, and PTX for 10.0, which the
    driver compiles: they are not refused.

    Source: vLLM 0.8.5, 0.9.0 and 0.9.2 setup.py MAIN_CUDA_VERSION, requirements/cuda.txt and
    docker/Dockerfile `torch_cuda_arch_list`; github.com/vllm-project/vllm/pull/39878, whose
    wheels are for CUDA 13 and PyTorch 2.11: neither has kernels for 7.0.
    """
    since, least = BLACKWELL_SINCE
    if capability(served) >= least and served.libraries.older("vllm", since):
        raise ConfigError(
            f"serving: {served.release} does not run on {served.gpu.key}: wheels "
            f"before {since} have no kernels for compute capability {least} or newer; give "
            f"libraries vllm={FIRST_BLACKWELL} or newer, or leave serving out"
        )
    if capability(served) >= CARD_SINCE[1]:
        return
    since, least = CARD_SINCE
    if not served.libraries.older("vllm", since):
        has_kernels = served.run.quant not in QUANT_CARDS.weights
        instead = f"give libraries vllm={BEFORE_CARD}, or " if has_kernels else ""
        raise ConfigError(
            f"serving: {served.release} does not run on {served.gpu.key}: since "
            f"{since} it needs compute capability {least} or newer; {instead}leave serving out"
        )


def _check_values(served: Served) -> None:
    """Refuse numbers that vLLM does not start with.

    Before 0.8 a prompt that is not cut into chunks has to fit a step.
    Source: vLLM 0.33.0 config/scheduler.py `verify_max_model_len`, 0.2.7 to 0.7.3 config.py
    `SchedulerConfig._verify_args`; config/lora.py `MaxLoRARanks`;
    `FlashAttentionBackend.get_kv_cache_shape` ("a multiple of 16") since its V1 engine.
    """
    tokens, running = max_num_batched_tokens(served), max_num_seqs(served)
    if tokens < running:
        raise ConfigError(
            f"max_num_batched_tokens: {tokens} is less than max_num_seqs {running}; give {running} "
            f"or more, or max_num_seqs {tokens} or less"
        )
    is_whole = served.libraries.older("vllm", "0.8") and older_chunk(served) is None
    if is_whole and tokens < served.context:
        raise ConfigError(
            f"max_num_batched_tokens: {tokens} is less than the context {served.context}, which "
            f"{served.release} reads in one step; give {served.context} or more, or "
            "libraries vllm=0.8 or newer"
        )
    rank, size = served.count("max_lora_rank"), block_size_of(served)
    if served.is_asked("max_lora_rank") and rank not in LORA_RANKS:
        raise ConfigError(
            f"max_lora_rank: vllm has no slots of rank {rank}; give {alternatives(LORA_RANKS)}"
        )
    if size % BLOCK_STEP and not served.libraries.older("vllm", "0.8"):
        raise ConfigError(
            f"block_size: {size} is no multiple of {BLOCK_STEP}; give "
            f"{ceil_div(size, BLOCK_STEP) * BLOCK_STEP}, or leave it out"
        )


def _check_drafts(served: Served) -> None:
    """Refuse drafts that are not predicted.

    Source: vLLM 0.33.0 config/speculative.py:1849 `_verify_and_get_draft_tp`.
    """
    drafts, ranks = asked_drafts(served), served.count(RANKS) or 1
    check_drafts(served, DRAFTS, drafts, served.count(STAGES) or 1)
    if drafts is None:
        return
    own = draft_settings(str(served.options[DRAFTS])).get("draft_tensor_parallel_size", ranks)
    if own != ranks:
        raise ConfigError(
            f"{DRAFTS}: draft_tensor_parallel_size {own} is not predicted beside {RANKS} {ranks}; "
            "leave it out"
        )


def _has_drafts(model: ModelSpec, options: Mapping[str, OptionValue]) -> bool:
    """Whether the drafts that `options` ask for are predicted of `model`."""
    method = draft_settings(str(options[DRAFTS])).get("method")
    by = METHODS.get(str(method))
    return by is not None and (by != "layer" or has_draft_layer(model))


def _drafter_of(options: Mapping[str, OptionValue]) -> str:
    """The model that drafts, where it is another one."""
    asked = draft_settings(str(options[DRAFTS])) if options.get(DRAFTS) else {}
    by = METHODS.get(str(asked.get("method")))
    return str(asked.get("model", "")) if by in BY_A_DRAFTER else ""


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
    if served.is_asked("enable_lora") and not served.options["enable_lora"]:
        raise ConfigError(
            "enable_lora: false has no slot for the adapter of serve as-trained; leave it out, or "
            "use serve merged"
        )
    rank = served.count("max_lora_rank") or 0
    if served.is_asked("max_lora_rank") and rank < run.r:
        raise ConfigError(
            f"max_lora_rank: {rank} is less than the adapter's rank {run.r}; give {run.r} or more"
        )
    if run.r > LORA_RANKS[-1]:
        raise ConfigError(f"r: vllm serves adapters up to rank {LORA_RANKS[-1]}, got {run.r}")


def command(served: Served) -> str:
    """Source: vLLM 0.33.0 engine/arg_utils.py:977-1000, :1389, :1610; that of older releases."""
    quant, flags, older = served.run.quant, list[str](), served.libraries.older
    if quant in LOADED_AS_NF4:
        flags.append("--quantization bitsandbytes")
        flags += ["--load-format bitsandbytes"] if older("vllm", LOADER_SINCE) else []
    elif quant in BNB_QUANTS:  # files of which kind, only the directory says
        return ""
    denied = {name for name, value in served.run.serving_options if value is False}
    denied &= {"enable_prefix_caching", AHEAD, *ENGINE.ignored}
    denied = {name for name in denied if not ENGINE.lacks_flag(name, served.libraries)}
    if not older("vllm", "0.8"):
        flags += [f"--no-{name.replace('_', '-')}" for name in sorted(denied)]
    if served.targets:
        if not served.options["enable_lora"]:
            flags.append("--enable-lora")
        if not served.is_asked("max_lora_rank"):
            flags.append(f"--max-lora-rank {lora_slots(served)[1]}")
        flags.append(f"--lora-modules adapter={shlex.quote(served.adapter)}")
    if served.nodes > 1 and not older("vllm", NODES_SINCE):
        flags.append(f"--nnodes {served.nodes} --node-rank 0 --master-addr {HEAD_NODE}")
    redundant = "num-redundant-experts" if older("vllm", "0.10.2") else REDUNDANT_FLAG
    return shell_command(
        served,
        _in_shell(served) + _server(served),
        context="--max-model-len",
        flags=tuple(flags),
        num_redundant_experts=f"--enable-eplb --{redundant} {{}}",
        restarted="",
        **{PARTITION: "", ACCEPTED: ""},
    )


def own_context(model: ModelSpec, libraries: Libraries) -> int | None:
    """The most tokens of a sequence where no max_model_len is given. Kind and source as there."""
    return derived_context(
        model, scaled=SCALED_MODELS, scales_yarn=libraries.older("vllm", STATED_YARN_SINCE)
    )


def _in_shell(served: Served) -> str:
    stated = served.options[PARTITION]
    return "" if stated is None else f"{PARTITION}={shlex.quote(str(stated))} "


def _server(served: Served) -> str:
    """What starts the server, before the name of the model."""
    return OLDER_SERVER if served.libraries.older("vllm", SERVE_SINCE) else "vllm serve"


def notes(served: Served, start: Start) -> tuple[str, ...]:
    """What a user must know."""
    lines = [
        f"{served.release} as `{_server(served)}` starts it: max_num_batched_tokens "
        f"{max_num_batched_tokens(served)}, max_num_seqs {max_num_seqs(served)}"
    ]
    if (ranks := served.count(RANKS) or 1) > 1:
        lines.append(f"{RANKS} {ranks}: bytes are of each GPU")
    if start.copies > 1:
        lines.append(
            f"{COPIES} {start.copies}: each engine has its own pool and up to "
            f"{max_num_seqs(served)} sequences; sequences and tokens are of all"
        )
    slots = [each for each in ("max_loras", "max_lora_rank") if served.is_asked(each)]
    if slots and not lora_slots(served)[0]:
        lines.append(f"{' and '.join(slots)}: without enable_lora there are no slots for adapters")
    if _has_first_kernels(served):
        lines.append(
            "adapters before vllm 0.8 have kernels whose time is not predicted: published runs had "
            "0.5 to 0.84 of the tokens/s, so the slow end is twice as long"
        )
    lines += _nodes_notes(served)
    lines += [NOTE] if (drafts := asked_drafts(served)) and drafts.passes else []
    if multiplies_by_triton(served):
        lines.append(
            "experts in mxfp4 have Triton's kernels; without the package triton_kernels vllm takes "
            "Marlin's, whose layout is larger"
        )
    lines += tower_notes(served)
    if start.longest_context is None:
        lines += positions_note(served, f"vllm may not start without {LONGER}")
    lines += stage_notes(start, stage_layers(served), STAGES, _stage_pools(served))
    lines += known_note(served)
    lines += release_note(served, first_start=FIRST_START)
    return tuple(lines)


def _nodes_notes(served: Served) -> list[str]:
    """What several machines are started with.

    Before, Ray is taken where the ranks are more than the GPUs of a machine.
    Source: vLLM 0.11.1 to 0.33.0 config/parallel.py, entrypoints/cli/serve.py `run_headless`.
    """
    if served.nodes == 1:
        return []
    if not served.libraries.older("vllm", NODES_SINCE):
        return [nodes_note(served, "--headless", "--node-rank")]
    if (served.count(COPIES) or 1) > 1:
        return [f"the command is that of one machine: {COPIES} over several has flags of its own"]
    return [
        f"{served.nodes} machines are joined by Ray first: `ray start --head --port=6379` on one, "
        f"`ray start --address={HEAD_NODE}:6379` on the others; {HEAD_NODE} stands for its address"
    ]


def _no_graphs(stated: str) -> str:
    """Source: vLLM 0.33.0 config/vllm.py:2554, which asserts that the largest is 1 or more."""
    instead = "leave it out, and give enforce_eager=true"
    return f"is less than the 1 token that vllm captures; {instead}" if stated == "0" else ""


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
        Option(
            name="max_num_batched_tokens",
            summary="tokens of one step",
            default=None,
            has_suffixes=True,
        ),
        Option(name=SEQUENCES, summary="sequences that run at once", default=None),
        Option(name="block_size", summary="tokens of a block", default=16),
        Option(
            name="kv_cache_dtype",
            summary="of keys and values: as the model's, or in 8 bits",
            default="auto",
            choices=("auto", "bfloat16", *FP8_CACHES),
            since="0.3",
            choices_since={
                "fp8": "0.4.1",
                "fp8_e4m3": "0.4.3",
                "bfloat16": "0.11",
                PACKED: SPARSE_SINCE,
            },
        ),
        Option(
            name="enable_prefix_caching",
            summary="blocks of a common prefix are kept once",
            default=None,
            kind=bool,
            since="0.4",
        ),
        Option(name="enable_lora", summary="slots for adapters", default=False, since="0.3"),
        Option(name="max_loras", summary="adapters in one batch", default=1, since="0.3"),
        Option(name="max_lora_rank", summary="rank of a slot", default=16, since="0.3"),
        Option(name=RANKS, summary="GPUs that share a matrix", default=1, other_names=("tp",)),
        Option(
            name=STAGES,
            summary="stages that have some of the layers each",
            default=1,
            other_names=("pp",),
            since="0.5.1",
        ),
        Option(
            name=PARTITION,
            summary="layers of each stage, such as 16,32; a variable of the shell",
            default=None,
            kind=str,
            since="0.5.4",
        ),
        Option(
            name=NODES, summary="machines, equally many GPUs on each; else the fewest", default=None
        ),
        Option(
            name=COPIES,
            summary="engines with sequences of their own that share experts",
            default=1,
            other_names=("dp",),
            since="0.8.3",
        ),
        Option(
            name=WHOLE_EXPERTS,
            summary="experts are divided whole, not each by its width",
            default=False,
            other_names=("ep",),
            since="0.8",
        ),
        Option(
            name=REDUNDANT,
            summary="experts held twice, of --eplb-config",
            default=0,
            kind=int,
            since="0.9.2",
        ),
        Option(
            name=DRAFTS,
            summary='drafts, by a layer of the model or another one: {"method": "mtp", ...}',
            default=None,
            kind=str,
            since="0.8.2",
        ),
        acceptance_option(),
        Option(name="enforce_eager", summary="no CUDA graphs", default=False),
        Option(
            name=RESTARTED,
            summary="an equal start came before, and its compiled code is in vLLM's cache",
            default=False,
            since="0.17",
        ),
        Option(
            name=CAPTURED,
            summary="tokens of the largest CUDA graph",
            default=None,
            since="0.11.1",
            explain=_no_graphs,
        ),
        Option(
            name=POOL_BYTES,
            summary="bytes of the pool, in place of a share of the GPU",
            default=None,
            has_suffixes=True,
            other_names=("kv_cache_memory",),  # as argparse takes the start of a flag
            since="0.10.2",
        ),
        Option(name=POOL_BLOCKS, summary="blocks of the pool, whatever is free", default=None),
        Option(
            name=MODE,
            summary="throughput doubles what runs at once, interactivity has more graphs",
            default="balanced",
            choices=("balanced", "interactivity", "throughput"),
            since="0.17",
        ),
        Option(
            name=AHEAD,
            summary="a step is planned while another runs",
            default=None,
            kind=bool,
            since="0.10",
        ),
        Option(
            name=TEXT_OPTION, summary="leaves out what sees and hears", default=False, since="0.17"
        ),
        Option(
            name=LIMITS,
            summary='items of a prompt: {"image": 0, "video": 0} leaves the tower out',
            default=None,
            kind=str,
            since="0.4.1",
        ),
        Option(
            name=UNPROFILED,
            summary="keeps no room for the largest image",
            default=False,
            since="0.11",
        ),
    ),
    shared_by=RANKS,
    staged_by=STAGES,
    takes_unequal=True,
    copied_by=COPIES,
    spread_by=NODES,
    drafted_by=DRAFTS,
    has_drafts=_has_drafts,
    drafter_of=_drafter_of,
    divides_joint=True,
    drafting=(ACCEPTED,),
    bounded_by=SEQUENCES,
    least_capability=7.0,  # as `kv_cache: vllm`; vLLM's installation page
    start=start,
    load_of_start=load_of_start,
    stored_forms=ENGINE_QUANTS,
    usual_quants=("none", "fp8", "awq-int4"),
    loads_towers=False,
    starts_tower=starts_tower,
    text_options=text_options,
    float16_alone={
        quant: forms[1][0] for quant, forms in QUANT_DTYPES.items() if forms[0][1] == (FLOAT16,)
    },
    stepping=stepping,
    check=check,
    command=command,
    notes=notes,
    log=LOG,
    programs=(
        *("vllm serve", "vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"),
        "vllm.entrypoints.cli.main",
    ),
    takes_beginnings=True,
    images=("vllm/vllm-openai",),
    model_flags=("model", "model_tag"),
    own_context=own_context,
    elsewhere={
        "max_model_len": "context",
        "dtype": "precision",
        "quantization": "quant",
        "q": "quant",
    },
    ignored=dict.fromkeys(OF_A_SERVER, NO_SAY) | OF_VLLM | KERNELS_OF_VLLM,
    ignored_in=RELEASES_OF_VLLM,
    refused={"all2all_backend": ALL_TO_ALL}
    | dict.fromkeys(("speculative_model", "num_speculative_tokens"), DRAFT)
    | {"mm_processor_kwargs": IMAGES}
    | dict.fromkeys(("compilation_config", "cudagraph_capture_sizes"), CAPTURED_SIZES)
    | dict.fromkeys(("long_prefill_token_threshold", "max_long_partial_prefills"), CHUNKS)
    | dict.fromkeys(("mamba_block_size", "mamba_cache_mode"), KEPT_STATES)
    | {"enable_chunked_prefill": "cuts prompts into steps; give their max_num_batched_tokens"}
    | {"cpu_offload_gb": HOST_WEIGHTS},
    set_aside=frozenset(
        (
            *("all2all_backend", "mm_processor_kwargs", "compilation_config"),
            *("cudagraph_capture_sizes", "enable_chunked_prefill", "long_prefill_token_threshold"),
            *("max_long_partial_prefills", "mamba_block_size", "mamba_cache_mode"),
        )
    ),
)
