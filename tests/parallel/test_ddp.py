"""DistributedDataParallel: buckets as large as the gradients, and one all-reduce per step."""

from __future__ import annotations

import pytest

from whichlora.memory.gradients import gradient_bytes
from whichlora.parallel import ddp, ddp_events
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.units import MiB

GPU = find_gpu("a100-sxm-80gb")
MODEL = load_model("meta-llama/Llama-3.2-1B")


def predicted(method: str, gpus: int, **options: bool) -> Prediction:
    parallel = ParallelConfig(strategy="ddp", gpus=gpus, options=tuple(options.items()))
    run = RunConfig(model=MODEL.name, method=method, seq_len=512, parallel=parallel)
    return predict(MODEL, run, GPU, prior_calibration(GPU))


def alone(method: str) -> Prediction:
    run = RunConfig(model=MODEL.name, method=method, seq_len=512)
    return predict(MODEL, run, GPU, prior_calibration(GPU))


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_every_rank_needs_what_one_gpu_does_and_buckets(method: str) -> None:
    run = RunConfig(model=MODEL.name, method=method, seq_len=512)
    gradients = gradient_bytes(training_step(resolve(MODEL, run, GPU)).tensors)
    several = predicted(method, 4).memory.peak_allocated_bytes
    assert several == alone(method).memory.peak_allocated_bytes + gradients
    assert predicted(method, 8).memory.peak_allocated_bytes == several


def test_views_of_the_buckets_are_the_gradients_and_outlive_them() -> None:
    copied = predicted("lora", 4).several_gpus
    viewed = predicted("lora", 4, gradient_as_bucket_view=True).several_gpus
    assert copied is not None
    assert viewed is not None
    # no gradient is there yet at the loss, where these peak
    assert copied.ranks[0].moment == viewed.ranks[0].moment == "loss_backward"
    assert copied.ranks[0].peak_allocated_bytes == viewed.ranks[0].peak_allocated_bytes


def test_buckets_are_as_large_as_what_is_trained() -> None:
    job = resolve(
        MODEL,
        RunConfig(model=MODEL.name, method="lora", parallel=ParallelConfig(strategy="ddp", gpus=2)),
        GPU,
    )
    assert job.layout is not None
    assert job.layout.strategies
    step = training_step(job)
    assert ddp.bucket_bytes(step) == 4 * step.num_trained


def test_each_rank_sends_its_gradients_twice_but_for_its_own_share() -> None:
    several = predicted("full", 4).several_gpus
    assert several is not None
    assert several.communication.num_bytes == 2 * MODEL.num_params * 2 * 3 // 4
    assert several.global_batch_size == 4


def test_the_reducer_groups_gradients_by_the_bytes_of_a_bucket() -> None:
    sizes = [MiB // 2, MiB, 10 * MiB, 10 * MiB, 10 * MiB, 40 * MiB, MiB]
    grouped = list(ddp_events.grouped(sizes))
    assert [sum(bucket) / MiB for bucket in grouped] == [1.5, 30, 40, 1]


def test_what_weights_are_sent_in_stays_idle_in_small_runs() -> None:
    # two copies of 250 MiB, which no tensor of a short row fills
    idle = predicted("lora", 4).memory.breakdown["allocator"]
    assert idle > alone("lora").memory.breakdown["allocator"]
    viewed = predicted("lora", 4, gradient_as_bucket_view=True).memory.breakdown["allocator"]
    assert viewed != idle  # of which no requests are written
