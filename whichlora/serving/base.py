"""What a serving engine is: its options, what it refuses, and what its start takes of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry, Fact
from whichlora.methods.base import Method
from whichlora.serving.block_groups import CachedLayers
from whichlora.serving.drafted import Drafts
from whichlora.serving.expert_ranks import ExpertRanks
from whichlora.serving.indexers import INDEXER_KERNELS
from whichlora.serving.kernel_rates import (
    UNPACKING_PRODUCTS,
    ZEROED_READS,
    CodeBlocks,
    KernelRates,
)
from whichlora.serving.log import EngineLog
from whichlora.serving.other_flags import NO_NUMBER
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.layer import Linear
from whichlora.spec.numeric import Count, Real, floor_div, largest, last_between, where
from whichlora.spec.options import Option, OptionValue, filled, known
from whichlora.spec.run import MOST_COUNT, RunConfig
from whichlora.spec.versions import Libraries
from whichlora.spec.words import release_of
from whichlora.units import format_bytes

if TYPE_CHECKING:
    from whichlora.serving.cpu_timer import CpuTimer
    from whichlora.serving.hosted_time import Hosted


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model in the form in which an engine is asked to serve it.

    Args:
        engine: who is asked.
        targets: names of the matrices whose adapters are not merged, if any.
        options: the engine's own, defaults filled in.
        libraries: their versions, the engine's among them.
        nodes: machines that its GPUs are on, equally many on each.
        weights, adapter: where its command finds them; without `weights`, under the model's name.
    """

    model: ModelSpec
    run: RunConfig
    dtypes: Dtypes
    method: Method
    gpu: GpuSpec
    targets: tuple[str, ...]
    options: Mapping[str, OptionValue | None]
    libraries: Libraries
    engine: Engine
    nodes: int = 1
    weights: str = ""
    adapter: str = "ADAPTER"

    @property
    def version(self) -> str:
        """Of the engine; empty where its releases are not told apart."""
        return getattr(self.libraries, self.engine.library, "")

    @property
    def release(self) -> str:
        """The engine with its version, as messages name it: vllm 0.33.0."""
        return release_of(self.engine.name, self.version)

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.run.longest_sequence

    def is_asked(self, option: str) -> bool:
        """Whether the run names `option` itself."""
        return option in dict(self.run.serving_options)

    @property
    def shared_tokens(self) -> int:
        """Tokens of the prefix that all prompts share; the last token is computed for each.

        Source: vLLM 0.33.0 v1/core/kv_cache_manager.py:302 max_cache_hit_length.
        """
        prompt_len = self.run.prompt_len
        return min(int(self.run.shared_prompt_fraction * prompt_len), prompt_len - 1)

    @property
    def refused_requests(self) -> str:
        """Why an engine refuses the requests of the run; empty where it takes them."""
        prompt_len, new_tokens = self.run.prompt_len, self.run.max_new_tokens
        if prompt_len + new_tokens <= self.context:
            return ""
        return (
            f"prompts of {prompt_len} and answers of {new_tokens} tokens exceed the context of "
            f"{self.context}: the engine refuses such requests; give a larger context, or shorter "
            "ones"
        )

    def count(self, option: str) -> int | None:
        """The value of a whole number; None where the engine decides."""
        value = self.options[option]
        assert value is None or isinstance(value, int)
        return value


@lru_cache(maxsize=256)
def _libraries(library: str, version: str, stated: tuple[tuple[str, str], ...]) -> Libraries:
    defaults = {library: version} if library else {}
    return Libraries.of((defaults | dict(stated)).items())


