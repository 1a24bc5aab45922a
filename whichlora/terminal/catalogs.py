"""Accelerators and models as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from whichlora.methods import NOT_IN_PEFT, NOT_MODELLED
from whichlora.spec.gpu import GpuSpec
from whichlora.terminal.tables import new_table, open_console, print_table, print_whole, say
from whichlora.units import format_bytes, format_count

if TYPE_CHECKING:
    from whichlora.store.models import ModelRecord
    from whichlora.workflow.methods import MethodRow


def print_gpus(gpus: Sequence[GpuSpec], *, here: GpuSpec | str) -> None:
    """The catalog, and this machine's GPU, or why it can't be detected."""
    console = open_console()
    rates = ("bf16", "fp16", "fp32")
    numbers = ("memory", "bandwidth", *(f"{rate} TFLOP/s" for rate in rates))
    rows = []
    for gpu in gpus:
        peaks = [gpu.peak_flops_per_s.get(rate) for rate in rates]
        rows.append(
            (
                gpu.key,
                gpu.name,
                format_bytes(gpu.memory_bytes),
                f"{gpu.bandwidth_bytes_per_s / 1e9:.0f} GB/s",
                *("-" if peak is None else f"{peak / 1e12:.1f}" for peak in peaks),
                gpu.compute_capability or "-",
                ", ".join(gpu.unverified),
            )
        )
    print_table(
        console,
        ("key", "name", *numbers, "capability", "unverified"),
        rows,
        right=numbers,
        spare=("unverified", "name", "capability", "fp16 TFLOP/s"),
    )
    if not isinstance(here, str):
        here = f"{here.key} ({here.name}, {format_bytes(here.memory_bytes)})"
    say(console, f"this machine: {here}; every figure's source is in calibration/<key>/gpu.json")


def print_methods(rows: Sequence[MethodRow]) -> None:
    """What each method trains and takes; where it does not run, why."""
    console = open_console()
    numbers = ("trained", "peak", "of LoRA", "step of LoRA")
    shown = []
    for row in rows:
        if row.refusal:
            shown.append((row.name, *["-"] * len(numbers), "-", "-", "-", row.refusal))
            continue
        shares = ("-" if x is None else f"{x:.2f}" for x in (row.peak_share, row.step_share))
        shown.append(
            (
                row.name,
                format_count(row.num_trainable_params or 0),
                format_bytes(row.peak_bytes or 0),
                *shares,
                "yes" if row.merges else "no",
                "yes" if row.quantised else "no",
                ", ".join(row.engines) or "merged alone",
                f"{row.summary} ({', '.join(row.options)})" if row.options else row.summary,
            )
        )
    print_table(
        console,
        ("method", *numbers, "merges", "4 bit", "unmerged by", "what it is (its settings)"),
        shown,
        right=numbers,
        spare=("unmerged by", "what it is (its settings)"),
    )
    say(console, "of PEFT 0.21.2; --method-option name=value gives a setting")
    say(console, f"not modelled: {', '.join(sorted(NOT_MODELLED))}")
    say(console, f"not in PEFT: {', '.join(NOT_IN_PEFT)}")


def print_models(models: Sequence[ModelRecord]) -> None:
    console = open_console()
    table = new_table("model", "type", "parameters", right=("parameters",))
    for model in models:
        table.add_row(model.hub_id, model.model_type, format_count(model.params))
    print_whole(console, table)
    say(console, "1 model" if len(models) == 1 else f"{len(models)} models")
