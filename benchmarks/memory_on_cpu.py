"""Part b of the memory tables: predicted against measured peak memory on this CPU.

Small models of every family in every mode, a second each, or the quickstart's models at full size.
Nothing is downloaded; weights are random.

    python benchmarks/memory_on_cpu.py                 all settings (about half an hour)
    python benchmarks/memory_on_cpu.py --full-size     three models (about ten minutes)
    python benchmarks/memory_on_cpu.py --images        models that see (about five minutes)
    python benchmarks/memory_on_cpu.py --only F,A --output accuracy.md
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import oracle_memory as oracle
from markdown_tables import markdown_table

from whichlora.errors import WhichLoraError

CHECKPOINTING: dict[str, Any] = {"gradient_checkpointing": True}
PADDED: dict[str, Any] = {"padding": "padded"}
INFERENCE: dict[str, Any] = {"phase": "inference"}
DPO: dict[str, Any] = {"trainer": "dpo"}
WRITTEN = (("max_completion_length", 16), ("num_generations", 2))
GRPO: dict[str, Any] = {"trainer": "grpo", "trainer_options": WRITTEN}
LOOP: dict[str, Any] = {"trainer": "loop"}
ORPO: dict[str, Any] = {"trainer": "orpo"}
CPO: dict[str, Any] = {"trainer": "cpo"}
# The letter is the precision mode of docs/memory.md; I is inference.
SETTINGS: dict[str, dict[str, Any]] = {
    "F lora": {},
    "F lora, checkpointing": CHECKPOINTING,
    "F lora, eager": {"attn": "eager"},
    "F lora, padded": PADDED,
    "F lora, padded, checkpointing": PADDED | CHECKPOINTING,
    "F lora, dropout": {"lora_dropout": 0.1},
    "F lora, attention only": {"target_modules": ("attention",)},
    "F full": {"method": "full"},
    "F full, checkpointing": {"method": "full"} | CHECKPOINTING,
    "F dora": {"method": "dora"},
    "F dora, dropout": {"method": "dora", "lora_dropout": 0.1},
    "F dora, checkpointing": {"method": "dora"} | CHECKPOINTING,
    "F qlora": {"method": "qlora"},
    "F qlora, checkpointing": {"method": "qlora"} | CHECKPOINTING,
    "F qdora": {"method": "qdora"},
    "C lora": {"precision": "bf16-no-autocast"},
    "P lora": {"precision": "bf16-pure"},
    "A lora": {"precision": "bf16"},
    "A lora, checkpointing": {"precision": "bf16"} | CHECKPOINTING,
    "A dora": {"precision": "bf16", "method": "dora"},
    "A full": {"precision": "bf16", "method": "full"},
    "Q qlora": {"precision": "bf16", "method": "qlora"},
    "Q qlora, checkpointing": {"precision": "bf16", "method": "qlora"} | CHECKPOINTING,
    "loop, F lora": LOOP,
    "loop, F lora, checkpointing": LOOP | CHECKPOINTING,
    "loop, F full": LOOP | {"method": "full"},
    "loop, F qlora, checkpointing": LOOP | {"method": "qlora"} | CHECKPOINTING,
    "loop, C lora, checkpointing": LOOP | {"precision": "bf16-no-autocast"} | CHECKPOINTING,
    "loop, A lora": LOOP | {"precision": "bf16"},
    "TRL sft, F lora": {"trainer": "sft"},
    "TRL sft, A lora, checkpointing": {"trainer": "sft", "precision": "bf16"} | CHECKPOINTING,
    "TRL dpo, F lora": DPO,
    "TRL dpo, F full": DPO | {"method": "full"},
    "TRL dpo, A dora": DPO | {"precision": "bf16", "method": "dora"},
    "TRL dpo, P qlora, checkpointing": DPO
    | {"precision": "bf16", "method": "qlora"}
    | CHECKPOINTING,
    "TRL kto, F lora": {"trainer": "kto"},
    "TRL reward, F lora": {"trainer": "reward"},
    "TRL reward, F full": {"trainer": "reward", "method": "full"},
    "TRL reward, A qlora, checkpointing": {"trainer": "reward", "precision": "bf16"}
    | {"method": "qlora"}
    | CHECKPOINTING,
    "TRL orpo, F lora": ORPO,
    "TRL orpo, F full": ORPO | {"method": "full"},
    "TRL orpo, A dora": ORPO | {"precision": "bf16", "method": "dora"},
    "TRL orpo, Q qlora, checkpointing": ORPO
    | {"precision": "bf16", "method": "qlora"}
    | CHECKPOINTING,
    "TRL cpo, F lora": CPO,
    "TRL cpo, F full, alphapo": CPO
    | {"method": "full", "trainer_options": (("loss_type", "alphapo"),)},
    "TRL cpo, A lora, checkpointing": CPO | {"precision": "bf16"} | CHECKPOINTING,
    "TRL grpo, F lora": GRPO,
    "TRL grpo, F full, reference": GRPO
    | {"method": "full", "trainer_options": (("beta", 0.1), *WRITTEN)},
    "TRL grpo, A dora, checkpointing": GRPO
    | {"precision": "bf16", "method": "dora"}
    | CHECKPOINTING,
    "I fp32": INFERENCE,
    "I fp32, 4 x 24": INFERENCE | {"batch_size": 4, "prompt_len": 24},
    "I bf16": INFERENCE | {"precision": "bf16"},
    "I fp32, static cache": INFERENCE | {"kv_cache": "static"},
    "I fp32, fp8 cache": INFERENCE | {"kv_cache": "quantized", "cache_backend": "fp8"},
    "I fp32, quanto cache": INFERENCE | {"kv_cache": "quantized", "max_new_tokens": 140},
    "I fp32, hqq cache": INFERENCE
    | {"kv_cache": "quantized", "cache_backend": "hqq", "max_new_tokens": 140},
}
FULL_SIZE = ("HuggingFaceTB/SmolLM2-135M", "EleutherAI/pythia-160m", "Qwen/Qwen2.5-0.5B")
FULL_SIZE_SETTINGS = (
    "F lora",
    "F lora, checkpointing",
    "F lora, padded",
    "F qlora",
    "F qlora, checkpointing",
    "F dora",
    "F dora, checkpointing",
    "I fp32",
)


IMAGE_SETTINGS = (
    *("F lora", "F lora, checkpointing", "F full", "F full, checkpointing", "F qlora", "F dora"),
    *("P lora", "I fp32"),
)
FROZEN: dict[str, dict[str, Any]] = {
    "F lora, frozen tower": {"freeze_vision_tower": True},
    "F lora of q_proj and v_proj": {"target_modules": ("q_proj", "v_proj")},
}


def image_cases() -> Iterable[tuple[str, str, oracle.Case]]:
    settings = {name: SETTINGS[name] for name in IMAGE_SETTINGS} | FROZEN
    for setting, values in settings.items():
        for family in oracle.IMAGE_CONFIGS:
            yield setting, family, oracle.image_case(family, **values)
        if not values.get("freeze_vision_tower"):
            yield setting, "whisper", oracle.sound_case(**values)
        yield setting, "qwen2_audio", oracle.audio_case(**values)


def measured_rows(cases: Iterable[tuple[str, str, oracle.Case]]) -> list[tuple[str, str, int, int]]:
    """Setting, model, measured and predicted bytes; what the libraries refuse is left out."""
    rows = []
    for setting, model, one in cases:
        try:
            measured, predicted = oracle.peak(one)
        except (ValueError, RuntimeError, AssertionError, WhichLoraError) as error:  # refusals
            print(f"{setting}, {model}: left out: {error}", file=sys.stderr)
            continue
        rows.append((setting, model, measured, predicted))
        error_percent = 100 * (predicted / measured - 1)
        print(f"{setting:30} {model:28} {error_percent:+6.2f} %", file=sys.stderr, flush=True)
    return rows


def summary(rows: list[tuple[str, str, int, int]], column: int, title: str) -> str:
    """One line per setting (column 0) or model (column 1), and one for all."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        error = 100 * abs(row[3] / row[2] - 1)
        groups.setdefault(str(row[column]), []).append(error)
        groups.setdefault("**all**", []).append(error)
    groups["**all**"] = groups.pop("**all**")  # last
    cells = []
    for name, errors in groups.items():
        errors.sort()
        p95 = errors[min(len(errors) - 1, round(0.95 * len(errors)))]
        sizes = (statistics.median(errors), p95, errors[-1])
        cells.append((name, len(errors), *(f"{size:.2f} %" for size in sizes)))
    return markdown_table((title, "runs", "median", "p95", "worst"), cells, first_figure=1)


