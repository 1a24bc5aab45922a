"""What each backend states, and what a run is refused there."""

from __future__ import annotations

from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.memory import allocator, optimizer
from whichlora.memory.gradients import Trained
from whichlora.predict.notes import notes_on
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.backends import BACKENDS, backend_of
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import BNB_QUANTS, RunConfig
from whichlora.spec.versions import Libraries
from whichlora.store.gpus import find_gpu, list_gpus
from whichlora.store.hub import load_model
from whichlora.units import MiB

MODEL = "HuggingFaceTB/SmolLM2-135M"


def job_on(gpu: str, **settings: Any) -> ResolvedRun:
    return resolve(load_model(MODEL), RunConfig(model=MODEL, **settings), find_gpu(gpu))


def test_every_device_has_a_backend_and_every_backend_but_the_cpu_a_device() -> None:
    kinds = {gpu.kind for gpu in list_gpus()}
    assert kinds <= BACKENDS.keys() <= kinds | {"cpu"}
    assert all(backend_of(kind).quants <= BNB_QUANTS for kind in BACKENDS)


@pytest.mark.parametrize(
    ("gpu", "settings", "message"),
    [
        (
            "m4-max-64gb",
            {"optimizer": "paged_adamw_8bit"},
            r"^optimizer: paged_adamw_8bit does not run on Apple's .*; use adamw_torch_fused$",
        ),
        ("gaudi3-128gb", {"optimizer": "adamw_8bit"}, r"^optimizer: adamw_8bit does not run on Ga"),
        ("m4-max-64gb", {"attn": "flash_attention_2"}, r"^attn: flash_attention_2 does not run on"),
        ("m4-max-64gb", {"attn": "sdpa-efficient"}, r"^attn: sdpa-efficient has no kernel on m4"),
        ("arc-b580-12gb", {"attn": "sdpa-efficient"}, r"^attn: sdpa-efficient has no kernel"),
        ("m4-max-64gb", {"loss_head": "liger"}, r"do not run on m4-max-64gb: Triton, .* for Metal"),
        ("gaudi2-96gb", {"trainer": "unsloth"}, r"do not run on gaudi2-96gb: Triton, .* for Gaudi"),
        ("m4-max-64gb", {"expandable_segments": True}, r"allocator of mps has none"),
        (
            "mi300x-192gb",
            {"expandable_segments": True, "libraries": (("torch", "2.12.0"),)},
            r"allocator of rocm has them since 2.13",
        ),
        (
            "gaudi2-96gb",
            {"quant": "fp4", "method": "qlora"},
            r"has for hpu, int8, nf4, nf4-dq",
        ),
        (
            "m4-max-64gb",
            {"parallel": ParallelConfig(gpus=2, strategy="ddp")},
            r"^gpus: Apple's GPUs have no communication library in torch; give gpus 1$",
        ),
        ("m4-max-64gb", {"precision": "tf32"}, r"^precision: tf32 has no units on m4-max-64gb"),
    ],
)
def test_what_does_not_exist_there_is_refused_in_one_line(
    gpu: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        job_on(gpu, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("gpu", "settings", "note"),
    [
        ("m4-max-64gb", {}, "precision bf16 needs macOS 14"),
        ("m4-max-64gb", {"precision": "fp16"}, "memory of a Mac: what Metal recommends"),
        ("gaudi3-128gb", {}, "Gaudi compiles graphs (lazy mode, the default"),
        ("mi300x-192gb", {"expandable_segments": True}, "expandable_segments needs ROCm 7"),
    ],
)
def test_a_run_there_says_what_nobody_knows(gpu: str, settings: dict[str, Any], note: str) -> None:
    assert any(line.startswith(note) for line in notes_on(job_on(gpu, **settings)))


@pytest.mark.parametrize(
    ("gpu", "training_mib"),
    [("mi300x-192gb", 256), ("mi210-64gb", 64), ("rx-7900-xtx-24gb", 64), ("arc-b580-12gb", 0)],
)
def test_hipblas_keeps_a_workspace_per_thread(gpu: str, training_mib: int) -> None:
    # torch 2.13 `parseChosenWorkspaceSize`: 128 MiB on gfx942 and gfx950, 32 on others
    assert allocator.workspace_bytes(find_gpu(gpu), training=True) == training_mib * MiB
    assert allocator.workspace_bytes(find_gpu(gpu), training=False) == training_mib * MiB // 2


def test_only_backends_with_foreach_make_lists_of_temporaries() -> None:
    tensor = Trained(rows=10, width=100, param_bytes=4)
    made = {
        kind: optimizer.step_temporary_bytes(
            [tensor],
            optimizer="adamw_torch",
            foreach=optimizer.has_foreach(kind, Libraries()),
        )
        for kind in BACKENDS
    }
    assert made == {"cuda": 4000, "rocm": 4000, "xpu": 4000, "hpu": 0, "mps": 0, "cpu": 0}
