"""What the kernels of serving engines reach of a datasheet, by compute capability.

Kind: fitted, to the operator times of vLLM 0.14 to 0.24 that aiconfigurator publishes for A100,
H100, H200, B200, L40S and RTX PRO 6000 (`benchmarks/engine_kernels.py`). Every kernel takes a time
of its own, then what the slower of arithmetic and memory takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import MOST_COUNT
from whichlora.timing.model import sustained_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRates:
    """Of a layer's experts after routing: sorting rows, their products, the gate and the sum.

    Args:
        own_s: of all these kernels beside their work.
        reads: of the bandwidth, of the weights of the experts that some token chose.
        products: of the peak of the numbers they are multiplied in.
        activations: bytes a second of one multiprocessor, of what is written and read between
            products, up to `MOST_ACTIVATIONS`.
        most_reads: bytes of weights a second of one multiprocessor; None where memory decides.
        elsewhere: of the time of such activations, what a row takes whose expert another GPU has:
            kernels that gate, narrow and add up go over the rows of all experts.
    """

    own_s: float
    reads: float
    products: float
    activations: float
    most_reads: float | None = None
    elsewhere: float = 0.0


MOST_ACTIVATIONS = 0.5  # of the bandwidth
# What kernels that skip those rows leave of `ExpertRates.elsewhere`: of compute capability 9.0 in
# fp8 blocks, 0.1 of 0.6. Kind: fitted, as `elsewhere`, to 4 to 16 ranks and 1,024 tokens or more.
SKIPPED_ELSEWHERE = 1 / 6
# Marlin unpacks so many bytes: 2.8, 2.9 and 3.4 TB/s of H100, H200 and B200, whose bandwidths are
# 3.4, 4.8 and 8; elsewhere memory decides.
_UNPACKED = 24e9
# The geometric means of those below that multiply 8-bit floats.
_NARROW_EXPERTS = ExpertRates(own_s=22e-6, reads=0.92, products=0.40, activations=8e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowedRates:
    """Of products whose inputs a kernel of its own narrows to what weights are stored in.

    Args:
        own_s: of that kernel, beside the product's.
        input_s: of each number of a long prompt.
        products: of the share of its peak that a product in 16 bit reaches.
    """

    own_s: float
    input_s: float
    products: float


# The geometric means of B200 and RTX PRO 6000.
_FP4 = NarrowedRates(own_s=6e-6, input_s=1e-12, products=0.81)
_FP4_EXPERTS = ExpertRates(own_s=33e-6, reads=0.92, products=0.80, activations=8e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """Seconds of a kernel in a CUDA graph beside its work, and shares of the datasheet's rates.

    Args:
        product_s: of one matrix product; `attention_s` of one attention while decoding;
            `prefill_attention_s` of one over a prompt.
        reads: of the bandwidth, while a product reads its weights for few rows, as `product_s`;
            `cache` while attention reads keys and values.
        products: of the peak, in large products; `attention` in attention over a prompt.
        power: `timing.model.sustained_factor` of the board that was measured: one that sustains
            more of its peak is as much faster, up to `MOST_PRODUCTS`.
        query_passes: times that the queries of a decoding step are read, as far as bytes go: blocks
            of few keys do not fill a multiprocessor.
        pointwise_s: of a kernel without products.
        experts: in 16 bit; `narrow_experts` in 8-bit floats; `code_experts` of stored codes,
            which are unpacked to 16 bit; `fp4_experts` in 4-bit floats.
        fp4: products in 4-bit floats, of cards with units for them.
        overlaps: whether a product reads weights while it computes; else one follows the other.
        few_rows: up to which a product has a kernel without matrix units; `few_products` of the
            fp32 peak. The arithmetic of the first row hides behind the reads.
        deviation: relative, of a step on a GPU of this kind.
    """

    product_s: float
    reads: float
    products: float
    power: float
    attention_s: float
    cache: float
    query_passes: float
    prefill_attention_s: float
    attention: float
    experts: ExpertRates
    code_experts: ExpertRates
    narrow_experts: ExpertRates = _NARROW_EXPERTS
    fp4: NarrowedRates = _FP4
    fp4_experts: ExpertRates = _FP4_EXPERTS
    pointwise_s: float = 2.5e-6
    overlaps: bool = True
    few_rows: int = 0
    few_products: float = 1.0
    deviation: float = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBlocks:
    """A kernel whose blocks take a share of the weights each, one tile after the other.

    Args:
        rows, outputs: of one block.
        splits: blocks that share the inputs of an output; a second kernel adds up what they made.
        inputs: of one tile; `tile_s` until the next one is begun, for which nothing is read ahead.
        resident: blocks at once on a multiprocessor.
        expanded_rows: from which on the matrix is unpacked into memory, and multiplied from there.
    """

    rows: int
    outputs: int
    splits: int
    inputs: int
    tile_s: float
    resident: int
    expanded_rows: int

    def seconds(self, rows: float, inputs: int, outputs: int, multiprocessors: int) -> float:
        """Of one matrix. Kind: estimate."""
        blocks = math.ceil(rows / self.rows) * math.ceil(outputs / self.outputs) * self.splits
        rounds = math.ceil(blocks / (multiprocessors * self.resident))
        return rounds * math.ceil(inputs / (self.inputs * self.splits)) * self.tile_s


# Triton's product of fp8 in blocks, without a tuned config of the card. Kind: exact, but for
# `tile_s`: of aiconfigurator's table of an L40S, 1 to 64 rows of 51,200 and 65,536 inputs take 1.06
# to 1.29 µs for each 128 of them, and 1,024 to 4,096 outputs alike. Source: vLLM 0.10.2
# quantization/utils/fp8_utils.py:636, two stages of 64 x 128 x 128; 0.33.0 the same.
TRITON_BLOCKS = CodeBlocks(
    rows=64, outputs=128, splits=1, inputs=128, tile_s=1.15e-6, resident=1, expanded_rows=MOST_COUNT
)

_BY_CAPABILITY = {
    "8.0": KernelRates(
        product_s=5.4e-6,
        reads=0.74,
        products=0.77,
        power=1.03,
        attention_s=17.6e-6,
        cache=0.75,
        query_passes=23,
        prefill_attention_s=12.7e-6,
        attention=0.58,
        experts=ExpertRates(own_s=39e-6, reads=0.81, products=0.42, activations=7e9, elsewhere=0.7),
        code_experts=ExpertRates(
            own_s=40e-6,
            reads=0.81,
            products=0.55,
            activations=5.9e9,
            most_reads=_UNPACKED,
            elsewhere=0.6,
        ),
    ),
    "8.9": KernelRates(
        product_s=1.0e-6,
        reads=0.80,
        products=0.60,
        power=0.91,
        attention_s=9.6e-6,
        cache=0.90,
        query_passes=7,
        prefill_attention_s=8.3e-6,
        attention=0.53,
        experts=ExpertRates(own_s=12e-6, reads=0.88, products=0.64, activations=8e9, elsewhere=1.0),
        code_experts=ExpertRates(
            own_s=11e-6,
            reads=0.96,
            products=0.88,
            activations=5.9e9,
            most_reads=_UNPACKED,
            elsewhere=0.75,
        ),
        narrow_experts=ExpertRates(
            own_s=4.5e-6, reads=0.87, products=0.58, activations=8e9, elsewhere=1.0
        ),
    ),
    "9.0": KernelRates(
        product_s=4.0e-6,
        reads=0.86,
        products=0.80,
        power=0.97,
        attention_s=11.7e-6,
        cache=0.90,
        query_passes=36,
        prefill_attention_s=13.1e-6,
        attention=0.67,
        experts=ExpertRates(own_s=42e-6, reads=0.99, products=0.75, activations=8e9, elsewhere=0.5),
        code_experts=ExpertRates(
            own_s=35e-6,
            reads=0.92,
            products=0.34,
            activations=7e9,
            most_reads=_UNPACKED,
            elsewhere=0.45,
        ),
        narrow_experts=ExpertRates(
            own_s=47e-6, reads=0.94, products=0.42, activations=7.7e9, elsewhere=0.6
        ),
    ),
    "10.0": KernelRates(
        product_s=4.0e-6,
        reads=0.81,
        products=0.70,
        power=0.92,
        attention_s=9.0e-6,
        cache=0.91,
        query_passes=27,
        prefill_attention_s=12.0e-6,
        attention=0.62,
        experts=ExpertRates(
            own_s=19e-6, reads=0.92, products=0.48, activations=23e9, elsewhere=0.1
        ),
        code_experts=ExpertRates(
            own_s=44e-6,
            reads=0.90,
            products=0.16,
            activations=5.9e9,
            most_reads=_UNPACKED,
            elsewhere=0.5,
        ),
        narrow_experts=ExpertRates(
            own_s=33e-6, reads=0.88, products=0.26, activations=14e9, elsewhere=0.45
        ),
        fp4=NarrowedRates(own_s=3.9e-6, input_s=0.5e-12, products=0.70),
        fp4_experts=ExpertRates(
            own_s=20e-6, reads=0.86, products=0.72, activations=17e9, elsewhere=0.1
        ),
    ),
    "12.0": KernelRates(
        product_s=1.0e-6,
        reads=0.91,
        products=0.79,
        power=1.07,
        attention_s=11.5e-6,
        cache=0.95,
        query_passes=10,
        prefill_attention_s=9.1e-6,
        attention=0.64,
        experts=ExpertRates(own_s=29e-6, reads=1.0, products=0.46, activations=8e9),
        code_experts=ExpertRates(
            own_s=20e-6, reads=1.0, products=0.87, activations=5.9e9, most_reads=_UNPACKED
        ),
        narrow_experts=ExpertRates(own_s=31e-6, reads=1.0, products=0.41, activations=8e9),
        fp4=NarrowedRates(own_s=9.6e-6, input_s=1.9e-12, products=0.94),
        fp4_experts=ExpertRates(own_s=54e-6, reads=0.99, products=0.89, activations=4e9),
    ),
}
_ELSEWHERE = KernelRates(
    product_s=2.4e-6,
    reads=0.82,
    products=0.73,
    power=0.98,
    attention_s=11.5e-6,
    cache=0.88,
    query_passes=17,
    prefill_attention_s=10.9e-6,
    attention=0.61,
    experts=ExpertRates(own_s=26e-6, reads=0.92, products=0.54, activations=8e9),
    code_experts=ExpertRates(
        own_s=28e-6, reads=0.91, products=0.47, activations=5.9e9, most_reads=_UNPACKED
    ),
    deviation=0.25,
)  # the geometric means of those above
# An 8-bit product narrows its inputs in a kernel of its own, and reaches less of a peak twice as
# high. Kind: fitted, to the same tables of five GPUs (3 µs, 0.74 to 1.10 of the share of 16 bit,
# 2.5 to 5.1 ps: geometric means).
NARROWED = NarrowedRates(own_s=3e-6, input_s=3.3e-12, products=0.89)
# One of stored codes (Marlin) has a longer prologue, and unpacks weights for every tile. AWQ's
# zeros are subtracted. Kind: fitted, to published vLLM speeds of Qwen2 and Qwen2.5: 24 layers of
# four products took 0.5 to 0.7 ms more than in 16 bit (0.5B), prompts of 14,336 and 30,720 tokens
# 0.5 to 0.8 s more (7B under 0.6.3; under 0.4.2 no longer), and AWQ 4 to 7 % more than GPTQ (7B and
# 32B).
UNPACKING_S = 8e-6
UNPACKING_PRODUCTS = 0.66  # of the rate of 16 bit
ZEROED_READS = 0.9  # of the bandwidth of GPTQ's codes
# The first Marlin kernel of experts is launched for each of them, and each 256 rows of all tokens,
# whether they chose it or not. Kind: exact. Source: vLLM 0.7.2 csrc/moe/marlin_moe_ops.cu
# `marlin_mm_moe`, 4 blocks of 4 x 16 rows.
FIRST_MARLIN_ROWS = 256
# Of a step of a model with experts, in the log: covers 90 % of 362 published times per token
# (docs/accuracy/serving_speeds.md).
EXPERTS_DEVIATION = 0.16
# One thread of the server makes tokens of a prompt's text. Kind: measured, of text with 128,000
# possible tokens on a cloud's CPU (`benchmarks/tokenizing.py`); of tokens drawn at random, as
# benchmarks of engines send them, 3.2 µs.
TOKENIZED_S = 1.6e-6
# What a kernel costs the host of an engine whose code is eager, which calls more Python around each
# than transformers does. Kind: estimate of vLLM's, relative to what is fitted to its 0.4.2: 28
# layers of Qwen2 whose kernels do nothing take one core 3.4 ms there, whose operators are pybind's,
# and 5.8 in 0.6.2, where torch's dispatcher calls them; a launch comes to each of 280
# (`vllm.SECOND_LAUNCH_S`). `benchmarks/eager_host.py`. SGLang's are called the same way: estimate.
EAGER_LAUNCH_S = 40e-6
POINTWISE_READS = 0.8  # of the bandwidth, as the prior of `timing.model`
MOST_PRODUCTS = 0.92  # of a peak, what products reach that power does not limit


def kernel_rates(gpu: GpuSpec) -> KernelRates:
    """Of `gpu`'s compute capability; means with a wider deviation where it was not measured."""
    rates = _measured(gpu)
    more = sustained_factor(gpu, "bf16") / rates.power
    return replace(
        rates,
        products=min(MOST_PRODUCTS, more * rates.products),
        attention=min(MOST_PRODUCTS, more * rates.attention),
        experts=_sustained(rates.experts, more),
        narrow_experts=_sustained(rates.narrow_experts, more),
        code_experts=_sustained(rates.code_experts, more),
        fp4_experts=_sustained(rates.fp4_experts, more),
    )


def _sustained(experts: ExpertRates, more: float) -> ExpertRates:
    return replace(experts, products=min(MOST_PRODUCTS, more * experts.products))


def _measured(gpu: GpuSpec) -> KernelRates:
    capability = str(gpu.compute_capability or "")
    major = capability.split(".")[0]
    return _BY_CAPABILITY.get(capability) or (
        _BY_CAPABILITY["10.0"] if major == "10" else _ELSEWHERE
    )
