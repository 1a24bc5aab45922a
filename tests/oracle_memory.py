"""Small real models, and what one training step or generation of them really holds.

`saved_per_layer` asks autograd which tensors it keeps; `step_peak` and `generation_peak` run the
profiler's own code in this process; `alive_at_peak` names the tensors behind a number.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from devices import CPU
from small_models import AUDIO_CONFIG, CONFIGS, IMAGE_CONFIGS, SOUND_CONFIG, VOCAB
from torch.utils._python_dispatch import TorchDispatchMode

from whichlora.families import build
from whichlora.memory.entries import tensor_bytes
from whichlora.predict import quantities
from whichlora.predict import resolve as resolution
from whichlora.profiler.build import build_model, without_cpu_packing
from whichlora.profiler.inference import measure_inference
from whichlora.profiler.meter import Meter
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model
from whichlora.trainers import get_trainer

_DEPTH_KEYS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("encoder_layers", "decoder_layers"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One small model and one run of it."""

    family: str
    run: RunConfig
    config: dict[str, Any]

    @property
    def model_config(self) -> dict[str, Any]:
        return {"model_type": self.family, **self.config}

    def with_layers(self, count: int) -> Case:
        depth = {key: count for key in _DEPTH_KEYS if key in self.config}
        return Case(self.family, self.run, self.config | depth)


def case(family: str, *, config: dict[str, Any] | None = None, **settings: Any) -> Case:
    """A run of the small model of `family`: fp32, 2 sequences of 48 tokens unless told."""
    defaults = {
        "model": family,
        "precision": "fp32",
        "batch_size": 2,
        "seq_len": 48,
        "r": 8,
        "gradient_checkpointing": False,
        "prompt_len": 16,
        "max_new_tokens": 8,
    }
    return Case(family, RunConfig(**(defaults | settings)), CONFIGS[family] | (config or {}))


def image_case(family: str, **settings: Any) -> Case:
    """A run of a small model with two images of 224x224 in each row, and as much text as fits.

    In fp32, or in bf16 where the processor's pixels are. A tower that PEFT can't adapt by name is
    frozen.
    """
    config = IMAGE_CONFIGS[family]
    tower = build({"model_type": family, **config}, name=family).tower
    assert tower is not None
    grid = tower.grid(224, 224)
    length = 2 * (grid.tokens + grid.markers) + 48
    by_name = bool(tower.wraps) and "target_modules" in settings
    # PEFT reaches GLM-4.5V's convolution of patches
    reached = any(not x.is_module for x in tower.idle) and settings.get("method") != "full"
    defaults = {
        "model": family,
        "precision": "fp32" if tower.pixel_bytes == torch.float32.itemsize else "bf16",
        "batch_size": 2,
        "seq_len": length,
        "r": 8,
        "gradient_checkpointing": False,
        "prompt_len": length,
        "max_new_tokens": 4,
        "images": 2,
        "image_size": (224, 224),
        "freeze_vision_tower": by_name or (reached and "target_modules" not in settings),
    }
    return Case(family, RunConfig(**(defaults | settings)), config)


def sound_case(**settings: Any) -> Case:
    """A run of the small model that hears, fp32, of labels of 48 tokens unless told."""
    defaults = {
        "model": "whisper",
        "precision": "fp32",
        "batch_size": 2,
        "seq_len": 48,
        "r": 8,
        "gradient_checkpointing": False,
        "prompt_len": 4,
        "max_new_tokens": 4,
    }
    return Case("whisper", RunConfig(**(defaults | settings)), SOUND_CONFIG)


def audio_case(**settings: Any) -> Case:
    """A run of the small model that reads two clips of 3 s in each row, fp32 unless told."""
    defaults = {
        "model": "qwen2_audio",
        "precision": "fp32",
        "batch_size": 2,
        "seq_len": 192,
        "r": 8,
        "gradient_checkpointing": False,
        "prompt_len": 192,
        "max_new_tokens": 4,
        "audios": 2,
        "audio_seconds": 3.0,
    }
    return Case("qwen2_audio", RunConfig(**(defaults | settings)), AUDIO_CONFIG)


def job_of(one: Case) -> resolution.Job:
    return resolution.resolve(build(one.model_config, name=one.family), one.run, CPU)


def predicted_peak(one: Case) -> int:
    return int(quantities.ledger(job_of(one)).peak_allocated_bytes)


def predicted_saved_per_layer(one: Case) -> int:
    """Bytes that the formulas say one layer (of each stack) keeps."""
    step = quantities.training_step(job_of(one))
    by_stack = {
        group.stack: layer for group, layer in zip(step.model.groups, step.layers, strict=True)
    }
    return sum(int(tensor_bytes(layer.tensors, **step.sized)) for layer in by_stack.values())


