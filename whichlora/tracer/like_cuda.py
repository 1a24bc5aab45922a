"""Make fake CPU tensors live and die as tensors on CUDA would.

A build of torch without CUDA cannot make fake CUDA tensors, so a trace runs on fake CPU ones. Each
difference that changes which tensors live is patched here, and listed in `docs/trace.md`.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree

from whichlora.spec.backends import SdpaCall, SdpaKernel, backend_of
from whichlora.spec.versions import Libraries

# Operators that autocast runs in fp32 on CUDA and not on a CPU. Source: torch 2.13
# `aten/src/ATen/autocast_mode.h`, AT_FORALL_FP32; only those that language models use.
_FP32 = (
    "exp expm1 log log10 log2 log1p pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar reciprocal "
    "rsqrt sinh tan cosh acos asin softplus layer_norm group_norm cosine_similarity nll_loss "
    "nll_loss_nd smooth_l1_loss huber_loss l1_loss kl_div binary_cross_entropy_with_logits "
    "logsumexp dist"
)
# Operators whose result autocast makes fp32, AT_FORALL_FP32_SET_OPT_DTYPE.
_FP32_RESULT = "softmax.int log_softmax.int cumsum cumprod prod prod.dim_int sum sum.dim_IntList"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the choice of an attention kernel asks of the device, and of the run on it.

    Args:
        kind: of its backend, which chooses the kernel.
        compute_capability: None where it is not known.
        half: the 16-bit dtype of the run, whatever stands in for it here.
        pinned: the only kernel that is allowed, if there is one.
    """

    kind: str = "cuda"
    compute_capability: str | None = None
    half: str = "bf16"
    pinned: SdpaKernel | None = None

    def kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        enable_gqa: bool,
    ) -> SdpaKernel:
        """What SDPA dispatches this call to."""
        if self.pinned is not None:
            return self.pinned
        grouped = key.shape[1] != query.shape[1]
        inputs = (query, key, value)
        call = SdpaCall(
            compute_capability=self.compute_capability,
            libraries=Libraries(),
            dtype="fp32" if query.dtype == torch.float32 else self.half,
            head_dim=query.shape[-1],
            v_head_dim=value.shape[-1],
            groups="none" if not grouped else "enabled" if enable_gqa else "broadcast",
            masked=attn_mask is not None,
            dropout=dropout_p > 0.0,
            needs_grad=torch.is_grad_enabled() and any(x.requires_grad for x in inputs),
        )
        return backend_of(self.kind).sdpa(call)


@contextmanager
def like_cuda(device: Device) -> Iterator[None]:
    """Attention, autocast, dropout, optimizers and HF's masks as on CUDA, inside this context."""
    with ExitStack() as stack:
        stack.enter_context(_autocast_of_cuda())
        for target, name, value in (
            (F, "scaled_dot_product_attention", partial(attention, device)),
            (F, "dropout", _dropout),
            (F, "cross_entropy", partial(_cross_entropy, F.cross_entropy)),
            (F, "grouped_mm", _grouped_mm),
            # HF takes fake tensors for a compiler at work, and materialises every causal mask.
            ("transformers.masking_utils", "is_tracing", lambda *_: False),
            # It looks at position ids for several sequences in a row; a batch of ours has none.
            ("transformers.masking_utils", "find_packed_sequence_indices", lambda *_: None),
            # PEFT's 4-bit layer asks without naming a device, which means CUDA.
            (torch, "is_autocast_enabled", _is_autocast_enabled),
            # Longformer counts its windows with tensors of the host, which keep their values.
            (torch, "div", _div),
            # `Module.to` exchanges fake parameters as a whole, and cannot while they are watched.
            ("torch.utils", "swap_tensors", _take_data),
            # bitsandbytes' 8-bit product expands the weight on a CPU.
            ("bitsandbytes.autograd._functions", "MatMul8bitFp", _int8_product()),
            # Paged states live on the host, and a CPU makes none.
            (_bnb_optimizer(), "get_state_buffer", _state_buffer),
            # PEFT knows a 4-bit weight by its class, which a fake one can't have.
            ("peft.tuners.lora.dora", "dequantize_module_weight", _expanded),
            *_of_peft(),
            *_of_towers(),
            # Pixels are made on the host, and are on the device when the model is called.
            ("whichlora.profiler.images", "host_pixels", _host_pixels),
            # One list of tensors per operation, as `foreach` optimizers do it on CUDA.
            ("torch.optim.optimizer", "_get_foreach_kernels_supported_devices", lambda: ["cpu"]),
            ("torch.optim.optimizer", "_foreach_supported_types", [FakeTensor]),
            ("torch.nn.utils.clip_grad", "_has_foreach_support", lambda *_: True),
        ):
            module = import_module(target) if isinstance(target, str) else target
            stack.enter_context(mock.patch.object(module, name, value))
        yield


