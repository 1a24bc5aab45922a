"""Quantised weights that are written out in 16 bit before a product: what each library's code does.

Bytes that a kernel reads and writes, kernels that the host launches, and what the product reads
then. A product whose kernel unpacks inside reads what is stored.
"""

from __future__ import annotations

from whichlora.memory import weights
from whichlora.spec.dtypes import (
    BNB_BLOCK,
    Dtypes,
    exllama_kernels,
    expands_by_operators,
    fused_rows,
    is_quantised,
)
from whichlora.spec.layer import Layer, Linear
from whichlora.spec.numeric import Count, Real, ceil_div, smallest
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.timing.chip import Chip

# Of nested scales, per scale: one read in 8 bits and written in fp32, the mean added in place, and
# read by the kernel that expands the weight. Source: bitsandbytes 0.43 and 0.50.2
# `dequantize_4bit`: `dequantize_blockwise`, `absmax += offset`, and the kernel itself.
NESTED_SCALE_BYTES = 4 + 2 * 4 + 4
# Bytes per weight that torch's operators read and write to expand GPTQ's codes: a shift that writes
# 32 bits, a cast to 8 bits (16 where the code has 8), a mask, the zero subtracted, the product with
# the scale. GPTQModel gathers zero and scale of every weight, which AutoGPTQ broadcasts. The codes
# read at first come on top. Kind: exact, traced (`tests/timing/test_expansion.py`).
# Source: AutoGPTQ 0.5 `qlinear_cuda_old`, GPTQModel 7.3 `BaseQuantLinear.dequantize_weight`.
OPERATOR_BYTES = {"gptq-int4": 4 + (4 + 1) + 2 + 2 + (1 + 2), "gptq-int8": 4 + (4 + 2) + 4 + 4 + 4}
GATHERED_BYTES = {"gptq-int4": 1 + 1 + 2 + 2, "gptq-int8": 2 + 2 + 2 + 2}
# Kernels of them: zeros are shifted, cast, masked and counted from one, weights shifted, cast,
# masked, less the zero and scaled. GPTQModel widens the groups' index and gathers, twice each.
OPERATOR_OPS, GATHERED_OPS = 9, 12
# How many more instructions bitsandbytes' kernel had while it branched on the codes: the middle of
# what its author states where these decide, 1.36 to 2.07 times on P100, A100 and H100. Kind:
# fitted. Source: bitsandbytes pull request 1747.
BRANCHING = 1.7

# Rows of a tile of AutoAWQ's kernel, and of exllama's first and second, for each of which it
# unpacks the weights anew. Source: AutoAWQ_kernels 0.0.9 gemm_cuda_gen.cu,
# `gemm_forward_4bit_cuda_m16n128k32`; AutoGPTQ 0.7.0 exllama q4_matmul.cu, `THREADS_Y`; exllamav2
# q_gemm.cu, `BLOCK_M_SIZE_MAX`.
AWQ_TILE_ROWS, EXLLAMA_TILE_ROWS = 16, {1: 1, 2: 8}


def multiplies_stored(dtypes: Dtypes) -> bool:
    """Whether a forward multiplies stored weights, which are then expanded for a backward alone.

    Kind: exact.
    Source: bitsandbytes 0.50.2 `matmul`: `MatMul8bitLt`, and `MatMul8bitFp` for training on a CPU
    and on XPU; `matmul_ogs` of the kernels of gpt-oss, which unpacks mxfp4 in registers.
    """
    if dtypes.quant == "mxfp4":
        return True
    return dtypes.quant == "int8" and not (dtypes.training and dtypes.backend.expands_int8_to_train)


def _read_bytes(linear: Linear, dtypes: Dtypes) -> int:
    """One matrix in the dtype of its product, which reads it."""
    narrow = dtypes.four_bit_product_bytes if dtypes.quant in FOUR_BIT_BNB else 2
    return linear.in_features * linear.out_features * narrow


def _stored_bytes(linear: Linear, dtypes: Dtypes) -> Real:
    return weights.linear_bytes(linear, dtypes) / linear.count


def expansion_bytes(linear: Linear, dtypes: Dtypes) -> Real:
    """Bytes that expanding one matrix reads and writes; the product that reads it is left out.

    Kind: exact per kernel.
    Source: the kernels of bitsandbytes, GPTQ and AWQ read what is stored and write 16 bit, but for
    operators (`OPERATOR_BYTES`), nested scales and int8: bitsandbytes 0.50.2
    `MatMul8bitLt.backward` copies to 16 bit and scales the copy in place.
    """
    num_weights = linear.in_features * linear.out_features
    written = num_weights * (dtypes.half_bytes if dtypes.quant in FOUR_BIT_BNB else 2)
    stored = _stored_bytes(linear, dtypes)
    if dtypes.quant == "int8":
        return stored + written + 2 * written
    if expands_by_operators(dtypes):
        gathers = dtypes.libraries.gathers_gptq_scales
        moved = OPERATOR_BYTES[dtypes.quant] + gathers * GATHERED_BYTES[dtypes.quant]
        return stored + num_weights * moved
    if dtypes.quant not in FOUR_BIT_BNB:
        return stored + written
    nested = NESTED_SCALE_BYTES * num_weights / BNB_BLOCK if dtypes.quant == "nf4-dq" else 0
    return stored + written + nested


