"""DeepSpeed ZeRO-3: parameters are divided too, and gathered module by module.

Source: deepspeed 0.19.8 `runtime/zero/stage3.py`, `partitioned_param_coordinator.py`,
`parameter_offload.py`.

All of it is of a model loaded within `zero.Init` (TrainingArguments made before the model). Without
that, `F.linear` keeps its gathered weight for the backward, and nothing is spared without
checkpointing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from whichlora.errors import ConfigError
from whichlora.memory import optimizer
from whichlora.memory.allocator import PINNED_REMAINDERS, REMAINDERS, pinned_remainder_bytes
from whichlora.memory.entries import Entry, Fact
from whichlora.memory.event_list import EventList
from whichlora.memory.gradients import Trained, base_tensors
from whichlora.memory.loading import UNSPLIT_WEIGHTS
from whichlora.memory.moments import (
    HEAD_GRADIENT,
    LAYER_BACKWARD,
    LAYER_FORWARDS,
    LOGITS_GRADIENT,
)
from whichlora.memory.step import TrainingStep
from whichlora.memory.weights import (
    BUFFERS,
    LAYER_WEIGHTS,
    quantised_state_bytes,
    weight_bytes,
)
from whichlora.parallel import deepspeed
from whichlora.parallel.base import (
    HostUpdate,
    Message,
    Moments,
    RankKind,
    Saving,
    Spread,
    Strategy,
    in_run,
)
from whichlora.parallel.deepspeed import Partitioned, Shares
from whichlora.parallel.gather_events import (
    GatherEvents,
    Gathering,
    HeldShares,
)
from whichlora.parallel.gathered_modules import (
    CONTAINER,
    SMALL,
    Live,
    Module,
    adapted_keys,
    adapted_kinds,
    element_widths,
    gathered_modules,
    gathers,
    live_parameters,
    seen_of,
    trace_of,
)
from whichlora.parallel.gradients import GRADIENTS, as_accumulated, without
from whichlora.parallel.host_update import OMP_NUM_THREADS
from whichlora.parallel.rank_events import rank_requests
from whichlora.spec.numeric import Count, ceil_div, largest, smallest
from whichlora.spec.options import Option
from whichlora.spec.run import (
    BNB_QUANTS,
    CHECKPOINT_QUANTS,
    FOUR_BIT_BNB,
    RunConfig,
    autocast_precision,
)

_OF_STAGE = (  # least: `DeepSpeedZeroConfig`, whose fields are from 0 on
    Option(
        name="stage3_max_live_parameters",
        summary="gathered elements beyond which nothing more is gathered ahead",
        default=1_000_000_000,
        least=0,
    ),
    Option(
        name="stage3_max_reuse_distance",
        summary="a parameter that is read again within so many elements stays gathered",
        default=1_000_000_000,
        least=0,
    ),
    Option(
        name="stage3_prefetch_bucket_size",
        summary="elements gathered ahead; the Trainer's auto: 0.9 hidden_size^2",
        default=None,
        least=0,
    ),
    Option(
        name="stage3_param_persistence_threshold",
        summary="parameters of so few elements stay gathered; the Trainer's auto: 10 hidden_size",
        default=None,
        least=0,
    ),
    Option(
        name="sub_group_size",
        summary="elements of each rank that one update of the optimizer takes at least",
        default=1_000_000_000,
        least=0,
    ),
)
_OPTIONS = (
    deepspeed.BUCKET,
    deepspeed.OVERLAP,
    deepspeed.OFFLOAD_BOTH,
    OMP_NUM_THREADS,
    *_OF_STAGE,
)
SMALL_PARAMETERS = Fact(
    part="weights",
    what="small parameters, which stay gathered",
    shape="[at most stage3_param_persistence_threshold]",
    dtype="of the parameter",
    why="gathering them each time would cost more than it spares",
    source="deepspeed 0.19.8 mark_persistent_parameters",
)
LIVE_PARAMETERS = Fact(
    part="weights",
    what="gathered parameters",
    shape="[out_features, in_features]",
    dtype="of the parameter",
    why="read now, soon, or again within stage3_max_reuse_distance",
    source="deepspeed 0.19.8 PartitionedParameterCoordinator.fetch_sub_module, release_sub_module",
)
GRADIENT_PARTITION = Fact(
    part="gradients",
    what="16-bit partition of the gradients",
    shape="[trained_params / ranks]",
    dtype="of the parameter",
    why="made with the optimizer, kept to the end",
    source="deepspeed 0.19.8 stage3.py grad_partitions_flat_buffer",
)
HOST_PARAMETERS = Fact(
    part="weights",
    what="partition of all parameters",
    shape="[num_params / ranks]",
    dtype="of the parameter",
    why="offload: params",
    source="deepspeed 0.19.8 Init(remote_device)",
)
FIRST_PARTITIONS = Fact(
    part="weights",
    what="partition of each parameter before they were joined",
    shape="[num_params / ranks]",
    dtype="of the parameter",
    why="zero.Init pins each; freed blocks of pinned memory stay with the allocator",
    source="deepspeed 0.19.8 Init._partition_param, _move_to_flat_buffer",
)


def _option(step: TrainingStep, spread: Spread, name: str, auto: int) -> int:
    stated = spread.options.get(name)
    return stated if isinstance(stated, int) else auto


def persistence_threshold(step: TrainingStep, spread: Spread) -> int:
    """Elements up to which a parameter stays gathered.

    Kind: exact.
    Source: transformers 5.23 `trainer_config_finalize`: "auto" is ten times the hidden size.
    """
    name = "stage3_param_persistence_threshold"
    return _option(step, spread, name, 10 * step.model.hidden_size)


def live_of(step: TrainingStep, spread: Spread) -> Live:
    """Source: `live_parameters`, with what the Trainer fills in."""
    return live_parameters(
        large_modules(step, spread),
        checkpointed=bool(step.run.gradient_checkpointing),
        reads_table_again=step.needs_grad,
        widths=element_widths(step),
        kinds=adapted_keys(step),
        seen=seen_of(step),
        **gather_limits(step, spread),
    )


def large_modules(step: TrainingStep, spread: Spread) -> tuple[Module, ...]:
    """`gathered_modules`, of which those with small parameters gather nothing."""
    threshold = persistence_threshold(step, spread)
    return tuple(
        module if module[2] > threshold or module[1] == CONTAINER else (module[0], SMALL, 0)
        for module in gathered_modules(step)
    )


def gather_limits(step: TrainingStep, spread: Spread) -> dict[str, int]:
    """The limits of `gathers` by name, in elements.

    Kind: exact. Source: transformers 5.23 `trainer_config_finalize`: "auto" gathers ahead 0.9 times
    the square of the hidden size.
    """
    hidden, options = step.model.hidden_size, spread.options
    return {
        "max_live": int(options["stage3_max_live_parameters"]),  # type: ignore[arg-type]
        "max_reuse": int(options["stage3_max_reuse_distance"]),  # type: ignore[arg-type]
        "prefetch": _option(step, spread, "stage3_prefetch_bucket_size", int(0.9 * hidden**2)),
    }


# --- what a rank computes -----------------------------------------------------------------------


def _split(rank: RankKind, spread: Spread) -> tuple[RankKind, ...]:
    """As in the other stages, but adapters stay in fp32, as PEFT makes them after `zero.Init`.

    A product with a frozen matrix then keeps an input that no adapter shares. A 4-bit base is not
    loaded within `zero.Init`. Source: deepspeed 0.19.8
    `DeepSpeedEngine._cast_module_mixed_precision`, which casts nothing where `zero.Init` has run;
    `LinearFunctionForZeroStage3.forward`, which saves input and weight whatever needs a gradient.
    """
    ranks = deepspeed.narrowed(rank, spread)
    half = autocast_precision(rank.step.run.precision)
    if half not in ("bf16", "fp16"):
        return ranks
    if rank.step.method.trains_base or rank.step.dtypes.quant != "none":
        return ranks
    wide = replace(ranks[0].step.run, precision=f"{half}-no-autocast")  # type: ignore[arg-type]
    step = in_run(ranks[0].step, wide)
    step = replace(step, dtypes=replace(step.dtypes, linears_keep_inputs=True))
    return (replace(ranks[0], step=step, at_rest=step),)


# --- what a rank holds --------------------------------------------------------------------------


def partitioned(step: TrainingStep, spread: Spread) -> Partitioned:
    """Each parameter is divided on its own, and padded to the number of ranks."""
    return _PerParameter(step, spread)


class _PerParameter(Partitioned):
    @property
    def width(self) -> int:
        """Bytes in which gradients are reduced and kept: the base's, of fp32 adapters, too."""
        return self.step.dtypes.base_bytes

    @property
    def groups(self) -> tuple[Shares, ...]:
        tensors = self.step.tensors
        decaying = [tensor for tensor in tensors if not self._is_plain(tensor)]
        plain = [tensor for tensor in tensors if self._is_plain(tensor)]
        return tuple(self._shares(group) for group in (decaying, plain) if group)

    @property
    def updated(self) -> tuple[Trained, ...]:
        """The largest sub-group: parameters are added until their parts reach its size.

        Kind: upper bound, by less than the largest part of one parameter. Source: deepspeed 0.19.8
        `_create_fp16_sub_groups`; `step`, which prepares, updates and releases one after another.
        """
        stated = int(self.spread.options["sub_group_size"])  # type: ignore[arg-type]
        decaying = self.groups[0]
        size = smallest(decaying.partition, stated + decaying.piece)
        return (Trained(rows=1, width=size, param_bytes=deepspeed.MASTER_BYTES),)

    def _is_plain(self, tensor: Trained) -> bool:
        return self.step.method.trains_base and bool(tensor.rows == 1)

    def _shares(self, tensors: Sequence[Trained]) -> Shares:
        ranks = self.spread.size
        partition = sum(ceil_div(t.num_params, ranks) * t.count for t in tensors)
        piece = largest(*(ceil_div(t.num_params, ranks) * (t.count > 0) for t in tensors))
        return Shares(partition, partition, piece, at_norm=(partition, piece))


