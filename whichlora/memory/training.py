"""The ledger: what is alive at each moment that can be the peak of a run.

The peak is the largest moment. A moment is a list of entries; the parts of the entries are the
breakdown that a user sees, and their facts are what `whichlora explain` prints. The moments of
training are in `memory.moments`, those of inference in `memory.inference`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from whichlora.memory import allocator, loss
from whichlora.memory.columns import column_moments, last_forward
from whichlora.memory.entries import Entry
from whichlora.memory.gradients import trained_params
from whichlora.memory.images import with_images
from whichlora.memory.layer_bytes import forward_bytes
from whichlora.memory.loading import (
    NARROW_TABLE,
    START,
    loading_moment,
    loading_temporaries,
    narrow_table_bytes,
)
from whichlora.memory.metal_heaps import idle_in_heaps
from whichlora.memory.moments import table_moment, training_moments
from whichlora.memory.step import TrainingStep
from whichlora.memory.weights import weight_entries
from whichlora.spec.numeric import Count, added, largest, smallest
from whichlora.spec.targets import adapted_linears

__all__ = ["PARTS", "RETURNED", "Ledger", "least_parts", "trained_params", "training_ledger"]

PARTS = (
    "weights",
    "adapters",
    "gradients",
    "optimizer_states",
    "activations",
    "logits_and_loss",
    "temporary",
    "kv_cache",
    "allocator",
    "context",
)
RETURNED = "returned"  # of "allocator": whole segments, which it gives back before a request fails
ROLLOUT = "rollout_"  # begins the names of moments in which the model writes, between steps
_OUTSIDE_LAYERS = ("loading", "embedding_backward", "table_backward", "optimizer_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Every candidate moment of one run.

    Args:
        moments: entries by moment, in the order they happen.
        idle_bytes: the allocator's cached but unusable bytes at the peak.
        returned_bytes: of these, in whole segments, which it gives back before a request fails.
        workspace_bytes: library workspaces, inside the allocator's pool, from the first product on.
    """

    moments: dict[str, tuple[Entry, ...]]
    idle_bytes: Count
    workspace_bytes: int
    returned_bytes: Count = 0

    def moment_bytes(self, moment: str) -> Count:
        return self.workspace_in(moment) + added(entry.num_bytes for entry in self.moments[moment])

    def workspace_in(self, moment: str) -> int:
        return 0 if moment == "loading" else self.workspace_bytes

    @property
    def peak_allocated_bytes(self) -> Count:
        return largest(*(self.moment_bytes(moment) for moment in self.moments))

    @property
    def peak_moment(self) -> str:
        """Name of the largest moment; of one run only, not of an array."""
        return max(self.moments, key=self.moment_bytes)


def training_ledger(step: TrainingStep, *, is_spread: bool = False) -> Ledger:
    """Moments of loading and of `step`.

    Args:
        is_spread: a strategy changes each moment of a rank; it knows none of a table alone.
    """
    if step.trainer.columns(step.run) is None:
        of_table = {} if is_spread else table_moment(step)
        moments = with_images(step, training_moments(step) | of_table)
    else:
        moments = column_moments(step)
        step = last_forward(step)
    ledger = Ledger(
        moments=moments | training_loading(step, like=step.batch_size),
        idle_bytes=0,
        workspace_bytes=allocator.workspace_bytes(step.gpu, training=True),
    )
    return replace(ledger, idle_bytes=_idle_bytes(step, ledger))


def training_loading(step: TrainingStep, *, like: Count) -> dict[str, tuple[Entry, ...]]:
    """The largest moment before the first step, where more is there than what stays.

    The base is loaded, its tables are widened, then adapters are made. Of these the largest is
    taken by what it holds beside the weights.
    Kind: as of its entries. Source: their facts.
    """
    weights = weight_entries(step.model, step.dtypes, like=like)
    adapters = tuple(entry for entry in step.static if entry.part == "adapters")
    narrow = narrow_table_bytes(step.model, step.dtypes, prepare_kbit=bool(step.run.prepare_kbit))
    linears = adapted_linears(step.model, step.targets)
    started = int(step.method.start_bytes(linears, step.dtypes, step.r))
    later = {
        narrow: (*weights, Entry(NARROW_TABLE, narrow + 0 * like)),
        started: (*weights, *adapters, Entry(START, started + 0 * like)),
    }
    most = max(later)
    if most <= sum(loading_temporaries(step.model, step.dtypes).values()):
        return loading_moment(step.model, step.dtypes, like=like)
    return {"loading": later[most]}


def least_parts(step: TrainingStep) -> dict[str, Count]:
    """Bytes by part that are alive together at the loss, at the rank of `step` or any larger one.

    Kind: lower bound, for a larger rank saves more tensors, not fewer. Left out are adapters and
    states: those of 8 bits take less where a tensor has grown past their threshold.
    Source: `moments.loss_forward` and `moments.loss_backward`, which have these entries and more.
    """
    step = last_forward(step)
    weights = weight_entries(step.model, step.dtypes, like=step.tokens)
    return {
        "weights": added(entry.num_bytes for entry in weights),
        "activations": step.saved_for_backward.num_bytes,
        "logits_and_loss": largest(step.loss.forward_bytes, step.loss.backward_bytes),
    }


def _idle_bytes(step: TrainingStep, ledger: Ledger) -> Count:
    """Segments that the peak cannot use.

    Kind: estimate. Source: `allocator.idle_after_step_bytes`.
    """
    peak = ledger.peak_allocated_bytes
    in_backward = step.loss.backward_bytes + step.loss.kept_logits_bytes
    in_loss = largest(step.loss.forward_bytes, in_backward)
    in_layer = step.layer_backward_bytes
    idle = _idle_after_layers(step, in_loss, in_layer)
    # these segments are idle while layers run; a later peak is cut from what they left
    in_layers = [
        ledger.moment_bytes(name) for name in ledger.moments if name not in _OUTSIDE_LAYERS
    ]
    later = largest(*in_layers) + idle - peak
    idle = largest(later, smallest(idle, allocator.PAGES_BYTES))
    idle = idle_in_heaps(step.gpu, peak_bytes=peak, idle_bytes=idle)
    if step.gpu.backend.allocator != "segments" or step.run.expandable_segments:
        return idle
    # The optimizer's lists of small tensors find no use for the segments of the activations.
    left_behind = largest(in_loss, in_layer) + step.saved_for_backward.num_bytes
    at_optimizer = ledger.moment_bytes("optimizer_step") + left_behind
    return largest(idle, at_optimizer - peak)


def _idle_after_layers(step: TrainingStep, in_loss: Count, in_layer: Count) -> Count:
    head = step.run.loss_head
    vocab = loss.logit_width(step.model) * loss.makes_all_logits(step.dtypes, head, step.tokens)
    working = in_layer
    if head == "unsloth-fused" or not step.dtypes.libraries.shifts_logits:
        working = forward_bytes(step.model, step.dtypes, **step.sized)
    return allocator.idle_after_step_bytes(
        step.gpu,
        loss_bytes=in_loss,
        layer_bytes=in_layer,
        left_bytes=working,
        narrow_logits_bytes=step.tokens * vocab * 2,
        expandable=step.run.expandable_segments,
    )
