"""Experts as Unsloth stores and runs them, on fake tensors: its own grouped products.

`forward_native_grouped_mm` of the installed unsloth_zoo runs as it is, uncompiled. Its Triton
kernels are stand-ins with their tensors: expanding weights, the gated activation, the weighted sum.
Source: unsloth_zoo 2026.10.9 `temporary_patches/moe_utils.py`, `moe_utils_bnb4bit.py`,
`moe_fused_swiglu.py`, `moe_triton_kernels.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from whichlora.errors import MeasurementError
from whichlora.spec.run import ALL_LINEAR, FOUR_BIT_BNB, RunConfig

_ADAPTERS = "lora_of_experts"
_WEIGHTS = ("gate_up_proj", "down_proj")


def _experts(model: nn.Module) -> Iterator[nn.Module]:
    return (module for name, module in model.named_modules() if name.endswith(".experts"))


def pack_experts(model: nn.Module, run: RunConfig) -> None:
    """Meta parameters of experts as `replace_expert_params_with_bnb_params` leaves them."""
    if run.quant not in FOUR_BIT_BNB:
        return
    packed = resolve_name("bitsandbytes.nn:Params4bit")
    for module in _experts(model):
        for name in _WEIGHTS:
            module._parameters[name] = packed(
                module._parameters[name],
                requires_grad=False,
                compress_statistics=run.quant.endswith("-dq"),
                quant_type=run.quant.removesuffix("-dq"),
            )


def module_targets(model: Any, targets: Sequence[str] | str) -> list[str]:
    """Those of `targets` that are modules; PEFT is told the names of parameters apart."""
    head = model.get_output_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(names if targets == ALL_LINEAR else names & set(targets))


def adapt_experts(model: Any, run: RunConfig, targets: Sequence[str] | str) -> None:
    """Flat fp32 matrices of each parameter's adapters, as PEFT's `ParamWrapper` has them."""
    for module in _experts(model):
        adapters = nn.Module()
        for name in _WEIGHTS:
            if targets != ALL_LINEAR and name not in targets:
                continue
            state = getattr(module._parameters[name], "quant_state", module._parameters[name])
            num_experts, out_features, in_features = state.shape
            rank = num_experts * run.r
            adapters.register_parameter(f"{name}_a", nn.Parameter(torch.empty(rank, in_features)))
            adapters.register_parameter(f"{name}_b", nn.Parameter(torch.empty(out_features, rank)))
        module.add_module(_ADAPTERS, adapters)


def group_experts(model: Any) -> None:
    """Let the experts of `model` run by Unsloth's function.

    Raises:
        MeasurementError: unsloth_zoo is not installed.
    """
    functions = _functions()
    for module in _experts(model):
        module.forward = MethodType(_forward(functions), module)


def _forward(functions: ModuleType) -> Any:
    def forward(self: Any, x: Any, chosen: Any, weights: Any) -> Any:
        # `_patched_param_wrapper_forward`, once for each parameter
        for name in _WEIGHTS:
            setattr(self, functions.moe_lora_stash_name(name), _factors(functions, self, name))
        result = functions.forward_native_grouped_mm(self, x, chosen, weights)
        for name in _WEIGHTS:
            delattr(self, functions.moe_lora_stash_name(name))
        return result

    return forward


def _factors(functions: ModuleType, module: Any, name: str) -> Any:
    adapters = getattr(module, _ADAPTERS)._parameters
    if f"{name}_a" not in adapters:
        return None
    a, b = (SimpleNamespace(weight=adapters[f"{name}_{part}"]) for part in "ab")
    wrapper = SimpleNamespace(
        lora_A={"default": a},
        lora_B={"default": b},
        scaling={"default": 1.0},
        num_experts=module.num_experts,
        parameter_name=name,
        get_base_layer=lambda: module,
    )
    return functions._extract_lora_from_wrapper(wrapper)


def _functions() -> ModuleType:
    """`moe_utils` of the installed package, whose import as a whole needs a GPU.

    Raises:
        MeasurementError: unsloth_zoo is not installed.
    """
    package = PathFinder.find_spec("unsloth_zoo")
    if package is None or package.origin is None:
        raise MeasurementError("trainer: unsloth_zoo is not installed; pip install unsloth_zoo")
    root = Path(package.origin).parent
    packages = {}
    for name, folder in (
        ("unsloth_zoo", root),
        ("unsloth_zoo.temporary_patches", root / "temporary_patches"),
    ):
        packages[name] = ModuleType(name)
        packages[name].__path__ = [str(folder)]
    with (
        mock.patch.dict(sys.modules, packages),
        TemporaryDirectory() as copies,  # which it makes of itself when it is imported
        mock.patch.dict(os.environ, {"UNSLOTH_COMPILE_LOCATION": copies}),
    ):
        module = import_module("unsloth_zoo.temporary_patches.moe_utils")
    vars(module).update(
        _TRITON_ROUTING=None,
        _check_torch_grouped_mm_supported=lambda *_: True,
        _moe_recompute_enabled=lambda *_, **__: True,  # as for each frozen weight in 4 bit
        _get_base_weight=_expanded,
        _grouped_mm_with_backward_fix=lambda x, weight, offs: F.grouped_mm(x, weight, offs=offs),
        _fused_moe_activation=lambda _, joint, *__: _Gated.apply(joint),
        weighted_unpermute=_weighted_sum,
    )
    return module


def _expanded(weight: Any, *_: Any) -> Any:
    """`nf4_dequant_triton`, which makes nothing beside the result."""
    state = getattr(weight, "quant_state", None)
    return weight if state is None else weight.new_empty(tuple(state.shape), dtype=state.dtype)


class _Gated(torch.autograd.Function):  # type: ignore[misc]
    """`_FusedSwiGLU`."""

    @staticmethod
    def forward(ctx: Any, joint: Any) -> Any:
        ctx.save_for_backward(joint)
        return joint.new_empty(joint.shape[0], joint.shape[1] // 2)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (joint,) = ctx.saved_tensors
        return torch.empty_like(joint)


class _WeightedSum(torch.autograd.Function):  # type: ignore[misc]
    """`_WeightedUnpermute` of weights without a gradient of theirs."""

    @staticmethod
    def forward(ctx: Any, rows: Any, order: Any, weights: Any, tokens: int, dtype: Any) -> Any:
        inverse = torch.empty_like(order)
        inverse.scatter_(0, order, torch.arange(order.numel(), dtype=order.dtype))
        ctx.save_for_backward(order, weights)
        ctx.shape = rows.shape
        return rows.new_empty(tokens, rows.shape[1], dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _ = ctx.saved_tensors
        return grad.new_empty(ctx.shape), None, None, None, None


def _weighted_sum(
    rows: Any, order: Any, weights: Any, tokens: int, top_k: int, out_dtype: Any = None
) -> Any:
    return _WeightedSum.apply(rows, order, weights, tokens, out_dtype or rows.dtype)
