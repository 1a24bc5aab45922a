"""The real code of one job on fake tensors: every storage's birth and death, without weights.

Runs the code that profiling runs (`finetune.py`, `inference.py`), so a trace and a measurement
never differ by what they do. `python -m whichlora.device.trace` answers one JSON request from
stdin; `tracer.py` asks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from whichlora.device.build import _fp32_names, _model_config, finished_model, meta_model
from whichlora.device.finetune import measure_finetune
from whichlora.device.inference import measure_inference
from whichlora.device.like_cuda import like_cuda, makes_host_tensors, with_flash_attention
from whichlora.device.meter import Meter
from whichlora.errors import ConfigError, WhichLoraError
from whichlora.memory.replay import replay
from whichlora.memory.stretch import (
    DEPTH_KEYS,
    TRACED_LAYERS,
    DoesNotRepeatError,
    TracedEvent,
    at_peak,
    check_growth,
    shallow,
    stretch,
    with_warm_up,
)
from whichlora.methods import get_method, with_defaults
from whichlora.specs import Precision, RunConfig

_KINDS = ("layer_types", "mlp_layer_types", "no_rope_layers")  # what may differ from layer to layer
_STAND_INS: dict[str, Precision] = {"fp16": "bf16", "tf32": "fp32"}  # of equal bytes, on a CPU
_FUSED_GEMM_ROWS = 1536  # bitsandbytes 0.50 expands the 4-bit weight above this on every GPU


def trace(
    run: RunConfig,
    model_config: Mapping[str, Any],
    *,
    target_modules: Sequence[str] | str,
    num_layers: int | None = None,
) -> list[TracedEvent]:
    """Storages of `run`, from loading to the end of the second step or of one generation.

    Args:
        num_layers: how many layers the traced model has; None for all.

    Raises:
        DoesNotRepeatError: fewer layers are asked for than the model has, and it has no list of
            them (ALBERT runs one again and again).
    """
    run = with_defaults(run)
    config = dict(model_config) if num_layers is None else shallow(model_config, num_layers)
    if run.attn == "flash_attention_2" and run.padding == "padded":
        raise ConfigError(
            "attn: flash_attention_2 of padded batches can't be traced, it counts their tokens; "
            "use engine ledger, or padding none"
        )
    if run.cache_format is not None and run.cache_format.backend != "fp8":
        raise ConfigError(
            f"cache_backend: {run.cache_backend} can't be traced, its operators look at values; "
            "use engine ledger, or cache_backend fp8"
        )
    # fp16 has no CPU kernels in some places, and the bytes of bf16.
    stand_in = dataclasses.replace(run, precision=_STAND_INS.get(run.precision, run.precision))
    weights = run if run.has_master_weights else stand_in
    with ExitStack() as patches:
        if run.attn == "flash_attention_2":
            patches.enter_context(with_flash_attention())
        model = meta_model(weights, config, device="cpu")
        patches.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        patches.enter_context(like_cuda())
        place_fake(model, getattr(torch, weights.weight_dtype))
        model = finished_model(model, stand_in, target_modules)
        for module in model.modules():
            if hasattr(module, "state") and hasattr(module.state, "threshold"):
                module.state.threshold = 0.0  # how many columns stand out depends on values
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # repacks 4-bit weights for a CPU
        layers = _layers(model)
        if num_layers is not None and not layers:
            raise DoesNotRepeatError("the model has no list of them")
        recorder = Recorder(layers, run)
        recorder.note_loaded(model)
        recorder.watch(model)
        with recorder:
            if run.phase == "inference":
                measure_inference(model, stand_in, _NoMeter(), 0)
            else:
                measure_finetune(model, stand_in, _NoMeter(), [run.seq_len])
        recorder.close()
    return recorder.events


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Writes down the births and deaths of storages on the device, and where they happen.

    A storage is known by itself, not by one of its tensors. Memory that an operator takes and
    gives back is not seen, `_taken_inside` apart.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], run: RunConfig) -> None:
        super().__init__()
        self._run = run
        self.events: list[TracedEvent] = []
        self._layers = layers
        self._live: dict[int, tuple[int, int | None, weakref.ref[Any]]] = {}
        self._next_storage = 0
        self._moment = "load"
        self._layer: int | None = None
        self._layer_task = -1  # the backward pass in which `_layer` was entered
        self._in_model = self._num_forwards = 0
        self._last_owner: int | None = None
        self._sum: tuple[int, int] | None = None  # storages of a sum just made, of what it adds to
        self._closed = False
        self._global_hooks: tuple[Any, ...] = ()

    # Where we are.

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
        """A mask of ones is dropped by looking at it; a fake one has no values to look at."""
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

    # What happens.

    def note_loaded(self, model: nn.Module) -> None:
        """The weights in the order of loading, then the adapters."""
        base: list[tuple[str, torch.Tensor]] = []
        adapters: list[tuple[str, torch.Tensor]] = []
        for name, module in model.named_modules():
            for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    kind = adapters if tensor.requires_grad and "lora" in name else base
                    kind.append((f"{name}.{leaf}", tensor))
                    state = getattr(tensor, "quant_state", None)
                    kind += [(f"{name}.{leaf}", one) for one in _quant_tensors(state)]
        for index, (name, tensor) in enumerate((*base, *adapters)):
            if index == len(base):
                self._moment = "adapters"
            owner = self._owner_of_name(name)
            state = getattr(tensor, "quant_state", None)
            if state is not None:  # quantised on the device, from the dtype of the model
                wide = state.shape[0] * state.shape[1] * state.dtype.itemsize
                self._write_death(self._write_birth(wide, "weight to be quantised", owner), owner)
            self._born(tensor, name, owner)

    def _owner_of_name(self, name: str) -> int | None:
        for index, (layer_name, _) in enumerate(self._layers):
            if name.startswith(f"{layer_name}."):
                return index
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._made_up(args[0])
        inside = _taken_inside(func, args, kwargs or {})
        taken = self._write_birth(inside, str(func), None) if inside else 0
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:
            return result  # `torch.tensor(1.0)`: stays on the host
        self._sum = None
        if isinstance(result, torch.Tensor):
            self._note(result, func, args, -1)
            self._note_sum(result, func, args)
        elif isinstance(result, list | tuple):
            for index, one in enumerate(result):
                if isinstance(one, torch.Tensor):
                    self._note(one, func, args, index)
        if taken:  # given back when the result is there
            self._write_death(taken, None)
        return result

    def _made_up(self, tensor: torch.Tensor) -> bool | int | float:
        """A number for code that asks a fake tensor for its value.

        In training it is asked whether a padding mask is all ones; in generation, whether every
        sequence is finished.
        """
        if tensor.dtype == torch.bool:
            generating = self._run.phase == "inference"
            return generating and self._num_forwards >= self._run.max_new_tokens
        return 1.0 if tensor.is_floating_point() else 1

    def _note(self, tensor: torch.Tensor, func: Any, args: Any, index: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._live or not storage.nbytes():
            return
        layer, moment = self._place()
        if moment == "forward" and not self._in_model and not tensor.is_floating_point():
            return  # a batch in the making, on the host
        owner = layer if layer is not None else self._owner_of_args(args, index, moment)
        if makes_host_tensors():
            self._last_owner = owner
            return
        self._born(tensor, str(func), owner)

    def _owner_of_args(self, args: Any, index: int, moment: str) -> int | None:
        """The layer that owns what an operator reads: of a list, what the result comes from."""
        for arg in args:
            one = arg
            if isinstance(arg, list | tuple):
                one = arg[index] if 0 <= index < len(arg) else None
            if isinstance(one, torch.Tensor):
                found = self._live.get(one.untyped_storage()._cdata)
                return None if found is None else found[1]
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
        if not in_backward or func is not torch.ops.aten.add.Tensor:
            return
        first = args[0]
        if not isinstance(first, torch.Tensor) or first._is_view() or first.dtype != result.dtype:
            return  # a view's base holds its storage, too
        made, read = (one.untyped_storage()._cdata for one in (result, first))
        if made in self._live and read in self._live:
            self._sum = made, read

    def _added_in_place(self, key: int) -> bool:
        """Whether the storage that dies is one that autograd would have gone on in.

        Autograd adds a gradient to the one that waits, in place where nobody else holds that one;
        but never to a fake tensor. So a sum whose first part dies at once was made in that part.
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
        """Write no more: what dies from now on outlives the trace."""
        self._closed = True
        for hook in self._global_hooks:
            hook.remove()