def small_parameter_bytes(step: TrainingStep, spread: Spread) -> Count:
    """Whole copies of parameters that are small enough to stay gathered, adapters among them.

    Kind: exact. Source: deepspeed 0.19.8 `mark_persistent_parameters`.
    """
    threshold = persistence_threshold(step, spread)
    tensors = list(base_tensors(step.model, step.dtypes.base_bytes))
    if not step.method.trains_base:
        tensors += step.tensors
    return sum(
        tensor.num_params * tensor.count * tensor.param_bytes * (tensor.num_params <= threshold)
        for tensor in tensors
    )


def live_bytes(step: TrainingStep, spread: Spread, live: Live, name: str) -> Count:
    """Gathered bytes of the base at one of the peaks of `live`, and of adapters beside them.

    Kind: estimate of the adapters: gathered and released with their matrix. Source:
    `live_parameters`.
    """
    threshold, width = persistence_threshold(step, spread), step.dtypes.adapter_bytes
    total: Count = getattr(live, name)
    for number, linear in zip(live.kinds[name], adapted_kinds(step), strict=True):
        for rows, columns in step.method.adapter_shapes(linear, step.r):
            elements = rows * columns
            total = total + number * linear.count * elements * width * (elements > threshold)
    return total


def trained_table_bytes(step: TrainingStep) -> Count:
    """Gradient of the embedding, the last of the backward; a tied one is summed with the head's.

    Kind: exact. Source: torch `embedding_dense_backward`.
    """
    if not step.method.trains_base or step.gradients.tied_wait:
        return 0
    return step.model.embeddings[0].num_params * step.param_bytes


