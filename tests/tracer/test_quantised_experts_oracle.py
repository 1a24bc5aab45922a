"""bitsandbytes' own 4-bit parameters of experts, traced on fake tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("bitsandbytes.nn.parametrize", reason="bitsandbytes before 0.49 has none")

import trainer_traces

from whichlora.spec.run import RunConfig

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize(
    ("name", "quant", "checkpoints"),
    [
        ("Qwen/Qwen3-30B-A3B", "nf4", True),
        ("deepseek-ai/DeepSeek-V2-Lite", "nf4-dq", True),
    ],
)
def test_the_ledger_has_the_bytes_of_experts_that_are_expanded_when_read(
    name: str, quant: str, checkpoints: bool
) -> None:
    run = RunConfig(
        model=name,
        method="qlora",
        quant=quant,  # type: ignore[arg-type]
        seq_len=512,
        gradient_checkpointing=checkpoints,
        quantize_moe_experts=True,
    )
    line = {"layers": 2, "run": run.to_dict()}
    assert trainer_traces.predicted(line) == pytest.approx(trainer_traces.traced(line), rel=0.006)
