"""TRL's losses on fake tensors as on CUDA, where its Triton kernels make no tensor.

The kernels themselves are left out: each reads a tile of logits and writes in place.
Source: TRL 1.16 `kernels/chunked_logprob.py`, `kernels/logprob_entropy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
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


class _FakeTriton(ModuleType):
    """Where there is no Triton, what a module of kernels takes from it when it is imported."""

    constexpr = None

    def jit(self, _: Any) -> _InPlace:
        return _InPlace()

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)


@contextmanager
def with_fused_log_probabilities() -> Iterator[None]:
    """Log-probabilities of whole logits come from TRL's kernel, inside this context."""
    triton = _FakeTriton("triton")
    triton.language = triton  # type: ignore[attr-defined]
    missing = {} if find_spec("triton") else {"triton": triton, "triton.language": triton}
    utils = import_module("trl.trainer.utils")
    with mock.patch.dict("sys.modules", missing):
        kernels = import_module("trl.kernels.logprob_entropy")
    with ExitStack() as stack:
        fused = kernels.selective_log_softmax_and_entropy
        for module, name, value in (
            (kernels, "_forward_kernel", _InPlace()),
            (kernels, "_backward_kernel", _InPlace()),
            (utils, "is_triton_available", lambda: True),
            (utils, "_supports_trl_loss_kernel", lambda *_: True),
            (utils, "_fused_logprob_entropy", fused),
        ):
            stack.enter_context(mock.patch.object(module, name, value, create=True))
        yield
