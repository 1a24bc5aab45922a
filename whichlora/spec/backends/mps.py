"""Apple's GPUs through Metal: one memory with the processor, and kernels that train in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from whichlora.spec.backends.base import (
    NARROW_OR_PAGED,
    Backend,
    Lack,
    SdpaCall,
    SdpaKernel,
    expands_always,
)

if TYPE_CHECKING:
    from whichlora.spec.run import RunConfig

# Heads that the prefill kernel is instantiated for. Source: torch 2.13 `mps/operations/
# Attention.mm`, `prefill_attention_supports_head_dim`.
PREFILL_HEAD_DIMS = (32, 64, 72, 80, 96, 128, 256)


def sdpa(call: SdpaCall) -> SdpaKernel:
    """A fused kernel where nothing needs a gradient; training writes every score.

    Where no kernel has the head, MPSGraph writes the scores, too: it counts as math.

    Source: torch 2.13 `transformers/attention.cpp`, the MPS branch of `SDPBackend::math`;
    `mps/operations/Attention.mm`, `_scaled_dot_product_attention_math_mps`;
    `derivatives.yaml`, which has no backward of it.
    """
    if call.groups == "broadcast" or call.needs_grad or call.dropout:
        return "math"
    fits = call.head_dim == call.v_head_dim and call.head_dim in PREFILL_HEAD_DIMS
    return "flash" if fits and not call.libraries.older("torch", "2.13") else "math"


def notes(run: RunConfig) -> Iterator[str]:
    yield "memory of a Mac: what Metal recommends (recommendedMaxWorkingSetSize) beside macOS"
    yield (
        "what MPSGraph takes outside torch's allocator is not counted, and nobody has compared "
        "these bytes with a run"
    )
    if run.precision == "bf16":
        # transformers 5.23 `is_torch_bf16_gpu_available`
        yield "precision bf16 needs macOS 14 on Apple's GPUs; M1 and M2 compute it in fp32"


BACKEND = Backend(
    kind="mps",
    called="Macs",
    torch_device="mps",
    allocator="heaps",
    sdpa=sdpa,
    takes_groups_since="2.13",
    wide_dropout_masks=True,  # torch 2.13 `Dropout.cpp`, `is_fused_kernel_acceptable`
    has_foreach=False,  # torch 2.13 `_foreach_utils.py`
    has_triton=False,
    has_paged_states=False,
    # one row has a kernel from the Hub on macOS 26 alone
    fused_4bit_rows=expands_always,
    quants=frozenset({"nf4", "nf4-dq", "fp4", "int8"}),  # bitsandbytes 0.50.2 `backends/mps`
    shares_host_memory=True,
    lacks=(
        Lack(
            "optimizer",
            NARROW_OR_PAGED,
            "does not run on Apple's GPUs: bitsandbytes 0.50 has no 8-bit or paged optimizer for "
            "mps",
            "use adamw_torch_fused",
        ),
        Lack(
            "attn",
            ("flash_attention_2",),
            "does not run on Apple's GPUs: flash-attn is built for CUDA and ROCm",
            "use sdpa",
        ),
    ),
    lacks_kernels="Triton, their language, has no backend for Metal",
    lacks_groups="Apple's GPUs have no communication library in torch; give gpus 1",
    notes=notes,
)