def _calls(function: Any, first: Any) -> Any:
    """`function` with its first argument; a hook's result must be None."""

    def call(*args: Any) -> None:
        function(first, *args)

    return call


def _taken_inside(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Bytes that an operator takes and gives back, where its library's code says so.

    Source: bitsandbytes 0.50.2 `_dequant_linear_fallback`: above a number of rows that depends on
    the GPU, a 4-bit product expands its weight to the dtype of the input first, and scales that
    are quantised themselves to fp32, without their offset and with it.
    """
    if str(func) != "bitsandbytes.gemm_4bit.default":
        return 0
    rows = args[0].numel() // args[0].shape[-1]
    if rows <= _FUSED_GEMM_ROWS:
        return 0
    out_features, in_features = args[2]
    scales = kwargs.get("absmax_8bit")
    of_scales = 0 if scales is None else 2 * 4 * scales.numel()
    return int(out_features * in_features * args[0].element_size()) + of_scales


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder's layers with their names; none where there are two stacks of them."""
    if getattr(model.config, "is_encoder_decoder", False):
        return []
    depth = model.config.get_text_config().num_hidden_layers
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not found:
        return []
    name, stack = max(found, key=lambda one: sum(p.numel() for p in one[1].parameters()))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(stack)]


def _quant_tensors(state: Any) -> Iterator[torch.Tensor]:
    if state is None:
        return
    for name in ("absmax", "code", "offset"):
        value = getattr(state, name, None)
        if isinstance(value, torch.Tensor):
            yield value
    yield from _quant_tensors(getattr(state, "state2", None))


