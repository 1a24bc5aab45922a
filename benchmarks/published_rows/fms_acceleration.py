"""fms-acceleration: TRL's trainer on an A100, by framework configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from published_rows.cells import A100, QUANT, Found, Line, Quantity, Row, libraries_of, whole
from published_rows.models import model_of
from whichlora.specs import RunConfig

_FMS_FIRST = {
    "bitsandbytes": "0.43.1",
    "torch": "2.2.2",
    "transformers": "4.39.3",
    "trl": "0.9.6",
}
_FMS_COUNTERS: dict[str, Quantity] = {
    "nvidia-smi memory.used peak minus first reading": "device_used",
    "max_memory_allocated via HF Trainer memory tracker": "peak_allocated",
    "memory_allocated after train via HF Trainer memory tracker": "allocated_between_steps",
}


def _fms_settings(row: Row) -> dict[str, Any]:
    config, mixed = _fms_config(row)
    if mixed == "none":
        # adapters stay fp32 (peft's default) and every product casts for itself
        precision = "bf16-pure" if row["method"] == "full" else "bf16-no-autocast"
    else:
        precision = mixed
    head = "hf"
    if "fast cross" in row["loss_kernel"]:
        head = "unsloth"
    if "liger" in row["loss_kernel"]:
        head = "liger"
    quant = "nf4-dq" if row["quant"] == "nf4" else QUANT[row["quant"]]
    dropout = re.search(r"lora_dropout ([\d.]+)", row["notes"])
    return {
        "method": row["method"],
        "r": whole(row["rank"] or "16"),
        "lora_dropout": float(dropout[1]) if dropout else 0.0,
        "precision": precision,
        "optimizer": "adamw_torch",
        "attn": "flash_attention_2",
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": whole(row["grad_accum"]),
        "loss_head": head,
        "quant": quant,
        "prepare_kbit": config.startswith("baseline-peft-bnb"),
        # what a commit does not pin looks like the first versions that one does
        "libraries": tuple(sorted((_FMS_FIRST | dict(libraries_of(row["versions"]))).items())),
    }


def _fms_config(row: Row) -> tuple[str, str]:
    """Name of the framework configuration, and the autocast dtype or "none"."""
    config = re.search(r"framework_config ([^;]*)", row["notes"])
    mixed = re.search(r"mixed precision fp16=(\w*) bf16=(\w*)", row["notes"])
    assert config is not None
    assert mixed is not None
    return config[1].strip(), "fp16" if mixed[1] else "bf16" if mixed[2] else "none"


def fms(line: Line) -> Iterator[Found]:
    row = line.row
    if "OOM" in row["flags"]:
        yield line.left_out("run", "flagged as failed or out of memory by the source")
        return
    config, _ = _fms_config(row)
    spec = model_of(row["model_id"])
    if "scattermoe" in config or spec is None or "granite" in row["model_id"]:
        yield line.left_out("run", "mixture kernels of its own, or lengths not stated")
        return
    targets = tuple(row["target_modules"].split())
    names = {linear.name for layer, _ in spec.layers() for linear in layer.linears}
    targets = tuple(name for name in targets if name in names)
    settings = _fms_settings(row)
    mean = re.search(r"mean ([\d.]+) tokens per sample", row["notes"])
    packed = bool(row["seq_len"])
    length = whole(row["seq_len"]) if packed else whole(mean[1]) if mean else 0
    run = RunConfig(
        model=spec.name,
        batch_size=whole(row["batch_size"]),
        seq_len=max(1, length),
        **settings,
        **({"target_modules": targets} if targets else {}),
    )
    if row["mem_value"]:
        if packed or _FMS_COUNTERS[row["mem_counter"]] == "allocated_between_steps":
            yield from line.memory(spec, run, A100, _FMS_COUNTERS[row["mem_counter"]], stack=config)
        else:
            yield line.left_out("memory", "length of the longest batch is not stated")
    if row["time_value"]:
        if not length or row["padding"] == "longest":
            yield line.left_out("time", "padded, and the share of padding is not stated")
            return
        per_step = run.batch_size * length * run.gradient_accumulation_steps
        yield line.observed(
            spec, run, A100, "step_s", per_step / float(row["time_value"]), stack=config
        )
