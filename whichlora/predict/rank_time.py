"""Time of one optimizer step on several GPUs: what the ranks compute and what they wait for."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from whichlora.errors import ConfigError
from whichlora.memory.images import TowerStep
from whichlora.memory.optimizer import Update
from whichlora.memory.step import TrainingStep
from whichlora.parallel.base import HostUpdate, Message, RankKind
from whichlora.parallel.communication import (
    PHASES,
    CommunicationTime,
    communication,
    extended,
    sent_over,
    step_s,
)
from whichlora.parallel.layout import Layout
from whichlora.predict.judgement import TimeJudgement
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.links import LinkSpec, NetworkSpec
from whichlora.spec.numeric import Count, Real, sqrt, where
from whichlora.spec.parallel import AUTO_INTERCONNECT, ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.timing import model as timing
from whichlora.timing import training_work, work
from whichlora.timing.links import host_update_s
from whichlora.timing.model import TimeModel
from whichlora.timing.running import RunningModel
from whichlora.timing.tower_work import tower_step_work

# "25GB/s", "200 Gb/s"
_BANDWIDTH = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[MGT]B|[MGT]b)(?:/s|ps)")
_UNITS = {"M": 1e6, "G": 1e9, "T": 1e12}
BY_BANDWIDTH_DEVIATION = 0.2  # of a stated bandwidth. Kind: estimate.


def update_of_step(step: TrainingStep) -> Update:
    """What happens to the gradients of `step`."""
    return Update(
        tensors=step.tensors,
        optimizer=step.run.optimizer,
        foreach=step.has_foreach,
        clips=step.trainer.clips_gradients,
        unscales=step.run.precision == "fp16" and step.dtypes.under_autocast,
        num_micro_batches=step.run.gradient_accumulation_steps * step.num_forwards,
    )


def features_of_step(step: TrainingStep, *, update_share: float = 1.0) -> dict[str, Real]:
    """Time features of one optimizer step.

    Args:
        update_share: of the trained parameters, what the optimizer of one rank updates.
    """
    dtype = step.run.precision[:4]
    counted = timing.features(work_of_step(step), step.gpu, dtype=dtype)
    return counted | {"optimizer": update_share * counted["optimizer"]}


def work_of_step(step: TrainingStep) -> work.Work:
    """What one optimizer step computes and moves, other ranks and the links left out."""
    return work.Work.total((_of_micro_batches(step), *_without_gradients(step), *_of_images(step)))


def _of_micro_batches(step: TrainingStep) -> work.Work:
    """Forwards and backwards with gradients, and the update."""
    return training_work.training_work(
        _running(step),
        batch_size=_sequences(step),
        seq_len=step.seq_len,
        update=update_of_step(step),
        scored=step.loss.scored_tokens,
        logits_loss=step.trainer.logits_loss(step.run),
        num_forwards=step.num_forwards,
    )


def _of_images(step: TrainingStep) -> Iterator[work.Work]:
    """What the tower does that reads them, if one does."""
    if step.model.tower is not None:
        yield tower_step_work(
            TowerStep.of(step, step.model.tower),
            text_tokens=step.tokens,
            chip=timing.chip_of(step.gpu, step.run.precision[:4]),
        )


def _without_gradients(step: TrainingStep) -> Iterator[work.Work]:
    """Forwards that a trainer makes beside those; the reference has no adapters."""
    forwards, update = step.trainer.forwards(step.run), update_of_step(step)
    no_adapters = replace(update, tensors=())
    for number, targets, counted in (
        (forwards.policy, step.targets, update),
        (forwards.reference, (), no_adapters),
    ):
        if number:
            forward = training_work.evaluation_work(
                replace(_running(step), targets=targets),
                batch_size=_sequences(step),
                seq_len=step.seq_len,
                logits_loss=step.trainer.logits_loss(step.run),
                update=counted,
            )
            times = number * step.run.gradient_accumulation_steps
            yield forward.times(times * step.num_forwards)


def _running(step: TrainingStep) -> RunningModel:
    return RunningModel(
        model=step.model,
        run=step.run,
        dtypes=step.dtypes,
        method=step.method,
        targets=step.targets,
        r=step.r,
        chip=timing.chip_of(step.gpu, step.run.precision[:4]),
    )


def _sequences(step: TrainingStep) -> Count:
    """Of one forward; several of a micro-step are taken as equally large."""
    has_columns = step.trainer.columns(step.run) is not None
    return step.batch_size / step.num_forwards if has_columns else step.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What ranks of one kind compute and send in one optimizer step; no calibration changes it.

    Args:
        stages: of a pipeline, how many of them these ranks are.
        forward_share: of the computing, the optimizer's left out.
        host_update: of offloaded states.
    """

    features: Mapping[str, Real]
    messages: tuple[Message, ...]
    stages: int
    forward_share: float
    host_update: HostUpdate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksWork:
    """The work of every kind of rank of one run."""

    config: ParallelConfig
    order: str
    micro_steps: int
    ranks: tuple[RankWork, ...]


