"""TRL's own trainers, traced on fake tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="pip install trl beside the profile extra")

import torch
import trainer_traces
from devices import A100
from trl.kernels import ChunkedLogProbFunction

from whichlora.memory.loss import log_probability_bytes
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("trainer", trainer_traces.TRAINERS)
@pytest.mark.parametrize("seed", [1000, 1001])
def test_the_ledger_has_the_bytes_that_trl_s_code_makes(seed: int, trainer: str) -> None:
    line = trainer_traces.draw(seed, trainer)
    assert trainer_traces.predicted(line) == pytest.approx(trainer_traces.traced(line), rel=0.015)


def test_what_the_fused_head_leaves_is_what_its_function_saves_and_returns() -> None:
    model = load_model("HuggingFaceTB/SmolLM2-135M")
    job = resolve(model, RunConfig(model=model.name, trainer="sft", seq_len=32), A100)
    tokens, saved = 32, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.data_ptr()] = tensor
        return tensor

    hidden = torch.randn(tokens, model.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(64, model.hidden_size, dtype=torch.bfloat16)
    targets = torch.zeros(tokens, dtype=torch.long)
    asked = ("entropy", "mean_logits", "is_top1")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        given = ChunkedLogProbFunction.apply(hidden, head, None, targets, 1.0, 64, None, 1.0, asked)
    held = saved | {each.data_ptr(): each for each in given if each is not None}
    del held[head.data_ptr()]
    assert log_probability_bytes(model, job.dtypes, trained_head=0) * tokens == sum(
        each.nbytes for each in held.values()
    )
