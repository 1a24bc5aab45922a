"""What DeepSpeed's ZeRO stages share: flat partitions, buckets, the update, the dtypes.

Source: deepspeed 0.19.8 `runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `stage3.py`;
accelerate 1.15 `utils/deepspeed.py`; transformers 5.23 `integrations/deepspeed.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from whichlora.errors import ConfigError
from whichlora.memory import moments as one_device
from whichlora.memory import optimizer
from whichlora.memory.allocator import PINNED_REMAINDERS, REMAINDERS, pinned_remainder_bytes
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.gradients import Trained
from whichlora.memory.loading import UNSPLIT_WEIGHTS
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import ROLLOUT
from whichlora.memory.weights import BUFFERS
from whichlora.parallel.base import HostUpdate, Message, Moments, RankKind, Saving, Spread, in_run
from whichlora.parallel.gradients import GRADIENTS, as_accumulated, without
from whichlora.parallel.host_update import threads_of, update_note
from whichlora.spec.numeric import Count, any_of, ceil_div, largest, smallest
from whichlora.spec.options import Option, OptionValue
from whichlora.spec.run import AnyOptimizer, RunConfig, autocast_precision

BUCKET = Option(
    name="zero_bucket_size",
    summary="elements of the bucket of gradients; the Trainer's auto: hidden_size^2",
    default=None,
)
OVERLAP = Option(
    name="overlap_comm",
    summary="gradients are reduced while the backward goes on, from two buckets",
    default=False,
)
OFFLOAD_OPTIMIZER = Option(
    name="offload",
    summary="what is kept on the host",
    default=(),
    choices=("optimizer",),
)
OFFLOAD_BOTH = replace(OFFLOAD_OPTIMIZER, choices=("optimizer", "params"))
MASTER_BYTES = 4  # the optimizer's copy of a parameter, its gradient and states
NORM_BYTES = 8  # `get_norm_dtype` is fp64
# Of an element in `_has_inf_or_nan`: `float`, `isnan`, `isinf`, `logical_or`, and `float` of that.
OVERFLOW_BYTES = (4, 1, 1, 1, 4)
FORWARD = (*one_device.LAYER_FORWARDS, "loss_forward")
BEFORE_GRADIENTS = (*FORWARD, "loss_backward")
OFFLOADED: tuple[AnyOptimizer, ...] = ("adamw_torch", "adamw_torch_fused")
# In whose place accelerate puts DeepSpeed's CPU Adam, too; of `lion` it makes its CPU Lion.
_AS_ADAM = ("adamw_hf", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd")

# --- what a rank computes ---------------------------------------------------------------------


def narrowed(rank: RankKind, spread: Spread) -> tuple[RankKind, ...]:
    """The rank's step in DeepSpeed's dtypes: all parameters in 16 bit, no autocast.

    Source: deepspeed 0.19.8 `DeepSpeedEngine._cast_module_mixed_precision`; accelerate 1.15
    `_prepare_deepspeed` enters no autocast, unlike `prepare_model`.
    """
    rank = _updated_on_host(rank, spread)
    step = rank.step
    half = autocast_precision(step.run.precision)
    if half not in ("bf16", "fp16"):
        return (rank,)
    pure = "bf16-pure" if half == "bf16" else "fp16-pure"
    run = replace(
        step.run,
        precision=pure,  # type: ignore[arg-type]
        base_dtype="auto",
        adapter_dtype="auto",
        prepare_kbit=False if step.run.prepare_kbit else step.run.prepare_kbit,
    )
    step = in_run(step, run)
    return (replace(rank, step=step, at_rest=step),)


def _updated_on_host(rank: RankKind, spread: Spread) -> RankKind:
    """The rank with DeepSpeed's CPU Adam, which replaces any optimizer that is offloaded.

    Source: accelerate 1.15 `_prepare_deepspeed`, `map_pytorch_optim_to_deepspeed`.
    """
    if not offloads(spread, "optimizer") or rank.step.run.optimizer not in _AS_ADAM:
        return rank
    step = in_run(rank.step, replace(rank.step.run, optimizer=OFFLOADED[0]))
    return replace(rank, step=step, at_rest=step)


def check(step: TrainingStep, spread: Spread) -> None:
    """Refuse what DeepSpeed and accelerate refuse. Raises: ConfigError."""
    accepted = (*OFFLOADED, *_AS_ADAM)
    if offloads(spread, "optimizer") and step.run.optimizer not in accepted:
        raise ConfigError(
            f"offload: optimizer {step.run.optimizer} is not predicted on the host; use optimizer "
            f"{' or '.join(OFFLOADED)}, or offload without optimizer"
        )
    if len(spread.config.names) > 1:
        raise ConfigError(
            f"parallel: {spread.config.strategy} combines ZeRO with another strategy, which "
            "accelerate does not; use ZeRO alone"
        )


# --- partitions -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shares:
    """How one flat group of parameters is divided over ranks, in elements.

    Args:
        partition: of each rank, padded.
        whole: of the parameters that one rank's partition touches, of the rank with most.
        piece: the largest part of one parameter that lies in one partition.
        at_norm: `whole` and `piece` of the rank that needs most while it computes the norm.
    """

    partition: Count
    whole: Count
    piece: Count
    at_norm: tuple[Count, Count]


def partition_elements(total: Count, ranks: int) -> Count:
    """Elements of a flat group of `total` that each rank has, padding included.

    Kind: exact. Source: deepspeed 0.19.8 `flatten_dense_tensors_aligned`: `nccl_start_alignment_
    factor` of 2 for each rank.
    """
    return ceil_div(total, 2 * ranks) * 2


def pieces_of_ranks(sizes: Iterable[int], partition: int) -> Iterator[tuple[int, int, int]]:
    """Rank, elements of a parameter, and those of them in the rank's partition, in flat order.

    Kind: exact. Source: deepspeed 0.19.8 `get_partition_info`.
    """
    start = 0
    for size in sizes:
        for rank, overlap in ranks_between(start, start + size, partition):
            yield rank, size, overlap
        start += size


def ranks_between(start: int, end: int, partition: int) -> Iterator[tuple[int, int]]:
    """Ranks whose partitions have elements of a flat group from `start` to `end`, and how many.

    Kind: exact. Source: as of `pieces_of_ranks`.
    """
    for rank in range(start // partition, -(-end // partition)):
        yield rank, min(end, (rank + 1) * partition) - max(start, rank * partition)


@lru_cache(maxsize=256)
def flat_shares(sizes: tuple[int, ...], ranks: int) -> Shares:
    """The division of one flat group, whose parameters have `sizes` elements in this order.

    Kind: exact. Source: deepspeed 0.19.8 `flatten_dense_tensors_aligned`, `get_partition_info`.
    """
    partition = partition_elements(sum(sizes), ranks)
    by_rank = _whole_and_largest(pieces_of_ranks(sizes, partition))
    return Shares(
        partition,
        whole=max(whole for whole, _ in by_rank.values()),
        piece=max(piece for _, piece in by_rank.values()),
        at_norm=max(by_rank.values(), key=_at_norm),
    )


def _whole_and_largest(pieces: Iterable[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    """Elements of the parameters that a rank's partition touches, and the largest part in it."""
    found: dict[int, tuple[int, int]] = {}
    for rank, size, overlap in pieces:
        whole, piece = found.get(rank, (0, 0))
        found[rank] = whole + size, max(piece, overlap)
    return found