def _divided(entries: tuple[Entry, ...], part: Partitioned) -> tuple[Entry, ...]:
    on_device = not deepspeed.offloads(part.spread, "params")
    ranks, step = part.spread.size, part.step
    # `QuantState` is no parameter, so that nobody divides it
    scales = quantised_state_bytes(step.model, step.dtypes, codes=False)

    def share(entry: Entry) -> Count:
        whole = scales if entry.fact is LAYER_WEIGHTS else 0
        return ceil_div(entry.num_bytes - whole, ranks) * on_device + whole

    return tuple(
        Entry(entry.fact, share(entry))
        if entry.part in ("weights", "adapters") and entry.fact is not BUFFERS
        else entry
        for entry in deepspeed.with_partitioned_states(entries, part)
        if entry.fact is not UNSPLIT_WEIGHTS  # `zero.Init` leaves no whole weight
    )


def _lasting(part: Partitioned) -> tuple[Entry, ...]:
    spread = part.spread
    on_device = not deepspeed.offloads(spread, "optimizer")
    return (
        Entry(GRADIENT_PARTITION, part.elements * part.width * on_device),
        Entry(deepspeed.BUCKETS, part.bucket_bytes),
    )


def _moments(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    step = rank.step
    part = partitioned(step, spread)
    live = live_of(step, spread)
    gathered = {
        **dict.fromkeys(LAYER_FORWARDS, "forward"),
        "images_forward": "seen",
        "images_masked": "forward",
        "images_backward": "seen_backward",
        "last_norm": "loss",
        "loss_forward": "loss",
        "loss_backward": "loss",
        "head_backward": "loss",
        "layer_backward": "last_layer",
        "first_layer_backward": "first_layer",
        "embedding_backward": "table",
    }
    small = Entry(SMALL_PARAMETERS, small_parameter_bytes(step, spread))
    changed: dict[str, tuple[Entry, ...]] = {}
    for name, entries in as_accumulated(step).items():
        if name == "optimizer_step":
            continue
        peak = gathered.get(name, "backward")
        entries = (
            *without(_divided(entries, part), *GRADIENTS),
            *_lasting(part),
            small,
            Entry(LIVE_PARAMETERS, live_bytes(step, spread, live, peak)),
        )
        if name not in (*deepspeed.BEFORE_GRADIENTS, "head_backward"):
            entries = (*entries, Entry(deepspeed.WAITING, part.waiting_bytes))
        changed[name] = entries
    changed["bucket_reduced"] = deepspeed.reducing(part, changed["first_layer_backward"])
    if tables := trained_table_bytes(step):
        # a post-backward hook releases the table after its gradient is reduced
        between = without(
            changed["first_layer_backward"], LAYER_BACKWARD, LIVE_PARAMETERS, deepspeed.WAITING
        )
        changed["table_reduced"] = (
            *between,
            Entry(LIVE_PARAMETERS, live_bytes(step, spread, live, "table")),
            Entry(deepspeed.WAITING, tables),
        )
    if deepspeed.offloads(spread, "optimizer"):
        # `_offload_grad_partition_at_boundary` takes the norm of each gradient as it goes
        norm = Entry(deepspeed.NORM_COPY, part.piece * deepspeed.NORM_BYTES)
        for name in changed.keys() & {"bucket_reduced", "table_reduced"}:
            changed[name] = (*changed[name], norm)
        if "head_backward" in changed:
            rest = without(changed["head_backward"], HEAD_GRADIENT, LOGITS_GRADIENT)
            changed["head_reduced"] = (*rest, norm)
    if "loading" in moments:
        changed["loading"] = moments["loading"]
    if deepspeed.offloads(spread, "optimizer"):
        return changed
    resting = (
        *without(
            _divided(moments["optimizer_step"], part),
            *GRADIENTS,
            optimizer.TEMPORARIES,
            REMAINDERS,
        ),
        *_lasting(part),
    )
    norm = Entry(deepspeed.NORM_COPY, part.piece * deepspeed.NORM_BYTES)
    changed["gradient_norm"] = (*resting, norm)
    none = Entry(deepspeed.PARTITION_GRADIENTS, 0 * part.elements)
    return changed | deepspeed.update_moments(part, resting, none)


def _requests(rank: RankKind, spread: Spread) -> EventList | None:
    return rank_requests(rank.step, partial(gather_events, rank.step, spread))


def gather_events(step: TrainingStep, spread: Spread) -> GatherEvents:
    """What writes the requests of one rank."""
    part = partitioned(step, spread)
    modules = large_modules(step, spread)
    trace = trace_of(
        modules,
        checkpointed=bool(step.run.gradient_checkpointing),
        reads_table_again=step.needs_grad,
        seen=seen_of(step),
    )
    steps = zip(trace, gathers(trace, **gather_limits(step, spread)), strict=True)
    gatherings = [
        Gathering(
            layer=layer,
            is_forward=place < len(modules),
            key=key,
            added=tuple(each for each, _ in added),
            released=released,
        )
        for place, ((layer, key, _), (added, released)) in enumerate(steps)
    ]
    widths = _gathered_bytes(step, spread, modules)
    return GatherEvents(part, _shares(step, spread, part), gatherings, widths)


def _gathered_bytes(
    step: TrainingStep, spread: Spread, modules: Iterable[Module]
) -> dict[int, list[int]]:
    """Bytes that each key gathers: its own parameter, then the adapters of its matrix."""
    threshold = persistence_threshold(step, spread)
    width, kinds = dict(element_widths(step)), dict(adapted_keys(step))
    adapted, of_kind = adapted_kinds(step), {}
    for kind, linear in enumerate(adapted):
        shapes = step.method.adapter_shapes(linear, step.r)
        sizes = [int(rows * columns) for rows, columns in shapes] * linear.count
        of_kind[kind] = [size * step.dtypes.adapter_bytes for size in sizes if size > threshold]
    return {
        key: [size * width.get(key, step.dtypes.base_bytes), *of_kind.get(kinds.get(key, -1), ())]
        for _, key, size in modules
        if key >= 0
    }


def _shares(step: TrainingStep, spread: Spread, part: Partitioned) -> HeldShares:
    """What one rank holds between steps."""
    ranks, trains_base = spread.size, step.method.trains_base
    on_device = not deepspeed.offloads(spread, "params")
    width = dict(element_widths(step))
    sizes = {key: size for _, key, size in gathered_modules(step) if size}
    frozen = [
        ceil_div(size * width.get(key, step.dtypes.base_bytes), ranks) * on_device
        for key, size in sizes.items()
        if not trains_base
    ]
    trained = [size for group in deepspeed.parameter_order(step) for size in group]
    scales = quantised_state_bytes(step.model, step.dtypes, codes=False)
    return HeldShares(
        frozen=tuple(frozen),
        flat=int(part.elements * step.param_bytes) * (on_device or not trains_base),
        small=int(small_parameter_bytes(step, spread)),
        buffers=weight_bytes(step.model, step.dtypes)["buffers"] + scales,
        groups=tuple(int(size) for size in sub_groups(step, spread, part)),
        sizes=tuple(ceil_div(size, ranks) for size in trained)
        if trains_base
        else (int(part.piece),),
    )


# --- what the ranks send, and the host keeps ----------------------------------------------------


def _messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    step = rank.step
    live = live_of(step, spread)
    steps = step.run.gradient_accumulation_steps
    overlaps = bool(spread.options["overlap_comm"])
    modules = max(1, sum(key >= 0 for _, key, _ in gathered_modules(step)))
    reductions = deepspeed.num_reductions(step, spread)
    again = max(live.total - live.loss, 0)  # what is still there is not gathered again
    return (
        Message(
            what="parameters of the forward",
            collective="all_gather",
            num_bytes=live.total // modules,
            count=steps * modules,
            size=spread.size,
            hidden_by="forward" if overlaps else "nothing",
        ),
        Message(
            what="parameters of the backward",
            collective="all_gather",
            num_bytes=again // modules,
            count=steps * modules,
            size=spread.size,
            hidden_by="backward" if overlaps else "nothing",
        ),
        Message(
            what="gradients",
            collective="reduce_scatter",
            num_bytes=step.gradients.total // reductions,
            count=steps * reductions,
            size=spread.size,
            hidden_by="backward" if overlaps else "nothing",
        ),
        *_copies(rank, spread, live, again),
    )


def _copies(rank: RankKind, spread: Spread, live: Live, again: int) -> tuple[Message, ...]:
    """What goes to and from the host where optimizer or parameters are offloaded.

    Source: deepspeed 0.19.8 `partition_grads`, `_reassign_or_swap_out_partitioned_parameters`;
    `_all_gather_dtype`, which copies a share to the GPU before its gather.
    """
    step, on_host = rank.step, deepspeed.offloads(spread, "params")
    part = partitioned(step, spread)
    steps = step.run.gradient_accumulation_steps
    updates = deepspeed.to_and_from_host(
        spread,
        part,
        accumulated=part.elements * part.width,
        stores=steps,
        fetches=steps,
        sent_back=0 if on_host else part.width,
    )
    if not on_host:
        return updates
    gathers: tuple[tuple[str, int], ...] = (("forward", live.total), ("backward", again))
    return (
        *(
            Message(
                what=f"shares to the GPU, {phase}",
                collective="from_host",
                num_bytes=total // spread.size,
                count=steps,
                size=1,
            )
            for phase, total in gathers
        ),
        *updates,
    )


def _host_update(rank: RankKind, spread: Spread) -> HostUpdate | None:
    return deepspeed.host_update(rank, spread, part=partitioned(rank.step, spread))


def _on_host(rank: RankKind, spread: Spread) -> tuple[Entry, ...]:
    step = rank.step
    part = partitioned(step, spread)
    entries: list[Entry] = []
    blocks: list[Count] = []
    if deepspeed.offloads(spread, "optimizer"):
        entries += [
            Entry(deepspeed.HOST_MASTER, 2 * deepspeed.MASTER_BYTES * part.elements),
            Entry(deepspeed.HOST_STATES, part.states),
            Entry(GRADIENT_PARTITION, part.elements * part.width),
        ]
        groups = sub_groups(step, spread, part)
        blocks = [part.elements * part.width, *(deepspeed.MASTER_BYTES * size for size in groups)]
    if deepspeed.offloads(spread, "params"):
        held = deepspeed.stored_entries(step)
        scales = quantised_state_bytes(step.model, step.dtypes, codes=False)
        total: Count = sum(ceil_div(entry.num_bytes, spread.size) for entry in held)
        total = total - ceil_div(scales, spread.size)
        entries.append(Entry(HOST_PARAMETERS, total))
        blocks += [group.partition * part.width for group in part.groups]
        first = first_partitions(step, spread)
        if step.method.trains_base:
            entries.append(Entry(FIRST_PARTITIONS, sum(first)))
        blocks += first
    if blocks:
        entries.append(Entry(PINNED_REMAINDERS, sum(map(pinned_remainder_bytes, blocks))))
    return tuple(entries)


def first_partitions(step: TrainingStep, spread: Spread) -> list[int]:
    """Bytes of a rank's share of each parameter, as `zero.Init` pins them one by one.

    Those of trained parameters are copied into one flat buffer, and their blocks stay with the
    allocator. Small parameters stay on the GPU.
    Kind: exact, of layers whose matrices are parameters. Source: deepspeed 0.19.8
    `Init._partition_param`, `_move_to_flat_buffer`; torch 2.13 `CachingHostAllocator.h`, `free`.
    """
    threshold = persistence_threshold(step, spread)
    width = dict(element_widths(step))
    of_key = {key: size for _, key, size in gathered_modules(step) if size > threshold}
    return [
        ceil_div(size, spread.size) * width.get(key, step.dtypes.base_bytes)
        for key, size in of_key.items()
    ]


def sub_groups(step: TrainingStep, spread: Spread, part: Partitioned) -> tuple[Count, ...]:
    """Elements of each group that one update takes, each with a gradient of its own on the host.

    Kind: exact but for the order of a layer's own matrices. Source: deepspeed 0.19.8
    `_create_fp16_sub_groups`, `initialize_optimizer_states`.
    """
    if not step.method.trains_base:
        return (part.elements,)
    limit = int(spread.options["sub_group_size"])  # type: ignore[arg-type]
    sizes: list[int] = []
    for group in deepspeed.parameter_order(step):
        elements = 0
        for size in group:
            elements += ceil_div(size, spread.size)
            if elements >= limit:
                sizes.append(elements)
                elements = 0
        sizes += [elements] if elements else []
    return tuple(sizes)


def saving(rank: RankKind, spread: Spread) -> Saving:
    """Rank 0 gathers what is trained module by module, and copies it to the host.

    Kind: exact, of tensors, but for adapters of 16 bits, which take half. Source: deepspeed 0.19.8
    `_zero3_consolidated_16bit_state_dict`, which transformers 5.23 `Trainer.save_model` asks to
    leave out frozen parameters under PEFT; `_cast_module_mixed_precision`.
    """
    step = rank.step
    if step.method.trains_base:
        what = "all weights"
        copied: Count = sum(entry.num_bytes for entry in deepspeed.stored_entries(step))
    else:
        # PEFT makes them in fp32 after `zero.Init`, whose models are not cast
        what = "what is trained"
        copied = sum(4 * tensor.num_params * tensor.count for tensor in step.tensors)
    widths = dict(element_widths(step))
    gathered = [size * widths.get(key, 0) for _, key, size in gathered_modules(step)]
    return Saving(
        what=what,
        host_bytes=copied,
        device_bytes=max(gathered),
        instead="DeepSpeed's stage3_gather_16bit_weights_on_model_save: false",
    )


def _weights_share(spread: Spread) -> float:
    """Kind: lower bound: small parameters stay whole. Source: deepspeed 0.19.8 `stage3.py`."""
    return 0.0 if deepspeed.offloads(spread, "params") else 1 / spread.size


def _check(step: TrainingStep, spread: Spread) -> None:
    """Source: GPTQModel 7.3 `BaseQuantLinear`; deepspeed 0.19.8 `Init._post_init_method`."""
    deepspeed.check(step, spread)
    tower = step.model.tower
    if tower is not None and (tower.hears or tower.runs_idle):
        reads = "audios: sound is" if tower.hears else "images: a block that learns nothing is"
        none = "audios 0" if tower.hears else "images 0"
        raise ConfigError(
            f"{reads} not predicted under zero3 ({step.model.name}); use zero2, ddp, or {none}"
        )
    if step.dtypes.quant in CHECKPOINT_QUANTS:
        raise ConfigError(
            f"quant: {step.dtypes.quant} weights are buffers, which ZeRO-3 leaves whole on each "
            "GPU; use parallel zero2 or ddp, or quant nf4"
        )
    if step.dtypes.quant in BNB_QUANTS and step.dtypes.quant not in FOUR_BIT_BNB:
        raise ConfigError(
            f"quant: {step.dtypes.quant} weights divided by ZeRO-3 are not modelled; use zero2, or "
            "quant none"
        )


def _notes(step: TrainingStep, spread: Spread) -> tuple[str, ...]:
    """What a user must know; a 4-bit base is left out of `zero.Init`.

    Source: transformers 5.23 `get_init_context`, `check_and_set_device_map`, which raises, and
    `Bnb4BitHfQuantizer.update_device_map`.
    """
    notes = deepspeed.notes(step, spread)
    if step.dtypes.quant not in FOUR_BIT_BNB:
        return notes
    return (
        *notes,
        "zero3: each GPU first loads all 4-bit weights, since transformers refuses a device_map "
        "beside ZeRO-3; fsdp loads them on the host",
    )


def _training_arguments(run: RunConfig, spread: Spread) -> Mapping[str, object]:
    stated = {option.name: spread.options[option.name] for option in _OF_STAGE}
    of_stage: dict[str, object] = {
        name: "auto" if value is None else value for name, value in stated.items()
    }
    of_stage["stage3_gather_16bit_weights_on_model_save"] = True
    return deepspeed.training_arguments(run, spread, stage=3, of_stage=of_stage)


STRATEGY = Strategy(
    name="zero3",
    summary="DeepSpeed: parameters, gradients and optimizer states divided",
    divides="data",
    options=_OPTIONS,
    smallest=(("offload", ("optimizer", "params")),),
    takes_images=True,
    check=_check,
    split=_split,
    moments=_moments,
    requests=_requests,
    update_share=deepspeed.update_share,
    weights_share=_weights_share,
    messages=_messages,
    host_update=_host_update,
    on_host=_on_host,
    loading=lambda step, spread: 0,  # rank 0 maps the file, others get what it sends: `zero.Init`
    saving=saving,
    training_arguments=_training_arguments,
    runs_alone=True,
    read_accelerator=partial(deepspeed.read_accelerator, stage=3, options=_OPTIONS),
    notes=_notes,
)
