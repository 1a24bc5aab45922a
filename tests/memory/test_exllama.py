"""Scratch memory of exllama's kernels against the published runs whose libraries it was read in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.memory.exllama import SCRATCH, scratch_bytes
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

LLAMA = load_model("huggyllama/llama-7b")
AUTOGPTQ = (("gptqmodel", "0"),)
SECOND = (("exllama", "2"), ("gptqmodel", "0"))
RUN = RunConfig(model=LLAMA.name, phase="inference", quant="gptq-int4", precision="fp16")
WIDEST = 4096 * 11008  # of its matrices


def job(**settings: object) -> ResolvedRun:
    return resolve(LLAMA, replace(RUN, **settings), find_gpu("a100-sxm-80gb"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"libraries": AUTOGPTQ}, 2 * WIDEST),
        # `temp_dq_size` and `temp_fwd_size` of 2,048 tokens times 8 sequences
        ({"libraries": SECOND}, 2 * WIDEST + 128 + 4 * 11008 * 2048 * 8 + 128),
        ({"libraries": (("exllama", "2"),)}, 2 * WIDEST + 128 + 4 * 11008 * 2048 * 8 + 128),
        ({}, 0),  # GPTQModel takes other kernels
        ({"libraries": SECOND, "quant": "gptq-int8"}, 0),
        ({"libraries": SECOND, "quant": "awq-int4"}, 0),
        ({"libraries": SECOND, "phase": "finetune", "method": "qlora"}, 0),
    ],
)
def test_scratch_is_what_the_kernels_allocate_after_loading(
    settings: dict[str, object], expected: int
) -> None:
    assert scratch_bytes(LLAMA, job(**settings).dtypes) == expected


@pytest.mark.parametrize(("batch_size", "measured"), [(1, 4991e6), (32, 10740e6), (64, 16675e6)])
def test_the_second_kernels_need_what_was_measured_on_an_a100(
    batch_size: int, measured: float
) -> None:
    """`optimum_benchmark.csv`, fp16+gptq+exllamav2, one forward over 256 tokens."""
    libraries = (*SECOND, ("torch", "2.1.1"), ("transformers", "4.35.2"))
    run = job(
        libraries=tuple(sorted(libraries)),
        batch_size=batch_size,
        prompt_len=256,
        max_new_tokens=1,
        attn="eager",
    )
    found = ledger(run)
    assert found.peak_allocated_bytes == pytest.approx(measured, rel=0.015)


def test_exllama_expands_into_its_scratch_and_nowhere_else() -> None:
    plain, scratch = (ledger(job(libraries=libraries)) for libraries in ((), AUTOGPTQ))
    held = [
        entry for entries in scratch.moments.values() for entry in entries if entry.fact is SCRATCH
    ]
    assert held
    assert not any(entry.fact is SCRATCH for entries in plain.moments.values() for entry in entries)
    # above 50 rows others write one matrix, which is no larger than the scratch
    assert scratch.moment_bytes("prefill") - plain.moment_bytes("prefill") < 2 * WIDEST


@pytest.mark.parametrize(
    ("quant", "rows", "expands"),
    [("gptq-int4", 50, False), ("gptq-int4", 51, True), ("awq-int4", 1024, False)],
)
def test_few_rows_are_multiplied_without_an_expanded_matrix(
    quant: str, rows: int, expands: bool
) -> None:
    def prefill(tokens: int) -> float:
        found = ledger(job(quant=quant, batch_size=1, prompt_len=tokens, max_new_tokens=1))
        return float(found.moment_bytes("prefill"))

    # a token more costs a thousandth of a matrix
    grown = prefill(rows) - prefill(rows - 1)
    assert (grown > WIDEST) is expands