def _at_norm(whole_and_piece: tuple[int, int]) -> int:
    whole, piece = whole_and_piece
    return 2 * whole + NORM_BYTES * piece


def rank_at_norm(pieces: Iterable[tuple[int, int, int]]) -> int:
    """The rank that needs most while it computes the norm; args as `pieces_of_ranks` yields.

    Kind: exact. Source: as of `Shares.at_norm`.
    """
    by_rank = _whole_and_largest(pieces)
    return max(by_rank, key=lambda rank: _at_norm(by_rank[rank]))


def estimated_shares(tensors: Sequence[Trained], ranks: int) -> Shares:
    """`flat_shares` of adapters, whose sizes may be arrays.

    Kind: upper bound of `whole`, by less than the largest adapter matrix. Source: `flat_shares`.
    """
    total: Count = sum(tensor.num_params * tensor.count for tensor in tensors)
    partition = partition_elements(total, ranks)
    biggest = largest(*(tensor.num_params for tensor in tensors))
    whole, piece = smallest(total, partition + biggest), smallest(partition, biggest)
    return Shares(partition, whole, piece, at_norm=(whole, piece))


def parameter_order(step: TrainingStep) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of each parameter of a trained base, in order: with weight decay, and without.

    Kind: exact but for the order of a layer's own matrices. Source: transformers 5.23
    `Trainer.create_optimizer`, which lets norms and biases go without decay.
    """
    depth = sum(count for _, count in step.model.layers())
    tables = [int(t.num_params) for t in step.tensors if t.is_embedding]
    once: list[int] = []
    of_layers: list[tuple[int, list[int]]] = []
    plain: list[int] = []
    for tensor in step.tensors:
        if tensor.is_embedding or not tensor.num_params:
            continue
        if tensor.rows == 1:
            plain += [int(tensor.num_params)] * int(tensor.count)
        elif tensor.count == 1 and depth > 1:
            once.append(int(tensor.num_params))
        else:
            of_layers.append((int(tensor.count), [int(tensor.num_params)]))
    matrices: list[int] = []
    for place in range(depth):
        for count, sizes in of_layers:
            each = count * (place + 1) // depth - count * place // depth
            matrices += sizes * each
    return (*tables, *matrices, *once), tuple(plain)


@dataclass(frozen=True)
class Partitioned:
    """What one rank keeps of the trained parameters, their gradients and states.

    Args:
        step: in DeepSpeed's dtypes.
    """

    step: TrainingStep
    spread: Spread

    @cached_property
    def groups(self) -> tuple[Shares, ...]:
        """The optimizer's flat groups: parameters that decay, and norms and biases."""
        ranks = self.spread.size
        if self.step.method.trains_base:
            return tuple(flat_shares(sizes, ranks) for sizes in parameter_order(self.step) if sizes)
        return (estimated_shares(self.step.tensors, ranks),)

    @property
    def elements(self) -> Count:
        return sum(group.partition for group in self.groups)

    @property
    def whole(self) -> Count:
        return sum(group.whole for group in self.groups)

    @property
    def piece(self) -> Count:
        return largest(*(group.piece for group in self.groups))

    @property
    def width(self) -> int:
        """Bytes of a trained parameter and of its gradient."""
        return self.step.param_bytes

    @cached_property
    def largest_trained(self) -> Count:
        return largest(*(tensor.num_params for tensor in self.step.tensors))

    @cached_property
    def flat(self) -> tuple[Trained, ...]:
        """The partitions as the optimizer sees them: one fp32 vector each."""
        return tuple(
            Trained(rows=1, width=group.partition, param_bytes=MASTER_BYTES)
            for group in self.groups
        )

    @property
    def updated(self) -> tuple[Trained, ...]:
        """Those vectors that one update of the optimizer reads and writes."""
        return self.flat

    @cached_property
    def states(self) -> Count:
        return optimizer.state_bytes(
            self.flat, optimizer=self.step.run.optimizer, device_kind=self.step.gpu.kind
        )

    @cached_property
    def update_temporaries(self) -> Count:
        """Bytes of temporaries while one flat vector is updated.

        Kind: exact. Source: torch 2.13 `_multi_tensor_adam` makes one list; on a CPU
        `_single_tensor_adam` holds the root and the quotient of one tensor at once.
        """
        biggest = largest(*(tensor.num_params for tensor in self.updated)) * MASTER_BYTES
        if self._updates_one_by_one:
            return 2 * biggest
        name, foreach = self.step.run.optimizer, self.step.has_foreach
        return optimizer.step_temporary_bytes(self.updated, optimizer=name, foreach=foreach)

    @property
    def _updates_one_by_one(self) -> bool:
        return self.step.gpu.kind == "cpu" and self.step.run.optimizer == "adamw_torch"

    def temporary_blocks(self, master: Trained) -> Iterable[list[int]]:
        """The same of one flat vector in order, those that are alive together in one list."""
        if self._updates_one_by_one:
            return [[int(master.num_params) * MASTER_BYTES] * 2]
        name, foreach = self.step.run.optimizer, self.step.has_foreach
        return optimizer.temporary_blocks([master], optimizer=name, foreach=foreach)

    @property
    def bucket_bytes(self) -> Count:
        return bucket_elements(self.step, self.spread) * self.width

    @property
    def reduced_copy_bytes(self) -> Count:
        """Bytes of the copy in which a bucket is reduced that several ranks share.

        Kind: upper bound: the last bucket may be less full. Source: deepspeed 0.19.8
        `allreduce_bucket`; `reduce_scatter_coalesced` of stage 3.
        """
        return smallest(self.bucket_bytes, self.step.gradients.total)

    @property
    def waiting_bytes(self) -> Count:
        """Bytes of a gradient that is too large for a bucket, and waits for the next gradient.

        Kind: exact. Source: deepspeed 0.19.8 `extra_large_param_to_reduce` of stages 1 and 2;
        `__add_grad_to_ipg_bucket` of stage 3.
        """
        in_layers = largest(
            *(
                tensor.num_params * (tensor.num_params > bucket_elements(self.step, self.spread))
                for tensor in self.step.tensors
                if tensor.count > 1
            ),
            0,
        )
        return in_layers * self.width

    @property
    def buckets_take_layers(self) -> bool:
        """Whether a bucket takes each gradient of a layer as it comes, and frees it.

        Kind: exact; in stage 1 only where there is one micro-step, and gradients are reduced as
        they come. Source: deepspeed 0.19.8 `reduce_independent_p_g_buckets_and_remove_grads`.
        """
        limit = bucket_elements(self.step, self.spread)
        in_layers = (tensor.num_params for tensor in self.step.tensors if tensor.count > 1)
        return not self.step.accumulates and not any(any_of(size > limit) for size in in_layers)

    @property
    def waiting_head(self) -> Count:
        """Bytes of a head's gradient that no bucket takes: in stage 1 it stays to the epilogue.

        Kind: upper bound: a copy replaces it on the rank whose partition has it. Source: deepspeed
        0.19.8 `reduce_ipg_grads`, `_clear_param_grad_only`.
        """
        limit = bucket_elements(self.step, self.spread)
        alone = (t.num_params for t in self.step.tensors if t.count == 1 and not t.is_embedding)
        return sum(size * (size > limit) for size in alone) * self.width

    @property
    def overlapped_bytes(self) -> Count:
        """What the first rank holds beside all gradients while the last layers are reduced.

        Stage 1 keeps gradients of other partitions until the epilogue, but for those in a bucket.
        The rank's own move into its buffer, which has room for the embeddings, too.
        Kind: estimate: small gradients are evenly spread. Source: deepspeed 0.19.8
        `reduce_ipg_grads`, `copy_grads_in_partition`.
        """
        tables = sum(t.num_params * t.count for t in self.step.tensors if t.is_embedding)
        limit = bucket_elements(self.step, self.spread)
        small = sum(
            t.num_params * t.count * (t.num_params <= limit)
            for t in self.step.tensors
            if not t.is_embedding
        )
        total = sum(t.num_params * t.count for t in self.step.tensors)
        of_others = small * (total - self.whole) // largest(total - tables, 1)
        room = smallest(self.whole, tables) - of_others
        on_device = not offloads(self.spread, "optimizer")
        return largest(room, 0) * self.width * on_device