def count_ranks(
    layout: Layout,
    run: RunConfig,
    kinds: Sequence[RankKind],
    features_of: Callable[..., Mapping[str, Real]] = features_of_step,
) -> RanksWork:
    """Count what the ranks of `layout` do.

    Args:
        kinds: of the ranks; the sizes of their steps may be arrays.
        features_of: `features_of_step`, or what keeps its results.
    """
    update_share = layout.update_share
    return RanksWork(
        config=layout.config,
        order=layout.order,
        micro_steps=run.gradient_accumulation_steps,
        ranks=tuple(
            RankWork(
                features=features_of(kind.step, update_share=update_share),
                messages=layout.messages(kind),
                stages=layout.num_stages(kind),
                forward_share=training_work.forward_share(kind.step.run, kind.step.method),
                host_update=layout.host_update(kind),
            )
            for kind in kinds
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksJudgement:
    """Time of a run on several GPUs.

    Args:
        time: NaN where the links are not known.
        communication: of every kind of rank, in the order of the layout's; empty likewise.
        features: of all computing that the step takes, idle stages among it.
        waits_s, waits_deviation_s: the rest of the step, the host's update among it, and its
            standard deviation.
    """

    time: TimeJudgement
    communication: tuple[CommunicationTime, ...]
    features: Mapping[str, Real]
    waits_s: Real = 0.0
    waits_deviation_s: Real = 0.0


def judge_ranks(counted: RanksWork, model: TimeModel, links: LinkSpec | None) -> RanksJudgement:
    """Seconds of one optimizer step: that of the rank which takes longest."""
    if links is None:
        unknown = TimeJudgement(
            passes=(),
            pass_s={"finetune": math.nan},
            pass_parts={"finetune": {}},
            total_s=math.nan,
            log_deviation=math.nan,
        )
        return RanksJudgement(time=unknown, communication=(), features=counted.ranks[0].features)
    kinds = [_judge_rank(counted, rank, model, links) for rank in counted.ranks]
    total = step_s(
        [
            (kind.total_s - kind.update_s, kind.update_s, rank.stages)
            for kind, rank in zip(kinds, counted.ranks, strict=True)
        ],
        order=counted.order,
        micro_steps=counted.micro_steps,
    )
    slowest = kinds[0]
    for kind in kinds[1:]:
        slowest = _slower(slowest, kind)
    parts = slowest.parts | {"communication": slowest.exposed_s, "contention": slowest.slowdown_s}
    if any(rank.host_update for rank in counted.ranks):
        parts["host_update"] = slowest.host_s
    if counted.order != "at once":
        parts["pipeline_idle"] = total - slowest.total_s
    waits = slowest.exposed_s + slowest.slowdown_s + slowest.host_s
    computing = total - waits
    with_idle = computing / (slowest.total_s - waits)
    deviation = sqrt((slowest.log_deviation * computing) ** 2 + slowest.waits_deviation_s**2)
    if not model.num_runs:  # the scale is of GPUs and machines that nobody measured
        deviation = links.interval_scale * deviation
    return RanksJudgement(
        time=TimeJudgement(
            passes=(("finetune", 1, slowest.features),),
            pass_s={"finetune": total},
            pass_parts={"finetune": parts},
            total_s=total,
            log_deviation=deviation / total,
        ),
        communication=tuple(kind.communication for kind in kinds),
        features={name: with_idle * value for name, value in slowest.features.items()},
        waits_s=waits,
        waits_deviation_s=slowest.waits_deviation_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """Time of ranks of one kind, without what they wait for other stages.

    Args:
        host_s: of the update of offloaded states.
        waits_deviation_s: of exposed seconds, slowdown and `host_s`, one standard deviation.
    """

    features: Mapping[str, Real]
    parts: dict[str, Real]
    update_s: Real
    exposed_s: Real
    slowdown_s: Real
    host_s: Real
    total_s: Real
    log_deviation: Real
    waits_deviation_s: Real
    communication: CommunicationTime


def _judge_rank(counted: RanksWork, rank: RankWork, model: TimeModel, links: LinkSpec) -> _Rank:
    computing, parts, deviation = timing.pass_time(model, rank.features)
    update_s = parts["optimizer"]
    forward_s = rank.forward_share * (computing - update_s)
    phase_s = dict(
        zip(PHASES, (forward_s, computing - update_s - forward_s, update_s), strict=True)
    )
    sent = sent_over(links, rank.messages, counted.config.gpus_per_node)

    def at(slower: float) -> CommunicationTime:
        return communication(
            sent,
            phase_s,
            micro_steps=counted.micro_steps,
            contention=links.contention,
            slower=slower,
        )

    by = links.relative_deviation
    waits, longer, shorter = (at(slower) for slower in (1.0, 1 + by, max(0.0, 1 - by)))
    # what overlaps is the least known: its deviation is as large as its mean
    open_s = (longer.exposed_s - shorter.exposed_s) / 2 + waits.slowdown_s
    host_s: Real = 0.0 * computing
    if rank.host_update is not None:
        host_s, host_deviation = host_update_s(
            links,
            rank.host_update.num_bytes,
            threads=rank.host_update.threads,
            processes=counted.config.gpus_per_node,
        )
        open_s = sqrt(open_s**2 + (host_deviation * host_s) ** 2)
    return _Rank(
        features=rank.features,
        parts=parts,
        update_s=update_s + host_s,
        exposed_s=waits.exposed_s,
        slowdown_s=waits.slowdown_s,
        host_s=host_s,
        total_s=computing + waits.exposed_s + waits.slowdown_s + host_s,
        log_deviation=deviation,
        waits_deviation_s=open_s,
        communication=waits,
    )


def _slower(rank: _Rank, other: _Rank) -> _Rank:
    """Of two kinds of ranks the one that takes longer, elementwise."""
    is_slower = other.total_s > rank.total_s

    def of(a: Real, b: Real) -> Real:
        return where(is_slower, b, a)

    return _Rank(
        features={name: of(rank.features[name], other.features[name]) for name in rank.features},
        parts={name: of(rank.parts[name], other.parts[name]) for name in rank.parts},
        update_s=of(rank.update_s, other.update_s),
        exposed_s=of(rank.exposed_s, other.exposed_s),
        slowdown_s=of(rank.slowdown_s, other.slowdown_s),
        host_s=of(rank.host_s, other.host_s),
        total_s=of(rank.total_s, other.total_s),
        log_deviation=of(rank.log_deviation, other.log_deviation),
        waits_deviation_s=of(rank.waits_deviation_s, other.waits_deviation_s),
        communication=rank.communication,
    )


def usual_links(gpu: GpuSpec, machines: Mapping[str, LinkSpec]) -> list[LinkSpec]:
    """Those of the `machines` that usually have this type of GPU."""
    return [links for links in machines.values() if gpu.key in links.gpus]


def over_nodes(
    config: ParallelConfig,
    gpu: GpuSpec,
    machines: Mapping[str, LinkSpec],
    *,
    hint: str = "; nodes states another number",
) -> tuple[ParallelConfig, str]:
    """`config` over the fewest equal nodes that hold its GPUs, and a note; "" where nothing moves.

    Only where it asks for one node, and no machine with as many of these GPUs is known.

    Args:
        machines: as of `links_of`.
        hint: the end of the note.
    """
    if config.gpus == 1 or config.nodes > 1:  # no links are asked for
        return config, ""
    name = config.interconnect.strip()
    candidates = [machines[name]] if name in machines else []
    if name == AUTO_INTERCONNECT:
        candidates = usual_links(gpu, machines)
    most = max((links.gpus_per_node for links in candidates), default=config.gpus)
    joined = next((links for links in candidates if links.network is not None), None)
    if config.gpus <= most or joined is None:
        return config, ""
    numbers = range(-(-config.gpus // joined.gpus_per_node), config.gpus)
    nodes = next((number for number in numbers if config.gpus % number == 0), None)
    if nodes is None:
        return config, ""
    spread = replace(config, nodes=nodes)
    return spread, (
        f"{config.gpus} GPUs: taken as {nodes} nodes of {spread.gpus_per_node}, since {joined.key} "
        f"has {joined.gpus_per_node} at most{hint}"
    )


def links_of(
    config: ParallelConfig, gpu: GpuSpec, machines: Mapping[str, LinkSpec]
) -> tuple[LinkSpec | None, str]:
    """The links of a run and a line that names them; None where they are not known.

    Args:
        machines: those that are known, by name.

    Raises:
        ConfigError: an interconnect that is neither a known machine nor a bandwidth.
    """
    name = config.interconnect.strip()
    bandwidth = _BANDWIDTH.fullmatch(name)
    if bandwidth is not None:
        bytes_per_s = float(bandwidth["number"]) * _UNITS[bandwidth["unit"][0]]
        links = _of_bandwidth(bytes_per_s / (8 if bandwidth["unit"][1] == "b" else 1), config)
        return links, f"each GPU sends with {name} in a collective, as stated"
    if name == AUTO_INTERCONNECT:
        usual = usual_links(gpu, machines)
        if not usual:
            return None, (
                f"the time is not known: no links of machines with {gpu.key} are known; give "
                "interconnect, such as 25GB/s"
            )
        # those of the user's folder come first, and may be of fewer GPUs or without a network
        links = next((each for each in usual if _reaches(each, config)), usual[0])
    elif name in machines:
        links = machines[name]
    else:
        close = difflib.get_close_matches(name, machines, n=3, cutoff=0.3) or sorted(machines)[:3]
        nearest = f", or a machine such as {', '.join(close)}" if close else ""
        raise ConfigError(
            f"interconnect: {name!r} is not known; give a bandwidth such as 25GB/s{nearest}"
        )
    if config.gpus_per_node > links.gpus_per_node:
        return None, (
            f"the time is not known: {links.key} has {links.gpus_per_node} GPUs at most, not "
            f"{config.gpus_per_node}; give nodes, or another interconnect"
        )
    if config.nodes > 1 and links.network is None:
        return None, (
            f"the time is not known: {links.key} has no network to other nodes; give interconnect, "
            "such as 25GB/s"
        )
    network = f", {links.network.name}" if config.nodes > 1 and links.network else ""
    return links, f"links of {links.key}: {links.name}{network}"


def _reaches(links: LinkSpec, config: ParallelConfig) -> bool:
    """Whether `links` are between as many GPUs and nodes as `config` has."""
    return config.gpus_per_node <= links.gpus_per_node and (
        config.nodes == 1 or links.network is not None
    )


def _of_bandwidth(bytes_per_s: float, config: ParallelConfig) -> LinkSpec:
    return LinkSpec(
        key="stated",
        name="stated bandwidth",
        gpus_per_node=config.gpus_per_node,
        bandwidth_bytes_per_s=bytes_per_s,
        relative_deviation=BY_BANDWIDTH_DEVIATION,
        network=NetworkSpec(
            name="stated bandwidth",
            bandwidth_bytes_per_s=bytes_per_s * config.gpus_per_node,
            reached_share=1.0,
            latency_s=14e-6,
        ),
    )


def link_notes(
    links: LinkSpec | None, line: str, messages: Sequence[Sequence[Message]], config: ParallelConfig
) -> tuple[str, ...]:
    """What must be said of the links: which they are, and what goes beyond their measurements."""
    if links is None:
        return (line,)
    if links.seconds and math.isfinite(links.relative_deviation):
        reasons = dict.fromkeys(
            reason for each in messages for reason in extended(links, each, config.gpus_per_node)
        )
        if reasons:
            return (f"{line}; {' and '.join(reasons)}, the rate of these stands for more",)
    return (line,)
