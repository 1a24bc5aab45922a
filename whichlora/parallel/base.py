"""What a parallel strategy is: what each rank holds and computes, and what the ranks send.

A strategy changes the run of one device in two places. `split` says what a rank computes: a part
of the model (tensor and pipeline parallelism), of the tokens, or all of it. `moments` says what it
holds of each entry of that run's ledger, and adds what is gathered. Strategies that are combined
do so one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from whichlora.errors import ConfigError
from whichlora.memory.entries import Entry
from whichlora.memory.event_list import EventList
from whichlora.memory.life import stored_dtypes
from whichlora.memory.step import TrainingStep
from whichlora.memory.weights import weight_bytes
from whichlora.spec.dtypes import resolve_dtypes
from whichlora.spec.numeric import Count
from whichlora.spec.options import Option, OptionValue
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig

Moments = Mapping[str, tuple[Entry, ...]]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "send", "to_host", "from_host"]
Hidden = Literal["nothing", "forward", "backward", "optimizer"]
Order = Literal["at once", "pipelined", "one after the other"]
ON_HOST = {"": "cpu"}  # device_map of a model that is sharded from host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One strategy as a run asks for it.

    Args:
        config: all GPUs of the run.
        size: ranks among which this strategy divides; the product over the combined strategies is
            `config.gpus`.
        joined: ranks of the strategies that it is combined with and shards among, too.
        options: of this strategy, defaults filled in.
    """

    config: ParallelConfig
    size: int
    joined: int = 1
    options: Mapping[str, OptionValue | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKind:
    """Ranks that hold and compute the same.

    Args:
        name: such as "every rank", "first stage"; in words that an engineer would search for.
        ranks: their numbers.
        at_rest: the step whose dtypes are those in which parameters are kept between steps.
        step: what these ranks compute, in the dtypes that their kernels see.
    """

    name: str
    ranks: tuple[int, ...]
    at_rest: TrainingStep
    step: TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Equal messages of one optimizer step.

    Args:
        what: such as "gradients of the blocks".
        num_bytes: of the whole tensor that is gathered, reduced or sent by one of them.
        count: how many there are in one optimizer step.
        size: ranks that take part.
        hidden_by: what computes meanwhile; "nothing" where everybody waits.
        micro_steps: those of an optimizer step that send them; None where all do.
        stride: between the numbers of ranks that take part, in ranks of the strategy: of 8 ranks
            2 with stride 4 are 0 and 4, 1 and 5, and so on.
    """

    what: str
    collective: Collective
    num_bytes: Count
    count: Count
    size: int
    hidden_by: Hidden = "nothing"
    micro_steps: int | None = None
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdate:
    """What the processor of a rank does in the update of offloaded states.

    Args:
        num_bytes: of host memory that are read and written.
        threads: of the rank's process.
    """

    num_bytes: Count
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What a checkpoint makes of tensors that ranks divide.

    Args:
        what: is copied to host memory, such as "all weights".
        host_bytes: of it, on each rank that copies.
        by_all_ranks: each rank copies; else rank 0 alone.
        device_bytes: largest tensors that a GPU gathers for it at once; 0: it has them.
        instead: the setting with which shares are written; empty where there is none.
    """

    what: str
    host_bytes: Count
    by_all_ranks: bool = False
    device_bytes: Count = 0
    instead: str = ""


def in_run(step: TrainingStep, run: RunConfig) -> TrainingStep:
    """`step` with the settings of `run`, and the dtypes that these imply.

    What is counted of kernels stays as `step` has it.
    """
    dtypes = resolve_dtypes(
        run,
        trains_base=step.method.trains_base,
        device_kind=step.gpu.kind,
        compute_capability=step.gpu.compute_capability,
        widens_result=step.method.widens_result,
        narrows_adapters=step.trainer.narrows_adapters(run),
    )
    dtypes = step.trainer.with_narrow_tables(dtypes, run, step.model)
    counted = step.dtypes
    dtypes = replace(
        dtypes,
        kernel_buffers=counted.kernel_buffers,
        fused_fp16_softmax=dtypes.fused_fp16_softmax and counted.kernel_buffers,
    )
    return replace(step, run=run, dtypes=dtypes)


def _computes_all(rank: RankKind, spread: Spread) -> tuple[RankKind, ...]:
    return (rank,)


def _holds_all(rank: RankKind, moments: Moments, spread: Spread) -> Moments:
    return moments


def _updates_all(spread: Spread) -> float:
    return 1.0


def _no_messages(rank: RankKind, spread: Spread) -> tuple[Message, ...]:
    return ()


def _nothing_on_host(rank: RankKind, spread: Spread) -> tuple[Entry, ...]:
    return ()


def _requests_unknown(rank: RankKind, spread: Spread) -> EventList | None:
    return None


def _updates_on_device(rank: RankKind, spread: Spread) -> HostUpdate | None:
    return None


def _saves_what_it_holds(rank: RankKind, spread: Spread) -> Saving | None:
    return None


def _loads_unknown(step: TrainingStep, spread: Spread) -> Count | None:
    return None


def _load_as_the_first(step: TrainingStep, spread: Spread) -> Count | None:
    return None


def loads_on_host(step: TrainingStep, spread: Spread) -> Count:
    """Weights that each process casts in host memory, before the Trainer moves them.

    Weights that keep the dtype of the checkpoint are pages of the mapped file, which all processes
    share and the kernel may drop.
    Kind: exact, of tensors; LoRA without quantisation mostly needs nothing. Source: transformers
    5.23 `core_model_loading._materialize_copy`.
    """
    dtypes = step.dtypes
    stored = stored_dtypes(step.model, dtypes)
    if dtypes.loads_at_once or dtypes.quant != "none" or stored.base_bytes == dtypes.base_bytes:
        return 0
    return sum(weight_bytes(step.model, dtypes).values())


def _accepts(step: TrainingStep, spread: Spread) -> None:
    return


def _no_notes(step: TrainingStep, spread: Spread) -> tuple[str, ...]:
    return ()


def _not_in_the_trainer(run: RunConfig, spread: Spread) -> Mapping[str, Any]:
    raise ConfigError(
        f"parallel: {spread.config.strategy} has no key in TrainingArguments, so that no train.py "
        "can be written; use ddp, fsdp or zero1 to zero3"
    )


def _reads_none(accelerator: Mapping[str, Any]) -> Mapping[str, OptionValue] | None:
    return None


def _no_settings(run: RunConfig, spread: Spread) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to spread a run over several GPUs.

    Args:
        options: what it declares beside the number of GPUs.
        smallest: values of them with which a GPU holds least; `parallel: auto` tries these where
            nothing fits.
        size_option: the one of them that says how many ranks it divides among, where it is
            combined with others; empty for the one that takes what the others leave.
        divides: what its ranks share: "data" where each has its own micro-batch, so that the
            global batch grows with their number; "model" where they work on the same one.
        order: in which its ranks compute one micro-batch: together, or one stage after the other,
            "pipelined" where several micro-batches are under way.
        keeps_weights: each rank has all of them all the time, so that the answers of a rollout are
            written as on one GPU.
        check: refuse what the libraries refuse, with one line (`ConfigError`).
        split: what the ranks of one kind compute, once this strategy has divided their work.
        moments: what a rank holds at each moment, of the entries that its step would have alone.
        update_share: of the trained parameters, what one rank's optimizer updates on its GPU.
        weights_share: of the weights of a rank's step, what it holds at least between steps.
        requests: large requests of a rank in order, from loading to the second step, of which
            `memory.reserved` says what the allocator reserves; None where they are not written.
        messages: what one rank sends and receives in one optimizer step.
        host_update: what the processor updates in place of the GPU; None where it does not.
        on_host: what it keeps in pinned host memory, by entry.
        loading: what each process holds of its own in host memory until its GPU has the weights;
            0 where tensors go there from the mapped file, None where nothing is said of it.
        loading_of_others: the same of the other processes of a node; None where they load as the
            first one does.
        saving: what is copied or gathered for a checkpoint of the Trainer.
        training_arguments: what `transformers.TrainingArguments` takes to turn it on; "deepspeed"
            holds the content of its JSON file. It refuses what the Trainer has no key for.
        model_arguments: what `from_pretrained` takes.
        accelerate: keys of accelerate's config file, `distributed_type` among them.
        read_accelerator: the options of a run whose accelerator is set up so; None where that is
            another strategy's. It gets "distributed_type", "sync_each_batch", "fsdp" (settings of
            the plugin), and "deepspeed" (content of its JSON). It refuses what is not modelled.
        launcher: "torchrun" starts a process per GPU, "python" one for all of them.
        takes_images: it is predicted for runs whose rows have images, too.
        runs_alone: files that ask for it get it on one GPU, too, whose dtypes it decides.
        notes: what a user must know.
        joins_shards: it shards among the ranks of strategies with `needs_shards`, too.
        needs_shards: why it runs beside one that shards parameters alone; empty where it does not.
        replicas_refused: why it can't be combined with a strategy whose every rank holds and
            updates all; empty where it can.
    """

    name: str
    summary: str
    divides: Literal["data", "model"]
    order: Order = "at once"
    options: tuple[Option, ...] = ()
    smallest: tuple[tuple[str, OptionValue], ...] = ()
    size_option: str = ""
    keeps_weights: bool = False
    check: Callable[[TrainingStep, Spread], None] = _accepts
    split: Callable[[RankKind, Spread], tuple[RankKind, ...]] = _computes_all
    moments: Callable[[RankKind, Moments, Spread], Moments] = _holds_all
    update_share: Callable[[Spread], float] = _updates_all
    weights_share: Callable[[Spread], float] = _updates_all
    requests: Callable[[RankKind, Spread], EventList | None] = _requests_unknown
    messages: Callable[[RankKind, Spread], tuple[Message, ...]] = _no_messages
    host_update: Callable[[RankKind, Spread], HostUpdate | None] = _updates_on_device
    on_host: Callable[[RankKind, Spread], tuple[Entry, ...]] = _nothing_on_host
    loading: Callable[[TrainingStep, Spread], Count | None] = _loads_unknown
    loading_of_others: Callable[[TrainingStep, Spread], Count | None] = _load_as_the_first
    saving: Callable[[RankKind, Spread], Saving | None] = _saves_what_it_holds
    training_arguments: Callable[[RunConfig, Spread], Mapping[str, Any]] = _not_in_the_trainer
    model_arguments: Callable[[RunConfig, Spread], Mapping[str, Any]] = _no_settings
    accelerate: Callable[[RunConfig, Spread], Mapping[str, Any]] = _no_settings
    read_accelerator: Callable[[Mapping[str, Any]], Mapping[str, OptionValue] | None] = _reads_none
    launcher: Literal["torchrun", "python"] = "torchrun"
    notes: Callable[[TrainingStep, Spread], tuple[str, ...]] = _no_notes
    takes_images: bool = False
    runs_alone: bool = False
    joins_shards: bool = False
    needs_shards: str = ""
    replicas_refused: str = ""

    @property
    def is_in_the_trainer(self) -> bool:
        """Whether `TrainingArguments` can turn it on."""
        return self.training_arguments is not _not_in_the_trainer

    @property
    def may_use_host(self) -> bool:
        """Whether an option of it keeps something in pinned host memory."""
        return self.on_host is not _nothing_on_host