def bucket_elements(step: TrainingStep, spread: Spread) -> int:
    """Elements of one bucket.

    Kind: exact.
    Source: transformers 5.23 `trainer_config_finalize`: "auto" is the square of the hidden size.
    """
    stated = spread.options.get("zero_bucket_size")
    return stated if isinstance(stated, int) else step.model.hidden_size**2


def offloads(spread: Spread, target: str) -> bool:
    offload = spread.options.get("offload") or ()
    return isinstance(offload, tuple) and target in offload


# --- entries ----------------------------------------------------------------------------------

MASTER = Fact(
    part="optimizer_states",
    what="fp32 partition of the parameters",
    shape="[trained_params / ranks]",
    dtype="float32",
    why="the optimizer updates it; the 16-bit parameters are copied from it",
    source="deepspeed 0.19.8 single_partition_of_fp32_groups",
)
BUCKETS = Fact(
    part="gradients",
    what="bucket of gradients that are reduced",
    shape="[zero_bucket_size]",
    dtype="of the parameter",
    count="2 with overlap_comm",
    why="gradients are copied into it as they come",
    source="deepspeed 0.19.8 setup_buckets, IPGBucket",
)
REDUCED_COPY = Fact(
    part="gradients",
    what="copy of a bucket that several ranks share",
    shape="[at most zero_bucket_size]",
    dtype="of the parameter",
    why="its parts are put side by side, and reduced at once",
    source="deepspeed 0.19.8 allreduce_bucket; reduce_scatter_coalesced",
)
PARTITION_GRADIENTS = Fact(
    part="gradients",
    what="gradients of the parameters in this rank's partition",
    shape="[parameters that the partition touches]",
    dtype="of the parameter",
    why="reduced gradients of others are dropped; a parameter that is cut is held whole",
    source="deepspeed 0.19.8 copy_grads_in_partition",
)
WAITING = Fact(
    part="gradients",
    what="gradient that is larger than the bucket",
    shape="[out_features, in_features]",
    dtype="of the parameter",
    why="it is reduced when the next gradient is there",
    source="deepspeed 0.19.8 extra_large_param_to_reduce",
)
FLAT_GRADIENT = Fact(
    part="gradients",
    what="flat gradient of the partition, and its fp32 copy",
    shape="[trained_params / ranks]",
    dtype="of the parameter, float32",
    why="the optimizer reads the fp32 copy",
    source="deepspeed 0.19.8 DeepSpeedZeroOptimizer.step; stage3 _prepare_fp32_grad_for_sub_group",
)
NORM_COPY = Fact(
    part="temporary",
    what="fp64 copy of a gradient",
    shape="[largest part of a parameter in the partition]",
    dtype="float64",
    why="the norm of the gradients is computed in fp64",
    source="deepspeed 0.19.8 get_grad_norm_direct, get_norm_dtype",
)
OVERFLOW_COPIES = Fact(
    part="temporary",
    what="fp32 copies and masks of a gradient",
    shape="[largest part of a parameter in the partition]",
    dtype="float32, float32, bool, bool, bool",
    why="fp16 gradients are searched for an overflow; offloaded ones always",
    source="deepspeed 0.14.5 _has_inf_or_nan",
)
HOST_MASTER = replace(MASTER, what="fp32 partition of the parameters, and its gradient")
HOST_STATES = replace(optimizer.STATES, source="deepspeed 0.19.8 DeepSpeedCPUAdam")
HOST_BUFFER = Fact(
    part="weights",
    what="16-bit partition of the parameters",
    shape="[trained_params / ranks]",
    dtype="of the parameter",
    why="updated parameters are cast here, and copied to the device",
    source="deepspeed 0.19.8 param_buffer_of_bit16_for_cpu_offload_groups",
)
HOST_GRADIENT = Fact(
    part="gradients",
    what="gradients on their way to the host",
    shape="[largest trained parameter], with accumulation [the partition's parameters]",
    dtype="of the parameter",
    why="gradients of earlier micro-steps are kept there",
    source="deepspeed 0.19.8 temp_grad_buffer_for_cpu_offload, accumulated_grads_in_cpu",
)
DEVICE_BUFFER = Fact(
    part="gradients",
    what="buffer through which gradients come back from the host",
    shape="[largest trained parameter]",
    dtype="of the parameter",
    why="accumulated gradients are summed on the device",
    source="deepspeed 0.19.8 temp_grad_buffer_for_gpu_offload",
)


