"""What a kind of device changes for every card of it: the values that one backend's file states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from whichlora.spec.run import RunConfig
    from whichlora.spec.versions import Libraries

SdpaKernel = Literal["flash", "efficient", "math"]
Groups = Literal["none", "enabled", "broadcast"]
"""How grouped keys come to SDPA: not at all or repeated, with `enable_gqa`, or without it."""
AllocatorRules = Literal["segments", "heaps", "host", "unknown"]
"""Segments of 2 MiB, 20 MiB and more; Metal heaps; the host's malloc; not public."""


# Optimizers of bitsandbytes with states of 8 bits, or in pages.
NARROW_OR_PAGED = (
    *("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "rmsprop_bnb_8bit", "lion_8bit"),
    *("paged_lion_32bit", "paged_lion_8bit", "ademamix_8bit", "paged_ademamix_32bit"),
    "paged_ademamix_8bit",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaCall:
    """One call of `F.scaled_dot_product_attention`, as far as a dispatcher looks at it.

    Args:
        dtype: of queries, keys and values: "bf16", "fp16" or "fp32".
    """

    compute_capability: str | None
    libraries: Libraries
    dtype: str
    head_dim: int
    v_head_dim: int
    groups: Groups
    masked: bool
    dropout: bool
    needs_grad: bool


class Lack(NamedTuple):
    """Values of a setting that a library does not have there.

    Args:
        why: what is missing, after "`setting`: `value` ".
        instead: what to do.
    """

    setting: str
    values: tuple[Any, ...]
    why: str
    instead: str


def no_workspace(compute_capability: str | None) -> int:
    return 0


def no_notes(run: RunConfig) -> Iterator[str]:
    return iter(())


def unknown_context(compute_capability: str | None, num_multiprocessors: int | None) -> int | None:
    """Of a backend whose contexts nobody has read."""
    return None


def no_context(compute_capability: str | None, num_multiprocessors: int | None) -> int | None:
    """Of a backend whose processes take nothing beside what they allocate."""
    return 0


def no_kernels(compute_capability: str | None) -> int:
    """Of a backend whose kernels are not counted apart."""
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A backend of torch: its allocator, kernels and dtypes, and the libraries that it has.

    Args:
        kind: as `gpu.json` names it; `called` as people do.
        torch_device: torch's device type; ROCm's is "cuda", too.
        allocator: the rules by which its allocator takes memory from the driver.
        sdpa: which kernel a call of SDPA is dispatched to.
        has_efficient: SDPA has a memory-efficient kernel.
        takes_groups_since: the torch from which transformers 5.23 hands SDPA grouped keys whatever
            the mask and the width (`use_gqa_in_sdpa`); None where these decide.
        workspace_bytes: what the library of matrix products keeps per thread, in torch's allocator.
        widens_norms: autocast runs LayerNorm and softmax in fp32.
        widens_cross_entropy: autocast runs a loss of narrow logits in fp32 as a whole; else its
            log-softmax is as narrow as they are. Source: torch 2.13 `autocast_mode.h`,
            autocast_mode.cpp; `cross_entropy_loss` of LossNLL.cpp names the dtype.
        wide_dropout_masks: dropout keeps a mask in the dtype of its input, not a boolean one.
        multiplies_before_softmax: softmax's backward makes the product of gradient and result.
        fuses_half_softmax: a softmax in fp32 of fp16 scores makes no copy of them first.
        has_foreach: torch's optimizers update lists of tensors.
        has_triton: kernels in Triton run.
        has_paged_states: bitsandbytes allocates paged optimizer states.
        has_bf16_since: compute capability that multiplies in bf16; None: every card does.
        has_tf32: precision tf32 is a mode of its matrix units.
        expands_int8_to_train: bitsandbytes trains on int8 weights expanded to 16 bit.
        fused_4bit_rows: rows up to which bitsandbytes 0.50 multiplies stored 4-bit weights; None
            where its table of cards decides.
        quants: those of bitsandbytes that it has kernels for.
        expandable_since: the torch whose allocator has expandable segments; None: none has.
        keeps_mxfp4: experts in mxfp4 are predicted as transformers multiplies them.
        idle_context_bytes: what a process takes outside the allocator once a kernel has run, by
            compute capability and multiprocessors; None where it is not known.
        step_kernels_bytes: what the kernels of a step add to it.
        uncalled_kernels_bytes: what kernels that nobody calls add, where all are loaded.
        shares_host_memory: processor and GPU have one memory, so that its size is no card's.
        lacks: what libraries do not have there.
        lacks_kernels: why fused kernels of trainers do not run; empty where they may.
        lacks_groups: why several do not train one model; empty where they may.
        torch_index: where pip finds torch built for it; empty: on PyPI.
        driver_files: one of these exists on a machine that has such a device.
        notes: what to know of a run there.
    """

    kind: str
    called: str
    torch_device: str
    allocator: AllocatorRules
    sdpa: Callable[[SdpaCall], SdpaKernel]
    has_efficient: bool = False
    takes_groups_since: str | None = None
    workspace_bytes: Callable[[str | None], int] = no_workspace
    widens_norms: bool = True
    widens_cross_entropy: bool = False
    wide_dropout_masks: bool = False
    multiplies_before_softmax: bool = False
    fuses_half_softmax: bool = False
    has_foreach: bool = True
    has_triton: bool = True
    has_paged_states: bool = True
    has_bf16_since: float | None = None
    has_tf32: bool = False
    expands_int8_to_train: bool = False
    fused_4bit_rows: Callable[[str | None], int] | None = None
    quants: frozenset[str]
    expandable_since: str | None = None
    keeps_mxfp4: bool = False
    idle_context_bytes: Callable[[str | None, int | None], int | None] = unknown_context
    step_kernels_bytes: Callable[[str | None], int] = no_kernels
    uncalled_kernels_bytes: Callable[[str | None], int] = no_kernels
    shares_host_memory: bool = False
    lacks: tuple[Lack, ...] = ()
    lacks_kernels: str = ""
    lacks_groups: str = ""
    torch_index: str = ""
    driver_files: tuple[str, ...] = ()
    notes: Callable[[RunConfig], Iterator[str]] = no_notes


def expands_always(compute_capability: str | None) -> int:
    """Rows of a backend whose bitsandbytes expands a 4-bit weight before every product."""
    return 0
