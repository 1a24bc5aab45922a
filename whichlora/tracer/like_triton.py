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

import torch


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
            target = import_module(module) if isinstance(module, str) else module
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield


# Modules of Liger, and their kernels that a training step launches.
_LIGER = {
    "rms_norm": (
        *("_rms_norm_forward_kernel", "_rms_norm_backward_kernel"),
        *("_block_rms_norm_forward_kernel", "_block_rms_norm_backward_kernel"),
    ),
    "rope": ("_triton_rope",),
    "swiglu": ("_swiglu_forward_kernel", "_swiglu_backward_kernel"),
    "geglu": ("_geglu_tanh_forward_kernel", "_geglu_tanh_backward_kernel"),
    "fused_linear_cross_entropy": ("liger_cross_entropy_kernel", "element_mul_kernel"),
}


@contextmanager
def with_liger() -> Iterator[None]:
    """Liger's functions run without their kernels, which make no tensor, inside this context.

    Source: liger-kernel 0.8.5 `ops/`.
    """
    loss = import_module("liger_kernel.ops.fused_linear_cross_entropy")
    with ExitStack() as stack:
        for module, kernels in _LIGER.items():
            patched = import_module(f"liger_kernel.ops.{module}")
            for name in kernels:
                stack.enter_context(mock.patch.object(patched, name, _InPlace()))
        # on a CPU the product makes a tensor for each chunk; CUDA's writes into one
        stack.enter_context(mock.patch.object(loss, "_can_use_mm_out", _writes_products))
        stack.enter_context(mock.patch.object(loss, "torch", _OnCuda("torch")))
        yield


class _OnCuda(ModuleType):
    """torch as the fused loss finds it where its tensors are on CUDA."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def equal(self, *_: Any) -> bool:
        """The gradient of the loss is multiplied with in place, whatever its value."""
        return False

    def mm(self, first: Any, second: Any, **written: Any) -> Any:
        """A product for the gradient of the weight is added to it where it is."""
        return torch.mm(first, second, **written) if written else first.new_zeros(())


def _writes_products(hidden: Any, weight: Any) -> bool:
    """Source: `_can_use_mm_out`, but for the device."""
    if hidden.dtype != weight.dtype:
        return False
    if torch.is_autocast_enabled("cpu"):
        return bool(hidden.dtype == torch.get_autocast_dtype("cpu"))
    return True


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
