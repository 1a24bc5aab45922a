"""Record every birth and death of a storage in a job, and where it happens."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from whichlora.methods import get_method
from whichlora.spec.run import RunConfig
from whichlora.tracer.extrapolate import TracedEvent
from whichlora.tracer.like_cuda import makes_host_tensors
from whichlora.trainers import get_trainer


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Writes down the births and deaths of storages on the device, and where they happen.

    Storages are recorded, not their tensors. Memory that an operator allocates and frees inside is
    not seen, apart from `_temporary_bytes`.

    Args:
        fused_rows: as of `Libraries.fused_4bit_rows`.
    """

    def __init__(
        self, layers: Sequence[tuple[str, nn.Module]], run: RunConfig, *, fused_rows: int = 0
    ) -> None:
        super().__init__()
        self._run = run
        self._fused_rows = fused_rows
        self._prefix = get_method(run.method).parameter_prefix
        trainer = get_trainer(run.trainer)
        self._scored = trainer.scored_tokens(run)
        self._tells_unwanted = trainer.rows == "labelled"
        self._unwanted: torch.Tensor | None = None  # a mask of the answers that are not wanted
        self.events: list[TracedEvent] = []
        self._layers = layers
        self._live: dict[int, tuple[int, int | None, weakref.ref[Any]]] = {}
        self._next_storage = 0
        self._moment = "load"
        self._layer: int | None = None
        self._layer_task = -1  # the backward pass in which `_layer` was entered
        self._in_model = self._num_forwards = 0
        self._last_owner: int | None = None
        self._drawn: int | None = None  # storage of a random number, then of what it is compared to
        self._sum: tuple[int, int] | None = None  # storages of a sum just made, of what it adds to
        self._has_numbers = bool(run.images or run.audios)
        self._closed = False
        self._global_hooks: tuple[Any, ...] = ()

    # The current layer and moment.

    def watch(self, model: nn.Module) -> None:
        """Follow `model` through its layers, forward and backward, and through optimizers."""
        self._moment = "step"
        model.register_forward_pre_hook(self._model_entered, with_kwargs=True)
        model.register_forward_hook(self._model_left, always_call=True)
        if getattr(model.config, "is_encoder_decoder", False):  # `generate` calls it by itself
            model.get_encoder().register_forward_pre_hook(self._unmasked, with_kwargs=True)
        for index, (_, layer) in enumerate(self._layers):
            layer.register_forward_pre_hook(_calls(self._layer_entered, index))
            layer.register_forward_hook(_calls(self._layer_left, index))
        self._global_hooks = (
            register_optimizer_step_pre_hook(lambda *_: setattr(self, "_moment", "optimizer")),
            register_optimizer_step_post_hook(lambda *_: setattr(self, "_moment", "step")),
        )

    def _model_entered(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        self._in_model += 1
        self._num_forwards += 1
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):  # now the inputs are on the device
                self._born(tensor, "input", None)
        return self._unmasked(model, args, kwargs)

    def _unmasked(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """transformers drops a mask of ones after reading it; a fake mask has no values to read."""
        drop = "attention_mask" in kwargs and self._run.padding == "none"
        return args, kwargs | {"attention_mask": None} if drop else kwargs

    def _model_left(self, *_: Any) -> None:
        self._in_model -= 1

    def _layer_entered(self, index: int, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # else it is recomputed in its backward
            self._layer, self._layer_task = index, -1

    def _layer_left(self, index: int, layer: Any, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        if index == len(self._layers) - 1:
            self._layer = None
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(_calls(self._backward_entered, index))

    def _backward_entered(self, index: int, *_: Any) -> None:
        self._layer, self._layer_task = index, torch._C._current_graph_task_id()

    def _place(self) -> tuple[int | None, str]:
        """The layer that runs, and the moment."""
        task = torch._C._current_graph_task_id()
        if (self._layer_task == -1) != (task == -1):  # its forward or backward is over
            self._layer = None
        self._layer_task = task  # reentrant checkpointing runs a pass inside another
        if self._moment != "step":
            return self._layer, self._moment
        return self._layer, "forward" if task == -1 else "backward"

    # Births and deaths.

    def note_loaded(self, model: nn.Module) -> None:
        """The weights in the order of loading, then the adapters."""
        base: list[tuple[str, torch.Tensor]] = []
        adapters: list[tuple[str, torch.Tensor]] = []
        for name, module in model.named_modules():
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    trains = tensor.requires_grad and self._prefix and self._prefix in name
                    kind = adapters if trains else base
                    kind.append((f"{name}.{leaf}", tensor))
                    state = getattr(tensor, "quant_state", None)
                    kind += [(f"{name}.{leaf}", part) for part in _quant_tensors(state)]
            state = getattr(module, "quant_state", None)  # of experts that are expanded when read
            base += [(name, part) for part in _quant_tensors(state)]
        for index, (name, tensor) in enumerate((*base, *adapters)):
            if index == len(base):
                self._moment = "adapters"
            owner = self._owner_of_name(name)
            state = getattr(tensor, "quant_state", None)
            if state is not None:  # quantised on the device, from the dtype of the model
                wide = state.shape.numel() * state.dtype.itemsize
                self._write_death(self._write_birth(wide, "weight to be quantised", owner), owner)
            self._born(tensor, name, owner)

    def _owner_of_name(self, name: str) -> int | None:
        for index, (layer_name, _) in enumerate(self._layers):
            if name.startswith(f"{layer_name}."):
                return index
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return self._placeholder_value(args[0])
        routed = _chosen_in_turn(func, args)
        if routed is not None:
            self._has_numbers = True
            self._note(routed, func, args, -1)
            return routed
        if self._has_numbers and _reads_numbers(func, args, kwargs or {}):
            with unset_fake_temporarily():
                result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, list | tuple) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor, func, args, -1)
            return result
        chosen = _chosen_by_mask(func, args, self._scored, self._unwanted)
        if chosen is not None:
            self._note(chosen, func, args, -1)
            return chosen
        args = _with_equal_parts(func, args)
        temporary_bytes = _temporary_bytes(func, args, kwargs or {}, self._fused_rows)
        temporary = self._write_birth(temporary_bytes, str(func), None) if temporary_bytes else 0
        result = func(*args, **(kwargs or {}))
        if _draws(func, args, result, self._drawn):
            self._drawn = _storage_of(result)
        if func is torch.ops.aten.bitwise_not.default and self._tells_unwanted and result.ndim == 1:
            self._unwanted = result
        if func is torch.ops.aten.lift_fresh.default:
            return result  # `torch.tensor(1.0)`: stays on the host
        self._sum = None
        if isinstance(result, torch.Tensor):
            self._note(result, func, args, -1)
            self._note_sum(result, func, args)
        elif isinstance(result, list | tuple):
            for index, tensor in enumerate(result):
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor, func, args, index)
        if temporary:  # freed once the result exists
            self._write_death(temporary, None)
        return result

    def _placeholder_value(self, tensor: torch.Tensor) -> bool | int | float:
        """A number for code that asks a fake tensor for its value.

        In training it is asked whether a padding mask is all ones; in generation, whether every
        sequence is finished. PEFT's LyCORIS layers draw whether they are dropped: never.
        """
        if tensor.dtype == torch.bool and _storage_of(tensor) == self._drawn:
            return True
        if tensor.dtype == torch.bool:
            generating = self._run.phase == "inference"
            return generating and self._num_forwards >= self._run.max_new_tokens
        return 1.0 if tensor.is_floating_point() else 1

    def _note(self, tensor: torch.Tensor, func: Any, args: Any, index: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._live or not storage.nbytes():
            return
        layer, moment = self._place()
        # `generate` calls a tower by itself, with a mask that is on the device
        of_batch = self._run.phase == "finetune" or tensor.numel() < _FEWEST_PIXELS
        is_inside = moment != "forward" or self._in_model
        if of_batch and not is_inside and not tensor.is_floating_point():
            return  # a batch in the making, on the host
        owner = layer if layer is not None else self._owner_of_args(args, index, moment)
        if makes_host_tensors() and self._run.phase == "finetune":
            self._last_owner = owner
            return
        self._born(tensor, str(func), owner)

    def _owner_of_args(self, args: Any, index: int, moment: str) -> int | None:
        """The layer that owns an operator's input; of a list, the input at the result's index."""
        for arg in args:
            tensor = arg
            if isinstance(arg, list | tuple):
                tensor = arg[index] if 0 <= index < len(arg) else None
            if isinstance(tensor, torch.Tensor):
                live = self._live.get(tensor.untyped_storage()._cdata)
                return None if live is None else live[1]
        return self._last_owner if moment == "optimizer" else None

    def _born(self, tensor: torch.Tensor, operator: str, owner: int | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or not storage.nbytes():
            return
        number = self._write_birth(storage.nbytes(), operator, owner)
        self._live[key] = (number, owner, weakref.ref(storage, _calls(self._died, key)))

    def _write_birth(self, num_bytes: int, operator: str, owner: int | None) -> int:
        layer, moment = self._place()
        self._next_storage += 1
        number = self._next_storage
        where = owner if layer is None else layer
        self._last_owner = where
        self.events.append(
            TracedEvent(number, num_bytes, where, layer is not None, moment, operator)
        )
        return number

    def _note_sum(self, result: torch.Tensor, func: Any, args: Any) -> None:
        """Remember a sum of two gradients; see `_added_in_place`."""
        in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if not in_backward or func not in _IN_PLACE:
            return
        first = args[0]
        if not isinstance(first, torch.Tensor) or first._is_view() or first.dtype != result.dtype:
            return  # a view's base holds its storage, too
        made, read = (tensor.untyped_storage()._cdata for tensor in (result, first))
        if made in self._live and read in self._live:
            self._sum = made, read

    def _added_in_place(self, key: int) -> bool:
        """Whether autograd would have reused the dying storage for a sum of gradients.

        Autograd adds a gradient in place to the waiting one if nothing else holds that; but never
        to a fake tensor. So a sum whose first operand dies at once is made in that operand.
        Source: torch 2.13 `InputBuffer::accumulate`.
        """
        if self._sum is None or self._sum[1] != key:
            return False
        made, _ = self._sum
        number, _, reference = self._live[made]
        if self.events[-1].storage != number:
            return False
        self.events.pop()
        old_number, owner, _ = self._live.pop(key)
        self._live[made] = old_number, owner, reference
        self._sum = None
        return True

    def _died(self, key: int, _: Any) -> None:
        if self._closed or self._added_in_place(key):
            return
        number, owner, _ = self._live.pop(key)
        self._write_death(number, owner)

    def _write_death(self, number: int, owner: int | None) -> None:
        layer, moment = self._place()
        where = owner if layer is None else layer
        self.events.append(TracedEvent(number, None, where, layer is not None, moment))

    def close(self) -> None:
        """Stop recording: storages that die from now on outlive the trace."""
        self._closed = True
        for hook in self._global_hooks:
            hook.remove()


_FEWEST_PIXELS = 100_000  # of a mask; positions of tokens are fewer

# `gather_backward` of FunctionsManual.cpp scatters in place, but for subclasses of a tensor
_IN_PLACE = (torch.ops.aten.add.Tensor, torch.ops.aten.scatter_add.default)


def _calls(function: Any, first: Any) -> Any:
    """`function` with its first argument; a hook's result must be None."""

    def call(*args: Any) -> None:
        function(first, *args)

    return call


def _reads_numbers(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator has real integers alone, which are so few that they keep their values.

    Sizes of images decide how patches are split: code asks for them as Python numbers.
    """
    dtype = kwargs.get("dtype")
    if dtype is not None and (dtype.is_floating_point or dtype.is_complex):
        return False
    leaves = torch.utils._pytree.tree_leaves((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:  # a factory
        is_range = func.overloadpacket in (torch.ops.aten.arange, torch.ops.aten.randint)
        return is_range or dtype is not None
    to_integers = dtype is not None  # positions times an interval, which Qwen2-VL rounds
    return not any(
        isinstance(tensor, FakeTensor) or (tensor.is_floating_point() and not to_integers)
        for tensor in tensors
    )


def _chosen_in_turn(func: Any, args: Any) -> torch.Tensor | None:
    """The expert of each token, which fake scores can't tell: one after the other."""
    if func is not torch.ops.aten.argmax.default or args[0].ndim != 3:  # of words it has two
        return None
    *rows, num_experts = args[0].shape
    with unset_fake_temporarily():
        return (torch.arange(math.prod(rows)) % num_experts).view(rows)


def _chosen_by_mask(
    func: Any, args: Any, scored: int | None, unwanted: torch.Tensor | None
) -> torch.Tensor | None:
    """What a mask chooses, which a fake one can't tell: everything, as of a batch without padding.

    Args:
        scored: positions of a sequence that are chosen, where a trainer scores a part of it.
        unwanted: a mask that chooses nothing: all answers of a batch are wanted.
    """
    if func is torch.ops.aten.masked_scatter_backward.default:
        return args[0].new_empty(args[2])
    if func is torch.ops.aten.nonzero.default:
        mask = args[0]
        rows = _num_chosen(mask, scored) * (mask is not unwanted)
        return torch.zeros((rows, mask.ndim), dtype=torch.long, device=mask.device)
    if func is not torch.ops.aten.index.Tensor or len(args[1]) != 1:
        return None
    tensor, (mask,) = args
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return None
    rows = _num_chosen(mask, scored) * (mask is not unwanted)
    keeps = nullcontext() if isinstance(tensor, FakeTensor) else unset_fake_temporarily()
    with keeps:  # a mask of pixels has values
        return tensor.flatten(0, mask.ndim - 1)[:rows].clone()


def _with_equal_parts(func: Any, args: Any) -> Any:
    """`args` with parts of one size, where a fake tensor stood for their sizes: images of a row."""
    if func is not torch.ops.aten.split_with_sizes.default:
        return args
    tensor, sizes, *dim = args
    length = int(tensor.shape[dim[0] if dim else 0])
    if sum(sizes) == length or length % len(sizes):
        return args
    return (tensor, [length // len(sizes)] * len(sizes), *dim)


def _num_chosen(mask: torch.Tensor, scored: int | None) -> int:
    if not isinstance(mask, FakeTensor):  # the places of images
        with unset_fake_temporarily():
            return int(mask.sum())
    if scored is None or mask.ndim != 2:
        return int(mask.numel())
    rows, columns = mask.shape
    return int(rows) * min(scored, int(columns))


_MASKED_SCATTER = (torch.ops.aten.masked_scatter.default, torch.ops.aten.masked_scatter_.default)


def _temporary_bytes(func: Any, args: Any, kwargs: Mapping[str, Any], fused_rows: int) -> int:
    """Bytes that an operator allocates and frees inside, where its library's code says so.

    Source: bitsandbytes 0.50.2 `_dequant_linear_fallback`: above a number of rows that depends on
    the GPU, a 4-bit product expands its weight to the dtype of the input first, and scales that
    are quantised themselves to fp32, without their offset and with it. torch 2.13 `_safe_softmax`:
    a byte for each score that is -inf or not; its backward on CUDA, `softmax_backward_cuda_out`:
    the product of gradient and result. `masked_scatter__cuda` of IndexKernel.cpp: for each element
    a position and, laid out, the mask. `host_softmax` of SoftMax.cu makes its input contiguous.
    """
    if func is torch.ops.aten._safe_softmax.default:
        return int(args[0].numel())
    if func in _MASKED_SCATTER:
        return (8 + 1) * int(args[0].numel())
    if func is torch.ops.aten._log_softmax.default:
        of_view = not args[0].is_contiguous()
        return int(args[0].numel() * args[0].element_size()) if of_view else 0
    if func is torch.ops.aten._softmax_backward_data.default:
        node = torch._C._current_autograd_node()
        in_math_kernel = node is not None and node.name() == "SafeSoftmaxBackward0"
        return int(args[0].numel() * args[0].element_size()) if in_math_kernel else 0
    if str(func) != "bitsandbytes.gemm_4bit.default":
        return 0
    rows = args[0].numel() // args[0].shape[-1]
    if rows <= fused_rows:
        return 0
    out_features, in_features = args[2]
    names = (argument.name for argument in func._schema.arguments)
    scales = {**dict(zip(names, args, strict=False)), **kwargs}.get("absmax_8bit")
    of_scales = 0 if scales is None else 2 * 4 * scales.numel()
    return int(out_features * in_features * args[0].element_size()) + of_scales


def _draws(func: Any, args: Any, result: Any, drawn: int | None) -> bool:
    """Whether `result` is one random number, or the comparison of the one that was drawn."""
    if func is torch.ops.aten.gt.Scalar:
        return _storage_of(args[0]) == drawn
    return func is torch.ops.aten.rand.default and bool(result.numel() == 1)


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _quant_tensors(state: Any) -> Iterator[torch.Tensor]:
    if state is None:
        return
    for name in ("absmax", "code", "offset"):
        value = getattr(state, name, None)
        if isinstance(value, torch.Tensor):
            yield value
    yield from _quant_tensors(getattr(state, "state2", None))