@contextmanager
def with_flash_attention() -> Iterator[None]:
    """transformers finds flash-attention 2 installed: the classes that have it take its path.

    Source: transformers 5.23 `modeling_flash_attention_utils`; a batch without padding only.
    """
    utils = import_module("transformers.modeling_flash_attention_utils")
    model_class = import_module("transformers.modeling_utils").PreTrainedModel
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):  # classes imported without it
            if name.startswith("transformers.models.") and "is_flash_attn_available" in vars(
                module
            ):
                vars(module)["_flash_attention_forward"] = utils._flash_attention_forward
        for target, name, value in (
            (model_class, "_flash_attn_import_error", lambda *_, **__: None),
            (utils, "_lazy_imports", lambda *_, **__: (_flash, _flash, None, None, None)),
            (utils, "_loaded_implementation", None),
            (utils, "_is_packed_sequence", lambda *_: False),
            (utils, "is_flash_attn_available", lambda **_: True),  # asked as a class is imported
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        versions = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
        installed = {"general_availability_check": lambda: True}
        stack.enter_context(mock.patch.dict(versions[2], installed))
        yield


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Attention of [batch, seq, heads, head_dim], saving what SDPA's fused kernels save."""
    by_head = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out: torch.Tensor = _Fused.apply(*by_head, None)
    return out.transpose(1, 2)


_torch_is_autocast_enabled = torch.is_autocast_enabled


_torch_div = torch.div


def _div(first: Any, second: Any, **settings: Any) -> Any:
    """Of two whole numbers their quotient, and what torch makes of tensors."""
    if isinstance(first, int) and isinstance(second, int):
        return first // second  # `rounding_mode="trunc"` of sizes, none of which is negative
    return _torch_div(first, second, **settings)


def _is_autocast_enabled(device_type: str = "cpu") -> bool:
    return bool(_torch_is_autocast_enabled(device_type))


def _int8_product() -> Any:
    from bitsandbytes.autograd._functions import MatMul8bitLt

    return MatMul8bitLt


def _bnb_optimizer() -> Any:
    from bitsandbytes.optim.optimizer import Optimizer8bit

    return Optimizer8bit


_MIN_PAGED_PARAMS = 100_000
_host_tensors = False


def _rotated(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Source: peft 0.21.2 `OrthLayer.forward`."""
    return x @ self.get_matrix().to(x.dtype).t()


def makes_host_tensors() -> bool:
    """Whether the code that runs makes tensors that do not live on the device."""
    return _host_tensors


def _host_pixels(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    global _host_tensors
    _host_tensors = True
    try:
        return torch.zeros(shape, dtype=dtype)
    finally:
        _host_tensors = False


def _state_buffer(
    optimizer: Any, parameter: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Source: bitsandbytes 0.50.2 `Optimizer8bit.get_state_buffer`."""
    global _host_tensors
    _host_tensors = optimizer.is_paged and parameter.numel() >= _MIN_PAGED_PARAMS
    try:
        return torch.zeros_like(parameter, dtype=dtype)
    finally:
        _host_tensors = False


def _expanded(module: Any) -> Any:
    """The weight of a layer in 16 bit."""
    from bitsandbytes.functional import dequantize_4bit
    from peft.utils.integrations import dequantize_bnb_weight

    state = getattr(module.weight, "quant_state", None)
    if state is not None:
        return dequantize_4bit(module.weight.data, state)
    if module.weight.dtype == torch.int8:
        return dequantize_bnb_weight(module.weight, state=module.state)
    return module.weight


Patch = tuple[Any, str, Any]  # a module or class, the name in it, and what stands in for it


@cache
def _of_peft() -> tuple[Patch, ...]:
    """What stands in for functions of PEFT that read values, of those methods that it has.

    BOFT writes a permutation entry by entry, and compiles a kernel for further factors. WaveFT
    picks the places that lie inside, which are all. Uni-LoRA counts equal indices. PSOFT reads
    none, but multiplies 16-bit inputs in fp32 on a CPU.
    """
    patches: list[Patch] = []
    if find_spec("peft.tuners.boft"):
        module = import_module("peft.tuners.boft.layer")
        patches += [
            (module.BOFTLayer, "perm2mat", lambda _, order: torch.zeros(len(order), len(order))),
            (module, "get_fbd_cuda", lambda: None),
        ]
    if find_spec("peft.tuners.psoft"):
        patches.append((import_module("peft.tuners.psoft.layer").OrthLayer, "forward", _rotated))
    if find_spec("peft.tuners.waveft"):
        layer = import_module("peft.tuners.waveft.layer").WaveFTLayer
        whole = {"indices": "padded_indices.clone()", "spectrum": "spectrum.clone()"}
        replaced = {f"valid_{what}": value for what, value in whole.items()}
        patches.append(_without_values(layer, "get_delta_weight", **replaced))
    if find_spec("peft.tuners.unilora"):
        model = import_module("peft.tuners.unilora.model").UniLoraModel
        replaced = {"counts": "torch.ones(config.theta_d_length)", "used_indices": "slice(None)"}
        patches.append(_without_values(model, "_assign_unilora_indices_and_scales", **replaced))
    return tuple(patches)


def _of_towers() -> list[Patch]:
    """What stands in for functions of vision towers that read values, of the model that is traced.

    Gemma 4's finds padding by the zeros of a matrix of places, which follow from their indices.
    """
    module = sys.modules.get("transformers.models.gemma4.modeling_gemma4")
    if module is None:
        return []
    places = "kernel_idxs.unsqueeze(-1).eq(torch.arange(length))"
    return [
        _without_values(
            module.Gemma4VisionPooler, "_avg_pool_by_positions", mask=f"{places}.any(dim=1)"
        )
    ]


def _without_values(owner: Any, name: str, **replaced: str) -> Patch:
    """A function of the class `owner` whose lines that fake tensors cannot run are others.

    Args:
        replaced: what stands in for a line, by the variable that it sets.

    Raises:
        ValueError: it has no such line.
    """
    module = import_module(owner.__module__)
    lines = textwrap.dedent(inspect.getsource(getattr(owner, name))).splitlines()
    for variable, value in replaced.items():
        (place,) = (n for n, line in enumerate(lines) if line.split()[:2] == [variable, "="])
        indent = lines[place][: -len(lines[place].lstrip())]
        lines[place] = f"{indent}{variable} = {value}"
    names: dict[str, Any] = {}
    exec("\n".join(lines), vars(module), names)
    return owner, name, names[name]


def _take_data(tensor: torch.Tensor, source: torch.Tensor) -> None:
    tensor.data = source.data


@contextmanager
def _autocast_of_cuda() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL", "AutocastCPU") as library:
        for name in _FP32.split():
            library.impl(name, partial(_in_fp32, _overload(name)))
        for name in _FP32_RESULT.split():
            library.impl(name, partial(_to_fp32, _overload(name)))
        yield


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _in_fp32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        args, kwargs = _pytree.tree_map(
            lambda value: value.float() if _is_narrow(value) else value, (args, kwargs)
        )
        return operator(*args, **kwargs)


def _to_fp32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        names = [argument.name for argument in operator._schema.arguments[: len(args)]]
        if _is_narrow(args[0]) and "dtype" not in names and kwargs.get("dtype") is None:
            kwargs["dtype"] = torch.float32
        return operator(*args, **kwargs)


def _cross_entropy(
    whole: Callable[..., Any], scores: Any, target: Any, weight: Any = None, **settings: Any
) -> Any:
    """A CPU's autocast runs the loss in fp32 as a whole, CUDA's only `nll_loss`, its second part.

    Source: torch 2.13 `cross_entropy_loss` of LossNLL.cpp: it tells `log_softmax` its dtype.
    """
    of_parts = {
        key: value for key, value in settings.items() if key in ("ignore_index", "reduction")
    }
    smoothed = settings.get("label_smoothing", 0.0) > 0 or target.is_floating_point()
    if smoothed or not _is_narrow(scores) or not _is_autocast_enabled():
        return whole(scores, target, weight, **settings)
    log_probabilities = F.log_softmax(scores, min(1, scores.dim() - 1), dtype=scores.dtype)
    return F.nll_loss(log_probabilities, target, weight, **of_parts)


def _dropout(
    input: torch.Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """CUDA has one dropout kernel with a one-byte mask; a CPU multiplies by a float mask."""
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


_fused_grouped_mm = F.grouped_mm


def _grouped_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    """The fake product supports bf16 only; in other dtypes the real one loops over the groups."""
    if mat_a.dtype == torch.bfloat16:
        product: torch.Tensor = _fused_grouped_mm(mat_a, mat_b, offs=offs, **keywords)
        return product
    looped: torch.Tensor = _GroupedProduct.apply(mat_a, mat_b)
    return looped


class _GroupedProduct(torch.autograd.Function):  # type: ignore[misc]
    """Rows [rows, in] by the matrix of their group [groups, in, out]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        needs_rows, needs_matrices = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_matrices else None, matrices if needs_rows else None)
        ctx.shapes = rows.shape, matrices.shape
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            grad.new_empty(shape) if needed else None
            for shape, needed in zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        )


def attention(
    device: Device,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """SDPA with the kernel that the device selects; the math kernel runs its own operators.

    Source: torch 2.13 `scaled_dot_product_attention`. The flash, memory-efficient and cuDNN
    kernels keep the same tensors: their inputs, the output and a log-sum-exp.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    kernel = device.kernel(query, key, value, attn_mask, dropout_p, enable_gqa)
    if attn_mask is not None and attn_mask.dtype != query.dtype:
        # `convert_boolean_attn_mask`: an additive mask in the dtype of the query, in every layer
        if attn_mask.dtype == torch.bool:
            # no name of the zeros stays beside it, as none does in `convert_boolean_attn_mask`
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
                attn_mask.logical_not(), float("-inf")
            )
        else:
            attn_mask = attn_mask.to(query.dtype)
    if kernel == "math":
        with (
            torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),  # autocast does not see its products
            torch.library._scoped_library("aten", "IMPL") as library,
        ):
            if dropout_p:
                library.impl("dropout", _dropout, "AutogradCPU")
            expanded: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )[0]  # fmt: skip
        return expanded
    if attn_mask is not None and kernel == "efficient" and attn_mask.shape[-1] % 16:
        # `preprocess_mask`, `pad_bias`: rows that are aligned, of which a part is read
        keys = attn_mask.shape[-1]
        attn_mask = torch.nn.functional.pad(attn_mask, (0, -keys % 16))[..., :keys]
    out: torch.Tensor = _Fused.apply(query, key, value, attn_mask)
    return out


class _Fused(torch.autograd.Function):  # type: ignore[misc]
    """The tensors that a fused kernel allocates and saves; its internal buffers are not seen."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        out = torch.empty_like(query)
        if value.shape[-1] != query.shape[-1]:
            batch, heads, length, _ = query.shape
            out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask, *_ = ctx.saved_tensors
        bias = torch.empty_like(mask) if ctx.needs_input_grad[3] else None
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), bias
