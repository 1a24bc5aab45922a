"""What a product with quantised weights has the host do, beside launching that product's kernel."""

from __future__ import annotations

from dataclasses import dataclass

from whichlora.spec.dtypes import Dtypes, expands_by_operators, fused_rows, is_quantised
from whichlora.spec.layer import Layer, Linear
from whichlora.spec.numeric import Count
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.timing.expansion import expansion_ops, is_fused, visited_matrices


@dataclass(frozen=True, slots=True)
class QuantLaunches:
    """Of the products of one layer, beside their kernels.

    Args:
        kernels: launched.
        host: what Python does beside them, in launches that take the host as long.
    """

    kernels: Count = 0
    host: Count = 0

    def __add__(self, other: QuantLaunches) -> QuantLaunches:
        return QuantLaunches(self.kernels + other.kernels, self.host + other.host)

    def times(self, count: Count) -> QuantLaunches:
        return QuantLaunches(count * self.kernels, count * self.host)


# AWQ sums split results, 8-bit GPTQ widens and narrows. Kind: fitted, whole numbers from published
# decoding speeds of Qwen2.
_BESIDE = {"awq-int4": QuantLaunches(kernels=2), "gptq-int8": QuantLaunches(kernels=2)}

# bitsandbytes. Kernels are read in 0.44.1, 0.45.0 and 0.50.2. What Python does is fitted, to
# speeds of two of its releases on three hosts (`benchmarks/published/bitsandbytes_readme.csv`):
# kernels and this, by 4-bit product, are 2.1 to 2.4 launches (0.45) and 3.7 (0.44), by nested one
# 4.2 and 7.1. Where the weight is expanded first, 3.7 more.
_LOOKUP, _OLD_LOOKUP, _OLD_NESTED = 2, 4, 1
_NESTED_SCALES = QuantLaunches(kernels=2)  # `dequantize_blockwise`, and the mean added
_EXPANSION = QuantLaunches(kernels=1, host=3)
# 8 bits: the operators of a layer have input quantised and result scaled. With a threshold inputs
# that reach it are looked for (3), found (3) and taken out of input and weights (2), which are
# expanded (1), and multiplied apart (1); every input of a large model has some: Dettmers et al.
# 2022, arXiv:2208.07339, section 4. By the same speeds 6.2 to 7.0 launches with the two, and 13 to
# 20 with a threshold, for which the host waits twice. Before 0.45: 16 to 18, and 36 to 38.
_INT8, _INT8_OUTLIERS = QuantLaunches(host=4.5), QuantLaunches(kernels=10)
_OLD_INT8, _OLD_INT8_OUTLIERS = QuantLaunches(4, 11), QuantLaunches(kernels=14, host=5)
_INT8_BACKWARD = QuantLaunches(kernels=3, host=2)  # copied, scales divided, scaled


def forward_launches(layer: Layer, dtypes: Dtypes, rows: Count) -> QuantLaunches:
    """Those of one forward over `rows`.

    Kind: fitted, and kernels that torch's operators launch are exact.
    Source: the tables above; `expansion_ops`.
    """
    total = QuantLaunches()
    most_fused = fused_rows(dtypes)
    by_operators = expands_by_operators(dtypes)
    for linear in layer.linears:
        if not is_quantised(linear, dtypes):
            continue
        visited = _products(linear, rows)
        expanded = 1 - is_fused(linear, rows, most_fused)
        if by_operators:
            total += QuantLaunches(kernels=expansion_ops(dtypes)).times(visited)
        elif dtypes.quant in FOUR_BIT_BNB:
            total += _four_bit(dtypes, expanded).times(visited)
            if dtypes.autocasts_four_bit:  # the weight, inside the operator
                total += QuantLaunches(kernels=1).times(visited * expanded)
        else:
            total += _others(dtypes).times(visited)
    return total


def _products(linear: Linear, rows: Count) -> Count:
    """One for each expert that is a module of its own and that a row chose, else one."""
    return visited_matrices(linear, rows) if linear.is_module else 1 + 0 * rows


def backward_launches(layer: Layer, dtypes: Dtypes, rows: Count) -> QuantLaunches:
    """Those of the backward of `forward_launches`; autograd's C++ calls the Python functions.

    Kind: fitted. Source: the tables above; bitsandbytes 0.50.2 `MatMul4Bit.backward`,
    `MatMul8bitLt.backward`.
    """
    number = 0 * rows
    for linear in layer.linears:
        number = number + _products(linear, rows) * is_quantised(linear, dtypes)
    if dtypes.quant in FOUR_BIT_BNB:
        casts = dtypes.computes_four_bit_apart and not dtypes.under_autocast
        return (_four_bit(dtypes, 1) + QuantLaunches(kernels=int(casts))).times(number)
    if dtypes.quant == "int8":
        return _INT8_BACKWARD.times(number)
    return QuantLaunches() if expands_by_operators(dtypes) else _others(dtypes).times(number)


def _four_bit(dtypes: Dtypes, expanded: Count) -> QuantLaunches:
    """One product, whose weight is written out in 16 bit first where `expanded` is 1."""
    is_old = dtypes.libraries.older("bitsandbytes", "0.45")
    launches = QuantLaunches(host=_OLD_LOOKUP if is_old else _LOOKUP) + _EXPANSION.times(expanded)
    if dtypes.quant != "nf4-dq":
        return launches
    launches += QuantLaunches(host=_OLD_NESTED * is_old)
    in_kernel = not dtypes.libraries.older("bitsandbytes", "0.50")  # where nothing is expanded
    return launches + _NESTED_SCALES.times(1 - in_kernel * (1 - expanded))


def _others(dtypes: Dtypes) -> QuantLaunches:
    if dtypes.quant != "int8":
        return _BESIDE.get(dtypes.quant, QuantLaunches())
    if dtypes.libraries.older("bitsandbytes", "0.45"):
        return _OLD_INT8 + _OLD_INT8_OUTLIERS.times(dtypes.finds_outliers)
    return _INT8 + _INT8_OUTLIERS.times(dtypes.finds_outliers)
