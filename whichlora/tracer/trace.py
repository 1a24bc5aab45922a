"""Run the real code of a job on fake tensors: every storage's birth and death, without weights.

Runs the code that profiling runs (`finetune.py`, `inference.py`), so a trace and a measurement
run the same operations. `python -m whichlora.tracer.trace` answers one JSON request from
stdin, which `client.py` sends.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pkgutil import resolve_name
from typing import Any
from unittest import mock

from peft import PeftModel
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from whichlora.errors import ConfigError, WhichLoraError
from whichlora.memory.allocator_simulator import replay
from whichlora.methods import get_method, with_defaults
from whichlora.profiler.build import (
    config_object,
    experts_quantised,
    finished_model,
    meta_model,
    stored_dtype,
    with_efficient_attention,
    without_cpu_packing,
)
from whichlora.profiler.inference import measure_inference
from whichlora.profiler.meter import Meter
from whichlora.spec.dtypes import has_master_weights
from whichlora.spec.run import (
    AUTOCAST_PRECISIONS,
    BNB_QUANTS,
    FP32_PRECISIONS,
    Precision,
    RunConfig,
)
from whichlora.spec.versions import Libraries
from whichlora.tracer.extrapolate import (
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
from whichlora.tracer.fake_weights import place_fake
from whichlora.tracer.like_cuda import Device, like_cuda, with_flash_attention
from whichlora.tracer.like_triton import with_fused_head, with_fused_log_probabilities, with_liger
from whichlora.tracer.recorder import Recorder
from whichlora.tracer.unsloth_experts import adapt_experts, module_targets, pack_experts
from whichlora.trainers import get_trainer

_KINDS = (
    "layer_types",
    "mlp_layer_types",
    "no_rope_layers",
)  # may differ from layer to layer
_STAND_INS: dict[str, Precision] = {  # of equal bytes, on a CPU
    "fp16": "bf16",
    "fp16-pure": "bf16-pure",
    "fp16-no-autocast": "bf16-no-autocast",
    "tf32": "fp32",
}


def trace(
    run: RunConfig,
    model_config: Mapping[str, Any],
    *,
    target_modules: Sequence[str] | str,
    device_kind: str = "cuda",
    compute_capability: str | None = None,
    num_layers: int | None = None,
) -> list[TracedEvent]:
    """Storages of `run`, from loading to the end of the second step or of one generation.

    Args:
        device_kind, compute_capability: of the GPU; they decide which attention kernel runs.
        num_layers: how many layers the traced model has; None for all.

    Raises:
        DoesNotRepeatError: fewer layers are asked for than the model has, and it has no list of
            them (ALBERT runs one again and again).
    """
    run = with_defaults(run)
    config = dict(model_config) if num_layers is None else shallow(model_config, num_layers)
    _check_traceable(run)
    # fp16 has no CPU kernels in some places, and the bytes of bf16.
    stand_in = dataclasses.replace(run, precision=_STAND_INS.get(run.precision, run.precision))
    trains_base = get_method(run.method).trains_base
    weights = run if has_master_weights(run, trains_base=trains_base) else stand_in
    efficient = run.attn == "sdpa-efficient"
    device = Device(
        # a CPU and Gaudi are traced as a card that fuses
        kind="cuda" if device_kind in ("cpu", "hpu") else device_kind,
        compute_capability=compute_capability,
        half="fp16" if run.precision.startswith("fp16") else "bf16",
        pinned="efficient" if efficient else None,
    )
    with ExitStack() as patches:
        for patch in _patches(run):
            patches.enter_context(patch)
        model = meta_model(weights, config, device="cpu")
        trainer = get_trainer(run.trainer)
        if trainer.quantises_experts:
            pack_experts(model, run)
        modules = module_targets(model, target_modules) if trainer.names_experts else target_modules
        with experts_quantised(model, weights):
            patches.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            patches.enter_context(like_cuda(device))
            place_fake(model, stored_dtype(weights))
        model = without_cpu_packing(finished_model(model, stand_in, modules))
        if trainer.names_experts:
            adapt_experts(model, run, target_modules)
        for module in model.modules():
            if hasattr(module, "state") and hasattr(module.state, "threshold"):
                module.state.threshold = 0.0  # how many columns stand out depends on values
        layers = _layers(model)
        if num_layers is not None and not layers:
            raise DoesNotRepeatError("the model has no list of them")
        is_wide = run.precision in FP32_PRECISIONS or run.compute_dtype == "float32"
        product = "fp32" if is_wide else device.half
        fused_rows = Libraries().fused_4bit_rows(device_kind, compute_capability, product)
        recorder = Recorder(layers, run, fused_rows=fused_rows)
        recorder.note_loaded(model)
        # `generate` of a PEFT model calls the model inside, and passes its own forward over
        generates = run.phase == "inference" and isinstance(model, PeftModel)
        recorder.watch(model.get_base_model() if generates else model)
        with recorder:
            if run.phase == "inference":
                measure_inference(model, stand_in, _NoMeter(), 0)
            else:
                measure = resolve_name(get_trainer(run.trainer).steps)
                measure(model, stand_in, _NoMeter(), [run.seq_len])
        recorder.close()
    return recorder.events


def _patches(run: RunConfig) -> Iterator[AbstractContextManager[Any]]:
    """What stands in for values and kernels that fake tensors have not."""
    if run.attn == "sdpa-efficient":
        yield with_efficient_attention()
    if run.padding == "none":  # BART makes its decoder a mask of ones, and asks whether it is one
        yield mock.patch("transformers.masking_utils.fast_all", return_value=True)
    if run.attn == "flash_attention_2":
        yield with_flash_attention()
    trainer = get_trainer(run.trainer)
    if run.loss_head == "trl-fused":
        yield with_fused_head()
    if "use_liger_kernel" in trainer.arguments(run):
        yield with_liger()
    computed = trainer.logits_loss(run) if run.phase == "finetune" else None
    if computed is not None and computed.log_probabilities == "kernel":
        yield with_fused_log_probabilities()


def _check_traceable(run: RunConfig) -> None:
    """Refuse operators that look at values, which tensors without storage lack."""
    if run.attn == "flash_attention_2" and run.padding == "padded":
        raise ConfigError(
            "attn: flash_attention_2 of padded batches can't be traced, it counts their tokens; "
            "use engine ledger, or padding none"
        )
    by_autocast = run.phase == "finetune" and run.precision in AUTOCAST_PRECISIONS
    if run.compute_dtype != "auto" and (by_autocast or run.compute_dtype != "float32"):
        raise ConfigError(
            f"compute_dtype: {run.compute_dtype} can't be traced here, its casts are inside an "
            "operator of bitsandbytes or of equal bytes; use engine ledger"
        )
    if run.cache_format is not None and run.cache_format.backend != "fp8":
        raise ConfigError(
            f"cache_backend: {run.cache_backend} can't be traced, its operators look at values; "
            "use engine ledger, or cache_backend fp8"
        )


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder's layers with their names; none where there are two stacks of them."""
    if getattr(model.config, "is_encoder_decoder", False):
        return []
    depth = model.config.get_text_config().num_hidden_layers
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not stacks:
        return []
    name, layers = max(stacks, key=lambda named: sum(p.numel() for p in named[1].parameters()))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


