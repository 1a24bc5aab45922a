"""TRL's fused head on fake tensors as on CUDA, where its Triton kernels make no tensor.

The kernels themselves are left out: each reads a tile of logits and writes in place.
Source: TRL 1.16 `kernels/chunked_logprob.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock


class _InPlace:
    """A Triton kernel, of which nothing is run."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


@contextmanager
def with_fused_head() -> Iterator[None]:
    """TRL's fused head takes its path for CUDA, inside this context."""
    kernels = import_module("trl.kernels.chunked_logprob")
    with ExitStack() as stack:
        for module, name, value in (
            (kernels, "_use_triton", lambda _: True),
            ("trl.trainer.utils", "_use_triton", lambda _: True),
            (kernels, "_forward_kernel", _InPlace()),
            (kernels, "_backward_kernel", _InPlace()),
            (kernels, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b))),
            # cuBLAS adds to the fp32 sum; a CPU widens both factors first
            (kernels, "_addmm_fp32", lambda *_: None),
        ):
            found = import_module(module) if isinstance(module, str) else module
            stack.enter_context(mock.patch.object(found, name, value, create=True))
        yield
