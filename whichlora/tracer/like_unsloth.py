"""Steps of Unsloth's stack on fake tensors: its own LoRA functions, without a GPU.

`kernels/fast_lora.py` of the installed package runs as it is. It needs a GPU to be imported with
all of Unsloth, so what stands around it is written here with the tensors of the original: Triton
kernels, which write in place; expanding weights; norms, rotary positions, checkpoints and the loss.
Source: unsloth 2026.10.9 `kernels/utils.py`, `rms_layernorm.py`, `rope_embedding.py`,
`models/llama.py`; unsloth_zoo 2026.10.9 `gradient_checkpointing.py`, `fused_losses`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any
from unittest import mock

import torch
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812

from whichlora.errors import MeasurementError
from whichlora.families import build
from whichlora.memory.layer_passes import LEAST_OFFLOADED_BYTES
from whichlora.memory.loss import unsloth_rows
from whichlora.profiler.finetune import measure_finetune
from whichlora.profiler.meter import Meter
from whichlora.spec.run import RunConfig
from whichlora.tracer import like_cuda
from whichlora.tracer.unsloth_experts import group_experts
from whichlora.trainers import get_trainer

_PACKAGE = "_whichlora_unsloth"


def measure_unsloth(
    model: Any, run: RunConfig, meter: Meter, seq_lens: Sequence[int], *_: Any, **__: Any
) -> dict[str, Any]:
    """Steps of `run` with the layers, checkpoints and loss of Unsloth.

    Raises:
        MeasurementError: real tensors, which need Unsloth itself and a GPU.
    """
    if not all(isinstance(weight, FakeTensor) for weight in model.parameters()):
        raise MeasurementError("trainer: unsloth can't be profiled; use profile: none")
    base = model.get_base_model()
    trainer = get_trainer(run.trainer)
    _check_release(run, base.config.model_type)
    offloads = trainer.offloads(run)
    if trainer.kernels(run, base.config.model_type).experts:
        group_experts(base)
    else:
        functions = _functions(_Expansion())
        for layer in base.model.layers:
            _patch_layer(layer, functions)
        base.model.norm.forward = MethodType(_norm, base.model.norm)
    spec = build(base.config.to_dict(), name="traced")
    rows = partial(unsloth_rows, spec)
    base.forward = MethodType(partial(_with_loss, rows), base)
    checkpoint = _Checkpoints(len(base.model.layers)) if offloads else None
    with ExitStack() as stack:
        if checkpoint is not None:
            stack.enter_context(mock.patch("transformers.modeling_utils.checkpoint", checkpoint))
        return measure_finetune(model, replace(run, loss_head="hf"), meter, seq_lens)


def _check_release(run: RunConfig, model_type: str) -> None:
    """The functions that are patched here are those of today's release.

    Raises:
        MeasurementError: another release, whose functions differ.
    """
    kernels = get_trainer(run.trainer).kernels
    if kernels(run, model_type) != kernels(replace(run, libraries=()), model_type):
        raise MeasurementError(
            f"libraries: unsloth={run.versions.unsloth} can't be traced, only the newest release; "
            "use engine ledger"
        )


# --- LoRA functions -------------------------------------------------------------------------------


class _Expansion:
    """`fast_dequantize`: in a buffer that stays for forwards, in a new tensor for backwards."""

    def __init__(self) -> None:
        self._buffer: Any = None

    def __call__(
        self,
        weight: Any,
        state: Any,
        out: Any = None,
        use_global_buffer: bool = False,
        dtype: Any = None,
    ) -> Any:
        if state is None:
            return weight
        if not use_global_buffer:
            full = weight.new_empty(tuple(state.shape), dtype=state.dtype)
        else:
            count = state.shape.numel()
            if self._buffer is None or self._buffer.numel() < count:
                self._buffer = None
                self._buffer = weight.new_empty(count, dtype=state.dtype)
            full = self._buffer[:count].view(tuple(state.shape))
        return full.t() if weight.shape[0] == 1 else full


def _functions(expand: _Expansion) -> ModuleType:
    """`kernels/fast_lora.py` of the installed package, beside stand-ins for what it imports.

    Raises:
        MeasurementError: Unsloth is not installed.
    """
    package = PathFinder.find_spec("unsloth")
    if package is None or package.origin is None:
        raise MeasurementError("trainer: unsloth is not installed; pip install unsloth")
    utils = _module("utils", {
        "_has_active_dora_adapter": lambda *_: False,
        "_has_active_lora_bias": lambda *_: False,
        "_has_multiple_active_adapters": lambda *_: False,
        "addmm_": lambda out, a, b, alpha=1: out.addmm_(a, b, alpha=alpha),
        "fast_dequantize": expand,
        "_base_quant_state": lambda layer: getattr(layer.weight, "quant_state", None),
        "get_lora_parameters": _lora_parameters,
        "get_lora_parameters_bias": _lora_parameters,
        "matmul_lora": partial(_matmul_lora, expand),
        "torch_amp_custom_fwd": lambda function: function,
        "torch_amp_custom_bwd": lambda function: function,
    })  # fmt: skip
    norms = _module("rms_layernorm", {"_SAVE_OUTPUT": False})
    modules = {
        _PACKAGE: _module(_PACKAGE, {"__path__": [], "rms_layernorm": norms}),
        f"{_PACKAGE}.utils": utils,
        f"{_PACKAGE}.rms_layernorm": norms,
        f"{_PACKAGE}.swiglu": _module("swiglu", {
            "swiglu_fg_kernel": lambda e, g: torch.empty_like(e),
            "swiglu_DWf_DW_dfg_kernel": lambda dw, e, g: (dw, e, g),
        }),
        f"{_PACKAGE}.geglu": _module("geglu", dict.fromkeys((
            *("geglu_exact_forward_kernel", "geglu_exact_backward_kernel"),
            *("geglu_approx_forward_kernel", "geglu_approx_backward_kernel"),
        ))),
        "unsloth_zoo": _module("unsloth_zoo", {"__path__": []}),
        "unsloth_zoo.utils": _module("unsloth_zoo.utils", {"Version": Version}),
    }  # fmt: skip
    path = Path(package.origin).parent / "kernels" / "fast_lora.py"
    spec = spec_from_file_location(f"{_PACKAGE}.fast_lora", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(module)
    vars(module).update(_dropout_forward=_dropout, _dropout_replay=_dropout_again)
    return module


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _dropout(x: Any, p: float) -> Any:
    """As on CUDA: one kernel, and a mask of a byte."""
    return torch.native_dropout(x, p, True) if p else (x, None)


def _dropout_again(x: Any, mask: Any, p: float, scaling: float = 1.0) -> Any:
    return torch.ops.aten.native_dropout_backward(x, mask, scaling / (1.0 - p))


def _lora_parameters(layer: Any) -> tuple[Any, ...]:
    base = layer.base_layer
    adapter = layer.active_adapters[0]
    factors = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    state = getattr(base.weight, "quant_state", None)
    return base.weight, state, *factors, layer.scaling[adapter]


def _matmul_lora(
    expand: _Expansion,
    x: Any,
    weight: Any,
    state: Any,
    a: Any,
    b: Any,
    scaling: Any,
    out: Any = None,
    use_global_buffer: bool = True,
) -> Any:
    rows = x.view(-1, x.shape[-1])
    dense = expand(weight, state, use_global_buffer=use_global_buffer)
    result = torch.matmul(rows, dense.t())
    del dense
    if a is not None:
        result.addmm_(torch.matmul(rows, a.t().to(x.dtype)), b.t().to(x.dtype), alpha=scaling)
    return result.view(*x.shape[:-1], -1)


# --- layers ---------------------------------------------------------------------------------------


def _patch_layer(layer: Any, functions: ModuleType) -> None:
    layer.input_layernorm.forward = MethodType(_norm, layer.input_layernorm)
    layer.post_attention_layernorm.forward = MethodType(_norm, layer.post_attention_layernorm)
    attention = layer.self_attn
    for name in ("q_norm", "k_norm"):
        if hasattr(attention, name):
            norm = getattr(attention, name)
            norm.forward = MethodType(_norm, norm)
    layer.mlp.forward = MethodType(functions.apply_lora_mlp_swiglu, layer.mlp)
    attention.forward = MethodType(partial(_attend, functions), attention)


def _norm(self: Any, x: Any) -> Any:
    return _Norm.apply(x, self.weight)


class _Norm(torch.autograd.Function):  # type: ignore[misc]
    """`Fast_RMS_Layernorm` with `reuse_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _ = ctx.saved_tensors
        return grad.reshape(-1, grad.shape[-1]).contiguous().view(grad.shape), None


class _Rotated(torch.autograd.Function):  # type: ignore[misc]
    """`_fast_rope_embedding_eager`: in place, gradients into new tensors."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        ctx.save_for_backward(cos, sin)
        return tuple(x.transpose(1, 2).transpose(1, 2) for x in (q, k))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors
        made = [torch.empty_like(g.transpose(1, 2).contiguous()).transpose(1, 2) for g in grads]
        return *made, None, None


def _attend(functions: ModuleType, self: Any, hidden_states: Any, **keywords: Any) -> Any:
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (x.view(shape) for x in functions.apply_lora_qkv(self, hidden_states))
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k = _Rotated.apply(q, k, *keywords["position_embeddings"])
    k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    joined = out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
    return functions.apply_lora_o(self, joined), None


def _repeated(x: Any, num_heads: int) -> Any:
    """As xformers takes it, whose backward knows no groups: `utils/attention_dispatch.py`."""
    batch, heads, length, width = x.shape
    if heads == num_heads:
        return x
    groups = x.transpose(1, 2).view(batch, length, heads, 1, width)
    groups = groups.expand(batch, length, heads, num_heads // heads, width)
    return groups.reshape(batch, length, num_heads, width).transpose(1, 2)


# --- checkpoints and loss -------------------------------------------------------------------------


class _Checkpoints:
    """`unsloth_checkpoint`: inputs go to the host, but for the last layer's."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._next = 0
        self.buffers: list[Any] = []

    def __call__(self, function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        self._next = self._next % self._num_layers + 1
        is_small = args[0].numel() * 2 <= LEAST_OFFLOADED_BYTES
        stays = is_small or self._next == self._num_layers
        if not stays and not self.buffers:
            self.buffers = [torch.empty_like(args[0].detach()) for _ in range(2)]
        return _Checkpoint.apply(function, self, stays, *args)


class _Checkpoint(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, function: Any, owner: _Checkpoints, stays: bool, *args: Any) -> Any:
        ctx.function, ctx.owner, ctx.stays, ctx.rest = function, owner, stays, args[1:]
        ctx.autocast = torch.is_autocast_enabled("cpu")
        stored = args[0]
        if not stays:
            like_cuda._host_tensors = True
            stored = torch.empty_like(args[0].detach())
            like_cuda._host_tensors = False
        ctx.save_for_backward(stored)
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (stored,) = ctx.saved_tensors
        x = (stored if ctx.stays else ctx.owner.buffers[0]).detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=ctx.autocast):
            outputs = ctx.function(x, *ctx.rest)
        torch.autograd.backward([outputs], list(grads))
        return None, None, None, x.grad, *(None for _ in ctx.rest)


def _with_loss(
    rows: Callable[..., int], self: Any, input_ids: Any = None, labels: Any = None, **keywords: Any
) -> Any:
    keywords.pop("num_items_in_batch", None)
    hidden = self.model(input_ids=input_ids, **keywords).last_hidden_state
    loss = _Loss.apply(hidden, self.lm_head.weight, labels, rows(tokens=labels.numel()))
    return {"loss": loss}


class _Loss(torch.autograd.Function):  # type: ignore[misc]
    """`fused_linear_cross_entropy` of a frozen head: the gradient is made in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, labels: Any, rows: int) -> Any:
        targets = torch.empty_like(labels)
        gradient = torch.empty_like(hidden)
        scores = hidden.new_empty(targets.numel(), dtype=torch.float32)
        logits = hidden.new_empty((rows, weight.shape[0]), dtype=torch.float32)
        ctx.save_for_backward(gradient)
        del logits
        return scores.sum()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return torch.empty_like(gradient), None, None, None
