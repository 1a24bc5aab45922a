"""What `explain`, `where` and `recommend` say of settings that nobody stated."""

from __future__ import annotations

import pytest
from plan_runs import Silent

from whichlora.spec.run import RunConfig
from whichlora.terminal.assumed import assumed_lines
from whichlora.terminal.explained import explanation_document
from whichlora.terminal.placements import placements_document
from whichlora.workflow import estimates
from whichlora.workflow.recommend import Question, recommend

MODEL = "HuggingFaceTB/SmolLM2-135M"
RUN = RunConfig(model=MODEL, method="lora", precision="auto", gradient_checkpointing=None)
USUAL = "gradient checkpointing, fused AdamW, SDPA"


def said(lines: object) -> list[str]:
    assert isinstance(lines, tuple | list)
    return [line for line in lines if str(line).startswith("assumed: ")]


def test_an_explanation_says_what_it_assumes_as_an_estimate_does() -> None:
    explanation = estimates.explain(RUN, "l4", stated={"model", "method", "seq_len"})
    (line,) = said(explanation_document(explanation).lines)
    assert line.startswith(f"assumed: bf16 with autocast, {USUAL}; Trainer by itself has bf16")
    (estimated,) = estimates.estimate([RUN], ["l4"], stated={"model", "method", "seq_len"})
    assert list(assumed_lines([estimated])) == [line]


def test_cards_of_two_precisions_are_told_in_one_line() -> None:
    placements = estimates.where(RUN, ["l4", "t4"], stated={"seq_len", "optimizer"})
    (line,) = said(placements_document(placements).lines)
    assert line.startswith("assumed: fp16 with autocast or bf16 with autocast, gradient")
    assert "AdamW" not in line


@pytest.mark.parametrize("stated", [None, {"precision", "gradient_checkpointing", "optimizer"}])
def test_what_is_stated_is_not_said(stated: set[str] | None) -> None:
    stated = stated and {*stated, "attn", "seq_len"}
    placements = estimates.where(RUN, ["l4"], stated=stated)
    explanation = estimates.explain(RUN, "l4", stated=stated)
    assert said(placements_document(placements).lines) == []
    assert said(explanation_document(explanation).lines) == []


@pytest.mark.parametrize(("attn", "kernel"), [(None, ", SDPA"), ("eager", "")])
def test_a_recommendation_says_what_its_winner_has(attn: str | None, kernel: str) -> None:
    answer = recommend(Question(gpu="l4", models=(MODEL,), attn=attn), progress=Silent())
    (line,) = assumed_lines(answer.assumed)
    assert line == f"assumed: bf16 with autocast, gradient checkpointing, fused AdamW{kernel}"
