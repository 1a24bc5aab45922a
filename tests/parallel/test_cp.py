"""Context parallelism: parts of every sequence, and torch's own ring on a fake process group."""

from __future__ import annotations

from statistics import median
from typing import Any

import cp_traces
import fsdp_traces
import pytest

from whichlora.errors import ConfigError
from whichlora.parallel.cp import ringed
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.quantities import training_step
from whichlora.predict.rank_time import update_of_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing.running import RunningModel
from whichlora.timing.training_work import training_work

GPU = find_gpu("a100-sxm-80gb")
LLAMA = "meta-llama/Llama-3.2-1B"


def asked(
    strategy: str = "cp+fsdp", model: str = LLAMA, gpus: int = 8, run: Any = None, **options: Any
) -> RunConfig:
    parallel = ParallelConfig(strategy=strategy, gpus=gpus, options=tuple(sorted(options.items())))
    settings = {"method": "full", "seq_len": 16_384} | (run or {})
    return RunConfig(model=model, parallel=parallel, **settings)


def predicted(*args: Any, **settings: Any) -> Prediction:
    run = asked(*args, **settings)
    return predict(load_model(run.model), run, GPU, prior_calibration(GPU))


def job_of(*args: Any, **settings: Any) -> ResolvedRun:
    run = asked(*args, **settings)
    return resolve(load_model(run.model), run, GPU)


def moments_of(**settings: Any) -> dict[str, int]:
    job = job_of(**settings)
    assert job.layout is not None
    ledger = job.layout.ledger(job.layout.rank_kinds(training_step(job))[0])
    return {name: int(ledger.moment_bytes(name)) for name in ledger.moments}


def test_a_longer_ring_holds_fewer_tokens_and_no_more_parameters() -> None:
    peaks = [predicted(cp_size=size).memory.peak_allocated_bytes for size in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    held = [moments_of(cp_size=size)["between_steps"] for size in (2, 8)]
    assert held[0] == held[1]


def test_one_micro_batch_is_shared_and_parameters_are_sharded_among_all() -> None:
    several = predicted(cp_size=4, run={"gradient_checkpointing": True}).several_gpus
    assert several is not None
    assert several.global_batch_size == 2
    of_keys, others = [], []
    job = job_of(cp_size=4)
    assert job.layout is not None
    for message in job.layout.messages(job.layout.rank_kinds(training_step(job))[0]):
        (of_keys if "keys and values" in message.what else others).append(message)
    assert {(message.size, message.stride) for message in others} == {(8, 1)}
    assert {(message.size, message.stride) for message in of_keys} == {(4, 1)}
    config = load_model(LLAMA)
    (gathered,) = [m for m in of_keys if m.what == "keys and values, forward"]
    # 8 key/value heads of 64, in 16 bit, of all 16,384 tokens; once more where it is recomputed
    assert gathered.num_bytes == 2 * 2 * 8 * 64 * 16_384
    assert gathered.count == 2 * config.num_hidden_layers


def test_queries_of_a_rank_see_the_keys_of_all() -> None:
    flops = []
    for strategy, options in (("fsdp", {}), ("cp+fsdp", {"cp_size": 8})):
        job = job_of(strategy, **options)
        assert job.layout is not None
        step = job.layout.rank_kinds(training_step(job))[0].step
        work = training_work(
            RunningModel(
                model=step.model,
                run=step.run,
                dtypes=step.dtypes,
                method=step.method,
                targets=step.targets,
                r=step.r,
            ),
            batch_size=step.batch_size,
            seq_len=step.seq_len,
            update=update_of_step(step),
        )
        flops.append(work.attention_flops)
    assert flops[1] == flops[0] // 8


def test_a_model_of_a_ring_differs_in_its_attention_alone() -> None:
    model = load_model(LLAMA)
    assert ringed(ringed(model, 4), 1) == model
    assert {a.ring for layer, _ in ringed(model, 4).layers() for a in layer.attentions} == {4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "cp"}, "use cp.fsdp"),
        ({"strategy": "cp+ddp", "cp_size": 2}, "use cp.fsdp"),
        ({"cp_size": 2, "fsdp_version": "1"}, "version 2 alone"),
        ({"cp_size": 2, "model": "google/gemma-2-2b"}, "do not all attend"),
        ({"cp_size": 2, "run": {"precision": "fp32"}}, "flash kernel"),
        ({"cp_size": 8, "run": {"seq_len": 1000}}, "multiple of 16"),
    ],
)
def test_what_the_libraries_refuse_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predicted(**settings)


def test_kept_traces_are_as_near_as_now() -> None:
    sizes = [abs(cp_traces.error(record)) for record in cp_traces.records()]
    assert len(sizes) >= cp_traces.FEWEST
    assert median(sizes) < 0.0005
    assert max(sizes) < 0.02


@pytest.mark.oracle
def test_a_rank_holds_what_torchs_ring_holds() -> None:
    record = next(cp_traces.records())
    run = RunConfig.from_dict({"model": "drawn", **record["run"]})
    assert cp_traces.traced(record["config"], run) == record["moments"]
    assert fsdp_traces.predicted(record)["loss"] > 0
