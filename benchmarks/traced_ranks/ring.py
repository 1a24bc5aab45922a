"""Attention around the ranks that share one sequence, for `traced_ranks.ranks`: torch's own ring.

The ring's code is torch 2.13's `_templated_ring_attention`; the fused kernel that it calls is a
stand-in, which makes what the kernel makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from whichlora.tracer import like_cuda


@contextmanager
def ring_attention(group: Any, rotates_by: str = "allgather") -> Iterator[None]:
    """Fused attention of a sequence of which each rank of `group` has two parts.

    Args:
        rotates_by: accelerate's `cp_comm_strategy`.
    """
    set_rotate_method(rotates_by)
    with mock.patch.object(like_cuda, "_Fused", _ring_of(group)):
        yield


def _ring_of(group: Any) -> Any:
    class Ring(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
            assert mask is None
            out, log_sum_exp = ring._templated_ring_attention(
                group, 2, _forward, query, key, value, is_causal=True
            )
            ctx.save_for_backward(query, key, value, out, log_sum_exp)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            query, key, value, out, log_sum_exp = ctx.saved_tensors
            gradients = ring._templated_ring_attention_backward(
                group, 2, _backward, grads[0], "grad_out", query, key, value, out, log_sum_exp,
                is_causal=True,
            )  # fmt: skip
            return (*gradients[:3], None)

    return Ring


def _forward(query: Any, key: Any, value: Any, **_: Any) -> tuple[Any, Any]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _backward(query: Any, key: Any, value: Any, **_: Any) -> tuple[Any, Any, Any]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
