"""`device_map="auto"`: what each GPU holds, copies and refuses."""

from __future__ import annotations

from typing import Any

import device_map_cases
import pytest

from whichlora.errors import ConfigError
from whichlora.parallel.device_map import returned_logits, shares
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

GPU = find_gpu("a100-sxm-80gb")
UNTIED, TIED = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"


def job_of(model: str, gpus: int, strategy: str = "device-map", **settings: Any) -> ResolvedRun:
    parallel = ParallelConfig(strategy=strategy, gpus=gpus)
    run = RunConfig(model=model, parallel=parallel, seq_len=512, **({"method": "lora"} | settings))
    return resolve(load_model(model), run, GPU)


def test_the_head_is_on_the_last_gpu_unless_it_is_tied() -> None:
    untied = shares(training_step(job_of(UNTIED, 2)), 2)
    assert [(share.embeds, share.scores) for share in untied] == [(True, False), (False, True)]
    tied = shares(training_step(job_of(TIED, 2)), 2)
    assert [(share.embeds, share.scores) for share in tied] == [(True, True), (False, False)]


def test_the_rule_leaves_a_gpu_empty_and_a_note_says_so() -> None:
    job = job_of(TIED, 4)
    assert job.layout is not None
    step = training_step(job)
    assert [kind.name for kind in job.layout.rank_kinds(step)] == ["GPU 0", "GPU 1", "GPU 2"]
    assert any("leaves GPU 3 without" in note for note in job.layout.notes(step))


def test_the_outputs_return_to_the_first_gpu() -> None:
    step = training_step(job_of(UNTIED, 2))
    come, held = returned_logits(step)
    assert (come, held) == (512 * 128_256 * (2 + 4), 0)  # the Trainer widens them, and lets go


def test_one_gpu_computes_at_a_time_and_the_batch_is_one() -> None:
    job = job_of(UNTIED, 4)
    answer = predict(job.model, job.run, GPU, prior_calibration(GPU))
    assert answer.several_gpus is not None
    assert answer.several_gpus.global_batch_size == 1
    assert job.layout is not None
    assert job.layout.communicator_bytes(job.gpu) == 0


@pytest.mark.parametrize(
    ("model", "gpus", "settings", "message"),
    [
        ("google-t5/t5-small", 2, {}, "layers stand in one row"),
        ("meta-llama/Llama-3.1-70B", 2, {"method": "full", "precision": "fp32"}, "can't place the"),
        (TIED, 2, {"loss_head": "raw"}, "loss_head: raw is not modelled with parallel device-map"),
        (TIED, 2, {"trainer": "orpo"}, "trainer orpo has no other"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    model: str, gpus: int, settings: dict[str, Any], message: str
) -> None:
    job = job_of(model, gpus, **settings)
    assert job.layout is not None
    step = training_step(job)
    with pytest.raises(ConfigError, match=message):
        job.layout.check(step)


def test_gpus_have_the_bytes_of_a_trace_grouped_by_their_modules() -> None:
    assert max(device_map_cases.byte_errors()) < 0.02
