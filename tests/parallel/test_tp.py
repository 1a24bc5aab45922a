"""Tensor parallelism: shares of the matrices, its messages, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import tp_traces

from whichlora.errors import ConfigError
from whichlora.parallel import tp
from whichlora.parallel.base import Message
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

GPU = find_gpu("a100-sxm-80gb")
LLAMA = "meta-llama/Llama-3.2-1B"
BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def job_of(model: str, gpus: int, strategy: str = "tp", **settings: Any) -> ResolvedRun:
    options = (("tp_size", settings.pop("tp_size", gpus)),)
    parallel = ParallelConfig(strategy=strategy, gpus=gpus, options=options)
    settings = {"method": "lora", "target_modules": BY_COLUMNS} | settings
    run = RunConfig(model=model, parallel=parallel, seq_len=512, **settings)
    return resolve(load_model(model), run, GPU)


def messages_of(job: ResolvedRun) -> dict[str, Message]:
    assert job.layout is not None
    (kind,) = job.layout.rank_kinds(training_step(job))
    return {message.what: message for message in job.layout.messages(kind)}


def test_each_module_reduces_the_gradient_of_its_input_by_itself() -> None:
    job = job_of(LLAMA, 4, gradient_checkpointing=True)
    messages = messages_of(job)
    # counted in a trace: per layer 2 forward, 1 made again, 5 backward, and one at each end
    assert messages["sums of the ranks' products"].count == 16 * 3 + 1
    assert messages["gradients of the modules' inputs"].count == 16 * 5 + 1
    assert messages["sums of the ranks' products"].num_bytes == 512 * 2048 * 2
    assert messages["gradients of A·x of the adapters"].count == 16 * 5


def test_a_table_of_trained_tokens_has_the_gradient_of_all_rows_on_every_rank() -> None:
    job = job_of("meta-llama/Llama-3.1-8B", 4, method="full")
    assert job.layout is not None
    step = training_step(job)
    (kind,) = job.layout.rank_kinds(step)
    update = job.layout.ledger(kind).moments["optimizer_step"]
    (whole,) = [entry for entry in update if entry.fact is tp.WHOLE_TABLE_GRADIENT]
    assert whole.num_bytes == 128_256 * 4096 * 2
    assert messages_of(job)["gradient of the token embedding"].num_bytes == whole.num_bytes


def test_ranks_hold_less_with_every_doubling() -> None:
    run = RunConfig(model=LLAMA, method="full", seq_len=512)
    peaks = []
    for gpus in (2, 4, 8):
        job = job_of(LLAMA, gpus, method="full")
        answer = predict(job.model, job.run, GPU, prior_calibration(GPU))
        peaks.append(answer.memory.peak_allocated_bytes)
    alone = predict(load_model(LLAMA), run, GPU, prior_calibration(GPU))
    assert alone.memory.peak_allocated_bytes > peaks[0] > peaks[1] > peaks[2]


@pytest.mark.parametrize(
    ("model", "gpus", "settings", "message"),
    [
        ("openai-community/gpt2", 2, {"target_modules": ("c_attn",)}, "gpt2 has no base_model_tp"),
        ("mistralai/Mixtral-8x7B-v0.1", 2, {"method": "full"}, "plan that is not modelled"),
        (LLAMA, 16, {}, "16 ranks can't share the 32 query and 8 key/value heads"),
        (LLAMA, 2, {"method": "qlora"}, "can't divide weights of quant nf4"),
        (LLAMA, 2, {"method": "dora"}, "adapters of lora alone in peft 0.21, not of dora"),
        (LLAMA, 2, {"target_modules": ("o_proj",)}, "o_proj can't get adapters with parallel tp"),
        (LLAMA, 2, {"modules_to_save": ("lm_head",)}, "modules_to_save: what peft copies"),
        (LLAMA, 4, {"strategy": "tp+ddp", "tp_size": 2}, "takes no tp_size with replicas"),
    ],
)
def test_what_the_libraries_cannot_divide_is_refused(
    model: str, gpus: int, settings: dict[str, Any], message: str
) -> None:
    job = job_of(model, gpus, **settings)
    assert job.layout is not None
    with pytest.raises(ConfigError, match=message):
        job.layout.check(training_step(job))


def test_the_ledger_has_the_bytes_of_the_kept_traces() -> None:
    errors = tp_traces.errors()
    assert len(errors["peak"]) >= 30
    for name, limit in (("at_rest", 2e-5), ("optimizer", 0.0002), ("peak", 0.0003)):
        assert max(errors[name]) < limit, name
