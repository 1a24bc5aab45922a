"""What llama.cpp's kernels reach on a GPU: with weights in blocks, and with those of 16 bit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from whichlora.serving.kernel_rates import ExpertRates, KernelRates, kernel_rates
from whichlora.spec.gpu import GpuSpec
from whichlora.timing.model import product_rate, sustained_factor

BLOCK_READS = 0.86  # of the bandwidth; as the constants below


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRates:
    """What products with weights in blocks reach on GPUs of one compute capability.

    Args:
        kernel_s: of a kernel beside its work; a product also narrows its input to 8 bit.
        products: of the fp32 peak, in many rows, where `sustained_factor` is 1.
        deviation: wider where fewer than five cards were measured.
        reads: of the bandwidth.
        plain_products: as `products`, of files of 16 bit, which the same kernels read; None where
            a library of products does.
    """

    kernel_s: float
    products: float
    deviation: float = 0.12
    reads: float = BLOCK_READS
    plain_products: float | None = None


# Kind: fitted, to the published speeds of one 7B model in Q4_0 on 25 cards
# (`benchmarks/llama_cpp_gpus.py --fit`); those of few rows to an RTX 3090, whose steps of 1 to 8
# tokens take 1.04 ms longer for each (pull request 15802).
FEW_PRODUCTS = 0.38  # of the fp32 peak, of at most FEW_ROWS rows
BLOCK_RATES = {
    "6.1": BlockRates(kernel_s=13.2e-6, products=1.15, deviation=0.25),
    "7.0": BlockRates(kernel_s=6.8e-6, products=2.95, deviation=0.25),
    "7.5": BlockRates(kernel_s=7.6e-6, products=2.37, deviation=0.25),
    "8.0": BlockRates(kernel_s=7.6e-6, products=3.69, deviation=0.25),
    "8.6": BlockRates(kernel_s=3.7e-6, products=1.89),
    "8.9": BlockRates(kernel_s=2.5e-6, products=1.96),
    "9.0": BlockRates(kernel_s=5.8e-6, products=2.19, deviation=0.25),
    "12.0": BlockRates(kernel_s=2.4e-6, products=1.82),
    "12.1": BlockRates(kernel_s=3.1e-6, products=1.59, deviation=0.25),
}
# The least compute capability with a product of 8-bit integers in hardware. A P100 computes it one
# by one: two published speeds of it (65 tokens/s of Ministral 3B in Q4_K_M and of gpt-oss-20b,
# pavlokhmel.com, 2026-06) are 2.6 and 3 times slower than the means of other cards say.
# Source: llama.cpp 0c1e570 ggml/src/ggml-cuda/common.cuh GGML_CUDA_CC_DP4A.
LEAST_INTEGER_PRODUCTS = 6.1
_BLOCKS_ELSEWHERE = BlockRates(kernel_s=5.1e-6, products=2.07, deviation=0.25)  # geometric means
# Of other vendors' GPUs. AMD's by architecture, of builds for ROCm and Vulkan alike: means of two
# to seven rows each, one of gfx90a and gfx942; then geometric means. Macs have one, of 20 chips
# whose cores and memory go together. Kind: fitted (`benchmarks/llama_cpp_backends.py --fit`).
ARCHITECTURE_RATES = {
    "gfx90a": BlockRates(kernel_s=12.8e-6, products=0.88, deviation=0.4),
    "gfx942": BlockRates(kernel_s=8.3e-6, products=1.72, deviation=0.4),
    "gfx1100": BlockRates(kernel_s=5.1e-6, products=0.84, deviation=0.3),
    "gfx1151": BlockRates(kernel_s=5.3e-6, products=0.76, deviation=0.3),
    "gfx1201": BlockRates(kernel_s=1.6e-6, products=1.82, deviation=0.25),
}
KIND_RATES = {
    "rocm": BlockRates(kernel_s=5.4e-6, products=1.12, deviation=0.4),
    "mps": BlockRates(
        kernel_s=13.3e-6, products=0.69, deviation=0.17, reads=0.91, plain_products=0.77
    ),
}
# Of 16-bit files, and of several GPUs: only releases of 2024 were measured. Of recurrent layers:
# none gave a constant, and of 24 published speeds 20 lie inside.
PLAIN_DEVIATION = WIDE_DEVIATION = 0.25
# Of experts: of two products beside four small kernels, and of the rate of a dense product. Kind:
# estimate.
EXPERT_KERNELS_S, EXPERTS_PRODUCTS = 20e-6, 0.39
FEW_ROWS = 8  # ggml/src/ggml-cuda/mmvq.cuh MMVQ_MAX_BATCH_SIZE


def has_block_rates(gpu: GpuSpec) -> bool:
    """Whether products with weights in blocks are known on `gpu`, or like those of other cards."""
    if gpu.kind != "cuda":
        return gpu.kind in KIND_RATES
    return float(gpu.compute_capability or LEAST_INTEGER_PRODUCTS) >= LEAST_INTEGER_PRODUCTS


def _blocks_of(gpu: GpuSpec) -> BlockRates:
    """Of its compute capability or architecture; means of its kind where it was not measured."""
    named = gpu.compute_capability or ""
    measured = BLOCK_RATES.get(named) or ARCHITECTURE_RATES.get(named)
    return measured or KIND_RATES.get(gpu.kind, _BLOCKS_ELSEWHERE)


def block_rates(gpu: GpuSpec, dtype: str) -> KernelRates:
    """Of kernels that read weights in blocks and compute in 8 bit, and of those beside them.

    Source: llama.cpp 0c1e570 ggml/src/ggml-cuda/mmvq.cu, mmq.cuh.
    """
    return _rates(gpu, dtype, _blocks_of(gpu))


def _rates(gpu: GpuSpec, dtype: str, blocks: BlockRates) -> KernelRates:
    rate = blocks.products * sustained_factor(gpu, "bf16") * product_rate(gpu, "fp32")
    products = rate / product_rate(gpu, dtype)
    return replace(
        kernel_rates(gpu),
        product_s=blocks.kernel_s,
        attention_s=blocks.kernel_s,
        prefill_attention_s=blocks.kernel_s,
        pointwise_s=blocks.kernel_s,
        reads=blocks.reads,
        products=products,
        code_experts=ExpertRates(
            own_s=EXPERT_KERNELS_S + 4 * blocks.kernel_s,
            reads=blocks.reads,
            products=EXPERTS_PRODUCTS * products,
            activations=math.inf,
        ),
        overlaps=False,
        few_rows=FEW_ROWS,
        few_products=FEW_PRODUCTS,
        deviation=blocks.deviation,
    )


def wide_block_rates(gpu: GpuSpec, dtype: str) -> KernelRates:
    """As `block_rates`, where several GPUs have some of the layers each."""
    rates = block_rates(gpu, dtype)
    return replace(rates, deviation=max(rates.deviation, WIDE_DEVIATION))


def plain_rates(gpu: GpuSpec, dtype: str) -> KernelRates:
    """Of kernels that read weights of 16 bit."""
    blocks = _blocks_of(gpu)
    if blocks.plain_products is not None:
        return _rates(gpu, dtype, replace(blocks, products=blocks.plain_products))
    return replace(kernel_rates(gpu), deviation=PLAIN_DEVIATION)
