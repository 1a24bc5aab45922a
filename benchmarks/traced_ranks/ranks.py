"""Run the real code of one rank among several on fake tensors and a fake process group.

Collectives of the fake group do nothing, so that one process shows what a rank of any number holds.
A strategy is a function that wraps the model as its library does; the mesh is made before, outside
of the fake mode, where `DeviceMesh` reads its own numbers.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from whichlora.methods import with_defaults
from whichlora.profiler.build import (
    finished_model,
    meta_model,
    stored_dtype,
    without_cpu_packing,
)
from whichlora.profiler.images import with_fields
from whichlora.spec.run import FP32_PRECISIONS, RunConfig
from whichlora.spec.versions import Libraries
from whichlora.tracer.extrapolate import TracedEvent
from whichlora.tracer.fake_weights import place_fake
from whichlora.tracer.like_cuda import Device, like_cuda
from whichlora.tracer.recorder import Recorder, _calls, _quant_tensors

_CAPABILITY = "8.0"  # of the traced device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """A model as one rank trains it.

    Args:
        autocast: whether the forward runs under autocast.
        accumulating: what surrounds a micro-step whose gradients are not sent.
        clip: what clips the gradients of `parameters()`; None: torch's function.
        on_host: what surrounds the steps where parameters, gradients and states are on the host,
            whose tensors it takes from the recorder. None: they are on the GPU.
    """

    model: nn.Module
    autocast: bool = False
    accumulating: Callable[[], AbstractContextManager[Any]] = nullcontext
    clip: Callable[[], Any] | None = None
    on_host: Callable[[RankRecorder], AbstractContextManager[None]] | None = None


Wrap = Callable[[nn.Module, Any], Wrapped]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """Storages of one rank.

    Args:
        peak_bytes: of the second step, by moment; "rest": between the steps.
        sent: of that step, by collective: messages, and bytes of the whole tensors.
    """

    events: list[TracedEvent]
    peak_bytes: dict[str, int]
    alive_at_peak: dict[str, dict[str, int]]
    sent: dict[str, tuple[int, int]]


_COLLECTIVES = {  # and which argument is the whole tensor
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),  # version 1 of FSDP on a CPU
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
}


@contextmanager
def fake_group(
    size: int, shape: Sequence[int] = (), names: Sequence[str] = (), *, rank: int = 0
) -> Iterator[Any]:
    """The device mesh of `size` ranks of which this process plays one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(shape) or (size,), mesh_dim_names=tuple(names) or None)
    finally:
        dist.destroy_process_group()


def trace_rank(
    run: RunConfig,
    model_config: Mapping[str, Any],
    wrap: Wrap,
    *,
    mesh: Any,
    target_modules: Sequence[str] | str,
    sync_each_batch: bool = False,
    quant_storage: str = "uint8",
    prepared: Callable[[nn.Module], None] = lambda _: None,
) -> RankTrace:
    """Storages of the first rank of `mesh`, in the steps that the Trainer makes.

    Args:
        wrap: what the strategy makes of the loaded model, called inside the fake mode.
        quant_storage: the dtype whose elements hold 4-bit codes.
        prepared: what is done to the model before.
    """
    run = with_defaults(run)
    with ExitStack() as patches:
        model = meta_model(run, model_config, device="cpu", quant_storage=quant_storage)
        fake = patches.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        patches.enter_context(like_cuda(Device(compute_capability=_CAPABILITY)))
        place_fake(model, stored_dtype(run))
        patches.enter_context(_states_kept_by_modules(model))
        model = without_cpu_packing(finished_model(model, run, target_modules))
        prepared(model)
        if run.gradient_checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": bool(run.use_reentrant)}
            )
            model.enable_input_require_grads() if _has_frozen_input(model) else None
        product = "fp32" if run.precision in FP32_PRECISIONS else "bf16"
        fused_rows = Libraries().fused_4bit_rows("cuda", _CAPABILITY, product)
        recorder = RankRecorder(run, fused_rows)
        patches.enter_context(recorder.uncounted_propagation(fake))
        wrapped = wrap(model, mesh)
        recorder.watch(wrapped.model)
        if wrapped.on_host is not None:
            patches.enter_context(wrapped.on_host(recorder))
            for parameter in wrapped.model.parameters():
                if parameter is not local(parameter):  # else it is not sharded
                    recorder.leave(parameter)
        with recorder:
            take_steps(wrapped, run, recorder, sync_each_batch)
        recorder.close()
    return recorder.result()


