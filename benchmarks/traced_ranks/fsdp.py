"""Wrap a model as accelerate 1.15 does under FSDP, for `traced_ranks.ranks`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from traced_ranks.ranks import RankRecorder, Wrapped

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.bfloat16, "fp32": torch.float32}  # fp16: as wide


def fully_sharded(
    model: nn.Module,
    mesh: Any,
    *,
    mixed_precision: str,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> Wrapped:
    """Version 2: `fsdp2_prepare_model` with the plugin that the Trainer makes."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = None
    if mixed_precision != "no":
        dtype = _DTYPES[mixed_precision]
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    plugin = SimpleNamespace(
        set_auto_wrap_policy=lambda _: None,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=CPUOffloadPolicy(pin_memory=False) if cpu_offload else OffloadPolicy(),
        mixed_precision_policy=policy,
        ignored_modules=None,
        cpu_ram_efficient_loading=False,  # what it leaves is the same
        auto_wrap_policy=partial(transformer_auto_wrap_policy),
        transformer_cls_names_to_wrap=None,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh={("ranks",): mesh},
        parallelism_config=SimpleNamespace(fsdp_dim_names=["ranks"]),
        mixed_precision=mixed_precision,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    sharded: Any = fsdp2_prepare_model(accelerator, model)

    @contextmanager
    def accumulating() -> Iterator[None]:
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)

    return Wrapped(
        model=sharded,
        accumulating=accumulating,
        on_host=_copied_for_the_gpu if cpu_offload else None,
    )


@contextmanager
def _copied_for_the_gpu(recorder: RankRecorder) -> Iterator[None]:
    """A CPU is host and device here, so that what FSDP copies between them is copied for it."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    inputs, makes_gradient = FSDPParam.all_gather_inputs, FSDPParam.to_sharded_dtensor

    def copied_inputs(param: Any) -> list[torch.Tensor]:
        recorder.leave(param._sharded_param_data)
        own = param._sharded_param_data.untyped_storage()._cdata
        return [
            part.clone() if part.untyped_storage()._cdata == own else part
            for part in inputs.fget(param)
        ]

    def copied_gradient(param: Any, gradient: torch.Tensor) -> Any:
        with recorder.uncounted():
            copy = gradient.clone()
            recorder.leave(copy)
            return makes_gradient(param, copy)

    with (
        mock.patch.object(FSDPParam, "all_gather_inputs", property(copied_inputs)),
        mock.patch.object(FSDPParam, "to_sharded_dtensor", copied_gradient),
    ):
        yield


def flat_sharded(
    model: nn.Module,
    mesh: Any,
    *,
    mixed_precision: str,
    reshard_after_forward: bool = True,
    backward_prefetch: bool = False,
    quant_storage: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> Wrapped:
    """Version 1: `FullyShardedDataParallel` with the policies that the Trainer gives it.

    Args:
        quant_storage: of 4-bit weights, which `update_fsdp_plugin_peft` gathers everything in.
    """
    from accelerate.utils.dataclasses import get_module_class_from_name
    from peft.utils.other import fsdp_auto_wrap_policy
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = None
    if mixed_precision != "no" or quant_storage is not None:
        dtype = quant_storage or _DTYPES[mixed_precision]
        policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    whole: Any = model
    if hasattr(model, "peft_config"):
        wrap_policy = fsdp_auto_wrap_policy(model)
    else:
        blocks = {get_module_class_from_name(model, name) for name in whole._no_split_modules}
        wrap_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks - {None})
    full, grad_op = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
    sharded = FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        sharding_strategy=full if reshard_after_forward else grad_op,
        auto_wrap_policy=wrap_policy,
        mixed_precision=policy,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if backward_prefetch else None,
        use_orig_params=True,
        cpu_offload=CPUOffload(offload_params=True) if cpu_offload else None,
        limit_all_gathers=True,
        device_id=torch.device("cpu"),
    )
    if mixed_precision != "no":  # as `Accelerator.prepare_model` does afterwards
        for module in FullyShardedDataParallel.fsdp_modules(sharded):
            flat = module._flat_param if module._has_params else None
            if flat is not None and flat.requires_grad and flat.dtype != torch.float32:
                flat.data = flat.data.to(torch.float32)
                module._handle._orig_param_dtype = torch.float32
    return Wrapped(
        model=sharded,
        autocast=mixed_precision != "no",
        accumulating=sharded.no_sync,
        clip=partial(sharded.clip_grad_norm_, 1.0),
        on_host=_flat_on_host if cpu_offload else None,
    )


@contextmanager
def _flat_on_host(recorder: RankRecorder) -> Iterator[None]:
    """The same of version 1: what it pins is the host's, and shares are copied before a gather."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.distributed.utils import _alloc_storage

    on_host: list[Any] = []  # storages, whose views must find them as they were left

    def leave(tensor: torch.Tensor) -> None:
        on_host.append(tensor.untyped_storage())
        recorder.leave(tensor)

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        with recorder.uncounted():
            copy = tensor.clone()
        leave(copy)
        return copy

    starts, unshards = FlatParamHandle.init_flat_param_attributes, FlatParamHandle.pre_unshard
    writes_back = FlatParamHandle._writeback_orig_params

    def started(handle: Any) -> None:
        leave(handle.flat_param.data)
        starts(handle)

    def written_back(handle: Any) -> bool:
        with recorder.uncounted():
            changed: bool = writes_back(handle)
        gradient, share = handle.flat_param.grad, handle.flat_param._local_shard
        if gradient is not None and gradient.size() == share.size():
            leave(gradient)
        return changed

    def copied(handle: Any) -> bool:
        changed: bool = unshards(handle)
        if not handle._uses_param_mixed_precision and handle.needs_unshard():
            handle.flat_param.data = handle.flat_param.data.clone()
        return changed

    def narrowed(handle: Any) -> None:
        flat = handle.flat_param
        _alloc_storage(flat._mp_shard, flat._local_shard.size())
        flat._mp_shard.copy_(flat._local_shard.clone())
        flat.data = flat._mp_shard

    with (
        mock.patch.object(torch.Tensor, "pin_memory", pinned),
        mock.patch.object(FlatParamHandle, "init_flat_param_attributes", started),
        mock.patch.object(FlatParamHandle, "pre_unshard", copied),
        mock.patch.object(FlatParamHandle, "_writeback_orig_params", written_back),
        mock.patch.object(FlatParamHandle, "_use_low_precision_shard", narrowed),
        mock.patch.object(torch.cpu.Stream, "synchronize", mock.Mock(), create=True),
    ):
        yield
