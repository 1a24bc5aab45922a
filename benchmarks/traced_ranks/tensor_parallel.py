"""Trace one rank of transformers' tensor parallelism: a process group that sends nothing.

Source: transformers 5.23 `DistributedMixin.maybe_distribute_model`; torch 2.13 `FakeProcessGroup`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from traced_ranks import fsdp, ranks
from whichlora.methods import with_defaults
from whichlora.profiler import plain_loop
from whichlora.profiler.build import finished_model, meta_model, stored_dtype
from whichlora.spec.run import RunConfig
from whichlora.tracer.extrapolate import TracedEvent
from whichlora.tracer.fake_weights import place_fake
from whichlora.tracer.like_cuda import Device, like_cuda
from whichlora.tracer.recorder import Recorder
from whichlora.tracer.trace import _NoMeter
from whichlora.trainers import get_trainer


class RankRecorder(Recorder):
    """The recorder, of the local tensors of one rank.

    Operators of a DTensor come again with its local tensors; shapes of the whole tensor, which
    DTensor's rules are asked for on fake ones, are no memory.
    """

    in_rules = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented
        if self.in_rules:
            return func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # it is the tensor that was waited for; a fake one would be another
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _born(self, tensor: torch.Tensor, operator: str, owner: int | None) -> None:
        if tensor.device.type != "meta":  # `_from_local_last_dim_shard` asks one for its strides
            super()._born(tensor, operator, owner)

    @contextmanager
    def rules_unseen(self) -> Iterator[None]:
        """DTensor's propagation of shapes, inside this context, is not recorded."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(propagator: Any, *args: Any, **kwargs: Any) -> Any:
            before, self.in_rules = self.in_rules, True
            try:
                return original(propagator, *args, **kwargs)
            finally:
                self.in_rules = before

        with mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen):
            yield


def trace_rank(
    run: RunConfig,
    model_config: Mapping[str, Any],
    *,
    tp_size: int,
    target_modules: Sequence[str] | str,
) -> tuple[list[TracedEvent], int]:
    """Storages of the first rank of `run`, and the bytes that are there when it begins."""
    run = with_defaults(run)
    with ExitStack() as patches:
        mesh = patches.enter_context(ranks.fake_group(tp_size, names=("tp",)))
        model = meta_model(run, model_config, device="cpu")
        _divide(model, mesh, tp_size)
        patches.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        patches.enter_context(like_cuda(Device(compute_capability="8.0")))
        _place_locals(model, run)
        model = finished_model(model, run, target_modules)
        recorder = RankRecorder((), run)
        patches.enter_context(recorder.rules_unseen())
        patches.enter_context(
            mock.patch.object(plain_loop, "_optimizer", _grouped(plain_loop._optimizer))
        )
        _note_locals(recorder, model)
        at_rest = sum(event.num_bytes or 0 for event in recorder.events)
        recorder.watch(model)
        with recorder:
            measure = resolve_name(get_trainer(run.trainer).steps)
            measure(model, run, _NoMeter(), [run.seq_len])
        recorder.close()
    return recorder.events, at_rest


def trace_sharded_rank(
    run: RunConfig,
    model_config: Mapping[str, Any],
    *,
    tp_size: int,
    dp_size: int,
    target_modules: Sequence[str] | str,
) -> ranks.RankTrace:
    """Storages of the first rank where `dp_size` groups of `tp_size` shard by FSDP, version 2.

    Gradients are not clipped: torch 2.13 refuses the norm of tensors of several meshes.
    """
    run = with_defaults(run)
    mixed = run.precision if run.precision in ("bf16", "fp16") else "no"
    with ExitStack() as patches:
        mesh = patches.enter_context(
            ranks.fake_group(tp_size * dp_size, (dp_size, tp_size), ("dp", "tp"))
        )
        model = meta_model(run, model_config, device="cpu")
        _divide(model, mesh["tp"], tp_size)
        fake = patches.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        patches.enter_context(like_cuda(Device(compute_capability="8.0")))
        _place_locals(model, run)
        model = finished_model(model, run, target_modules)
        if run.gradient_checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": bool(run.use_reentrant)}
            )
            model.enable_input_require_grads() if run.method != "full" else None
        patches.enter_context(mock.patch.object(DeviceMesh, "_concatenate", _real_mesh()))
        recorder = ranks.RankRecorder(run, False)
        patches.enter_context(recorder.uncounted_propagation(fake))
        wrapped = fsdp.fully_sharded(model, mesh["dp"], mixed_precision=mixed)
        wrapped = replace(wrapped, clip=lambda: None)
        recorder.watch(wrapped.model)
        with recorder:
            ranks.take_steps(wrapped, run, recorder, False)
        recorder.close()
    return recorder.result()


def _real_mesh() -> Any:
    """`DeviceMesh._concatenate` on real numbers of ranks, which it looks for."""
    joined = DeviceMesh._concatenate

    def outside(meshes: Any) -> Any:
        with unset_fake_temporarily():
            return joined(meshes)

    return staticmethod(outside)


def _divide(model: Any, mesh: Any, tp_size: int) -> None:
    config = DistributedConfig(tp_size=tp_size)
    model.config.distributed_config = config
    model._device_mesh, model._tp_size = mesh, tp_size
    _untie(model)  # `from_pretrained` divides before it ties
    plan, _, _ = model._resolve_parallel_plans(config)
    apply_tensor_parallelism(model, mesh, plan)
    model.tie_weights()


def _untie(model: Any) -> None:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is table.weight:
        head.weight = nn.Parameter(torch.empty_like(table.weight))


def _place_locals(model: Any, run: RunConfig) -> None:
    """Fake storage for this rank's part of every divided parameter, then for all others."""
    placed: dict[int, nn.Parameter] = {}
    divided: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, meta in list(module._parameters.items()):
            if isinstance(meta, DTensor):
                if id(meta) not in placed:
                    local = torch.empty(meta._local_tensor.shape, dtype=meta.dtype, device="cpu")
                    placed[id(meta)] = nn.Parameter(
                        DTensor.from_local(
                            local,
                            meta.device_mesh,
                            meta.placements,
                            run_check=False,
                            shape=meta.shape,
                            stride=meta.stride(),
                        ),
                        requires_grad=meta.requires_grad,
                    )
                divided.append((module, name, placed[id(meta)]))
                module._parameters[name] = None
    place_fake(model, stored_dtype(run))
    for module, name, parameter in divided:
        module._parameters[name] = parameter


def _note_locals(recorder: Recorder, model: Any) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        recorder._born(local, name, None)


def _grouped(make: Any) -> Any:
    """Divided and whole parameters in groups of their own: `foreach` takes no mixture."""

    def grouped(model: Any, run: RunConfig) -> Any:
        optimizer = make(model, run)
        (group,) = optimizer.param_groups
        parts = [
            [p for p in group["params"] if isinstance(p, DTensor) is is_divided]
            for is_divided in (True, False)
        ]
        settings = {key: value for key, value in group.items() if key != "params"}
        optimizer.param_groups[:] = [dict(settings, params=part) for part in parts if part]
        return optimizer

    return grouped
