"""What the kernels between the products read and write, evaluated for the sizes of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from whichlora.memory.layer_bytes import layer_cases
from whichlora.memory.loss import cross_entropy_form
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.kernels import FusedKernels
from whichlora.spec.layer import Layer
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.numeric import Count, largest
from whichlora.spec.run import RunConfig
from whichlora.symbolic import traffic
from whichlora.symbolic.language_head import head_traffic
from whichlora.symbolic.layer import forward_traffic, layer_traffic, stream_bytes
from whichlora.symbolic.linear_form import evaluate
from whichlora.timing.running import RunningModel
from whichlora.trainers.base import Trainer

_FUSED = FusedKernels(norm="apart", rope="apart", gated=True)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that kernels read and write, and how many run; args as of `traffic.Traffic`."""

    moved: Count = 0
    kernels: Count = 0
    saves: Count = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.moved + other.moved, self.kernels + other.kernels, self.saves + other.saves
        )

    def times(self, count: Count) -> Traffic:
        return Traffic(count * self.moved, count * self.kernels, count * self.saves)


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Args: as of `traffic.StepTraffic`."""

    forward: Traffic = Traffic()
    repeated: Traffic = Traffic()
    backward: Traffic = Traffic()

    def __add__(self, other: StepTraffic) -> StepTraffic:
        return StepTraffic(
            self.forward + other.forward,
            self.repeated + other.repeated,
            self.backward + other.backward,
        )

    def times(self, count: Count) -> StepTraffic:
        return StepTraffic(
            self.forward.times(count), self.repeated.times(count), self.backward.times(count)
        )


def _evaluated(
    symbolic: traffic.Traffic, running: RunningModel, *, tokens: Count, span: Count
) -> Traffic:
    """`symbolic`, less what takes less time because the second-level cache holds it."""
    number, chip = partial(evaluate, tokens=tokens, span=span, r=running.r), running.chip
    moved = number(symbolic.moved)
    if chip.l2_bytes and chip.l2_saves:
        for sized in symbolic.sizes:
            share = largest(0.0, 1 - number(sized.moved) / (sized.number * chip.l2_bytes))
            moved = moved - chip.l2_saves * share * number(sized.passing)
    return Traffic(moved, symbolic.kernels, symbolic.saves)


def _step(
    symbolic: traffic.StepTraffic, running: RunningModel, *, tokens: Count, span: Count
) -> StepTraffic:
    return StepTraffic(*(_evaluated(part, running, tokens=tokens, span=span) for part in symbolic))


def trained_layer(
    layer: Layer, running: RunningModel, *, tokens: Count, span: Count
) -> StepTraffic:
    """One layer in one micro-step.

    Kind: estimate. Source: `symbolic.layer.layer_traffic`.
    """
    total, model, run = StepTraffic(), running.model, running.run
    dtypes = _fused(running.dtypes, run)
    for share, case, masked, ragged in layer_cases(layer, dtypes, tokens=tokens, span=span):
        symbolic = layer_traffic(
            case,
            model.stream_width,
            running.targets,
            dtypes,
            running.method,
            masked=masked,
            ragged=ragged,
            reentrant=bool(run.use_reentrant),
            checkpointed=bool(run.gradient_checkpointing),
            stream=stream_bytes(layer, dtypes, after_norm=model.starts_in_layer_norm),
        )
        total = total + _step(symbolic, running, tokens=tokens, span=span).times(share)
    return total


def served_layer(
    layer: Layer, running: RunningModel, *, tokens: Count, span: Count, alone: bool
) -> Traffic:
    """One layer of a forward without gradients.

    Args:
        alone: one token of each sequence runs, and sees the `span` of it.

    Kind: estimate. Source: `symbolic.layer.forward_traffic`.
    """
    total, model, dtypes = Traffic(), running.model, running.dtypes
    stream = stream_bytes(layer, dtypes, after_norm=model.starts_in_layer_norm)
    for share, case, masked, ragged in layer_cases(layer, dtypes, tokens=tokens, span=span):
        symbolic = forward_traffic(
            case,
            model.stream_width,
            running.targets,
            dtypes,
            running.method,
            masked=masked,
            ragged=ragged,
            stream=stream,
            decoding=alone,
        )
        total = total + _evaluated(symbolic, running, tokens=tokens, span=span).times(share)
    return total


def head(
    running: RunningModel, trainer: Trainer, *, computed: bool, tokens: Count, span: Count
) -> StepTraffic:
    """The last norm, the head and the loss of one micro-step, as far as PyTorch's operators go.

    Args:
        computed: the trainer makes its loss of the logits by itself, which is left out.

    Kind: estimate. Source: `symbolic.language_head.head_traffic`.
    """
    model, run = running.model, running.run
    (*_, last), dtypes = [layer for layer, _ in model.layers()], _fused(running.dtypes, run)
    symbolic = head_traffic(
        model,
        dtypes,
        running.method,
        running.targets,
        stream=stream_bytes(last, dtypes, after_norm=model.starts_in_layer_norm),
        form=cross_entropy_form(model, dtypes, sequences=2),
        trains_head=running.method.trains_base,
        loss_head="" if computed else run.loss_head,
        widens_outputs=trainer.widens_outputs,
    )
    return _step(symbolic, running, tokens=tokens, span=span)


def _fused(dtypes: Dtypes, run: RunConfig) -> Dtypes:
    """With the kernels of whoever brings a loss of its own."""
    if not LOSS_HEADS[run.loss_head].fuses_layers or dtypes.kernels.norm != "none":
        return dtypes
    return replace(dtypes, kernels=_FUSED)