def checks_in_fp32(step: TrainingStep) -> bool:
    """Whether gradients of a partition are searched for an overflow in fp32 copies.

    Kind: exact; 0.19.5 does so in bf16, too. Source: deepspeed 0.14.5 `step`, `check_overflow`.
    """
    half = autocast_precision(step.run.precision)
    return half == "fp16" and step.dtypes.libraries.widens_overflow_check


def with_partitioned_states(entries: Iterable[Entry], part: Partitioned) -> Iterator[Entry]:
    """`entries` with the states and the fp32 partition of one rank in place of all states.

    What is trained lies in flat blocks, which leave no remainders.
    """
    on_device = not offloads(part.spread, "optimizer")
    for entry in entries:
        if entry.fact is REMAINDERS:
            yield replace(entry, num_bytes=entry.num_bytes - part.step.lasting_remainder)
            continue
        if entry.fact is UNSPLIT_WEIGHTS and part.step.method.trains_base:
            continue
        if entry.fact is not optimizer.STATES:
            yield entry
            continue
        yield Entry(entry.fact, part.states * on_device)
        yield Entry(MASTER, MASTER_BYTES * part.elements * on_device)


# Bytes of host memory that the update of a parameter reads and writes: DeepSpeedCPUAdam reads the
# parameter, its gradient and two states, and writes all but the gradient; `mul_` scales gradients.
CPU_ADAM_BYTES = 7 * MASTER_BYTES
CLIP_BYTES = 2 * MASTER_BYTES


