"""Which layers llama.cpp puts on which GPU: by free memory, by proportions, or as `--fit` does.

Read in llama.cpp 0c1e570 (llama-cpp-python 0.3.36). The output matrix counts as one more layer.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

# What of a layer lies elsewhere, by the beginning of the names of its tensors. `--fit` leaves
# attention, or attention and one or two of three matrices, on the GPU.
# Source: llama.cpp 0c1e570 common/fit.cpp:497 get_overflow_pattern.
MOVED_NAMES = {
    "experts": ("ffn_up_exps", "ffn_gate_exps", "ffn_down_exps"),
    "all but attention": ("ffn_up", "ffn_gate", "ffn_down"),
    "gate and down": ("ffn_gate", "ffn_down"),
    "down": ("ffn_down",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Matrices of one layer that lie elsewhere than the layer.

    Args:
        kind: of `MOVED_NAMES`.
        device: the number of a GPU, from 0; None is the host.
    """

    layer: int
    kind: str
    device: int | None = None

    def has(self, name: str) -> bool:
        """Whether it has the tensor of that name."""
        return name.startswith(MOVED_NAMES[self.kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What lies on GPUs: the last layers of a model, in order.

    Args:
        by_device: layers of each GPU; the output matrix is one more, after all others.
        moved: what lies elsewhere than its layer.
        overlaps: whether the buffers for micro-batches that overlap fit; else one passes alone.
    """

    by_device: tuple[int, ...]
    moved: tuple[Moved, ...] = ()
    overlaps: bool = True

    @property
    def layers(self) -> int:
        """Of all GPUs."""
        return sum(self.by_device)

    def ends(self, num_layers: int) -> list[int]:
        """Of each GPU the first layer that is not its own, of a model of `num_layers`."""
        first = num_layers + 1 - self.layers
        return [first + count for count in accumulate(self.by_device)]

    def range_of(self, device: int, num_layers: int) -> range:
        """The layers of a GPU, the output matrix left out."""
        end = self.ends(num_layers)[device]
        return range(min(num_layers, end - self.by_device[device]), min(num_layers, end))

    def layers_on_gpus(self, num_layers: int) -> range:
        """Of all GPUs, the output matrix left out."""
        return range(num_layers + 1 - self.layers, num_layers)

    @property
    def output_device(self) -> int | None:
        """Which GPU has the output matrix; None where the host has it."""
        used = [device for device, count in enumerate(self.by_device) if count]
        return used[-1] if used else None

    def is_pipelined(self, num_layers: int) -> bool:
        """Whether micro-batches overlap, for which inputs are kept several times.

        Kind: exact. Source: llama.cpp 0c1e570 src/llama-context.cpp:430 pipeline_parallel.
        """
        is_whole = self.layers > num_layers and not self.moved
        return self.overlaps and len(self.by_device) > 1 and is_whole


def divided(num_layers: int, on_gpus: int, proportions: Sequence[float]) -> tuple[int, ...]:
    """Of the last `on_gpus` layers, the output matrix included, how many each GPU has.

    Args:
        proportions: of each GPU, such as its free bytes; not all are 0.

    Kind: exact, in its 32-bit floats. Source: llama.cpp 0c1e570 src/llama-model.cpp:1579-1597.
    """
    splits: list[float] = []
    total = 0.0
    for proportion in proportions:
        total = _float32(total + _float32(proportion))
        splits.append(total)
    splits = [_float32(split / total) for split in splits]
    counts = [0] * len(splits)
    layers = min(on_gpus, num_layers + 1)
    for index in range(layers):
        counts[bisect_right(splits, _float32(index / layers))] += 1
    return tuple(counts)


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


# --- what --fit does --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """Layers of one GPU while `--fit` fills it.

    Args:
        partial: of them the last ones, whose experts lie on the host; of the first of these
            `overflow` lies on `spills_to`.
    """

    layers: int = 0
    partial: int = 0
    overflow: str = "experts"
    spills_to: int | None = None

    @property
    def full(self) -> int:
        return self.layers - self.partial

    def more(self, layers: int, partial: int) -> _Share:
        return replace(self, layers=self.layers + layers, partial=self.partial + partial)


_Shares = tuple[_Share, ...]
Needs = Callable[[Placement], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """What `--fit` knows: the model, what it may take of each GPU, and what a placement takes."""

    num_layers: int
    has_experts: bool
    targets: Sequence[int]
    needs: Needs

    def placement(self, shares: _Shares) -> Placement:
        """Source: llama.cpp 0c1e570 common/fit.cpp:560 set_ngl_tensor_split_tbo."""
        first = self.num_layers + 1 - sum(share.layers for share in shares)
        moved: list[Moved] = []
        for share in shares:
            first += share.full
            for place in range(share.partial):
                kind, to = ("experts", None) if place else (share.overflow, share.spills_to)
                moved.append(Moved(layer=first + place, kind=kind, device=to))
            first += share.partial
        counts = tuple(share.layers for share in shares)
        # the output matrix has no number of a layer: a pattern for it matches nothing
        return Placement(
            by_device=counts,
            moved=tuple(each for each in moved if each.layer < self.num_layers),
        )

    def taken(self, shares: _Shares) -> Sequence[int]:
        return self.needs(self.placement(shares))


def fitted(
    num_layers: int, *, has_experts: bool, free: Sequence[int], margin: int, needs: Needs
) -> Placement:
    """How `--fit` places a model that does not fit as it is.

    GPUs are filled from the last one with whole layers, of experts without them. Where these all
    fit, GPUs are filled from the first one with experts, and with a part of one more layer.

    Args:
        free: bytes of each GPU, of which `margin` stays free.
        needs: bytes that a placement takes of each.

    Kind: exact for what `needs` says. Source: llama.cpp 0c1e570 `common_params_fit_impl`,
    common/fit.cpp:173.
    """
    filling = _Filling(
        num_layers=num_layers,
        has_experts=has_experts,
        targets=tuple(each - margin for each in free),
        needs=needs,
    )
    shares = _filled_from_the_back(filling)
    if has_experts and _all_but_experts_fit(filling, divided(num_layers, num_layers + 1, free)):
        shares = _with_experts(filling, shares)
    return filling.placement(shares)


def _all_but_experts_fit(filling: _Filling, by_default: tuple[int, ...]) -> bool:
    """Whether all GPUs together hold what is left where all experts lie on the host."""
    experts = tuple(Moved(layer=layer, kind="experts") for layer in range(filling.num_layers))
    taken = filling.needs(Placement(by_device=by_default, moved=experts))
    return sum(filling.targets) - sum(taken) > 0


def _between(low: int, high: int, room: int, below: int, above: int) -> int:
    """How many layers more than `low` are tried next, by the bytes that both ends take.

    Source: llama.cpp 0c1e570 common/fit.cpp:690, the method of false position.
    """
    delta = high - low
    if room < below or above <= below:  # there a negative number becomes the largest one
        return delta - 1
    return min(max(delta * (room - below) // (above - below), 1), delta - 1)


def _filled_from_the_back(filling: _Filling) -> _Shares:
    """Source: llama.cpp 0c1e570 common/fit.cpp:661-735."""
    last = len(filling.targets) - 1
    shares: _Shares = (_Share(),) * (last + 1)
    taken = filling.taken(shares)
    for device in range(last, -1, -1):

        def given(layers: int, shares: _Shares = shares, device: int = device) -> _Shares:
            partial = layers - (device == last) if filling.has_experts and layers else 0
            share = _Share(layers=layers, partial=partial)
            return (*shares[:device], share, *shares[device + 1 :])

        unassigned = filling.num_layers + 1 - sum(share.layers for share in shares)
        low, high, target = 0, unassigned, filling.targets[device]
        if not high:
            continue
        above = filling.taken(given(high))
        if above[device] <= target:
            shares, taken = given(high), above
            continue
        while high - low > 1:
            middle = low + _between(low, high, target, taken[device], above[device])
            tested = filling.taken(given(middle))
            if tested[device] <= target:
                low, taken = middle, tested
            else:
                high, above = middle, tested
        shares = given(low)
    return shares


def _with_experts(filling: _Filling, shares: _Shares) -> _Shares:
    """Source: llama.cpp 0c1e570 common/fit.cpp:738-878."""
    last = len(shares) - 1
    dense = next(device for device, share in enumerate(shares) if share.layers)
    taken = filling.taken(shares)
    device = 0
    while device <= dense and dense <= last:
        shares, dense, taken = _converted(filling, shares, device, dense, taken)
        if dense <= last and shares[dense].layers > (0 if device < last else 1):
            shares, dense, taken = _with_a_part(filling, shares, device, dense, taken)
        device += 1
    return shares


def _converted(
    filling: _Filling, shares: _Shares, device: int, dense: int, taken: Sequence[int]
) -> tuple[_Shares, int, Sequence[int]]:
    """As many layers as fit, with experts, on `device`; from `dense` on GPUs have none."""
    last, target = len(shares) - 1, filling.targets[device]
    high_shares = list(shares)
    for giver in range(dense, last + 1):
        moved = high_shares[giver].layers - (giver == last)
        high_shares[device] = high_shares[device].more(moved, 0)
        high_shares[giver] = replace(high_shares[giver].more(-moved, 0), partial=0)
    high, above = tuple(high_shares), filling.taken(tuple(high_shares))
    if above[device] <= target:
        return high, last, above
    while (delta := high[device].full - shares[device].full) > 1:
        step = _between(0, delta, target, taken[device], above[device])
        tested_shares, begin, converted = list(shares), dense, 0
        while begin <= last:
            each = min(step - converted, tested_shares[begin].partial)
            tested_shares[begin] = tested_shares[begin].more(-each, -each)
            tested_shares[device] = tested_shares[device].more(each, 0)
            converted += each
            if tested_shares[begin].partial > 0:
                break
            begin += 1
        tested = filling.taken(tuple(tested_shares))
        if tested[device] <= target:
            shares, taken, dense = tuple(tested_shares), tested, begin
        else:
            high, above = tuple(tested_shares), tested
    return shares, dense, taken


def _with_a_part(
    filling: _Filling, shares: _Shares, device: int, dense: int, taken: Sequence[int]
) -> tuple[_Shares, int, Sequence[int]]:
    """A part of one more layer, whose rest lies on the next GPU; of the last one on the host."""
    last = len(shares) - 1
    changed = list(shares)
    changed[dense] = changed[dense].more(-1, -1)
    changed[device] = changed[device].more(1, 1)
    begin = dense + (changed[dense].partial == 0)
    to = device + 1 if device < last else None

    def tried(overflow: str) -> tuple[_Shares, Sequence[int], bool]:
        share = replace(changed[device], overflow=overflow, spills_to=to)
        tested_shares = (*changed[:device], share, *changed[device + 1 :])
        tested = filling.taken(tested_shares)
        fits = tested[device] < filling.targets[device]
        if to is not None:
            fits = fits and tested[to] < filling.targets[to]
        return tested_shares, tested, fits

    with_up, needed, fits = tried("gate and down")
    if not fits:
        with_attention, needed, fits = tried("all but attention")
        return (with_attention, begin, needed) if fits else (shares, dense, taken)
    with_gate, needed_with_gate, also = tried("down")
    return (with_gate, begin, needed_with_gate) if also else (with_up, begin, needed)
