"""What an engine that writes answers takes of the GPU of a training, in the same process."""

from __future__ import annotations

from collections.abc import Sequence

from whichlora.memory.entries import Entry, Fact
from whichlora.spec.numeric import Count, added, largest

WEIGHTS = Fact(
    part="weights",
    what="engine beside the trainer: weights of its own",
    shape="[every parameter]",
    dtype="as the engine loads them",
    why="a vLLM in the same process loads the model once more, or shares it and pads what it must",
    source="TRL 1.16 generation/vllm_generation.py:347; unsloth_zoo 2026.10.9 vllm_utils.py:2070 "
    "convert_vllm_to_huggingface",
)
SLOTS = Fact(
    part="adapters",
    what="engine beside the trainer: slots for adapters",
    shape="[max_loras, max_lora_rank, features]",
    dtype="compute_bytes",
    why="the adapter that is trained is copied into one before answers are written",
    source="unsloth_zoo 2026.10.9 vllm_utils.py:5091 enable_lora, max_lora_rank",
)
POOL = Fact(
    part="kv_cache",
    what="engine beside the trainer: pool of keys and values",
    shape="[what is left of its share of the GPU]",
    dtype="bytes",
    why="allocated at its start, before the training; only a sleeping engine gives it back",
    source="vLLM 0.33.0 v1/worker/gpu_worker.py:641 determine_available_memory",
    kind="estimate",
)
REST = Fact(
    part="temporary",
    what="engine beside the trainer: graphs, kernels and buffers",
    shape="-",
    dtype="bytes",
    why="no sleep gives them back",
    source="vLLM 0.33.0 v1/worker/gpu_worker.py sleep, device_allocator/cumem.py: tagged weights "
    "and kv_cache alone",
    kind="estimate",
)
STEP = Fact(
    part="temporary",
    what="engine beside the trainer: room for its step of the most tokens",
    shape="[max_num_batched_tokens or max_num_seqs, ...]",
    dtype="bytes",
    why="kept free by its profile pass; while the model learns, the trainer may use it",
    source="vLLM 0.33.0 v1/worker/gpu_worker.py:641; both allocate from one PyTorch allocator",
    kind="upper bound",
)
_OF_PART = {WEIGHTS.part: WEIGHTS, SLOTS.part: SLOTS, POOL.part: POOL}


def engine_entries(
    entries: Sequence[Entry], *, outside_bytes: int, passing_bytes: int, shared_bytes: Count
) -> tuple[Entry, ...]:
    """Those of an engine's start, added up by what happens to them while the model learns.

    Args:
        entries: its own, the pool among them.
        outside_bytes, passing_bytes: as of its start.
        shared_bytes: of its weights, those that the training holds anyway.

    Kind: estimate, as the engine's start. Source: as of the facts.
    """
    sums = {
        fact: added(e.num_bytes for e in entries if e.part == part)
        for part, fact in _OF_PART.items()
    }
    others = added(entry.num_bytes for entry in entries if entry.part not in _OF_PART)
    sums[WEIGHTS] = largest(sums[WEIGHTS] - shared_bytes, 0)
    sums |= {REST: others - passing_bytes + outside_bytes, STEP: passing_bytes}
    return tuple(Entry(fact, sums[fact]) for fact in (WEIGHTS, SLOTS, POOL, REST, STEP))