def full_table(rows: list[tuple[str, str, int, int]]) -> str:
    cells = (
        (
            setting,
            model,
            f"{measured / 2**20:.1f} MiB",
            f"{predicted / 2**20:.1f} MiB",
            f"{100 * (predicted / measured - 1):+.2f} %",
        )
        for setting, model, measured, predicted in rows
    )
    return markdown_table(
        ("setting", "model", "measured", "predicted", "error"), cells, first_figure=2
    )


def environment() -> str:
    names = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{today}, {platform.machine()} CPU, Python {platform.python_version()}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full-size", action="store_true", help="the quickstart's models")
    parser.add_argument("--images", action="store_true", help="models that see")
    parser.add_argument("--only", default="", help="modes, such as F,A; all unless given")
    parser.add_argument("--families", default=",".join(oracle.CONFIGS))
    parser.add_argument("--output", type=Path, help="a file instead of stdout")
    options = parser.parse_args()

    modes = tuple(mode for mode in options.only.split(",") if mode)
    if options.images:
        cases = list(image_cases())
    elif not options.full_size:
        cases = [
            (setting, family, oracle.case(family, **values))
            for setting, values in SETTINGS.items()
            for family in options.families.split(",")
            if not modes or setting.startswith(modes)
        ]
    else:
        cases = [
            (setting, name, oracle.real_case(name, **SETTINGS[setting]))
            for name in FULL_SIZE
            for setting in FULL_SIZE_SETTINGS
        ]
    rows = measured_rows(cases)
    command = " ".join(["python", "benchmarks/memory_on_cpu.py", *sys.argv[1:]])
    parts = [
        "# Peak memory, predicted against measured",
        f"{environment()}. Made by `{command}`.",
        "Live tensor bytes at the peak of one optimizer step of the Trainer, or of one "
        "generation; no coefficient is fitted. Errors are of the whole peak, without sign.",
        summary(rows, 0, "setting"),
        summary(rows, 1, "model" if options.full_size else "family"),
    ]
    if options.full_size:
        parts.append(full_table(rows))
    text = "\n\n".join(parts) + "\n"
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