def _none_of(tokens: int) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Blocks for keys and values, which an engine allocates when it starts.

    Args:
        num_bytes: what is left for it; below 0 where the rest already takes too much.
        block_bytes: of one block, in all layers that share it.
        blocks_of: blocks that a sequence of so many tokens takes; of an array, each.
        shared_of: blocks of a prefix of so many tokens that are there once for all sequences.
    """

    num_bytes: int
    block_bytes: int
    blocks_of: Callable[[Count], Count]
    shared_of: Callable[[int], int] = _none_of

    @property
    def num_blocks(self) -> int:
        return max(0, self.num_bytes // self.block_bytes)

    def sequence_bytes(self, context: int) -> int:
        """Of one sequence of `context` tokens."""
        num_blocks: int = self.blocks_of(context)
        return num_blocks * self.block_bytes

    def spare_bytes(self, context: int) -> int:
        """Bytes left beside one sequence of `context` tokens; below 0 where it does not fit."""
        return self.num_bytes - self.sequence_bytes(context)

    def max_concurrency(self, context: Count) -> Real:
        """Sequences of `context` tokens that the pool holds at once, none of them sharing blocks.

        Engines log it so.
        """
        return self.num_blocks / self.blocks_of(context)

    def num_tokens(self, context: int) -> int:
        """Tokens of the pool for sequences of `context` tokens, as engines log it."""
        return int(self.max_concurrency(context) * context)

    def num_sequences(self, context: Count, shared_tokens: int = 0) -> Count:
        """Sequences of `context` tokens that fit as a whole; a common prefix is stored once."""
        needed = self.blocks_of(context)
        unshared = largest(1, needed - self.shared_of(shared_tokens))
        return where(needed > self.num_blocks, 0, floor_div(self.num_blocks - needed, unshared) + 1)

    def max_context(self, most: int | None, spare_bytes: int = 0) -> int:
        """Tokens of the longest sequence that leaves `spare_bytes`, at most `most`; 0 for none."""
        return last_between(
            lambda tokens: self.spare_bytes(tokens) >= spare_bytes, 0, most or MOST_COUNT
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What an engine takes of one GPU when it starts, whatever is asked of it later.

    Args:
        entries: what it holds, or reserves, beside the pool.
        budget_bytes: what it allows itself of the GPU.
        pool_fact: of the bytes of its pool; None where `entries` has what sequences take.
        states_pool: whether its bytes are asked for as such, so that they are known.
        max_num_seqs: sequences of a context that run at once, however many the pool holds.
        shared_cells: tokens of the one cache that all of them have, however many the pool holds;
            None where each has its own.
        outside_bytes: what it takes beyond its budget, the context of its process left out.
        passing_bytes: of its entries, what only a step of the most tokens has: free between steps.
        fault: why it does not start; empty where it does.
        longest_context: of a sequence that it accepts of the model, where it refuses to start for
            longer ones; beyond: what lies beyond it, and the way out.
        untimed: why the steps of what has started are not predicted; empty where they are.
        counts_process: whether the budget has the context of its process, too.
        needs_context: whether it does not start, either, where the pool lacks room for one
            sequence.
        least_blocks: without which it does not start, either; least_blocks_for: the setting that
            asks for one each.
        stage: of a pipeline, whose GPU this is: that with the fewest blocks, which all have, or
            the fullest; 0 where there is no pipeline.
        copies: engines that share experts, each with such GPUs, a pool and sequences of its own.
        at_context: the start for another context, where the bytes of the pool depend on it.
        held: what of the model GPUs hold, in words, where they hold less of it beside more, or
            longer, sequences; empty where what does not fit fails.
        is_whole: whether that is all of it.
    """

    entries: tuple[Entry, ...]
    budget_bytes: int
    pool: Pool
    pool_fact: Fact | None = None
    states_pool: bool = False
    max_num_seqs: Callable[[int], int]
    shared_cells: int | None = None
    outside_bytes: int = 0
    passing_bytes: int = 0
    fault: str = ""
    longest_context: int | None = None
    beyond: str = ""
    untimed: str = ""
    counts_process: bool = False
    needs_context: bool = False
    least_blocks: int = 0
    least_blocks_for: str = ""
    stage: int = 0
    copies: int = 1
    at_context: Callable[[int], Start] | None = None
    held: str = ""
    is_whole: bool = True

    def max_context(self, most: int | None, spare_bytes: int = 0) -> int:
        """Tokens of the longest sequence, at most `most`, for which it starts; 0 for none.

        A release that reads long contexts in chunks may start for them where it does not for
        shorter ones, whose prompts it reads whole: the chunks' pool is asked first.

        Args:
            spare_bytes: that such a sequence leaves of the pool.
        """
        high = min(most or MOST_COUNT, self.longest_context or MOST_COUNT)
        if self.at_context is None:
            return self.pool.max_context(high, spare_bytes)
        at_context = self.at_context

        def holds(context: int) -> bool:
            start = at_context(context)
            return not start.lacks(context) and start.pool.spare_bytes(context) >= spare_bytes

        chunked = at_context(high).pool.max_context(high, spare_bytes)
        return last_between(holds, chunked if chunked and holds(chunked) else 0, high)

    def lacks(self, context: int) -> bool:
        """Whether it does not start for sequences of `context` tokens."""
        lacks_any = self._lacks_blocks or self._lacks_room(context)
        return bool(self.fault) or self.is_beyond(context) or lacks_any

    def fault_at(self, context: int) -> str:
        """Why it does not start for sequences of `context` tokens; empty where it does."""
        pool = self.pool
        if self.fault:
            longest = 0 if self.at_context is None else self.max_context(context)
            return f"{self.fault}; a context up to {longest} starts" if longest else self.fault
        if self.is_beyond(context):
            return f"a context of {context} tokens is beyond {self.beyond}"
        if self._lacks_blocks:
            return (
                f"{self.least_blocks_for} {self.least_blocks} is more than the {pool.num_blocks} "
                f"blocks of the pool, of which each sequence keeps its state in one; give "
                f"{self.least_blocks_for} {pool.num_blocks} or less"
            )
        if not self._lacks_room(context):
            return ""
        return (
            f"one sequence of {context} tokens takes {format_bytes(pool.sequence_bytes(context))} "
            f"of keys and values, and the pool has {format_bytes(pool.num_bytes)}; the longest "
            f"context is {self.max_context(context)}"
        )

    def is_beyond(self, context: int) -> bool:
        """Whether it accepts no sequence of `context` tokens, whatever the pool is."""
        return self.longest_context is not None and context > self.longest_context

    def closest(self, context: int) -> tuple[int, str]:
        """Bytes of the pool that what decides whether it starts leaves, and what that is."""
        pool = self.pool
        spare = pool.spare_bytes(context)
        beside = pool.num_bytes - self.least_blocks * pool.block_bytes
        if self.least_blocks and beside < spare:
            return beside, f"{self.least_blocks_for} {self.least_blocks}"
        return spare, f"one sequence of {context} tokens"

    @property
    def _lacks_blocks(self) -> bool:
        # where not one sequence fits, that is what is said
        return 0 < self.pool.num_blocks < self.least_blocks

    def _lacks_room(self, context: int) -> bool:
        return self.needs_context and self.pool.blocks_of(context) > self.pool.num_blocks

    def entries_at(self, context: int) -> tuple[Entry, ...]:
        """All that it holds; where the pool is too small, what it would need at least."""
        if self.pool_fact is None:
            return self.entries
        pool = self.pool
        held = pool.num_blocks * pool.block_bytes
        if self.fault or self._lacks_room(context):
            held = pool.sequence_bytes(context) if self.needs_context else pool.block_bytes
        return (*self.entries, Entry(self.pool_fact, held))

    def max_running(self, context: int, shared_tokens: int = 0) -> int:
        """Sequences of `context` tokens that run at once, over all engines; further ones wait."""
        if self.fault_at(context):
            return 0
        held: int = self.pool.num_sequences(context, shared_tokens)
        if self.shared_cells is not None:
            held = min(held, self.shared_cells // context)
        return self.copies * min(self.max_num_seqs(context), held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """How an engine steps, as it is asked to serve.

    Args:
        ranks: GPUs that share every matrix.
        experts: how routed experts are divided; None: as every matrix.
        elsewhere: of `ExpertRates.elsewhere`, what the kernels of this engine have.
        wide_routers: whether what chooses experts is computed in fp32.
        gathered_share: of a state in the dtype of products, what ranks with own sequences send.
        stage_layers: of a pipeline, how many layers each stage has; empty where there is none.
        stage_cards: of `GpuSpec.beside`, the number of each stage's card, from 0; empty where all
            are equal.
        step_s: what its host does between two steps, for which the GPU waits; `sequence_s` for each
            sequence that runs.
        max_step_tokens: of prompts and answers in one step.
        mixes: whether prompts and answers share a step; else prompts go first, alone.
        whole_prompts: whether a prompt is read in one step, however long it is.
        captured_tokens: of the largest step that is one CUDA graph.
        launch_s: what a kernel of a larger step costs the host.
        cache_bytes: of one element of keys and values.
        head_reads: FLOP/s of attention whose query heads each read keys and values, a share of the
            fp32 peak; None where the heads of a group share them.
        query_tile: queries of a prompt that one block of attention has, whose keys it does not
            share; None where blocks fill the device however few they are.
        copied_token_s: of its host, for each token of the running sequences, beside the GPU's work.
        code_products: of the rate of 16 bit, what large products of codes reach.
        zeroed_reads: of the bandwidth of GPTQ's codes, what AWQ's reach.
        code_blocks: of its own kernel for quantised weights, where that is not Marlin's.
        narrow_blocks: of its own kernel for 8-bit floats that a GPU multiplies, beside experts.
        code_launch_s: of a second kernel of such a product, which no Python launches.
        expert_rows: of one kernel, where each expert's product of codes has kernels of its own,
            also without tokens; None where all experts share one.
        rates: what its own kernels reach on a GPU, computing in a dtype; None where they are those
            of `kernel_rates`.
        weight_bytes: of a matrix as the engine stores it, all experts, the mean of the layers; None
            asks for the head. None where the run's dtypes say it.
        joins: whether matrices that read one input are one product.
        max_num_seqs: that run at once, where fewer than `Start` could be had are allocated.
        graph_tokens: of one pass over the layers; a larger step is several. None for no limit.
        state_bytes: of a recurrent layer's state; None where the model's dtypes say it.
        state_passes: times that a step reads and writes that state.
        delta_token_s: of each token of a prompt in a layer with the delta rule, whose kernel takes
            one after the other; None where it takes chunks.
        passes_at_once: of one step that are at different stages of a pipeline; None where whole
            steps of several batches are.
        hosted: which part of the model the host has; None where GPUs have all.
        reserved_tokens, keeps_blocks, front_s, plans_ahead: as `scheduler.Rules`.
        caches_prompts: what all sequences begin with is read once.
        indexer_kernels: of one indexer, beside its products.
        tokenized_s: of each token of a prompt, before the scheduler has it.
        drafts: that a step verifies; `accepted` tokens it gives a sequence in the mean.
        slowest: how many times longer than at the slow end of the interval a step may take, as
            published runs say of what is not predicted.
    """

    ranks: int
    step_s: float
    sequence_s: float
    max_step_tokens: int
    mixes: bool
    whole_prompts: bool = False
    captured_tokens: int
    launch_s: float
    cache_bytes: float
    head_reads: float | None = None
    query_tile: int | None = None
    copied_token_s: float = 0.0
    code_products: float = UNPACKING_PRODUCTS
    zeroed_reads: float = ZEROED_READS
    code_blocks: CodeBlocks | None = None
    narrow_blocks: CodeBlocks | None = None
    code_launch_s: float = 0.0
    expert_rows: int | None = None
    rates: Callable[[GpuSpec, str], KernelRates] | None = None
    weight_bytes: Callable[[Linear | None], float] | None = None
    joins: bool = True
    max_num_seqs: int | None = None
    graph_tokens: int | None = None
    stage_layers: tuple[int, ...] = ()
    stage_cards: tuple[int, ...] = ()
    state_bytes: Callable[[CachedLayers], int] | None = None
    state_passes: int = 1
    delta_token_s: float | None = None
    elsewhere: float = 1.0
    wide_routers: bool = False
    reserved_tokens: int = 0
    keeps_blocks: bool = False
    caches_prompts: bool = True
    front_s: float = 0.0
    tokenized_s: float = 0.0
    plans_ahead: bool = False
    indexer_kernels: int = INDEXER_KERNELS
    experts: ExpertRanks | None = None
    gathered_share: float = 1.0
    passes_at_once: int | None = None
    hosted: Hosted | None = None
    drafts: Drafts | None = None
    accepted: float = 1.0
    slowest: float = 1.0

    @property
    def copies(self) -> int:
        """Engines that share experts, each with sequences of its own."""
        return self.experts.copies if self.experts else 1

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stage_layers))

    def chunk_share(self, batches: int) -> float:
        """Share of a prompt's step after which the first stage is free for its next chunk.

        Args:
            batches: that the stage has to work on meanwhile, this one included.

        Kind: exact for equal layers. Source: vLLM 0.33.0 v1/core/sched/scheduler.py:817, which
        holds back sequences that decode, no chunks; SGLang 0.5.23
        srt/managers/scheduler_pp_mixin.py; llama.cpp 0c1e570 tools/server/server-context.cpp:3660,
        which waits for batches that have an answer's token alone.
        """
        if not self.stage_layers:
            return 1.0
        slowest, passing = float(max(self.stage_layers)), sum(self.stage_layers)
        if self.passes_at_once is None:
            return min(1.0, batches * slowest / passing)
        passes = self.passes(self.max_step_tokens)
        slowest = max(slowest, passing / self.passes_at_once)
        return passes * slowest / (passing + (passes - 1) * slowest)

    def passes(self, tokens: int) -> int:
        """Number of passes over the layers in a step of `tokens`."""
        return max(1, -(-tokens // (self.graph_tokens or tokens or 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTimes:
    """What an engine printed of requests that it answered.

    Args:
        run: how it was started, and the mean lengths of prompts and answers.
        values: by name in a record: `ttft_s`, `tpot_s`.
    """

    run: RunConfig
    values: Mapping[str, float]


ReadLogs: TypeAlias = Callable[[], Sequence[LoggedTimes]]
"""Reads what logs of the device state, which takes as long as an estimate."""


def unequal(gpus: int, nodes: int) -> str:
    """Why GPUs cannot be divided evenly over machines; empty where they can."""
    if gpus % nodes == 0:
        return ""
    shared, instead = ("1 GPU", "1") if gpus == 1 else (f"{gpus} GPUs", f"a divisor of {gpus}")
    return f"{nodes} machines cannot have equally many of {shared}; give {instead}, or more gpus"


def _accepts(served: Served) -> None:
    return None


def _nothing(served: Served) -> str:
    return ""


def _no_options(libraries: Libraries, model: ModelSpec) -> Mapping[str, OptionValue]:
    return {}


def _no_time_notes(served: Served) -> tuple[str, ...]:
    return ()


def _no_notes(served: Served, start: Start) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Who serves a model.

    Args:
        library: the field of `Libraries` that is its version; empty where none is.
        version: the release that its file was read from, which a run that names none is of.
        options: its own settings, by its own names.
        device_kinds: those that it is predicted for.
        also_called: what else people call it, or what runs it; by that name, what a user of it
            must know, where there is anything.
        stored_by: its option that says how weights are stored, where it has one of its own;
            stored_as: what that says of a checkpoint, by the checkpoint's quantisation;
            counted_type: what the type in a file's name is counted as; of a name without one, the
            file that the engine takes; compared_forms: what is compared of it.
        usual_quants: of `quant`, or of its own types, what people serve, the widest first.
        shared_by: its option for the number of GPUs that share every matrix, where that is
            predicted; `staged_by` for the number of stages that each have some of the layers.
        copied_by: its option for the number of engines that share experts alone, each with GPUs of
            its own beside those of `shared_by`.
        spread_by: its option for the number of machines, equally many GPUs on each.
        bounded_by: its option for sequences at once, where it starts with no more than have a block
            for their state; empty where it runs as many as have.
        drafted_by: its option that asks for drafts; has_drafts: whether those that options ask for
            are predicted of a model; drafter_of: the name of another model that drafts, empty where
            none does; divides_joint: of a draft layer, ranks share the matrix before it; drafting:
            its other options that only say how drafts are made.
        takes_unequal: whether the GPUs of a pipeline may be of several types.
        fills_stages: whether a pipeline has a batch at every stage; else one batch passes them.
        least_capability: the oldest compute capability that it has kernels for.
        runs_torch: whether it computes with PyTorch, whose wheels and dtypes bind it.
        takes_context: whether a process takes memory of a GPU beside what it allocates.
        start: what it takes when it starts; None where memory is taken as sequences come, so that
            the run is one call of `generate`.
        load_of_start: what that depends on of the sequences asked for: two loads with an equal
            one start alike.
        reads_checkpoints: it loads the files of the hub as they are stored.
        stored_forms: of `ENGINE_QUANTS`, those in which it serves weights.
        float16_alone: of `quant`, whose products are float16 alone before a release, that release.
        loads_towers: whether adapters of what sees are loaded with those of the text.
        starts_tower: whether it loads what a model sees with, as a run asks it, to serve texts.
        text_options: with which a release does not, that of a run; none where no flag says so.
        stepping: how it steps, where `Start.untimed` does not say why not; None where its times are
            not predicted.
        logged_timer: of steps, by logs of the same device, which say it better than `stepping`;
            None where these do not tell.
        check: refuses what the engine refuses, in one line.
        command: starts it as it is judged, in a shell; empty where there is no such command.
        prepare: lines of a shell that make what the command loads from the directory of
            `Served.weights`; empty where it loads that.
        notes: what a user must know of a run; time_notes: of its times by `stepping`.
        log: how what it prints is read.
        programs: commands and modules that start it, such as "vllm serve"; images: of containers
            that do; model_flags: their options that name the model, before all others what stands
            first; takes_beginnings: its parser takes the beginning of a flag that no other has, as
            argparse does.
        own_context: the most tokens of a sequence of a model that it takes where a command does
            not say; None where that is as many as fit.
        elsewhere: settings of a run, by the names that are no options here.
        refused: why a flag of the engine is no option here; set_aside: those of them without which
            a command is predicted, with a note; idle_faults: of `refused`, what is said of flags
            that change nothing here.
        ignored: flags that stand in its command as they are given, and what is said of them;
            ignored_in: the first release that has one and the first that has not, where not all
            have; empty where none is known.
    """

    name: str
    summary: str
    library: str = ""
    version: str = ""
    options: tuple[Option, ...] = ()
    device_kinds: tuple[str, ...] = ("cuda",)
    also_called: Mapping[str, str] = field(default_factory=dict)
    stored_by: str = ""
    stored_as: Mapping[str, str] = field(default_factory=dict)
    counted_type: Callable[[str], str] = str
    compared_forms: tuple[str, ...] = ()
    usual_quants: tuple[str, ...] = ("none",)
    shared_by: str = ""
    staged_by: str = ""
    copied_by: str = ""
    spread_by: str = ""
    bounded_by: str = ""
    drafted_by: str = ""
    has_drafts: Callable[[ModelSpec, Mapping[str, OptionValue]], bool] = lambda model, options: (
        False
    )
    drafter_of: Callable[[Mapping[str, OptionValue]], str] = lambda options: ""
    divides_joint: bool = False
    drafting: tuple[str, ...] = ()
    takes_unequal: bool = False
    fills_stages: bool = True
    least_capability: float = 0.0
    runs_torch: bool = True
    takes_context: Callable[[GpuSpec], bool] = lambda gpu: True
    start: Callable[[Served], Start] | None = None
    load_of_start: Callable[[Served], Hashable] = _nothing
    reads_checkpoints: bool = True
    stored_forms: frozenset[str] = frozenset()
    loads_towers: bool = True
    starts_tower: Callable[[RunConfig, ModelSpec], bool] | None = None
    text_options: Callable[[Libraries, ModelSpec], Mapping[str, OptionValue]] = _no_options
    float16_alone: Mapping[str, str] = field(default_factory=dict)
    stepping: Callable[[Served], Stepping] | None = None
    logged_timer: Callable[[Served, ReadLogs], CpuTimer | None] | None = None
    check: Callable[[Served], None] = _accepts
    command: Callable[[Served], str] = _nothing
    prepare: Callable[[Served], str] = _nothing
    notes: Callable[[Served, Start], tuple[str, ...]] = _no_notes
    time_notes: Callable[[Served], Sequence[str]] = _no_time_notes
    log: EngineLog | None = None
    programs: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    model_flags: tuple[str, ...] = ("model",)
    takes_beginnings: bool = False
    own_context: Callable[[ModelSpec, Libraries], int | None] | None = None
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    set_aside: frozenset[str] = frozenset()
    idle_faults: tuple[str, ...] = (NO_NUMBER,)
    ignored: Mapping[str, str] = field(default_factory=dict)
    ignored_in: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def divided_by(self) -> str:
        """The option for the number of GPUs; empty where only one GPU is predicted."""
        return self.shared_by or self.staged_by

    def num_gpus(self, run: RunConfig) -> int:
        """GPUs that share the model of `run`: those of every stage, and of every copy."""
        return self.num_stages(run) * self._number(run, self.shared_by) * self.num_copies(run)

    def num_copies(self, run: RunConfig) -> int:
        """Data parallel engines of `run`, which share experts and have GPUs of their own."""
        return self._number(run, self.copied_by)

    def num_stages(self, run: RunConfig) -> int:
        """Stages of the pipeline of `run`; 1 where there is none."""
        return self._number(run, self.staged_by)

    def stated_nodes(self, run: RunConfig) -> int | None:
        """Machines that `run` states; None where it states none: then as few as hold its GPUs."""
        nodes = dict(run.serving_options).get(self.spread_by)
        return nodes if isinstance(nodes, int) else None

    def check_nodes(self, run: RunConfig) -> None:
        """Refuse GPUs that cannot be divided evenly over the stated machines.

        Raises:
            ConfigError: one line.
        """
        nodes = self.stated_nodes(run)
        if nodes is not None and (fault := unequal(self.num_gpus(run), nodes)):
            raise ConfigError(f"{self.spread_by}: {fault}")

    def _number(self, run: RunConfig, option: str) -> int:
        value = dict(run.serving_options).get(option, 1)
        return value if isinstance(value, int) else 1

    def libraries(self, run: RunConfig) -> Libraries:
        """Versions of `run`, this engine's own where it names none."""
        return _libraries(self.library, self.version, run.libraries)

    def fault_of(self, flag: str) -> str:
        """Why a flag of the engine is not among `options`; empty where no reason is known."""
        if setting := self.elsewhere.get(flag):
            return f"is the setting {setting}"
        return self.refused.get(flag, "")

    def ignored_notes(self, run: RunConfig) -> list[str]:
        """Notes on flags of `run` that no prediction depends on."""
        names_by_note: dict[str, list[str]] = {}
        libraries = self.libraries(run)
        lacking = f"no flags of {release_of(self.name, getattr(libraries, self.library, ''))}, "
        for name, _ in run.serving_options:
            if name in self.ignored:
                is_lacking = self.lacks_flag(name, libraries)
                note = f"{lacking}left out of the command" if is_lacking else self.ignored[name]
                names_by_note.setdefault(note, []).append(name)
        return [f"{', '.join(names)}: {note}" for note, names in names_by_note.items()]

    def lacks_flag(self, name: str, libraries: Libraries) -> bool:
        """Whether the release does not know a flag of `ignored`, and would not start with it."""
        since, until = self.ignored_in.get(name, ("", ""))
        is_later = bool(until) and libraries.reaches(self.library, until)
        return is_later or (bool(since) and libraries.older(self.library, since))

    def check_flags(self, served: Served) -> None:
        """Refuse options and values that the engine's release does not have.

        Raises:
            ConfigError: one line.
        """
        for option in self.options:
            value = served.options[option.name]
            if not served.is_asked(option.name) or value is False:
                continue
            if option.since and served.libraries.older(self.library, option.since):
                raise ConfigError(
                    f"{option.name}: {served.release} has no such option, {option.since} or newer "
                    f"has; leave it out, or give libraries {self.library}={option.since}"
                )
            since = option.choices_since.get(str(value), "")
            if since and served.libraries.older(self.library, since):
                raise ConfigError(
                    f"{option.name}: {served.release} has no {value}, {since} or newer has; give "
                    f"another value, or libraries {self.library}={since}"
                )

    def filled(self, run: RunConfig) -> dict[str, OptionValue | None]:
        """Every option's value.

        Raises:
            ConfigError: `run` has an option that is not this engine's, or a value is not accepted.
        """
        stated = {name: value for name, value in run.serving_options if name not in self.ignored}
        for name in stated:
            if fault := self.fault_of(name):
                instead = f"; give --{self.elsewhere[name]}" if name in self.elsewhere else ""
                raise ConfigError(f"serving_options: {name} {fault}{instead}")
        known(self.options, stated, setting="serving_options", owner=self.name)
        return filled(self.options, stated)
