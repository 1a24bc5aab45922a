"""Work of choosing the keys that each query sees (`symbolic.sparse_keys` has its operators)."""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.architecture import Attention, Linear
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count

INDEXER_OPS = 44  # kernels that choose keys, and those that mask the others, on torch 2.13
MASK_OPS = 5


def indexer_linears(attention: Attention) -> tuple[Linear, ...]:
    """Matrices of its indexer, as each token passes them in a forward.

    Kind: exact. Source: transformers 5.23 `DeepseekV32Indexer`.
    """
    return tuple(replace(each, active=1) for each in attention.linears if not each.active)


def choosing_flops_per_pair(attention: Attention) -> int:
    """Products of a query and a key of every head, and the sum over heads by their weights.

    Every query is multiplied with every key, masked or not.
    Kind: exact. Source: transformers 5.23 `DeepseekV32Indexer.forward`.
    """
    sparse = attention.sparse
    return 0 if sparse is None else 2 * sparse.num_heads * (sparse.head_dim + 1)


def choosing_bytes_per_pair(attention: Attention, dtypes: Dtypes, *, batched: Count) -> Count:
    """What one forward reads and writes for each query and key, that of two products included.

    Scores are written, scaled, cut at zero and summed up; for several sequences keys are first laid
    out for every query. Masks have a byte each.

    Args:
        batched: 1 where there are several sequences, else 0.

    Kind: exact as counted per operator. Source: as of `choosing_flops_per_pair`.
    """
    sparse = attention.sparse
    if sparse is None:
        return 0 * batched
    size = dtypes.compute_bytes if dtypes.under_autocast else 4
    masks = 1 + 2 + 2 + 3  # ones, what is not chosen, its inverse, both
    if not sparse.num_heads:
        return masks + 0 * batched
    of_sums = size + 1 + 2 * size + 1 + size  # written, masked and searched
    return masks + of_sums + 6 * sparse.num_heads * size + 2 * sparse.head_dim * size * batched


def choosing_ops(attention: Attention) -> int:
    """Kernels of one forward. Kind: estimate. Source: kernels of traced layers."""
    sparse = attention.sparse
    return 0 if sparse is None else MASK_OPS + INDEXER_OPS * bool(sparse.num_heads)
