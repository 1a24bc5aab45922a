"""Devices that are nothing like their datasheet, learnt from a handful of records."""

from __future__ import annotations

import csv
import io
import itertools
import statistics
from typing import Any

import whichlora
from plan_cases.folder import Folder
from plan_cases.registry import case, expect

GPU = "t4-16gb"
SEEN = [("Qwen/Qwen3-0.6B", "lora"), ("meta-llama/Llama-3.2-1B", "qlora")]
SETTINGS = (
    *("model", "phase", "method", "batch_size", "seq_len", "r", "lora_alpha", "precision"),
    *("optimizer", "gradient_checkpointing", "gradient_accumulation_steps", "attn", "padding"),
)
UNSEEN = [("Qwen/Qwen3-1.7B", "lora"), ("HuggingFaceTB/SmolLM2-360M", "dora")]


def runs(pairs: list[tuple[str, str]], gpu: str = GPU, **settings: Any) -> list[Any]:
    return [
        whichlora.estimate(
            model, gpu, method=method, batch_size=size, seq_len=length, precision="fp16", **settings
        )[0]
        for (model, method), size, length in itertools.product(pairs, (1, 4), (256, 512))
    ]


def learnt(folder: Folder, slower: float) -> float:
    """Worst relative error of unseen runs after six records, each `slower` times its prior."""
    empty = folder.path / "empty"
    empty.mkdir(exist_ok=True)
    seen = runs(SEEN, calibration_dir=empty)[:6]
    table = io.StringIO()
    rows = [
        {
            "gpu": GPU,
            **{name: getattr(run.run, name) for name in SETTINGS},
            "step_s": run.time.step_s * slower,
            "date": "2026-11-01",
            "source": "made of the prior by plans.py",
        }
        for run in seen
    ]
    writer = csv.DictWriter(table, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    folder.write("records.csv", table.getvalue())
    calibration = folder.path / f"calibration-{slower:g}"
    variables = {"WHICHLORA_CALIBRATION": str(calibration)}
    imported = folder.whichlora("calibrate", "import", "records.csv", **variables)
    expect(imported.code == 0, imported.last_line)
    fitted = folder.whichlora("calibrate", "--gpu", GPU, **variables)
    expect(fitted.code == 0, fitted.last_line)
    before = runs(UNSEEN, calibration_dir=empty)
    after = runs(UNSEEN, calibration_dir=calibration)
    errors = [
        new.time.step_s / (slower * old.time.step_s) - 1
        for old, new in zip(before, after, strict=True)
    ]
    expect(statistics.median(map(abs, errors)) < 0.1, f"{slower:g} times slower: {errors}")
    return max(errors, key=abs)


@case("A T4 that is throttled, shared or a slice: 0.2 to 20 times its prior, six records")
def slow_devices_are_learnt(folder: Folder) -> str:
    worst = {slower: learnt(folder, slower) for slower in (0.2, 0.5, 1.0, 2.0, 3.0, 8.0, 20.0)}
    return "worst unseen: " + ", ".join(f"x{k:g} {error:+.0%}" for k, error in worst.items())


@case("The record holder: which of two cards is said to be measured, and which is a prior?")
def basis_says_what_stands_behind(folder: Folder) -> str:
    told = []
    for gpu, words in (("a100-sxm-80gb", "runs"), ("l40s-48gb", "datasheet")):
        (run,) = whichlora.estimate("Qwen/Qwen3-8B", gpu, method="lora")
        expect(words in run.basis, run.basis)
        told.append(run.basis)
    return "; ".join(told)


@case("DeepSeek-V2-Lite, full, SGD, no checkpointing: is any part negative?")
def no_negative_bytes(folder: Folder) -> str:
    (run,) = whichlora.estimate(
        "deepseek-ai/DeepSeek-V2-Lite",
        "h200-sxm-141gb",
        method="full",
        optimizer="sgd",
        gradient_checkpointing=False,
        batch_size=8,
        seq_len=300,
    )
    least = min(run.memory.breakdown.items(), key=lambda part: part[1])
    expect(least[1] >= 0, f"{least}")
    expect(
        sum(run.memory.breakdown.values()) == run.memory.device_used_bytes, "parts do not add up"
    )
    return f"least part {least[0]}: {least[1]}"


@case("One token more: does Qwen3.5-27B QDoRA in fp4 need less?")
def more_tokens_never_need_less(folder: Folder) -> str:
    sizes = [
        whichlora.estimate(
            "Qwen/Qwen3.5-27B", "h100-sxm-80gb", method="qdora", quant="fp4", seq_len=seq_len
        )[0].memory.peak_allocated_bytes
        for seq_len in range(1020, 1030)
    ]
    steps = [later - earlier for earlier, later in itertools.pairwise(sizes)]
    expect(min(steps) >= 0, f"{min(steps)} bytes")
    return f"{min(steps)} to {max(steps)} bytes a token"


@case("A 4-bit mixture of experts: is batch 1 slower than batch 2?")
def larger_batches_take_longer(folder: Folder) -> str:
    seconds = [
        run.time.step_s
        for run in whichlora.estimate(
            "Qwen/Qwen3-30B-A3B", "h200-sxm-141gb", method="qlora", batch_size=[1, 2, 4]
        )
    ]
    expect(seconds == sorted(seconds), f"{seconds}")
    return ", ".join(f"{second:.2f} s" for second in seconds)