def host_update(rank: RankKind, spread: Spread, *, part: Partitioned) -> HostUpdate | None:
    """The update of the partition on the host, and the cast of what is copied to the GPU.

    Kind: exact. Source: deepspeed 0.19.8 `cpu_adam_impl.cpp` `Step_AVX`, `unscale_and_clip_grads`,
    `param_buffer_of_bit16_for_cpu_offload_groups`; stage 3 `_reassign_or_swap_out_partitioned_
    parameters`.
    """
    if not offloads(spread, "optimizer"):
        return None
    scales = rank.step.trainer.clips_gradients or rank.step.run.precision.startswith("fp16")
    cast = (MASTER_BYTES + part.width) * (part.width != MASTER_BYTES)
    each = CPU_ADAM_BYTES + CLIP_BYTES * scales + cast
    return HostUpdate(num_bytes=each * part.elements, threads=threads_of(spread))


def flat_host_update(rank: RankKind, spread: Spread) -> HostUpdate | None:
    """The same in stages 1 and 2."""
    return host_update(rank, spread, part=Partitioned(rank.step, spread))


def to_and_from_host(
    spread: Spread,
    part: Partitioned,
    *,
    accumulated: Count = 0,
    stores: int = 0,
    fetches: int = 0,
    sent_back: int,
) -> tuple[Message, ...]:
    """Copies of an offloaded update: fp32 gradients to the host, updated parameters back.

    Args:
        accumulated: bytes of gradients that micro-steps store on the host, and fetch to add to.
        stores, fetches: how many micro-steps do so.
        sent_back: bytes of a parameter that comes back; 0 where it stays on the host.

    Kind: estimate: one copy of all, where the library makes one per parameter. Source: deepspeed
    0.19.8 `async_inplace_copy_grad_to_fp32_buffer_from_gpu`, `async_accumulate_grad_in_cpu_via_
    gpu`; stage 3 `partition_grads`, `_offload_grad_partition_at_boundary`.
    """
    if not offloads(spread, "optimizer"):
        return ()
    copies = [("gradients to the host", "to_host", MASTER_BYTES * part.elements, 1)]
    copies += [
        ("gradients of micro-steps to the host", "to_host", accumulated, stores),
        ("gradients of earlier micro-steps", "from_host", accumulated, fetches),
    ]
    if sent_back:
        copies.append(("updated shares to the GPU", "from_host", sent_back * part.elements, 1))
    return tuple(
        Message(
            what=what,
            collective=collective,  # type: ignore[arg-type]
            num_bytes=num_bytes,
            count=count,
            size=1,
            micro_steps=1 if count == 1 else None,
        )
        for what, collective, num_bytes, count in copies
        if count
    )