class _NoMeter(Meter):
    """The meter of a run that is not measured: no clock, no counters, no extra run."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.needs_extra_run = False

    def now(self) -> float:
        return 0.0


def whole_trace(
    run: RunConfig,
    model_config: Mapping[str, Any],
    *,
    target_modules: Sequence[str] | str,
    device_kind: str = "cuda",
    compute_capability: str | None = None,
    layers: str = "2,4",
    loads_at_once: bool = True,
) -> tuple[list[TracedEvent], str]:
    """Storages of `run` at its full depth, and a note.

    Four layers are traced and stretched to all. A trace of two layers checks that, unless `layers`
    is "4"; "all" traces every layer. Where the layers do not repeat, all are traced, and the note
    says so.

    Args:
        loads_at_once: the warm-up block of loading comes first, as of `Dtypes`.
    """
    traced = partial(
        trace,
        run,
        model_config,
        target_modules=target_modules,
        device_kind=device_kind,
        compute_capability=compute_capability,
    )
    note = "every layer traced"
    if layers != "all":
        try:
            depth = _depth(model_config)
            some = traced(num_layers=TRACED_LAYERS)
            if not any(event.inside for event in some):  # ALBERT repeats one set of weights
                raise DoesNotRepeatError("no list of layers is in the model")
            stretched = stretch(some, num_layers=depth)
            if layers == "2,4":
                few = traced(num_layers=TRACED_LAYERS - 2)
                check_growth(few, some, stretched, num_layers=depth)
            note = f"{TRACED_LAYERS} of {depth} layers traced and stretched"
            return with_warm_up(stretched) if loads_at_once else stretched, note
        except (DoesNotRepeatError, StopIteration, ValueError) as error:
            note = f"every layer traced: {error or 'no depth in the config'}"
    return with_warm_up(traced()) if loads_at_once else traced(), note


def peaks(request: Mapping[str, Any]) -> dict[str, Any]:
    """Peaks of a traced job, and the bytes by part at the peak."""
    run = RunConfig.from_dict(request["run"])
    config = request["model_config"]
    events, note = whole_trace(
        run,
        config,
        target_modules=request["target_modules"],
        device_kind=request["device_kind"],
        compute_capability=request["compute_capability"],
        layers=request["layers"],
        loads_at_once=with_defaults(run).quant in BNB_QUANTS,  # as of `Dtypes.loads_at_once`
    )
    allocator = replay(
        (traced.event for traced in events), expandable_segments=run.expandable_segments
    )
    moment, parts = at_peak(events)
    adapter_bytes = sum(event.num_bytes or 0 for event in events if event.moment == "adapters")
    base = meta_model(dataclasses.replace(run, quant="none"), config, device="cpu")
    num_params = sum(parameter.numel() for parameter in base.parameters())
    trained = adapter_bytes // (2 if run.narrows_adapters else 4)
    return {
        "peak_allocated_bytes": allocator.peak_allocated_bytes,
        "peak_reserved_bytes": allocator.peak_reserved_bytes,
        "moment": moment,
        "parts": parts,
        "num_params": num_params,
        "num_trainable_params": num_params if _is_full(run) else trained,
        "note": note,
    }


def _is_full(run: RunConfig) -> bool:
    return run.phase == "finetune" and get_method(run.method).trains_base


def _depth(config: Mapping[str, Any]) -> int:
    """Number of layers of `config`, where four of them can represent all.

    Raises:
        DoesNotRepeatError: the kinds of layers alternate.
        StopIteration: no key says the depth.
    """
    text = config.get("text_config") or config
    depth = int(next(text[key] for key in DEPTH_KEYS if key in text))
    if config_object(config).is_encoder_decoder:
        raise DoesNotRepeatError("there are two stacks of them")
    if depth <= TRACED_LAYERS:
        raise DoesNotRepeatError(f"there are {depth}")
    shown = config_object(config).get_text_config()
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
