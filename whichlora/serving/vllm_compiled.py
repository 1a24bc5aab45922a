"""What compiling takes while vLLM profiles: tensors that torch makes up to time its kernels on.

A start that compiles the code times each kernel before the first forward, inside the profile; one
that finds the code of an equal start in vLLM's cache does not.
"""

from __future__ import annotations

from whichlora.memory import allocator
from whichlora.memory.allocator_simulator import segment_bytes
from whichlora.memory.entries import Entry, Fact
from whichlora.serving.base import Served
from whichlora.serving.vllm_settings import RANKS, RESTARTED, max_num_batched_tokens
from whichlora.spec.architecture import ModelSpec

COMPILED_SINCE = "0.17"  # the oldest release that was read; its torch is 2.10
CONSUMED_SINCE = "0.27"  # what is used counts by what is free, idle segments of torch with it
PERSISTENT_WIDTH = 1024  # up to which a reduction has one configuration, and is not timed

TRIED_TABLE = Fact(
    part="temporary",
    what="profile pass: what the compiler tries the kernel of the embeddings with",
    shape="[vocab_size, hidden_size], 2 x [max_num_batched_tokens, hidden_size], a cache to flush",
    dtype="compute_bytes",
    why="a first start times its kernels on tensors made up for it, and the peak counts them",
    source="torch 2.13 _inductor/standalone_compile.py:461 autotune_at_compile_time, "
    "codegen/wrapper.py:2253 generate_and_run_autotune_block; runtime/benchmarking.py:649",
)
TRIED_MLP = Fact(
    part="temporary",
    what="profile pass: what the compiler tries the kernel of the MLP's activation with",
    shape="[max_num_batched_tokens, 3 x intermediate_size + 2 x hidden_size], a cache to flush",
    dtype="compute_bytes",
    why=TRIED_TABLE.why,
    source=TRIED_TABLE.source,
)
HELD_TABLE = Fact(
    part="temporary",
    what="segment of the table that the compiler tried",
    shape="[vocab_size, hidden_size]",
    dtype="compute_bytes",
    why="cuBLAS finds room for its workspace in it, where states are smaller than that: it is idle "
    "but for that, and is not given back",
    source="vLLM 0.27.0 utils/mem_utils.py `total_consumed`; logs of Qwen2.5-0.5B (0.27.1) and "
    "Qwen2.5-3B (0.27.0)",
    kind="estimate",
)


def is_compiled(served: Served) -> bool:
    """Whether the profile compiles. Source: vLLM 0.27.0 compilation/decorators.py:670."""
    if served.options["enforce_eager"] or served.options[RESTARTED]:
        return False
    return not served.libraries.older("vllm", COMPILED_SINCE)


def trial_entries(served: Served, rank: ModelSpec) -> list[list[Entry]]:
    """What each of the two largest kernels is tried with, less the workspace that comes after it.

    A model that sees embeds its tokens outside of what is compiled. Over several ranks the kernel
    ends before they add up its result.
    Kind: exact: logs of 0.59 GiB (Qwen2.5-3B, RTX 3090, 0.27.0), and of 0.25 and 0.31 GiB
    (Qwen2.5-0.5B with 2,048 and 8,192 tokens, RTX 4090, 0.27.1), to the last digit.
    Source: `TRIED_TABLE`; the same code in published files of vLLM's cache.
    """
    if not is_compiled(served):
        return []
    tokens, element_bytes = max_num_batched_tokens(served), served.dtypes.compute_bytes
    hidden, flushed = rank.hidden_size, served.gpu.l2_bytes or 0
    workspace = allocator.workspace_bytes(served.gpu, training=False)
    trials = []
    if table := _table_elements(served, rank):
        is_split = (served.count(RANKS) or 1) > 1
        states = (1 if is_split else 2) * tokens * hidden
        num_bytes = (table + states) * element_bytes + 4 * tokens - workspace
        num_bytes += flushed if is_split or hidden > PERSISTENT_WIDTH else 0
        trials.append([Entry(TRIED_TABLE, num_bytes)])
    widths = [layer.mlp.width for layer, _ in rank.layers() if layer.mlp and layer.mlp.gated]
    if widths:
        num_bytes = tokens * (3 * max(widths) + 2 * hidden) * element_bytes
        trials.append([Entry(TRIED_MLP, num_bytes + flushed - workspace)])
    return trials


def held_entries(served: Served, rank: ModelSpec) -> list[Entry]:
    """The segment of the tried table, where cuBLAS' workspace keeps it.

    Kind: estimate: the allocator takes the smallest idle block that is large enough; it is the
    table's where those of states are too small.
    Source: `HELD_TABLE`; a log of Llama-3.1-8B (0.31.0), whose states are larger, has none of it.
    """
    if not is_compiled(served) or served.libraries.older("vllm", CONSUMED_SINCE):
        return []
    if served.run.expandable_segments:  # the rest of that block is given back
        return []
    element_bytes = served.dtypes.compute_bytes
    workspace = allocator.workspace_bytes(served.gpu, training=False)
    state = max_num_batched_tokens(served) * rank.hidden_size * element_bytes
    table = _table_elements(served, rank) * element_bytes
    if not table or state >= workspace:
        return []
    return [Entry(HELD_TABLE, segment_bytes(table) - workspace)]


def _table_elements(served: Served, rank: ModelSpec) -> int:
    """Of the table that the compiled code looks tokens up in; 0 where it has none."""
    if served.model.started_tower is not None:
        return 0
    return sum(table.num_elements for table in rank.embeddings[:1] if table.rows)