def gathered_once(rank: RankKind, spread: Spread) -> Message:
    """The all-gather of updated parameters after each rank's update."""
    step = rank.step
    return Message(
        what="updated parameters",
        collective="all_gather",
        num_bytes=step.gradients.total,  # as wide as the parameters
        count=1,
        size=spread.size,
        micro_steps=1,
    )


def num_reductions(step: TrainingStep, spread: Spread) -> Count:
    """Number of messages that reduce the gradients of one micro-step.

    Kind: estimate: buckets are full, and no gradient is divided. Source: deepspeed 0.19.8
    `reduce_independent_p_g_buckets_and_remove_grads`.
    """
    bucket = bucket_elements(step, spread) * step.param_bytes
    tensors = sum(tensor.count for tensor in step.tensors)
    return largest(1, smallest(ceil_div(step.gradients.total, bucket), tensors))


def reduced(rank: RankKind, spread: Spread, *, micro_steps: int | None) -> Message:
    """The sum of gradients over ranks: whole buckets, of which each rank keeps its share.

    Source: deepspeed 0.19.8 `allreduce_and_scatter`: an all-reduce, not a reduce-scatter.
    """
    step = rank.step
    number = num_reductions(step, spread)
    return Message(
        what="gradients",
        collective="all_reduce",
        num_bytes=step.gradients.total // number,
        count=number * (micro_steps or step.run.gradient_accumulation_steps),
        size=spread.size,
        hidden_by="backward" if spread.options["overlap_comm"] else "nothing",
        micro_steps=micro_steps,
    )


def update_share(spread: Spread) -> float:
    """Share of the trained parameters that one rank updates on its GPU.

    Kind: exact but for padding. Source: deepspeed 0.19.8 `get_data_parallel_partitions`.
    """
    return 0.0 if offloads(spread, "optimizer") else 1 / spread.size


def notes(step: TrainingStep, spread: Spread) -> tuple[str, ...]:
    if offloads(spread, "optimizer"):
        return (
            "offload: accelerate replaces the optimizer by DeepSpeedCPUAdam",
            update_note(spread),
        )
    return ()


# --- stages 1 and 2 ---------------------------------------------------------------------------


def replicated_moments(
    part: Partitioned, moments: Moments, *, partitions_gradients: bool
) -> Moments:
    """The moments of a rank that has all parameters.

    Args:
        moments: of one device.
        partitions_gradients: stage 2, in which each gradient is reduced as it comes.
    """
    step, spread = part.step, part.spread
    held = part.whole * part.width * (not offloads(spread, "optimizer"))
    buckets = Entry(BUCKETS, part.bucket_bytes * (1 + bool(spread.options["overlap_comm"])))
    earlier = Entry(PARTITION_GRADIENTS, held * step.accumulates)
    later = Entry(PARTITION_GRADIENTS, held * (1 + step.accumulates))
    changed: dict[str, tuple[Entry, ...]] = {}
    buckets_take = bool(spread.options["overlap_comm"]) and part.buckets_take_layers
    source = as_accumulated(step) if partitions_gradients or buckets_take else moments
    written = {name: entries for name, entries in moments.items() if name.startswith(ROLLOUT)}
    early = (*BEFORE_GRADIENTS, *written)
    for name, entries in (*source.items(), *written.items()):
        if name == "optimizer_step":
            continue
        entries = tuple(with_partitioned_states(entries, part))
        if name == "loading":
            changed[name] = entries
            continue
        entries = (*entries, *_device_buffer(part))
        if not partitions_gradients:
            # the epilogue, which drops the buckets, runs in the last micro-step alone
            has_buckets = step.accumulates or name not in early
            changed[name] = (*entries, buckets) if has_buckets else entries
            if spread.options["overlap_comm"] and name not in (*early, "head_backward"):
                is_early = name == "layer_backward" or buckets_take
                copied = held if is_early else part.overlapped_bytes
                changed[name] = (*changed[name], Entry(PARTITION_GRADIENTS, copied))
            if buckets_take:
                left = Entry(one_device.ALL_GRADIENTS, part.waiting_head * (name not in early))
                changed[name] = (*without(changed[name], *GRADIENTS), left)
        elif name in early:
            changed[name] = (*without(entries, *GRADIENTS), earlier)
        elif name == "head_backward":
            changed[name] = (*without(entries, *GRADIENTS), earlier, buckets)
        else:
            waiting = Entry(WAITING, part.waiting_bytes)
            changed[name] = (*without(entries, *GRADIENTS), later, buckets, waiting)
    if "loading" in moments:
        changed["loading"] = moments["loading"]
    if partitions_gradients:
        changed["bucket_reduced"] = reducing(part, changed["first_layer_backward"])
    resting = resting_entries(part, moments)
    if not partitions_gradients:
        all_gradients = Entry(one_device.ALL_GRADIENTS, step.gradients.total)
        changed["gradients_reduced"] = (
            *resting,
            Entry(one_device.ALL_GRADIENTS, part.waiting_head) if buckets_take else all_gradients,
            buckets,
            Entry(PARTITION_GRADIENTS, held),
        )
    gradients = Entry(PARTITION_GRADIENTS, held)
    if offloads(spread, "optimizer"):
        norm = Entry(NORM_COPY, part.piece * NORM_BYTES)
        if step.dtypes.libraries.widens_overflow_check:  # of the whole gradient
            norm = Entry(OVERFLOW_COPIES, part.largest_trained * sum(OVERFLOW_BYTES))
        # `set_norm_for_param_grad_in_gpu` of each gradient, on its way to the host
        copied = part.largest_trained * part.width if partitions_gradients else step.gradients.total
        leaving = (Entry(WAITING, copied), buckets, norm)
        changed["last_gradient_to_host"] = (*resting, *leaving)
        if partitions_gradients and step.gradients.of_head and not step.gradients.tied_wait:
            before = without(changed["layer_backward"], one_device.LAYER_BACKWARD, WAITING, BUCKETS)
            changed["first_gradient_to_host"] = (*before, *leaving)
    else:
        changed |= _norm_moments(part, resting)
        changed |= update_moments(part, resting, gradients)
    return changed


