"""The loss that a trainer makes of whole logits, added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100

from whichlora.memory import logits_loss, loss
from whichlora.memory.allocator import REMAINDERS
from whichlora.memory.step import TrainingStep
from whichlora.memory.step_events import training_events
from whichlora.predict.quantities import ledger, training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.numeric import added
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.trainers.base import LogitsLoss

NAME = "HuggingFaceTB/SmolLM2-135M"
VOCAB, SEQ_LEN = 49_152, 256
WITH, WITHOUT = (LogitsLoss(has_cross_entropy=value) for value in (True, False))


def step_of(**settings: Any) -> TrainingStep:
    run = RunConfig(model=NAME, trainer="orpo", seq_len=SEQ_LEN, precision="bf16")
    gpu = A100 if settings.pop("on_gpu", True) else find_gpu("cpu")
    job = resolve(load_model(NAME), RunConfig.from_dict({**run.to_dict(), **settings}), gpu)
    return training_step(job)


def in_rows(formula: Any, computed: LogitsLoss, *, pairs: int, **settings: Any) -> float:
    """Bytes by those of all logits of the batch in fp32."""
    step = step_of(**settings)
    tokens = 2 * pairs * SEQ_LEN
    sized = {"tokens": tokens, "sequences": 2 * pairs}
    num_bytes = formula(step.model, step.dtypes, step.trainer, computed, **sized)
    return float(num_bytes / (4 * tokens * VOCAB))


SCORED = 1 - 1 / SEQ_LEN  # of all positions
BY_ROWS, BY_SOFTMAX = (LogitsLoss(log_probabilities=way) for way in ("rows", "softmax"))
OF_KTO = replace(BY_SOFTMAX, held_beside=1.0)


def test_the_forward_holds_logits_and_what_the_chosen_half_saves() -> None:
    assert in_rows(logits_loss.forward_bytes, WITH, pairs=2) == pytest.approx(1 + SCORED)
    # of one pair the shifted logits are a view, so that widening all of them takes as much
    assert in_rows(logits_loss.forward_bytes, WITH, pairs=1) == 1.5
    assert in_rows(logits_loss.forward_bytes, WITHOUT, pairs=2) == 1.5


def test_the_backward_holds_two_gradients_of_all_logits_and_one_of_the_chosen() -> None:
    assert in_rows(logits_loss.backward_bytes, WITH, pairs=2) == 2.5
    assert in_rows(logits_loss.backward_bytes, WITHOUT, pairs=2) == pytest.approx(1 + SCORED)


def test_without_autocast_logits_stay_narrow() -> None:
    narrow = in_rows(logits_loss.backward_bytes, WITH, pairs=2, precision="bf16-pure")
    assert narrow == 2.5 / 2
    step, pure = step_of(), step_of(precision="bf16-pure")
    widths = [
        loss.returned_logit_bytes(each.model, each.dtypes, each.trainer) for each in (step, pure)
    ]
    assert widths == [4, 2]


def test_a_cpu_has_no_kernel_and_stacks_the_gradients_of_rows() -> None:
    on_cpu = in_rows(logits_loss.backward_bytes, WITH, pairs=2, on_gpu=False, precision="fp32")
    assert on_cpu == pytest.approx(1 + 0.5 * SCORED + 2 * SCORED)


def test_a_run_takes_its_loss_from_its_trainer_and_says_so() -> None:
    step = step_of(batch_size=2)
    assert step.loss.backward_bytes == 2.5 * 4 * 4 * SEQ_LEN * VOCAB
    run = RunConfig(model=NAME, trainer="orpo", seq_len=SEQ_LEN, precision="bf16")
    moments = ledger(resolve(load_model(NAME), run, A100)).moments
    facts = [entry.fact for entry in moments["loss_backward"]]
    assert logits_loss.LOSS_BACKWARD in facts
    assert loss.LOSS_BACKWARD not in facts


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_requests_of_a_step_have_the_peak_of_the_ledger(alpha: float, batch_size: int) -> None:
    options = (("cpo_alpha", alpha),)
    run = RunConfig(model=NAME, trainer="cpo", batch_size=batch_size, seq_len=SEQ_LEN)
    job = resolve(load_model(NAME), replace(run, trainer_options=options), A100)
    listed = ledger(job)
    assert listed.peak_moment == "loss_backward"
    moment = listed.moments["loss_backward"]
    live = added(entry.num_bytes for entry in moment if entry.fact is not REMAINDERS)
    requests = training_events(training_step(job))
    assert requests.peak_bytes - requests.workspace_bytes == pytest.approx(live, rel=0.005)


def test_a_log_softmax_of_all_rows_is_saved_and_its_input_copied() -> None:
    # logits, the copy that `log_softmax` makes of all but the last positions, and its result
    assert in_rows(logits_loss.forward_bytes, BY_SOFTMAX, pairs=1) == pytest.approx(1 + 2 * SCORED)
    assert in_rows(logits_loss.held_bytes, BY_SOFTMAX, pairs=1) == pytest.approx(1 + SCORED)
    assert in_rows(logits_loss.backward_bytes, BY_SOFTMAX, pairs=1) == pytest.approx(3 * SCORED)
    # fp32 whatever the logits are
    narrow = in_rows(logits_loss.held_bytes, BY_SOFTMAX, pairs=1, precision="bf16-pure")
    assert narrow == pytest.approx(1 + SCORED)


def test_row_by_row_only_narrow_logits_leave_a_result() -> None:
    assert in_rows(logits_loss.held_bytes, BY_ROWS, pairs=2) == 1
    narrow = in_rows(logits_loss.held_bytes, BY_ROWS, pairs=2, precision="bf16-pure")
    assert narrow == pytest.approx((1 + SCORED) / 2)


def test_the_reference_scores_without_a_graph() -> None:
    # widening takes 1.5; row by row a fourth is a temporary, of a log-softmax copy and result
    assert in_rows(logits_loss.reference_bytes, BY_ROWS, pairs=2) == 1.5
    softmax = in_rows(logits_loss.reference_bytes, BY_SOFTMAX, pairs=2)
    assert softmax == pytest.approx(1 + 2 * SCORED)


def test_logits_of_answers_are_held_while_those_of_the_kl_term_are_scored() -> None:
    more = in_rows(logits_loss.held_bytes, OF_KTO, pairs=2)
    assert more - in_rows(logits_loss.held_bytes, BY_SOFTMAX, pairs=2) == 1


def test_metrics_copy_logits_beside_those_of_policy_and_reference() -> None:
    logged = replace(BY_ROWS, copied_for_metrics=2.0)
    alone = in_rows(logits_loss.forward_bytes, logged, pairs=2)
    assert alone == 1 + 2

    def both(*args: Any, **sized: Any) -> Any:
        return logits_loss.forward_bytes(*args, **sized, has_reference=True)

    assert in_rows(both, logged, pairs=2) == 2 + 2
    # one copy is less than the copy and the chunks that the entropy takes
    once = in_rows(both, replace(BY_ROWS, copied_for_metrics=1.0), pairs=2)
    assert once == pytest.approx(2 + SCORED + 3 * 128 / (4 * SEQ_LEN))
