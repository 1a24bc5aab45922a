"""What is printed of one run on several accelerators."""

from __future__ import annotations

import pytest

from whichlora.api import where
from whichlora.terminal.placements import print_placements


def test_a_name_is_said_to_be_taken_as_an_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    print_placements(where("Qwen/Qwen3-0.6B", ["p100", "t4"], method="lora", seq_len=64))
    assert "note: p100: taken as p100-pcie-16gb, the usual one" in capsys.readouterr().out


def test_an_engine_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    served = {"phase": "inference", "serving": "vllm", "context": 65_536}
    print_placements(where("Qwen/Qwen3-32B", ["h800-sxm", "h200-sxm"], **served))
    printed = " ".join(capsys.readouterr().out.split())
    assert "vllm does not start on h800-sxm-80gb: one sequence of 65536 tokens takes" in printed
    assert "vllm does not start on h200" not in printed