def _norm_moments(part: Partitioned, resting: tuple[Entry, ...]) -> dict[str, tuple[Entry, ...]]:
    """Moments when gradients are read before the update: for their norm, and for an overflow."""
    (whole, piece), *others = (group.at_norm for group in part.groups)
    whole = whole + sum(other for other, _ in others)
    before = (*resting, Entry(PARTITION_GRADIENTS, whole * part.width))
    read = {"gradient_norm": (*before, Entry(NORM_COPY, piece * NORM_BYTES))}
    if checks_in_fp32(part.step):
        copies = Entry(OVERFLOW_COPIES, piece * sum(OVERFLOW_BYTES))
        read["overflow_check"] = (*before, copies)
    return read


def reducing(part: Partitioned, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """`entries` at the moment when a bucket is reduced and no layer runs."""
    before = without(entries, one_device.LAYER_BACKWARD, WAITING)
    return (*before, Entry(REDUCED_COPY, part.reduced_copy_bytes))


def resting_entries(part: Partitioned, moments: Moments) -> tuple[Entry, ...]:
    """What lives during the update beside gradients and temporaries, and between steps."""
    entries = with_partitioned_states(moments["optimizer_step"], part)
    dropped = (*GRADIENTS, optimizer.TEMPORARIES, REMAINDERS)
    return (*without(entries, *dropped), *_device_buffer(part))


def update_moments(
    part: Partitioned, resting: tuple[Entry, ...], gradients: Entry
) -> dict[str, tuple[Entry, ...]]:
    """Moments of the update: the flat gradient is made, then read by the optimizer.

    Args:
        gradients: what is replaced by the flat gradient.
    """
    wide = part.width != MASTER_BYTES
    updated = sum(tensor.num_params for tensor in part.updated[:1])
    flat = Entry(FLAT_GRADIENT, updated * (part.width + MASTER_BYTES * wide))
    copy = Entry(FLAT_GRADIENT, updated * MASTER_BYTES)
    # `grads_in_partition` is one tensor: the gradients of norms, which come last, keep all of it
    still_held = replace(gradients, num_bytes=gradients.num_bytes * (len(part.groups) > 1))
    return {
        "flat_gradient": (*resting, gradients, flat),
        "optimizer_step": (
            *resting,
            still_held,
            copy,
            Entry(optimizer.TEMPORARIES, part.update_temporaries),
        ),
    }


def _device_buffer(part: Partitioned) -> tuple[Entry, ...]:
    if not offloads(part.spread, "optimizer"):
        return ()
    return (Entry(DEVICE_BUFFER, part.largest_trained * part.width),)


def on_host(rank: RankKind, spread: Spread) -> tuple[Entry, ...]:
    """What stages 1 and 2 keep on the host where the optimizer is offloaded.

    All but the states is pinned. Kind: exact, of the gradients of earlier micro-steps an estimate:
    large parameters are evenly spread. Source: deepspeed 0.19.8 `stage_1_and_2.py`
    `weights_partition`, `initialize_optimizer_states`, `buffer_to_accumulate_to_in_cpu`.
    """
    if not offloads(spread, "optimizer"):
        return ()
    part = Partitioned(rank.step, spread)
    accumulates = rank.step.accumulates
    gradients = part.largest_trained + part.whole * accumulates
    masters = [group.partition * MASTER_BYTES for group in part.groups]
    blocks = [*masters, *masters, *(group.partition * part.width for group in part.groups)]
    remainders = sum(map(pinned_remainder_bytes, [*blocks, part.largest_trained * part.width]))
    gradient_remainders = (
        sum(  # `accumulated_grads_in_cpu`, one of each parameter that the partition touches
            int(tensor.count) * pinned_remainder_bytes(tensor.num_params * part.width)
            for tensor in part.step.tensors
        )
    )
    total = sum(tensor.num_params * tensor.count for tensor in part.step.tensors)
    return (
        Entry(HOST_MASTER, 2 * MASTER_BYTES * part.elements),
        Entry(HOST_STATES, part.states),
        Entry(HOST_BUFFER, part.elements * part.width),
        Entry(HOST_GRADIENT, gradients * part.width),
        Entry(
            PINNED_REMAINDERS, remainders + accumulates * gradient_remainders * part.whole // total
        ),
    )


def stored_entries(step: TrainingStep) -> list[Entry]:
    """All weights and adapters in the dtypes that a rank keeps; buffers left out."""
    return [
        entry
        for entry in step.static
        if entry.part in ("weights", "adapters") and entry.fact not in (BUFFERS, UNSPLIT_WEIGHTS)
    ]


def saving(rank: RankKind, spread: Spread) -> Saving:
    """Stages 1 and 2: each rank copies all weights to the host, frozen ones too.

    Kind: exact, of tensors. Source: transformers 5.23 `Trainer.save_model`; accelerate 1.15
    `get_state_dict`; deepspeed 0.19.8 `clone_tensors_for_torch_save`.
    """
    copied = sum(entry.num_bytes for entry in stored_entries(rank.step))
    return Saving(what="all weights", host_bytes=copied, by_all_ranks=True)


# --- files --------------------------------------------------------------------------------------


def training_arguments(
    run: RunConfig, spread: Spread, *, stage: int, of_stage: Mapping[str, object] | None = None
) -> Mapping[str, object]:
    """`deepspeed`, the content of DeepSpeed's JSON file; what is "auto" the Trainer fills in.

    Args:
        of_stage: further keys of "zero_optimization".

    Source: transformers 5.23 `HfTrainerDeepSpeedConfig`; deepspeed 0.19.8 `DeepSpeedZeroConfig`.
    """
    options = spread.options
    zero: dict[str, object] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": options["overlap_comm"],
        "reduce_bucket_size": options["zero_bucket_size"] or "auto",
        **(of_stage or {}),
    }
    for target, key in (("optimizer", "offload_optimizer"), ("params", "offload_param")):
        if offloads(spread, target):
            zero[key] = {"device": "cpu", "pin_memory": True}
    half = autocast_precision(run.precision)
    return {
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": half == "bf16"},
            "fp16": {"enabled": half == "fp16"},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
    }