def recast_bytes(layer: Layer, dtypes: Dtypes, rows: Count) -> tuple[Real, Real]:
    """What a forward over `rows` and a backward move of 4-bit weights that they compute apart.

    A forward expands a weight to the compute dtype, from which autocast casts it inside the
    operator. A backward expands it to the dtype that was loaded, and casts it to the product's.

    Kind: exact per matrix, but for what fused kernels leave out.
    Source: bitsandbytes 0.50.2 `_dequant_linear_fallback`, `MatMul4Bit.backward`.
    """
    forward = backward = 0.0 * rows
    if not dtypes.computes_four_bit_apart:
        return forward, backward
    half, computed, autocast = dtypes.half_bytes, dtypes.four_bit_bytes, dtypes.under_autocast
    for linear in layer.linears:
        if not is_quantised(linear, dtypes) or not linear.is_module:
            continue
        weights_read = visited_matrices(linear, rows) * linear.in_features * linear.out_features
        expanded = 1 - is_fused(linear, rows, fused_rows(dtypes))
        written = computed - half + autocast * (computed + half)
        forward = forward + expanded * weights_read * written
        backward = backward + (not autocast) * weights_read * (half + computed)
    return forward, backward


def unpacking_time(dtypes: Dtypes, chip: Chip) -> float:
    """How long it takes to unpack a byte, where moving it takes 1: the slower of both decides.

    Kind: fitted. Source: `BRANCHING`; `timing.model.UNPACKING_SLOTS`.
    """
    by_kernel = dtypes.quant in FOUR_BIT_BNB and dtypes.device_kind == "cuda"
    branches = by_kernel and dtypes.libraries.branches_on_codes
    return max(1.0, chip.unpacking * (BRANCHING if branches else 1.0))


def expansion_ops(dtypes: Dtypes) -> int:
    """Kernels that the operators of one expansion launch in a forward; none of a fused kernel's.

    Kind: exact. Source: `OPERATOR_OPS`.
    """
    if not expands_by_operators(dtypes):
        return 0
    return GATHERED_OPS if dtypes.libraries.gathers_gptq_scales else OPERATOR_OPS


def is_fused(linear: Linear, rows: Count, most_fused: int) -> Count:
    """1 where the kernel of a product unpacks inside, 0 where the weight is written out first.

    Experts in one parameter are expanded together, whoever is chosen.

    Args:
        most_fused: rows up to which a kernel does.

    Kind: exact of the rows that each matrix gets in the mean. Source: `fused_rows`.
    """
    return (rows * linear.active / visited_matrices(linear, rows) <= most_fused) * linear.is_module


def visited_matrices(linear: Linear, tokens: Count) -> Count:
    """How many matrices of that name a batch of `tokens` reads: one no token chose stays unread.

    Kind: estimate. Source: experts are drawn independently.
    """
    return smallest(linear.count, tokens * linear.active) if linear.count > 1 else 1 + 0 * tokens


def _tile_rows(dtypes: Dtypes) -> int | None:
    """Rows for which a fused kernel unpacks once; None if it does so once for all."""
    if dtypes.quant == "awq-int4" and dtypes.libraries.multiplies_awq_by_tiles:
        return AWQ_TILE_ROWS
    return EXLLAMA_TILE_ROWS.get(exllama_kernels(dtypes))


def forward_bytes(layer: Layer, dtypes: Dtypes, rows: Count) -> tuple[Real, Real]:
    """What one forward over `rows` moves to unpack a layer's weights, and reads beyond the stored.

    A fused kernel reads the stored bytes once more, or once for every tile of rows. Above
    its rows, the weight is expanded, and the product reads it in 16 bit. An expert sees its share
    of the rows, and one that no row chose is not unpacked.

    Kind: estimate. Source: `spec.dtypes.fused_rows`, `expansion_bytes`.
    """
    moved = more_read = 0.0 * rows
    if multiplies_stored(dtypes):
        return moved, more_read
    tile_rows = _tile_rows(dtypes)
    most_fused = 0 if expands_by_operators(dtypes) else fused_rows(dtypes)
    for linear in layer.linears:
        if not is_quantised(linear, dtypes):
            continue
        fused = is_fused(linear, rows, most_fused)
        visited = visited_matrices(linear, rows) if linear.is_module else linear.count + 0 * rows
        stored = _stored_bytes(linear, dtypes)
        unfused = visited * (1 - fused)
        tiles = ceil_div(rows * linear.active / visited, tile_rows) if tile_rows else 1
        moved = moved + visited * fused * tiles * stored
        moved = moved + unfused * expansion_bytes(linear, dtypes)
        more_read = more_read + unfused * (_read_bytes(linear, dtypes) - stored)
    return moved, more_read


def backward_bytes(layer: Layer, dtypes: Dtypes) -> tuple[Real, Real]:
    """The same of one backward, which multiplies expanded weights whatever the number of rows.

    Autograd has kept what operators expanded.

    Kind: exact. Source: bitsandbytes 0.50.2 `MatMul4Bit.backward`, `MatMul8bitLt.backward`.
    """
    moved = more_read = 0.0
    for linear in layer.linears:
        if is_quantised(linear, dtypes):
            is_saved = not linear.is_module and not dtypes.kernels.experts
            is_kept = expands_by_operators(dtypes) or is_saved
            expanded = 0.0 if is_kept else expansion_bytes(linear, dtypes)
            moved += linear.count * expanded
            more_read += linear.count * (
                _read_bytes(linear, dtypes) - _stored_bytes(linear, dtypes)
            )
    return moved, more_read
