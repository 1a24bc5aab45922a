"""Weights without values: every meta tensor of a model gets a fake storage of its size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whichlora.profiler.build import replace_parameters
from whichlora.spec.numeric import ceil_div


def place_fake(model: Any, dtype: torch.dtype) -> None:
    """Give every meta tensor of `model` a fake storage, 4-bit and 8-bit layers their packed one.

    `Params4bit` can't hold a fake tensor. A plain parameter with the same attributes replaces it;
    the layers of bitsandbytes and PEFT need nothing else.
    """
    replace_parameters(model, dtype, lambda meta, is_wide: _fake_parameter(meta, dtype, is_wide))
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


def _fake_parameter(meta: Any, dtype: torch.dtype, is_wide: bool) -> nn.Parameter:
    kind = type(meta).__name__
    if kind == "Params4bit":
        return _fake_4bit(meta, dtype)
    if kind == "Int8Params":
        weight = nn.Parameter(torch.empty(meta.shape, dtype=torch.int8), requires_grad=False)
        weight.CB, weight.SCB = weight.data, torch.empty(meta.shape[0])
        weight.has_fp16_weights = False
        return weight
    value = torch.empty(meta.shape, dtype=torch.float32 if is_wide else meta.dtype, device="cpu")
    return nn.Parameter(value, requires_grad=meta.requires_grad)


def _fake_4bit(meta: Any, dtype: torch.dtype) -> nn.Parameter:
    from bitsandbytes.functional import QuantState

    size, block = meta.numel(), meta.blocksize
    num_blocks = ceil_div(size, block)
    state = QuantState(
        absmax=torch.empty(num_blocks),
        shape=meta.shape,
        dtype=dtype,
        blocksize=block,
        code=torch.empty(16),
        quant_type=meta.quant_type,
    )
    if meta.compress_statistics:
        state.absmax = torch.empty(num_blocks, dtype=torch.uint8)
        state.offset = torch.empty(())
        absmax, code = torch.empty(ceil_div(num_blocks, 256)), torch.empty(256)
        state.state2 = QuantState(absmax=absmax, blocksize=256, code=code, dtype=torch.float32)
        state.nested = True
    storage = meta.quant_storage
    codes = torch.empty(ceil_div(ceil_div(size, 2), storage.itemsize), 1, dtype=storage)
    weight = nn.Parameter(codes, requires_grad=False)
    weight.quant_state = state
    weight.bnb_quantized = True
    for name in ("quant_type", "compress_statistics", "blocksize", "quant_storage"):
        setattr(weight, name, getattr(meta, name))
    return weight
