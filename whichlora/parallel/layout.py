"""The strategies of one run, and what its ranks hold and send together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry
from whichlora.memory.event_list import EventList
from whichlora.memory.step import TrainingStep
from whichlora.memory.training import Ledger, training_ledger
from whichlora.memory.weights import weight_bytes
from whichlora.parallel.base import HostUpdate, Message, Order, RankKind, Saving, Spread, Strategy
from whichlora.parallel.communicators import communicator_bytes
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import largest
from whichlora.spec.options import OptionValue, filled
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig

Completed: TypeAlias = Callable[[Ledger, TrainingStep], Ledger]


def as_counted(counted: Ledger, step: TrainingStep) -> Ledger:
    """`counted`, where a step is all there is."""
    return counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The strategies of one run, in the order in which they divide it.

    Args:
        config: with every option of every strategy.
    """

    config: ParallelConfig
    strategies: tuple[tuple[Strategy, Spread], ...]

    @classmethod
    def of(cls, config: ParallelConfig, strategies: Sequence[Strategy]) -> Layout:
        """`config` with its strategies found and their options filled in.

        Raises:
            ConfigError: an option that none of them has, a value that one does not accept, or
                sizes that do not multiply to the number of GPUs.
        """
        asked = dict(config.options)
        options = {strategy.name: filled(strategy.options, asked) for strategy in strategies}
        of_all = {option.name for strategy in strategies for option in strategy.options}
        for name in asked:
            if name not in of_all:
                accepted = ", ".join(sorted(of_all)) or "none"
                raise ConfigError(
                    f"{name}: is no option of parallel {config.strategy}, whose options are "
                    f"{accepted}"
                )
        sizes = _sizes(config, strategies, options)
        of_tokens = zip(strategies, sizes, strict=True)
        joined = math.prod(size for strategy, size in of_tokens if strategy.needs_shards)
        stated = {k: v for each in options.values() for k, v in each.items() if v is not None}
        config = replace(config, options=tuple(sorted(stated.items())))
        return cls(
            config=config,
            strategies=tuple(
                (
                    strategy,
                    Spread(
                        config=config,
                        size=size,
                        joined=joined if strategy.joins_shards else 1,
                        options=options[strategy.name],
                    ),
                )
                for strategy, size in zip(strategies, sizes, strict=True)
            ),
        )

    @property
    def data_parallel_size(self) -> int:
        """Micro-batches that are computed at once."""
        return math.prod(
            spread.size for strategy, spread in self.strategies if strategy.divides == "data"
        )

    def check(self, step: TrainingStep) -> None:
        """Refuse what the libraries refuse. Raises: ConfigError."""
        self._check_replicas()
        joins = any(strategy.joins_shards for strategy, _ in self.strategies)
        for strategy, _ in self.strategies:
            if strategy.needs_shards and not joins:
                raise ConfigError(f"parallel: {strategy.needs_shards}")
            if step.model.tower is not None and not strategy.takes_images:
                raise ConfigError(
                    f"images: are not predicted for parallel {strategy.name}; use ddp, fsdp or "
                    "zero, or leave images out"
                )
        for strategy, spread in self.strategies:
            strategy.check(step, spread)

    def _check_replicas(self) -> None:
        replicates = any(
            strategy.divides == "data" and strategy.update_share(spread) == 1 < spread.size
            for strategy, spread in self.strategies
        )
        for strategy, _ in self.strategies:
            if replicates and strategy.replicas_refused:
                raise ConfigError(f"parallel: {strategy.replicas_refused}")

    def notes(self, step: TrainingStep) -> tuple[str, ...]:
        return tuple(
            note for strategy, spread in self.strategies for note in strategy.notes(step, spread)
        )

    def rank_kinds(self, step: TrainingStep) -> tuple[RankKind, ...]:
        """What the ranks compute, once for each kind of them.

        Args:
            step: of the whole model on one device; its sizes may be arrays.
        """
        kinds: tuple[RankKind, ...] = (
            RankKind(
                name="every rank", ranks=tuple(range(self.config.gpus)), at_rest=step, step=step
            ),
        )
        for strategy, spread in self.strategies:
            kinds = tuple(part for kind in kinds for part in strategy.split(kind, spread))
        return kinds

    def ledger(self, kind: RankKind, complete: Completed = as_counted) -> Ledger:
        """Every moment of the ranks of `kind`.

        Args:
            complete: adds moments beside those of the step, before it is divided.
        """
        counted = complete(training_ledger(kind.step, is_spread=True), kind.step)
        moments: Mapping[str, tuple[Entry, ...]] = counted.moments
        for strategy, spread in self.strategies:
            moments = strategy.moments(kind, moments, spread)
        return replace(counted, moments=dict(moments))

    def merged_ledger(self, kinds: Sequence[RankKind], complete: Completed = as_counted) -> Ledger:
        """The moments of every kind of rank: the largest is the peak of the rank that needs most.

        Where there are several kinds a moment is named after its ranks, such as
        "last stage: loss_backward". `complete` is as of `ledger`.
        """
        if len(kinds) == 1:
            return self.ledger(kinds[0], complete)
        ledgers = {kind.name: self.ledger(kind, complete) for kind in kinds}
        moments = {
            f"{name}: {moment}": entries
            for name, counted in ledgers.items()
            for moment, entries in counted.moments.items()
        }
        idle_bytes = largest(*(counted.idle_bytes for counted in ledgers.values()))
        return replace(ledgers[kinds[0].name], moments=moments, idle_bytes=idle_bytes)

    def requests(self, kind: RankKind) -> EventList | None:
        """As of `Strategy.requests`; None where several strategies are combined."""
        if len(self.strategies) > 1:
            return None
        ((strategy, spread),) = self.strategies
        return strategy.requests(kind, spread)

    def messages(self, kind: RankKind) -> tuple[Message, ...]:
        """What one rank of `kind` takes part in, in one optimizer step."""
        return tuple(
            replace(message, stride=message.stride * stride)
            for (strategy, spread), stride in zip(self.strategies, self._strides(), strict=True)
            for message in strategy.messages(kind, spread)
        )

    def _strides(self) -> list[int]:
        """Between the numbers of neighbouring ranks of each strategy.

        Those that share one micro-batch at once are next to each other, stages of a pipeline
        furthest away. Source: Megatron's default order, "tp-cp-ep-dp-pp"; torchtitan's mesh.
        """

        def distance(strategy: Strategy) -> int:
            return 2 if strategy.order != "at once" else int(strategy.divides == "data")

        strides = [1] * len(self.strategies)
        stride = 1
        for index in sorted(
            range(len(strides)), key=lambda place: distance(self.strategies[place][0])
        ):
            spread = self.strategies[index][1]
            strides[index] = stride // spread.joined
            stride *= spread.size
        return strides

    @property
    def order(self) -> Order:
        """In which the ranks compute one micro-batch."""
        orders = [strategy.order for strategy, _ in self.strategies]
        return next((order for order in orders if order != "at once"), "at once")

    def num_stages(self, kind: RankKind) -> int:
        """How many stages of a pipeline the ranks of `kind` are; 1 without one."""
        stages = math.prod(
            spread.size for strategy, spread in self.strategies if strategy.order != "at once"
        )
        return max(1, len(kind.ranks) * stages // self.config.gpus)

    @property
    def update_share(self) -> float:
        """Of the trained parameters of a rank, what its optimizer updates."""
        return math.prod(strategy.update_share(spread) for strategy, spread in self.strategies)

    def least_weight_bytes(self, kind: RankKind) -> float:
        """Weights that every rank of `kind` holds between steps.

        Kind: lower bound: what is gathered and small parameters that stay whole are left out.
        Source: `Strategy.weights_share`.
        """
        share = math.prod(strategy.weights_share(spread) for strategy, spread in self.strategies)
        held = weight_bytes(kind.at_rest.model, kind.at_rest.dtypes)
        return share * sum(held.values())

    @property
    def may_use_host(self) -> bool:
        """Whether one of the strategies may keep something in pinned host memory."""
        return any(strategy.may_use_host for strategy, _ in self.strategies)

    def on_host(self, kind: RankKind) -> tuple[Entry, ...]:
        """What one rank of `kind` keeps in pinned host memory."""
        return tuple(
            entry
            for strategy, spread in self.strategies
            for entry in strategy.on_host(kind, spread)
        )

    def host_update(self, kind: RankKind) -> HostUpdate | None:
        """What the processor of one rank of `kind` updates; None where GPUs do."""
        of_strategies = [each.host_update(kind, spread) for each, spread in self.strategies]
        return next((each for each in of_strategies if each is not None), None)

    def loading(self, step: TrainingStep) -> int:
        """Host memory of its own that each process takes while it loads the weights.

        It is that of the first strategy that says it: one that divides the model does so while it
        loads.
        """
        of_strategies = (strategy.loading(step, spread) for strategy, spread in self.strategies)
        return int(next((each for each in of_strategies if each is not None), 0))

    def loading_of_others(self, step: TrainingStep) -> int:
        """So of every process of a node but its first."""
        of_strategies = (each.loading_of_others(step, spread) for each, spread in self.strategies)
        said = next((each for each in of_strategies if each is not None), None)
        return self.loading(step) if said is None else int(said)

    def saving(self, kind: RankKind) -> Saving | None:
        """What a checkpoint copies or gathers, of the strategy that divides most; None: nothing."""
        of_strategies = [strategy.saving(kind, spread) for strategy, spread in self.strategies]
        return next((each for each in of_strategies if each is not None), None)

    @property
    def launcher(self) -> str:
        """What starts the script: a process per GPU, or one for all."""
        return self.strategies[0][0].launcher

    def training_arguments(self, run: RunConfig) -> dict[str, Any]:
        """What `transformers.TrainingArguments` takes to spread `run` so.

        Raises:
            ConfigError: an option that it has no key for.
        """
        return _merged(each.training_arguments(run, spread) for each, spread in self.strategies)

    def model_arguments(self, run: RunConfig) -> dict[str, Any]:
        """What `from_pretrained` takes; raises as `training_arguments`."""
        return _merged(each.model_arguments(run, spread) for each, spread in self.strategies)

    def accelerate(self, run: RunConfig) -> dict[str, Any]:
        """Keys of accelerate's config file; raises as `training_arguments`."""
        return _merged(each.accelerate(run, spread) for each, spread in self.strategies)

    def communicator_bytes(self, gpu: GpuSpec) -> int:
        """What NCCL takes of each device, outside of the framework's allocator."""
        return sum(
            communicator_bytes(spread.size, gpu)
            for strategy, spread in self.strategies
            if spread.size > 1 and strategy.launcher == "torchrun"
        )


def _merged(settings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for each in settings for name, value in each.items()}


def _sizes(
    config: ParallelConfig,
    strategies: Sequence[Strategy],
    options: Mapping[str, Mapping[str, OptionValue | None]],
) -> list[int]:
    """Ranks that each strategy divides among."""
    stated: list[int | None] = []
    for strategy in strategies:
        value = options[strategy.name].get(strategy.size_option)
        stated.append(value if isinstance(value, int) else None)
    open_ends = [strategy for strategy, size in zip(strategies, stated, strict=True) if not size]
    if len(open_ends) > 1:
        missing = [strategy.size_option for strategy in open_ends if strategy.size_option]
        raise ConfigError(
            f"parallel: {config.strategy} leaves open how {config.gpus} GPUs are divided; give "
            f"{' or '.join(missing) or 'one strategy for data alone'}"
        )
    product = math.prod(size or 1 for size in stated)
    if config.gpus % product or (not open_ends and product != config.gpus):
        sizes = " x ".join(str(size) for size in stated if size)
        raise ConfigError(
            f"gpus: {config.gpus} can't be divided into {sizes}; give a multiple of {product}"
        )
    return [size or config.gpus // product for size in stated]