def read_accelerator(
    accelerator: Mapping[str, Any], *, stage: int, options: tuple[Option, ...]
) -> dict[str, OptionValue] | None:
    """The options of DeepSpeed's JSON file; what is "auto" there the Trainer fills in.

    Args:
        options: that the stage declares.
    """
    config = accelerator.get("deepspeed")
    zero = {} if config is None else config.get("zero_optimization", {})
    if zero.get("stage", 0) != stage:
        return None
    accepted = {option.name: option.choices for option in options}
    offloaded = []
    for target, key, older in (
        ("optimizer", "offload_optimizer", "cpu_offload"),
        ("params", "offload_param", "cpu_offload_param"),  # deprecated: `DeepSpeedZeroConfig`
    ):
        device = (zero.get(key) or {}).get("device", "cpu" if zero.get(older) else "none")
        if device == "none":
            continue
        if device != "cpu" or target not in accepted["offload"]:
            raise ConfigError(f"deepspeed: {key} to {device} is not modelled in stage {stage}")
        offloaded.append(target)
    read: dict[str, OptionValue] = {
        "overlap_comm": bool(zero.get("overlap_comm", stage == 3)),
        "offload": tuple(offloaded),
    }
    for name, default in _DEFAULTS.items():
        key = "reduce_bucket_size" if name == BUCKET.name else name
        value = _stated(zero, key, default)
        if name in accepted and value != "auto":
            read[name] = int(value)
    return read


def _stated(zero: Mapping[str, Any], key: str, default: int) -> Any:
    """The value of a field, by its alias or by its own name.

    The Trainer fills in "auto" under the alias alone; else DeepSpeed takes its default.
    Source: deepspeed 0.19.8 `DeepSpeedConfigModel`: `populate_by_name`, `__init__`.
    """
    if key in zero:
        return zero[key]
    value = zero.get(key.removeprefix(STAGE_3), default)
    return default if value == "auto" else value


STAGE_3 = "stage3_"  # before a field's own name, in its alias
# Of `DeepSpeedZeroConfig`, where the file does not say.
_DEFAULTS = {
    BUCKET.name: 500_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "sub_group_size": 1_000_000_000,
}
