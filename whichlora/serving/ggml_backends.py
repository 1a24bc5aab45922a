"""The backends of ggml, one for each kind of device: what their buffers and their attention need.

Read in llama.cpp 0c1e570 (llama-cpp-python 0.3.36).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import ceil_div

FP32, FP16 = 4, 2  # bytes of activations, of masks with flash attention
IN_BLOCKS = frozenset({"q8_0", "q5_1", "q5_0", "q4_1", "q4_0"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """One fused attention that a graph is reserved for.

    Args:
        tokens: of each stream; cells: that they see; streams: caches beside each other.
        heads, key_heads: of queries, and of keys and values.
        value_dim: of one head's values.
        key_row_bytes, value_row_bytes: from one cached token to the next.
    """

    tokens: int
    cells: int
    streams: int
    heads: int
    key_heads: int
    value_dim: int
    key_row_bytes: int
    value_row_bytes: int


def no_attention_bytes(attention: FusedAttention) -> int:
    return 0


def no_experts_bytes(num_experts: int, tokens: int) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlBackend:
    """What one backend states.

    Args:
        name: as llama.cpp's `--device` numbers its devices.
        called: the library, as users know it.
        alignment: of every tensor in a buffer, in bytes.
        widens: from which caches attention copies keys and values to 16 bit: of other types, of
            all (room is reserved in any case), or of none.
        views_values: values that are a part of the keys are none of those copies.
        attention_bytes: that one fused attention needs beside its result and those copies.
        experts_bytes: that a product with experts needs beside its result.
        sorted_copies: tensors that sorting needs for its result.
        flash_heads: sizes of heads that fused attention has a kernel for; None for all.
        flash_types: of caches that it reads, both of the same; None for all.
        counts_process: the limit of its memory is for what a process allocates, and no context
            comes beside it.
        leaves: what its processes take, and nobody has read; empty where that is known.
        limit: whose the memory is that a card states; empty where it has all of it.
        builds: what else its times are of; empty where nothing.
        untimed: why its steps have no times; empty where they have.
    """

    name: str
    called: str
    alignment: int
    widens: str = "others"
    views_values: bool = False
    attention_bytes: Callable[[FusedAttention], int] = no_attention_bytes
    experts_bytes: Callable[[int, int], int] = no_experts_bytes
    sorted_copies: int = 1
    flash_heads: frozenset[int] | None = None
    flash_types: frozenset[str] | None = None
    counts_process: bool = False
    leaves: str = ""
    limit: str = ""
    builds: str = ""
    untimed: str = ""

    def has_flash(self, head_dims: frozenset[int], keys: str, values: str) -> bool:
        """Whether one kernel attends with such heads and caches."""
        if self.flash_types is not None and (keys != values or keys not in self.flash_types):
            return False
        return self.flash_heads is None or head_dims <= self.flash_heads


def metal_attention_bytes(attention: FusedAttention) -> int:
    """Of the last cells again, of which blocks are masked, and of 32 parts of a result.

    Kind: exact, but for caches in fp32.
    Source: llama.cpp 0c1e570 ggml/src/ggml-metal/ggml-metal-ops.cpp:3064
    `ggml_metal_op_flash_attn_ext_extra_pad`, `_extra_blk` and `_extra_tmp`.
    """
    rows = attention.key_row_bytes + attention.value_row_bytes
    last_cells = 64 * attention.streams * (attention.key_heads * rows + FP16 * attention.tokens)
    is_short = attention.tokens < 20
    queries, cells = (1, 32) if is_short else (8, 64)
    blocks = ceil_div(attention.cells, cells) * ceil_div(attention.tokens, queries)
    blocks = 32 * ceil_div(blocks * attention.streams, 32)
    parts = 32 * min(attention.tokens, 32) * attention.heads * attention.streams
    result: int = last_cells + blocks + FP32 * parts * (attention.value_dim + 2)
    return result


def metal_experts_bytes(num_experts: int, tokens: int) -> int:
    """Which tokens chose each expert, and 258 scales.

    Kind: exact. Source: llama.cpp 0c1e570 ggml/src/ggml-metal/ggml-metal-ops.cpp:2650.
    """
    return 4 * num_experts * (1 + tokens) + 4 * 258


CPU = GgmlBackend(name="CPU", called="the CPU", alignment=32, widens="none")
CUDA = GgmlBackend(name="CUDA", called="CUDA", alignment=128)  # ggml-cuda.cu:897
# The same source as CUDA's, compiled by HIP.
HIP = GgmlBackend(
    name="ROCm",
    called="ROCm",
    alignment=128,
    leaves="what a process of ROCm takes beside its buffers",
    builds=(
        "times are of llama.cpp's builds for ROCm and Vulkan alike; which one is faster depends on "
        "card and release"
    ),
)
METAL = GgmlBackend(
    name="MTL",
    called="Metal",
    alignment=32,  # ggml-metal.cpp:269
    widens="all",  # ggml-metal-ops.cpp:3190 `_extra_kv_f16`
    views_values=True,
    attention_bytes=metal_attention_bytes,
    experts_bytes=metal_experts_bytes,
    sorted_copies=2,  # ggml-metal.cpp:240
    flash_heads=frozenset({32, 40, 48, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576}),
    flash_types=frozenset({"f32", "f16", "bf16"}) | IN_BLOCKS,  # ggml-metal-device.m:1727
    # `recommendedMaxWorkingSetSize` less `currentAllocatedSize`; ggml-metal-device.m:1501
    counts_process=True,
    limit=(
        "memory of a Mac is what macOS 26 lets its GPU use (recommendedMaxWorkingSetSize), older "
        "ones up to a tenth less of all; sudo sysctl iogpu.wired_limit_mb=MIB raises it"
    ),
)
# Alignment is the driver's `minStorageBufferOffsetAlignment`: 4 to 64 bytes.
# Source: llama.cpp 0c1e570 ggml/src/ggml-vulkan/ggml-vulkan.cpp:13034, :13044.
VULKAN = GgmlBackend(
    name="Vulkan",
    called="Vulkan",
    alignment=64,
    widens="none",
    leaves="what Vulkan keeps beside its buffers (inputs in other types, parts of results)",
    untimed=(
        "published speeds of one of Intel's GPUs under Vulkan differ by up to three times from "
        "driver to driver; measure with llama-bench"
    ),
)
BACKENDS = {"cuda": CUDA, "rocm": HIP, "mps": METAL, "xpu": VULKAN, "cpu": CPU}


def ggml_backend(gpu: GpuSpec) -> GgmlBackend:
    """The backend that llama.cpp's programs have for `gpu`."""
    return BACKENDS[gpu.kind]
