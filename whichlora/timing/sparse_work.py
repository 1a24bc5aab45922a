"""Work of choosing the keys that each query sees (`symbolic.sparse_keys` has its operators)."""

from __future__ import annotations

from dataclasses import replace

from whichlora.spec.layer import Attention, Linear


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