def load(one: Case) -> Any:
    targets = job_of(one).peft_targets  # PEFT's own reading of all-linear, as a real run gets it
    model = build_model(one.run, one.model_config, device="cpu", target_modules=targets)
    return without_cpu_packing(model)  # which depends on this machine


def step_peak(one: Case) -> int:
    """Peak live bytes of one optimizer step of the run's trainer.

    With images or sound of several steps: the Trainer reads a batch ahead.
    """
    model = load(one)
    has_media = one.run.images or one.run.audios or one.config is SOUND_CONFIG
    batches = 4 if has_media else 1
    meter = Meter("cpu")
    with _quiet():
        measure = resolve_name(get_trainer(one.run.trainer).steps)
        found = measure(model, one.run, meter, [one.run.seq_len] * batches)
    return int(found["peak_allocated_bytes"])


def generation_peak(one: Case) -> int:
    """Peak live bytes of one generation."""
    model = load(one)
    with _quiet():
        found = measure_inference(model, one.run, Meter("cpu"), 1)
    return int(found["peak_allocated_bytes"])


def saved_per_layer(one: Case) -> Counter[str]:
    """Bytes that autograd keeps for one more layer of each stack, by dtype and shape."""
    few, many = (_saved(one.with_layers(count)) for count in (3, 4))
    many.subtract(few)
    return Counter({what: size for what, size in many.items() if size})


def _saved(one: Case) -> Counter[str]:
    model = load(one)
    if one.run.method == "full":
        model.train()
    held = list(_tensors())  # an address must not be used again while we count
    before = {t.untyped_storage().data_ptr() for t in held}
    found: dict[int, tuple[str, int]] = {}

    def pack(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before and storage.data_ptr() not in found:
            held.append(tensor.detach())
            found[storage.data_ptr()] = (_label(tensor), storage.nbytes())
        # Nothing goes into the graph: a tensor packed into its own node would never be freed.

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None), _autocast(one):
        _forward(model, one)
    total: Counter[str] = Counter()
    for what, size in found.values():
        total[what] += size
    return total


def _autocast(one: Case) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=one.run.precision == "bf16")


def _forward(model: Any, one: Case) -> Any:
    shape = (one.run.batch_size, one.run.seq_len)
    ids = torch.randint(3, VOCAB, shape)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    if one.run.padding == "padded":
        mask[1:, -one.run.seq_len // 3 :] = 0
    model.config.use_cache = False  # as the Trainer
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def _tensors() -> Iterator[torch.Tensor]:
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
            yield candidate


def _label(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class LiveBytes(TorchDispatchMode):
    """Births and deaths of storages; keeps the list of the moment that holds most.

    Memory that a kernel takes and gives back inside one operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[str, int]] = {}
        self.num_bytes = 0
        self.peak_bytes = 0
        self.at_peak: Counter[str] = Counter()
        self.in_op = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._born(tensor, str(func))
        return result

    def _born(self, tensor: torch.Tensor, op: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live or not storage.nbytes():
            return
        self.live[key] = (f"{op.removeprefix('aten.')} {_label(tensor)}", storage.nbytes())
        self.num_bytes += storage.nbytes()
        weakref.finalize(storage, self._died, key)
        if self.num_bytes > self.peak_bytes:
            self.peak_bytes, self.in_op = self.num_bytes, op
            self.at_peak = Counter()
            for what, size in self.live.values():
                self.at_peak[what] += size

    def _died(self, key: int) -> None:
        self.num_bytes -= self.live.pop(key, ("", 0))[1]


def alive_at_peak(one: Case, call: Callable[[Any], Any] | None = None) -> LiveBytes:
    """Tensors of a forward and backward that are alive at their peak, and the operator there."""
    model = load(one)
    if one.run.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with LiveBytes() as live, _quiet():
        if call is not None:
            call(model)
        else:
            with _autocast(one):
                loss = _forward(model, one)
            loss.backward()
    return live


def real_case(name: str, **settings: Any) -> Case:
    """A run of a full-sized model of the database: fp32, 2 sequences of 64 tokens unless told."""
    spec = find_model(name)
    assert spec is not None
    config = {key: value for key, value in spec.config.items() if key != "model_type"}
    defaults = {"batch_size": 2, "seq_len": 64, "r": 8, "precision": "fp32"}
    defaults |= {"gradient_checkpointing": False, "prompt_len": 16, "max_new_tokens": 8}
    return Case(spec.model_type, RunConfig(**({"model": name} | defaults | settings)), config)


def peak(one: Case) -> tuple[int, int]:
    """Measured and predicted peak of one step, or of one generation."""
    measure = step_peak if one.run.phase == "finetune" else generation_peak
    return measure(one), predicted_peak(one)
