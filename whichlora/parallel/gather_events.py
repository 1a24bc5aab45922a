"""The requests of a rank under ZeRO stage 3 in order: shares, gathered parameters, the update.

What a rank computes is the step of one device; parameters are gathered while a layer runs.

Source: deepspeed 0.19.8 `runtime/zero/stage3.py`, `partition_parameters.py`,
`partitioned_param_coordinator.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whichlora.memory.event_list import Block, Instance, Pass
from whichlora.parallel.deepspeed import MASTER_BYTES, NORM_BYTES, Partitioned
from whichlora.parallel.rank_events import Drop, ZeroEvents
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.numeric import ceil_div
from whichlora.units import MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """What one module of a micro-step gathers before it runs, and releases afterwards.

    Args:
        layer: in which it is: -1 before the layers, their number behind them.
        is_forward: of the first forward.
        key: of its own parameter, negative where it has none.
        added: keys that are gathered, its own first.
        released: key; None where it stays.
    """

    layer: int
    is_forward: bool
    key: int
    added: tuple[int, ...]
    released: int | None


def _while_recorded(gathering: Gathering) -> Gathering:
    """The same in the first micro-step, which records the modules: nothing is ahead, or stays."""
    key = gathering.key
    own = (key,) if key >= 0 else ()
    return replace(gathering, added=own, released=key if own else None)


def _by_pass(gatherings: Iterable[Gathering]) -> dict[tuple[int, bool], list[Gathering]]:
    found: dict[tuple[int, bool], list[Gathering]] = {}
    for gathering in gatherings:
        found.setdefault((gathering.layer, gathering.is_forward), []).append(gathering)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShares:
    """Bytes that one rank holds between steps.

    Args:
        frozen: shares of parameters that are not trained, or not on the device's flat buffer.
        flat: the flat buffer of trained ones.
        small: parameters that stay whole.
        buffers: of the model, and what else nobody divides.
        groups: elements of each sub-group that one update takes.
        sizes: of each trained parameter's share, in elements.
    """

    frozen: tuple[int, ...]
    flat: int
    small: int
    buffers: int
    groups: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(slots=True)
class _Together:
    """Parameters that one message gathers: a flat tensor, of which each gets a copy."""

    keys: set[int]
    drop: Drop
    is_copied: bool = False


@dataclass(slots=True)
class _Gathered:
    """What is gathered: by key, what frees it, and the message that it came with."""

    drops: dict[int, list[Drop]] = field(default_factory=dict)
    together: dict[int, _Together] = field(default_factory=dict)


class GatherEvents(ZeroEvents):
    """The events of one rank. Kind: estimate: a layer's modules run evenly.

    Args:
        gatherings: of a micro-step in order.
        widths: bytes of what each key gathers: of its own parameter, then of its adapters.
    """

    pieces = 12  # about as many as a layer has matrices and norms

    def __init__(
        self,
        part: Partitioned,
        shares: HeldShares,
        gatherings: Sequence[Gathering],
        widths: Mapping[int, Sequence[int]],
    ) -> None:
        super().__init__(part)
        self._shares, self._widths = shares, widths
        self._gathered = _Gathered()
        self._later = _by_pass(gatherings)
        self._of_pass = _by_pass(map(_while_recorded, gatherings))
        self._due: deque[Gathering] = deque()
        self._after: int | None = None  # the key that the last module releases
        self._place = -1, True  # the layer whose modules are due or done, and in which pass
        self._layer = -1
        self._is_forward = True
        self._filled = self._in_bucket = 0
        self._waiting: list[Drop] = []  # of gradients that the bucket has no room for
        self._is_boundary = False

    # --- the engine starts ----------------------------------------------------------------------

    def load(self) -> None:
        """Shares, then what the optimizer holds: flattening empties the cache before."""
        shares, width = self._shares, self._part.width
        self.list.stay(shares.frozen)
        self.list.stay([MiB] * -(-shares.small // MiB))
        self.list.stay([shares.buffers])
        self.list.stay([shares.flat])
        if not self._on_host:  # `_create_fp32_partitions`, `initialize_optimizer_states`
            before: list[int] = []
            for elements in shares.groups:
                converted = self.list.born(elements * MASTER_BYTES)
                self.list.die(*before)
                self.list.stay([elements * MASTER_BYTES])
                before = [converted]
            self.list.die(*before)
            self.list.pass_by([max(shares.groups) * MASTER_BYTES])
        self.list.stay([self._bucket_elements * width])
        if not self._on_host:
            self.list.stay([sum(shares.groups) * width])

    # --- gathering ------------------------------------------------------------------------------

    def micro_step(self, *, accumulated: bool, first: bool) -> None:
        self._is_boundary = accumulated or self.step.run.gradient_accumulation_steps == 1
        self._layer, self._is_forward, self._place = -1, True, (-2, True)
        self._begin(-1)
        self._run_due(len(self._due))
        super().micro_step(accumulated=True, first=first)
        self._reduce()
        self._release()
        for drops in self._gathered.drops.values():
            for drop in drops:
                drop()
        self._gathered = _Gathered()
        self._of_pass = self._later

    def _before_backward(self) -> None:
        self._is_forward = False

    def _begin(self, layer: int) -> None:
        """The next modules are those of `layer`."""
        place = layer, self._is_forward
        if place == self._place:
            return
        self._place = place
        self._run_due(len(self._due))
        self._due.extend(self._of_pass.get(place, ()))

    def _forward(self, block: Block, stream: int) -> tuple[Instance, int]:
        if not self._looks_up:
            self._layer += 1
            self._begin(self._layer)
        return super()._forward(block, stream)

    def _backward(self, instance: Instance, gradient: int) -> int:
        self._begin(self._layer)
        self._layer -= 1
        return super()._backward(instance, gradient)

    def _embedding_backward(self, model: ModelSpec, head: Instance, *, accumulated: bool) -> None:
        self._begin(-1)
        self._run_due(len(self._due))
        super()._embedding_backward(model, head, accumulated=accumulated)

    def _play(self, done: Pass, instance: Instance) -> None:
        """The modules run evenly, part by part."""
        number, parts = len(self._due), len(done.parts)
        run = 0
        for place, part in enumerate(done.parts, 1):
            now = -(-number * place // parts)
            self._run_due(now - run)
            run = now
            self._play_part(part, instance)

    def _run_due(self, number: int) -> None:
        for _ in range(number):
            self._release()
            gathering = self._due.popleft()
            self._fetch(gathering)
            self._after = gathering.released

    def _fetch(self, gathering: Gathering) -> None:
        """`fetch_sub_module`: its own parameter, then the next ones, as one message."""
        added, key = gathering.added, gathering.key
        if key in added:
            self._gather(key)
        elif key in self._gathered.together:
            self._wait(key)
        ahead = [each for each in added if each != key]
        if len(ahead) == 1:
            self._gather(ahead[0])
        elif ahead:
            total = sum(self._widths[each][0] for each in ahead)
            together = _Together(set(ahead), self._born(total))
            self._gathered.together |= dict.fromkeys(ahead, together)

    def _gather(self, key: int) -> None:
        self._gathered.drops[key] = [self._born(size) for size in self._widths[key]]

    def _wait(self, key: int) -> None:
        """`AllGatherCoalescedHandle.wait`; the flat tensor goes once all have been waited for."""
        together = self._gathered.together.pop(key)
        if not together.is_copied:
            together.is_copied = True
            for each in together.keys:
                self._gather(each)
        together.keys.discard(key)
        if not together.keys:
            together.drop()

    def _release(self) -> None:
        if self._after is not None:
            for drop in self._gathered.drops.pop(self._after, ()):
                drop()
            self._after = None

    # --- gradients ------------------------------------------------------------------------------

    def _hook(self, gradient: int, size: int) -> None:
        """`reduce_independent_p_g_buckets_and_remove_grads`."""
        elements = size // self._part.width
        if self._filled and self._filled + elements > self._bucket_elements:
            self._reduce()
        if self._filled + elements <= self._bucket_elements:
            self.list.die(gradient)
        else:
            self._waiting.append(lambda: self.list.die(gradient))
        self._filled += elements
        self._in_bucket += 1

    def _reduce(self) -> None:
        """`__reduce_and_partition_ipg_grads`; one tensor that divides evenly is not copied."""
        ranks, width = self._part.spread.size, self._part.width
        copies = self._filled if self._in_bucket > 1 or self._filled % ranks else 0
        free = self._born(copies * width) if copies else None
        if self._on_host and self._is_boundary and self._waiting:
            share = ceil_div(self._filled, ranks)
            self.list.pass_by([share * NORM_BYTES])
            self.list.pass_by([share * MASTER_BYTES])
        for drop in (*self._waiting, *([free] if free else ())):
            drop()
        self._waiting.clear()
        self._filled = self._in_bucket = 0

    # --- the update -----------------------------------------------------------------------------

    def optimizer_step(self, *, first: bool) -> None:
        """`step`: the norm, then one sub-group after another."""
        self._parameters.clear()
        if self._on_host:
            return
        width = self._part.width
        for elements in self._shares.sizes:
            self.list.pass_by([elements * NORM_BYTES])
        for elements in self._shares.groups:
            flat = self.list.born(elements * width)
            wide = self.list.born(elements * MASTER_BYTES)
            self.list.die(flat)
            self._update(elements, first=first)
            self.list.die(wide)