class _NoMeter(Meter):
    """The meter of a run that is not measured: no clock, no counters, no extra run."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.needs_extra_run = False

    def now(self) -> float:
        return 0.0


def place_fake(model: Any, dtype: torch.dtype) -> None:
    """Give every meta tensor of `model` a fake storage, 4-bit and 8-bit layers their packed one.

    `Params4bit` can't hold a fake tensor: a plain parameter with the same attributes takes its
    place, which is all that bitsandbytes' and PEFT's layers ask of it.
    """
    fp32_names = _fp32_names(model, dtype)
    placed: dict[int, nn.Parameter] = {}  # by id of the meta tensor, so that tied weights stay tied
    for module_name, module in model.named_modules():
        for name, meta in list(module._parameters.items()):
            if meta is None:
                continue
            if id(meta) not in placed:
                placed[id(meta)] = _fake_parameter(meta, dtype, f"{module_name}.{name}", fp32_names)
            module._parameters[name] = placed[id(meta)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")


def _fake_parameter(meta: Any, dtype: torch.dtype, name: str, fp32_names: Any) -> nn.Parameter:
    kind = type(meta).__name__
    if kind == "Params4bit":
        return _fake_4bit(meta, dtype)
    if kind == "Int8Params":
        weight = nn.Parameter(torch.empty(meta.shape, dtype=torch.int8), requires_grad=False)
        weight.CB, weight.SCB = weight.data, torch.empty(meta.shape[0])
        weight.has_fp16_weights = False
        return weight
    wide = fp32_names is not None and fp32_names.search(name)
    value = torch.empty(meta.shape, dtype=torch.float32 if wide else meta.dtype, device="cpu")
    return nn.Parameter(value, requires_grad=meta.requires_grad)


def _fake_4bit(meta: Any, dtype: torch.dtype) -> nn.Parameter:
    from bitsandbytes.functional import QuantState

    size, block = meta.numel(), meta.blocksize
    num_blocks = -(-size // block)
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
        absmax, code = torch.empty(-(-num_blocks // 256)), torch.empty(256)
        state.state2 = QuantState(absmax=absmax, blocksize=256, code=code, dtype=torch.float32)
        state.nested = True
    weight = nn.Parameter(torch.empty(-(-size // 2), 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = state
    weight.bnb_quantized = True
    for name in ("quant_type", "compress_statistics", "blocksize", "quant_storage"):
        setattr(weight, name, getattr(meta, name))
    return weight


def whole_trace(
    run: RunConfig,
    model_config: Mapping[str, Any],
    *,
    target_modules: Sequence[str] | str,
    layers: str = "2,4",
) -> tuple[list[TracedEvent], str]:
    """Storages of `run` at its full depth, the loading's warm-up block first, and how they came.

    Four layers are traced and stretched to all, and two as a check of it; `layers` "4" leaves the
    check out, "all" traces every layer. Where the layers do not repeat, all are traced, and the
    note says so.
    """
    note = "every layer traced"
    if layers != "all":
        try:
            depth = _depth(model_config)
            some = trace(run, model_config, target_modules=target_modules, num_layers=TRACED_LAYERS)
            if not any(
                one.inside for one in some
            ):  # ALBERT runs one set of weights again and again
                raise DoesNotRepeatError("no list of layers is in the model")
            stretched = stretch(some, num_layers=depth)
            if layers == "2,4":
                few = trace(
                    run, model_config, target_modules=target_modules, num_layers=TRACED_LAYERS - 2
                )
                check_growth(few, some, stretched, num_layers=depth)
            return with_warm_up(
                stretched
            ), f"{TRACED_LAYERS} of {depth} layers traced and stretched"
        except (DoesNotRepeatError, StopIteration, ValueError) as error:
            note = f"every layer traced: {error or 'no depth in the config'}"
    return with_warm_up(trace(run, model_config, target_modules=target_modules)), note


def peaks(request: Mapping[str, Any]) -> dict[str, Any]:
    """Peaks of a traced job, and what lives at the peak."""
    run = RunConfig.from_dict(request["run"])
    config = request["model_config"]
    events, note = whole_trace(
        run, config, target_modules=request["target_modules"], layers=request["layers"]
    )
    found = replay((one.event for one in events), expandable_segments=run.expandable_segments)
    moment, parts = at_peak(events)
    adapter_bytes = sum(one.num_bytes or 0 for one in events if one.moment == "adapters")
    base = meta_model(dataclasses.replace(run, quant="none"), config, device="cpu")
    num_params = sum(one.numel() for one in base.parameters())
    trained = adapter_bytes // (2 if run.narrows_adapters else 4)
    return {
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "moment": moment,
        "parts": parts,
        "num_params": num_params,
        "num_trainable_params": num_params if _is_full(run) else trained,
        "note": note,
    }


def _is_full(run: RunConfig) -> bool:
    return run.phase == "finetune" and get_method(run.method).trains_base


def _depth(config: Mapping[str, Any]) -> int:
    """Layers of `config`, where four in a row stand for all.

    Raises:
        DoesNotRepeatError: the kinds of layers alternate.
        StopIteration: no key says the depth.
    """
    text = config.get("text_config") or config
    depth = int(next(text[key] for key in DEPTH_KEYS if key in text))
    if _model_config(config).is_encoder_decoder:
        raise DoesNotRepeatError("there are two stacks of them")
    if depth <= TRACED_LAYERS:
        raise DoesNotRepeatError(f"there are {depth}")
    shown = _model_config(config).get_text_config()
    for name in _KINDS:
        kinds = getattr(shown, name, None)
        if isinstance(kinds, list) and len(set(map(str, kinds))) > 1:
            raise DoesNotRepeatError(f"{name} says that they differ")
    return depth


def main() -> None:
    """Answer the request on stdin; stdout belongs to the answer, not to the libraries."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    try:
        answer = peaks(json.load(sys.stdin))
    except WhichLoraError as error:
        answer = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
