"""A cell of a source becomes an `Observation` to compare a prediction with, or is `LeftOut`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from published.models import model_of
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import RunConfig
from whichlora.units import GiB, MiB

A100 = "a100-sxm-80gb"

MemoryQuantity = Literal[
    "peak_allocated",
    "peak_reserved",
    "device_used",
    "perhaps_allocated",
    "perhaps_device_used",
    "allocated_between_steps",
    "allocated_after_step",
    "allocated_after_forward",
    "allocated_after_load",
    "reserved_before_training",
    "peak_in_forward",
    "peak_in_backward",
    "peak_in_optimizer",
]
Quantity = (
    MemoryQuantity
    | Literal["step_s", "forward_s", "forward_backward_s", "prefill_s", "generate_s", "token_s"]
)
MEMORY: tuple[MemoryQuantity, ...] = get_args(MemoryQuantity)
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured value with the run it was measured on.

    Args:
        source: stem of the file; `line` of its row, the header being line 1.
        label: the model as the source calls it.
        stack: what the source's software does differently, in a few words.
        value: bytes or seconds.
        rounding: half of the last printed digit, in the unit of `value`.
        waits: why the device waits for the host in this run, as no work counts: a value to compare
            with, from which no fit learns.
    """

    source: str
    line: int
    label: str
    stack: str
    model: ModelSpec
    run: RunConfig
    gpu: str
    quantity: Quantity
    value: float
    rounding: float = 0.0
    waits: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A cell that nothing is compared with."""

    source: str
    line: int
    label: str
    what: Literal["memory", "time", "run"]
    reason: str


Found = Observation | LeftOut

_UNITS = {"GiB": GiB, "MiB": MiB, "MB(1e6)": 10**6, "GB(1e9)": 10**9, "GB (inferred GiB)": GiB}
QUANT = {
    "none": "none",
    "nf4": "nf4",
    "nf4-dq": "nf4-dq",
    "bnb-fp4": "fp4",
    "bnb-int8": "int8",
    "bnb-int8-threshold-0": "int8",
    "gptq-int4": "gptq-int4",
    "gptq-int8": "gptq-int8",
    "awq-int4": "awq-int4",
}
_LIBRARY = re.compile(r"(torch|transformers|peft|bitsandbytes|trl|litgpt) (\d+(?:\.\d+)+)")


def whole(text: str) -> int:
    return int(float(text))


def rounding_of(text: str) -> float:
    digits = len(text.rpartition(".")[2]) if "." in text else 0
    return 0.5 * 10.0**-digits


def libraries_of(versions: str) -> tuple[tuple[str, str], ...]:
    """Versions that a source states, of the libraries whose version moves a number."""
    return tuple(sorted(_LIBRARY.findall(versions)))


@dataclass(frozen=True, slots=True)
class Line:
    """One row of one file, on its way to observations."""

    source: str
    number: int
    row: Row

    def left_out(self, what: Literal["memory", "time", "run"], reason: str) -> LeftOut:
        label = self.row.get("model_id") or self.row["model"]
        return LeftOut(source=self.source, line=self.number, label=label, what=what, reason=reason)

    def observed(
        self,
        model: ModelSpec,
        run: RunConfig,
        gpu: str,
        quantity: Quantity,
        value: float,
        *,
        stack: str = "",
        rounding: float = 0.0,
        waits: str = "",
    ) -> Observation:
        return Observation(
            source=self.source,
            line=self.number,
            label=self.row.get("model_id") or self.row["model"],
            stack=stack,
            model=model,
            run=run,
            gpu=gpu,
            quantity=quantity,
            value=value,
            rounding=rounding,
            waits=waits,
        )

    def memory(
        self, model: ModelSpec, run: RunConfig, gpu: str, quantity: Quantity, *, stack: str = ""
    ) -> Iterator[Observation]:
        """The memory cell, where there is one; a unit that only says GB is taken as 2^30."""
        text = self.row.get("mem_value", "")
        if text:
            unit = _UNITS.get(self.row["mem_unit"], GiB)
            yield self.observed(
                model,
                run,
                gpu,
                quantity,
                float(text) * unit,
                stack=stack,
                rounding=rounding_of(text) * unit,
            )

    def generation(self, **settings: Any) -> tuple[ModelSpec, RunConfig] | LeftOut:
        """The run of an inference row, or why it has none."""
        row = self.row
        quant = QUANT.get(row["quant"])
        if quant is None:
            return self.left_out("run", f"{row['quant']}: no storage formula for this format")
        spec = model_of(row["model_id"])
        if spec is None:
            return self.left_out("run", "architecture neither in the database nor stated")
        run = RunConfig(
            model=spec.name,
            phase="inference",
            precision="bf16" if row["base_dtype"] in ("bfloat16", "") else "fp16",
            quant=quant,  # type: ignore[arg-type]
            batch_size=whole(row["batch_size"]),
            prompt_len=whole(row["prefill_len"]),
            max_new_tokens=max(1, whole(row["decode_len"] or "1")),
            libraries=libraries_of(row["versions"]),
            **settings,
        )
        return spec, run
