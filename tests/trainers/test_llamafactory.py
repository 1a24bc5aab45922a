"""LLaMA-Factory's trainers of preferences, and TRL's classes of an older release."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from devices import A100
from written_job import train_script_of

from whichlora.errors import ConfigError
from whichlora.memory.lasting import REFERENCE_WEIGHTS
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.trainers import trainer_of

NAME = "HuggingFaceTB/SmolLM2-135M"
VOCAB, SEQ_LEN, ROWS = 49_152, 512, 4
RUN = RunConfig(model=NAME, trainer="llamafactory-dpo", batch_size=2, seq_len=SEQ_LEN)
OLD = {"libraries": (("trl", "1.9.0"),)}
SIMPO = {"trainer_options": (("pref_loss", "simpo"),)}


def job(**settings: Any) -> ResolvedRun:
    return resolve(load_model(NAME), replace(RUN, **settings), A100)


def peak_bytes(**settings: Any) -> int:
    return int(ledger(job(**settings)).peak_allocated_bytes)


def test_dpo_holds_a_log_softmax_of_policy_and_reference() -> None:
    assert ledger(job()).peak_moment == "reference_forward"
    # logits and log-softmax of the policy, both and a copy of the reference, in fp32
    logits = 4 * ROWS * SEQ_LEN * VOCAB
    assert 5 * logits > peak_bytes() - peak_bytes(trainer="dpo") > 4 * logits


def test_orpo_and_simpo_have_no_reference() -> None:
    full = {"method": "full", "precision": "bf16-pure"}
    facts = {entry.fact for entry in ledger(job(**full)).moments["optimizer_step"]}
    assert REFERENCE_WEIGHTS in facts
    for loss in ("orpo", "simpo"):
        without = job(**full, trainer_options=(("pref_loss", loss),))
        moments = ledger(without).moments
        assert "reference_forward" not in moments
        assert REFERENCE_WEIGHTS not in {entry.fact for entry in moments["optimizer_step"]}


def test_its_adapters_stay_wide_and_its_base_is_not_prepared() -> None:
    of_llamafactory, of_trl = (job(trainer=name, method="qlora") for name in (RUN.trainer, "dpo"))
    assert of_llamafactory.run.prepare_kbit is of_trl.run.prepare_kbit is False
    assert (of_llamafactory.dtypes.adapter_bytes, of_trl.dtypes.adapter_bytes) == (4, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer_options": (("disable_dropout", False),)}, "always turns dropout off"),
        ({"trainer_options": (("pref_loss", "kto_pair"),)}, "pref_loss: 'kto_pair'"),
        ({"loss_head": "liger"}, "whose loss is raw"),
        ({"trainer": "dpo", "method": "qdora", **OLD}, "magnitude parameters of 16 bit"),
    ],
)
def test_what_the_library_does_not_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict(load_model(NAME), replace(RUN, **settings), A100, prior_calibration(A100))


def test_no_script_is_written_for_steps_that_it_could_not_run() -> None:
    with pytest.raises(ConfigError, match="CustomDPOTrainer; use trainer transformers"):
        train_script_of(job().run, target_modules="all-linear")


@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_before_its_tiles_trl_held_whole_logits(trainer: str) -> None:
    old, new = job(trainer=trainer, **OLD), job(trainer=trainer)
    assert (old.run.loss_head, new.run.loss_head) == ("raw", "trl-fused")
    assert ledger(old).peak_allocated_bytes > 2 * ledger(new).peak_allocated_bytes


def test_without_its_kernel_trl_stacked_the_gradients_of_rows() -> None:
    # 3.5 of all logits in place of 2.5
    more = peak_bytes(trainer="orpo", **OLD) - peak_bytes(trainer="orpo")
    assert more == pytest.approx(4 * ROWS * SEQ_LEN * VOCAB, rel=0.02)


def test_a_trainer_is_found_by_its_class() -> None:
    assert trainer_of("trl.DPOTrainer").name == "dpo"
    with pytest.raises(ConfigError, match="no trainer has the steps of"):
        trainer_of("trl.Nothing")