@contextmanager
def _states_kept_by_modules(model: nn.Module) -> Iterator[None]:
    """4-bit layers that are gathered find the scales of their weight where bitsandbytes has them.

    Source: bitsandbytes 0.50.2 `fix_4bit_weight_quant_state_from_module`, whose `Params4bit` shares
    the gathered storage; it can't be made of a fake tensor. PEFT and accelerate ask for its name.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            weight: Any = module.weight
            module.quant_state = weight.quant_state
            copied = {"__deepcopy__": lambda weight, _: weight}  # by DoRA as it starts
            weight.__class__ = type("Params4bit", (type(weight),), copied)

    def fixed(module: Any) -> None:
        assert module.weight.shape[1] == 1
        module.weight.quant_state = module.quant_state

    library = "bitsandbytes.nn.modules"
    with (
        mock.patch(f"{library}.fix_4bit_weight_quant_state_from_module", fixed),
        mock.patch(f"{library}.QuantState.as_dict", return_value={}),  # reads values
    ):
        yield


def _has_frozen_input(model: nn.Module) -> bool:
    return not all(parameter.requires_grad for parameter in model.parameters())


class RankRecorder(Recorder):
    """A recorder that starts with what the wrapped model holds, and names its own moments."""

    def __init__(self, run: RunConfig, fused_rows: int) -> None:
        super().__init__([], run, fused_rows=fused_rows)
        self._paused = 0
        self.step = 0
        self._live_bytes = 0
        self.phase = "rest"
        self._bytes_of: dict[int, tuple[int, str]] = {}
        self.peaks: dict[str, int] = {}
        self.alive: dict[str, dict[str, int]] = {}
        self.sent: dict[str, tuple[int, int]] = {}
        self._on_host: dict[int, Any] = {}  # references to storages, by key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # it is the tensor that was waited for; a fake one would be another
        if func.namespace == "c10d" and self.step:
            name, index = _COLLECTIVES.get(func._opname, (func._opname, 0))
            count, num_bytes = self.sent.get(name, (0, 0))
            num_bytes += sum(local(x).nbytes for x in torch.utils._pytree.tree_leaves(args[index]))
            self.sent[name] = count + 1, num_bytes
        return super().__torch_dispatch__(func, types, args, kwargs)

    def watch(self, model: nn.Module) -> None:
        self._moment = "load"
        tensors = [(name, local(parameter)) for name, parameter in model.named_parameters()]
        tensors += [(name, local(buffer)) for name, buffer in model.named_buffers()]
        for module in model.modules():
            if isinstance(module, Linear4bit):
                tensors += [("quant state", part) for part in _quant_tensors(module.quant_state)]
        for name, tensor in tensors:
            self._born(tensor, f"weight {name}", None)
        self._moment = "step"
        self._in_model = 1
        head = model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(self._head_entered)

    def _head_entered(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        if torch._C._current_graph_task_id() != -1 or not args[0].requires_grad:
            return
        self.phase = "loss"
        args[0].register_hook(lambda _: setattr(self, "phase", "layers_backward"))

    @contextmanager
    def uncounted_propagation(self, fake: Any) -> Iterator[None]:
        """DTensor learns shapes from fake tensors of the global size, which nobody allocates."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            self._resized(storage, size)
            return resize(storage, size)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
            # version 1 of FSDP compares addresses, which fake storages lack
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", _address))
            stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", _tensor_address))
            for name in ("_propagate_tensor_meta_non_cached", "propagate_tensor_meta"):
                method = getattr(ShardingPropagator, name, None)
                if method is None:
                    continue
                stack.enter_context(
                    mock.patch.object(ShardingPropagator, name, self._uncounted(method))
                )
            yield

    def _resized(self, storage: Any, size: int) -> None:
        """FSDP frees and allocates the storages of gathered parameters, whose tensors it keeps."""
        key = storage._cdata
        if key in self._live:
            self._died(key, None)
        if size:
            number = self._write_birth(size, "gathered", None)
            self._live[key] = (number, None, weakref.ref(storage, _calls(self._died, key)))

    def _died(self, key: int, reference: Any) -> None:
        if key in self._live:
            super()._died(key, reference)

    def leave(self, tensor: torch.Tensor) -> None:
        """Count `tensor` no more, which is in host memory."""
        storage = local(tensor).untyped_storage()
        key = storage._cdata
        if key not in self._on_host:
            self._died(key, None)
            self._on_host[key] = weakref.ref(storage, _calls(self._on_host.pop, key))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is made here is made on the host."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _uncounted(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.uncounted():
                return method(*args, **kwargs)

        return call

    def _note(self, tensor: torch.Tensor, func: Any, args: Any, index: int) -> None:
        tensor = local(tensor)
        is_counted = not self._paused and tensor.device.type != "meta"
        if is_counted and tensor.untyped_storage()._cdata not in self._on_host:
            super()._note(tensor, func, args, index)

    def _place(self) -> tuple[int | None, str]:
        return None, self.phase

    def _write_birth(self, num_bytes: int, operator: str, owner: int | None) -> int:
        number = super()._write_birth(num_bytes, operator, owner)
        self._bytes_of[number] = num_bytes, operator
        self._live_bytes += num_bytes
        self.measure()
        return number

    def measure(self) -> None:
        if self.step and self._live_bytes > self.peaks.get(self.phase, 0):
            self.peaks[self.phase] = self._live_bytes
            self.alive[self.phase] = dict(self._snapshot())

    def _snapshot(self) -> Iterator[tuple[str, int]]:
        total: dict[str, int] = {}
        for num_bytes, operator in self._bytes_of.values():
            key = f"{operator} {num_bytes}"
            total[key] = total.get(key, 0) + num_bytes
        return iter(total.items())

    def _write_death(self, number: int, owner: int | None) -> None:
        super()._write_death(number, owner)
        if number in self._bytes_of:
            self._live_bytes -= self._bytes_of.pop(number)[0]

    def _added_in_place(self, key: int) -> bool:
        before = self._next_storage
        made = self._sum[0] if self._sum is not None else None
        number = self._live[made][0] if made in self._live else before
        merged = super()._added_in_place(key)
        if merged and number in self._bytes_of:
            self._live_bytes -= self._bytes_of.pop(number)[0]
        return merged

    def result(self) -> RankTrace:
        return RankTrace(
            events=self.events, peak_bytes=self.peaks, alive_at_peak=self.alive, sent=self.sent
        )


