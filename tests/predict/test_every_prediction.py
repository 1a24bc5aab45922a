"""What holds for every part of every prediction, over the whole database of models and devices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import EVERY_GPU, every_finetune_run, every_inference_run

from whichlora.errors import ConfigError
from whichlora.memory import allocator, optimizer, quantised_cache
from whichlora.memory.allocator import SEGMENT_BYTES
from whichlora.memory.training import Ledger
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.counted import CountedRun, count_run
from whichlora.predict.judgement import ALLOCATED_PARTS
from whichlora.predict.parts import part_bytes
from whichlora.predict.predict import predict, predict_counted
from whichlora.predict.quantities import ledger, moment_parts, passes
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.search.counted_candidate import count_inference, count_training
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Prediction
from whichlora.spec.run import Quant, RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.symbolic.llama4 import check_experts
from whichlora.timing import model as timing
from whichlora.timing.model import FEATURES

RUNS = st.one_of(every_finetune_run(), every_inference_run())


def resolved(run: RunConfig, gpu: GpuSpec) -> ResolvedRun | None:
    """The job, or None where the model, the method, the device or the ledger refuses the run."""
    try:
        job = resolve(load_model(run.model), run, gpu)
        for layer, _ in job.model.layers():
            if layer.moe is not None:
                check_experts(layer.moe, job.dtypes.quant)
    except ConfigError:
        return None
    return job


def predicted(job: ResolvedRun, run: RunConfig) -> Prediction:
    return predict(load_model(run.model), run, job.gpu, prior_calibration(job.gpu))


def estimated(job: ResolvedRun, run: RunConfig) -> Prediction:
    """`run` predicted without a replay, which decides neither its live tensors nor its time."""
    job = resolve(job.model, run, job.gpu)
    counted = CountedRun(job=job, moments=moment_parts(job), is_replayed=False, passes=passes(job))
    return predict_counted(counted, prior_calibration(job.gpu))


def total_s(prediction: Prediction) -> float:
    """Seconds of one step, or of the whole generation."""
    time = prediction.time
    if time.step_s is not None:
        return time.step_s
    return time.time_per_token_s * prediction.tokens_per_generation


@settings(max_examples=100)
@given(run=RUNS, gpu=EVERY_GPU)
def test_the_parts_of_a_peak_are_not_negative_and_add_up(run: RunConfig, gpu: GpuSpec) -> None:
    job = resolved(run, gpu)
    if job is None:
        return
    memory = predicted(job, run).memory
    assert {name: size for name, size in memory.breakdown.items() if size < 0} == {}
    assert sum(memory.breakdown.values()) == memory.device_used_bytes
    assert sum(memory.breakdown[name] for name in ALLOCATED_PARTS) == memory.peak_allocated_bytes
    for (low, high), value in (
        (memory.interval_bytes, memory.device_used_bytes),
        (memory.reserved_interval_bytes, memory.peak_reserved_bytes),
        (memory.allocated_interval_bytes, memory.peak_allocated_bytes),
    ):
        assert 0 <= low <= value <= high


@settings(max_examples=200)
@given(run=RUNS, gpu=EVERY_GPU)
def test_every_moment_is_made_of_parts_that_are_not_negative(run: RunConfig, gpu: GpuSpec) -> None:
    job = resolved(run, gpu)
    if job is None:
        return
    moments = ledger(job)
    for name, entries in moments.moments.items():
        assert {entry.what: entry.num_bytes for entry in entries if entry.num_bytes < 0} == {}
        parts = part_bytes(job, moments, name)
        assert min(parts.values()) >= 0
        assert sum(parts[part] for part in ALLOCATED_PARTS) == moments.moment_bytes(name)


@settings(max_examples=100)
@given(run=RUNS, gpu=EVERY_GPU)
def test_the_parts_of_a_time_are_not_negative_and_add_up(run: RunConfig, gpu: GpuSpec) -> None:
    job = resolved(run, gpu)
    if job is None:
        return
    prediction = estimated(job, run)
    parts = prediction.time.breakdown
    assert all(0 <= seconds < math.inf for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(total_s(prediction), rel=1e-9)
    low, high = prediction.time.interval_s
    value = prediction.time.step_s or prediction.time.time_per_token_s
    assert 0 < low <= value <= high < math.inf


def test_layers_that_went_backward_give_back_what_they_kept_and_nothing_is_negative() -> None:
    # 8 batches of 300 tokens: what 26 layers kept was taken from "temporary", -11 GB
    run = RunConfig(
        model="deepseek-ai/DeepSeek-V2-Lite",
        method="full",
        optimizer="sgd",
        gradient_checkpointing=False,
        batch_size=8,
        seq_len=300,
    )
    job = resolved(run, find_gpu("h200-sxm-141gb"))
    assert job is not None
    memory = predicted(job, run).memory
    assert memory.moment == "layer_1_backward"
    assert min(memory.breakdown.values()) >= 0
    assert memory.breakdown["activations"] < 0.2 * memory.breakdown["gradients"]


@pytest.mark.parametrize("model", ["mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"])
@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "fp4", "gptq-int4", "awq-int4"])
@pytest.mark.parametrize("libraries", [(), (("transformers", "4.46.0"),)])
def test_a_4_bit_mixture_is_not_slower_for_one_sequence_than_for_two(
    model: str, quant: Quant, libraries: tuple[tuple[str, str], ...]
) -> None:
    run = RunConfig(
        model=model,
        phase="inference",
        quant=quant,
        libraries=libraries,
        prompt_len=12,
        max_new_tokens=470,
    )
    job = resolved(run, find_gpu("rtx-5060-8gb"))  # slow enough not to wait for its host
    assert job is not None
    seconds = [total_s(estimated(job, replace(run, batch_size=size))) for size in (1, 2, 8, 64)]
    assert seconds == sorted(seconds)


def length_name(run: RunConfig) -> str:
    return "seq_len" if run.phase == "finetune" else "prompt_len"


def chunk_tokens(job: ResolvedRun) -> int:
    """Tokens of a chunk of gated delta nets in fp32; 0 where there are none.

    Where a length fills its chunks, `F.pad` returns a view, so that each product copies its
    factors: one more token needs less. Traced on Qwen3.5-9B with qdora, fp4, fp32 and no
    checkpointing: 48.55 GB at 1024 tokens and 47.40 GB at 1025.
    """
    if job.dtypes.under_autocast or (job.dtypes.compute_bytes < 4 and job.run.phase != "finetune"):
        return 0
    layers = [layer for layer, _ in job.model.layers()]
    nets = [one for layer in layers for one in layer.attentions if one.kind == "linear"]
    return nets[0].chunk_size if nets else 0


def may_shrink_bytes(run: RunConfig, found: Ledger, moment: str) -> int:
    """What a larger run may have less of.

    Rests of blocks, which there are none of where a size divides the allocator's segments; and
    8-bit optimizer states, which tensors below 4096 elements have in 32 bit; and the newest tokens
    of a quantised cache, which gather in full width until they are quantised too.
    """
    shrinks = [allocator.REMAINDERS]
    if "8bit" in run.optimizer:
        shrinks.append(optimizer.STATES)
    if run.phase == "inference":
        # and what one layer expands beside them, which the renewing step has instead
        shrinks += [quantised_cache.FRESH_CACHE, quantised_cache.EXPANDED]
    return sum(entry.num_bytes for entry in found.moments[moment] if entry.fact in shrinks)


@settings(max_examples=200)
@given(run=RUNS, gpu=EVERY_GPU, axis=st.integers(0, 2), more=st.integers(1, 64))
def test_more_of_a_size_never_needs_less(
    run: RunConfig, gpu: GpuSpec, axis: int, more: int
) -> None:
    job = resolved(run, gpu)
    if job is None:
        return
    name = job.size_names[axis]
    value = getattr(run, name)
    chunk = chunk_tokens(job) if name == length_name(run) else 0
    if chunk and value % chunk == 0:  # more than the next length needs; one token less does not
        value -= 1
        run = replace(run, **{name: value})
    smaller, larger = estimated(job, run), estimated(job, replace(run, **{name: value + more}))
    before, after = (ledger(job, **{name: size}) for size in (value, value + more))
    for moment in before.moments:
        lasting = before.moment_bytes(moment) - may_shrink_bytes(run, before, moment)
        assert after.moment_bytes(moment) - may_shrink_bytes(run, after, moment) >= lasting
    shrinking = may_shrink_bytes(run, before, smaller.memory.moment)
    difference = larger.memory.peak_allocated_bytes - smaller.memory.peak_allocated_bytes
    assert difference >= -shrinking
    if run.phase == "inference" and job.model.task == "encoder":
        shrinking += 2 * SEGMENT_BYTES  # what its layers and its logits leave of whole segments
    # a replay may reserve less for more, where the larger blocks happen to fit into holes
    assert larger.memory.device_used_bytes - smaller.memory.device_used_bytes >= -shrinking
    assert total_s(larger) >= total_s(smaller) * (1 - 1e-12)


@settings(max_examples=100)
@given(run=RUNS, gpu=EVERY_GPU)
def test_what_the_search_sees_of_a_run_is_what_is_predicted_of_it(
    run: RunConfig, gpu: GpuSpec
) -> None:
    job = resolved(run, gpu)
    if job is None:
        return
    counted = count_run(job)
    time = predict_counted(counted, prior_calibration(gpu)).time
    if run.phase == "finetune":
        counted_candidate = count_training(counted, {run.seq_len: 1.0}, profiled=[run.seq_len])
        expected = time.step_s
    else:
        counted_candidate = count_inference(counted, num_runs=1)
        expected = time.time_per_token_s
    models = prior_calibration(gpu).time
    seconds = 0.0
    for phase, number, row in counted_candidate.passes:
        seconds += number * timing.seconds(models[phase], dict(zip(FEATURES, row, strict=True)))[0]
    assert seconds == pytest.approx(expected, rel=1e-9)
