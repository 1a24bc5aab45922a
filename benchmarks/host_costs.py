"""What the host does in a training step beside launching the kernels of a forward.

    OMP_NUM_THREADS=1 python benchmarks/host_costs.py

A Llama of 16 layers is so small that its kernels take nearly no time, so that the processor time
of a pass on a CPU is what Python, the dispatcher and autograd take. Printed in launches of a
forward without a graph: a kernel of the backward, what checkpointing adds beside the second
forward, and what the Trainer does around forward and backward for each module of the model.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from whichlora.predict.predict import passes
from whichlora.predict.resolve import resolve
from whichlora.profiler.build import build_model
from whichlora.profiler.finetune import measure_finetune
from whichlora.profiler.meter import Meter
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.models import find_model
from whichlora.timing.model import AUTOGRAD_LAUNCH
from whichlora.timing.work import LOSS_OPS, OUTSIDE_OPS

LLAMA = "meta-llama/Llama-3.2-1B"  # of 16 layers, too
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES: tuple[dict[str, Any], ...] = (
    {"method": "full", "precision": "bf16-pure"},
    {"method": "lora", "precision": "bf16-pure"},
    {"method": "lora", "precision": "bf16"},
    {"method": "lora", "precision": "fp32"},
    {"method": "dora", "precision": "bf16-pure"},
)
ROUNDS, REPEATS, TRAINER_STEPS = 4, 12, 12


class ProcessorTime(Meter):
    """Counts the processor's time: other programs on the machine do not distort it."""

    def now(self) -> float:
        return time.process_time()


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(ROUNDS):  # the speed of a shared machine drifts
        for case in CASES:
            found.setdefault(" ".join(case.values()), []).append(measured(case))
    print("| run | launch µs | backward kernel | checkpointing | of reentrant | module |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, rounds in found.items():
        columns = {key: median(each[key] for each in rounds) for key in rounds[0]}
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in columns.values()) + " |")


def measured(case: dict[str, Any]) -> dict[str, float]:
    """The costs of one case; all but the first in launches."""
    run = RunConfig(model=LLAMA, batch_size=1, seq_len=8, gradient_checkpointing=False, **case)
    model = build_model(run, CONFIG, device="cpu", target_modules=TARGETS).train()
    launches, backward_launches = counted(run)
    forward_s, backward_s = direct(model, run)
    unit_s = forward_s / launches
    checkpointing = []
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        if run.method != "full":
            model.enable_input_require_grads()
        added_s = sum(direct(model, run)) - 2 * forward_s - backward_s
        checkpointing.append(added_s / forward_s)
    model.gradient_checkpointing_disable()
    with contextlib.redirect_stdout(io.StringIO()):
        steps = measure_finetune(model, run, ProcessorTime("cpu"), [8] * TRAINER_STEPS)
    around_s = fast(steps["step_s"]) - forward_s - backward_s  # the update among it
    num_modules = sum(1 for _ in model.modules())
    gc.collect()
    return {
        "launch": 1e6 * unit_s,
        "backward": backward_s / backward_launches / unit_s,
        "hooks": checkpointing[0],
        "reentrant": checkpointing[1],
        "module": around_s / num_modules / unit_s,
    }


def counted(run: RunConfig) -> tuple[float, float]:
    """Launches of forward and loss, and of the backward, as a prediction counts them."""
    gpu, model = find_gpu("a100-sxm-80gb"), find_model(LLAMA)
    assert model is not None

    def of(**changed: Any) -> dict[str, Any]:
        settings = {**run.to_dict(), **changed}
        return passes(resolve(model, RunConfig.from_dict(settings), gpu))[0][2]

    plain, again = of(), of(gradient_checkpointing=True, use_reentrant=True)
    forward = again["kernels"] - plain["kernels"] + OUTSIDE_OPS + LOSS_OPS
    # the first counts a kernel of the backward whole, the second as what it costs the host
    return forward, (plain["kernels"] - plain["launch"]) / (1 - AUTOGRAD_LAUNCH)


def direct(model: Any, run: RunConfig) -> tuple[float, float]:
    """Processor seconds of a forward with its loss, and of a backward."""
    tokens = torch.randint(0, 128, (1, 8))
    mask = torch.ones_like(tokens)
    autocast: Callable[[], Any] = contextlib.nullcontext
    if run.precision == "bf16":
        autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    forward, backward = [], []
    for _ in range(REPEATS):
        start = time.process_time()
        with autocast():
            loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        middle = time.process_time()
        loss.backward()
        forward.append(middle - start)
        backward.append(time.process_time() - middle)
    return fast(forward), fast(backward)


def fast(times: list[float]) -> float:
    """Of the fastest quarter: what nothing else slowed down."""
    return sorted(times)[len(times) // 4]


if __name__ == "__main__":
    main()