def _address(storage: Any) -> int:
    return int(storage._cdata) if storage.nbytes() else 0


def _tensor_address(tensor: torch.Tensor) -> int:
    start = _address(tensor.untyped_storage())
    return start + tensor.storage_offset() * tensor.element_size() if start else 0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank holds."""
    held = getattr(tensor, "_local_tensor", tensor)
    return getattr(held, "elem", held)


def take_steps(
    wrapped: Wrapped, run: RunConfig, recorder: RankRecorder, sync_each_batch: bool
) -> None:
    """Two optimizer steps as the Trainer makes them, of which the second is measured."""
    model = wrapped.model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained, run)
    for step in range(2):
        recorder.step = step
        num_micro = run.gradient_accumulation_steps
        for micro in range(num_micro):
            recorder.phase = "forward"
            ids = torch.zeros(run.batch_size, run.seq_len, dtype=torch.long)
            batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
            mask = torch.ones_like(ids)
            if run.images:
                batch = dict(with_fields(model.config, run, batch))
            for tensor in (mask, *batch.values()):
                recorder._born(tensor, "input", None)
            cast = torch.autocast("cpu", torch.bfloat16) if wrapped.autocast else nullcontext()
            waits = micro < num_micro - 1 and not sync_each_batch
            with wrapped.accumulating() if waits else nullcontext():
                with cast:
                    loss = model(**batch, num_items_in_batch=torch.tensor(1)).loss
                loss = loss / num_micro
                recorder.phase = "loss_backward"
                loss.backward()
            del loss
        recorder.phase = "optimizer"
        with nullcontext() if wrapped.on_host is None else recorder.uncounted():
            (wrapped.clip or (lambda: nn.utils.clip_grad_norm_(trained, 1.0)))()
            optimizer.step()
        model.zero_grad()
        recorder.phase = "rest"
        recorder.measure()


def make_optimizer(parameters: list[nn.Parameter], run: RunConfig) -> Any:
    if run.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3)
    return torch.optim.AdamW(
        parameters,
        lr=1e-3,
        weight_decay=0.0,
        foreach=run.optimizer == "adamw_torch",
        fused=run.optimizer == "adamw_torch_fused",
    )
