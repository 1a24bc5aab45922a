"""What the host does in a training step beside launching the kernels of a forward.

    OMP_NUM_THREADS=1 python benchmarks/host_costs.py

A Llama of 16 layers is so small that its kernels take nearly no time, so that the processor time
of a pass on a CPU is what Python, the dispatcher and autograd take. Printed in launches of a
forward without a graph: a kernel of a forward that autograd records, one of the backward, a call of
reentrant checkpointing beside the second forward, each tensor that passes through the hooks of the
other kind, and what the Trainer does around forward and backward for each module of the model.
Then, of optimizers that launch a kernel for each tensor, what one of these takes.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from markdown_tables import markdown_table
from transformers.optimization import Adafactor

from whichlora.memory.optimizer import update_launches
from whichlora.predict.quantities import training_step, update_of
from whichlora.predict.rank_time import work_of_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.profiler.build import build_model
from whichlora.profiler.finetune import measure_finetune
from whichlora.profiler.meter import Meter
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.models import find_model

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
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adafactor": partial(Adafactor, lr=1e-4, scale_parameter=False, relative_step=False),
    "adamw_torch": partial(torch.optim.AdamW, lr=1e-4, foreach=False),
}
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
    columns = tuple(next(iter(found.values()))[0])
    rows = [
        (name, *(f"{median(each[key] for each in rounds):.2f}" for key in columns))
        for name, rounds in found.items()
    ]
    print(markdown_table(("run", *columns), rows))
    for optimizer in OPTIMIZERS:
        print(f"\nA kernel of {optimizer}: {update_cost(optimizer):.2f} launches")


def build(case: dict[str, Any]) -> tuple[RunConfig, Any]:
    run = RunConfig(model=LLAMA, batch_size=1, seq_len=8, gradient_checkpointing=False, **case)
    return run, build_model(run, CONFIG, device="cpu", target_modules=TARGETS).train()


def measured(case: dict[str, Any]) -> dict[str, float]:
    """The costs of one case; all but the first in launches."""
    run, model = build(case)
    launches, backward_launches = counted(run)
    forward_s, backward_s = direct(model, run)
    with torch.no_grad():
        plain_s = direct(model, run)[0]
    unit_s = plain_s / launches
    added_s = {}
    for use_reentrant in (True, False):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
        )
        if run.method != "full":
            model.enable_input_require_grads()
        first_s = plain_s if use_reentrant else forward_s
        added_s[use_reentrant] = sum(direct(model, run)) - first_s - forward_s - backward_s
    model.gradient_checkpointing_disable()
    call_s = added_s[True] / CONFIG["num_hidden_layers"]
    with contextlib.redirect_stdout(io.StringIO()):
        steps = measure_finetune(model, run, ProcessorTime("cpu"), [8] * TRAINER_STEPS)
    around_s = fast(steps["step_s"]) - forward_s - backward_s  # the update among it
    num_modules = sum(1 for _ in model.modules())
    gc.collect()
    return {
        "launch µs": 1e6 * unit_s,
        "recorded": forward_s / plain_s,
        "backward": backward_s / backward_launches / unit_s,
        "checkpoint call": call_s / unit_s,
        "saved tensor": (added_s[False] - added_s[True]) / num_saved(model, run) / unit_s,
        "module": around_s / num_modules / unit_s,
    }


def num_saved(model: Any, run: RunConfig) -> int:
    """Tensors that pass through the hooks on saved tensors in a forward."""
    packed: list[None] = []

    def pack(tensor: Any) -> Any:
        packed.append(None)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model, run)
    return len(packed)


def update_cost(optimizer: str) -> float:
    """Launches that one kernel of `optimizer` takes as long as."""
    run, model = build({"method": "full", "precision": "bf16-pure", "optimizer": optimizer})
    launches, _ = counted(run)
    with torch.no_grad():
        unit_s = direct(model, run)[0] / launches
    direct(model, run)
    made = OPTIMIZERS[optimizer](model.parameters())
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        made.step()
        times.append(time.process_time() - start)
    on_cpu = replace(update_of(job_of(run)), foreach=False)
    return fast(times) / float(update_launches(on_cpu)) / unit_s


def job_of(run: RunConfig) -> ResolvedRun:
    model = find_model(LLAMA)
    assert model is not None
    return resolve(model, run, find_gpu("a100-sxm-80gb"))


def counted(run: RunConfig) -> tuple[float, float]:
    """Launches of forward and loss, and of the backward, as a prediction counts them."""
    work = work_of_step(training_step(job_of(run)))
    return float(work.launches), float(work.autograd_launches)


def forward(model: Any, run: RunConfig) -> Any:
    tokens = torch.randint(0, 128, (1, 8))
    mask = torch.ones_like(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.precision == "bf16"):
        return model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


def direct(model: Any, run: RunConfig) -> tuple[float, float]:
    """Processor seconds of a forward with its loss, and of a backward where there is a graph."""
    forward_s, backward_s = [], []
    for _ in range(REPEATS):
        start = time.process_time()
        loss = forward(model, run)
        middle = time.process_time()
        if loss.requires_grad:
            loss.backward()
        forward_s.append(middle - start)
        backward_s.append(time.process_time() - middle)
    return fast(forward_s), fast(backward_s)


def fast(times: list[float]) -> float:
    """Of the fastest quarter: what nothing else slowed down."""
    return sorted(times)[len(times) // 4]


if __name__ == "__main__":
    main()
