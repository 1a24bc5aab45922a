"""Time of an engine's pipeline: one batch passes all stages, several fill them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whichlora.calibration.load import load_calibration
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.predict.running_cost import running_cost
from whichlora.predict.serving import service_of
from whichlora.predict.serving_time import steady_time_per_token_s
from whichlora.serving.base import Served, Stepping
from whichlora.serving.pipeline_time import PipelineTimer, pipeline_timer
from whichlora.serving.step_time import PARTS, Step, own_all_reduce, step_timer
from whichlora.spec.costs import Offer
from whichlora.spec.results import ServingPrediction
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

LLAMA = "meta-llama/Llama-3.1-8B"
H100 = find_gpu("h100-sxm-80gb")
STEPS = (Step(4, 4000, 4), Step(0, 0, 1, 2048, 2e6), Step(16, 8000, 17, 512, 2e5))
OPTIONS = {"vllm": "pipeline_parallel_size", "sglang": "pp_size"}


def staged(engine: str, stages: int) -> tuple[Served, Stepping]:
    run = RunConfig(
        model=LLAMA,
        phase="inference",
        serving=engine,
        context=8192,
        serving_options=((OPTIONS[engine], stages),),
    )
    job = resolve(load_model(LLAMA), run, H100)
    assert job.engine.stepping is not None
    return job.served, job.engine.stepping(job.served)


def timer(stages: int = 2, engine: str = "vllm", send_s: float = 0.0) -> PipelineTimer:
    served, stepping = staged(engine, stages)
    return pipeline_timer(
        served,
        stepping=stepping,
        reduction_s=own_all_reduce(0.0, 1),
        sends_s=lambda num_bytes: send_s,
    )


def answered(
    model: str = LLAMA, gpu: str = "h100-sxm-80gb", **settings: object
) -> ServingPrediction:
    options = settings.pop("options", {})
    run = RunConfig(
        model=model,
        phase="inference",
        serving="vllm",
        serving_options=tuple(sorted(options.items())),  # type: ignore[attr-defined]
        **({"context": 4096, "prompt_len": 512, "max_new_tokens": 128} | settings),  # type: ignore[arg-type]
    )
    card = find_gpu(gpu)
    answer = predict(load_model(model), run, card, load_calibration(card)).serving
    assert answer is not None
    return answer


@pytest.mark.parametrize("engine", OPTIONS)
@pytest.mark.parametrize("step", STEPS)
def test_one_batch_takes_as_long_as_on_one_gpu_and_the_sends(engine: str, step: Step) -> None:
    served, stepping = staged(engine, 1)
    stepping = replace(stepping, plans_ahead=False)  # which no pipeline does
    alone = step_timer(served, stepping=stepping, reduction_s=own_all_reduce(0.0, 1))
    for stages in (2, 4):
        passing = timer(stages, engine, send_s=1e-3).seconds(step)
        assert passing == pytest.approx(alone.seconds(step) + 1e-3, rel=1e-6)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_parts_add_up_to_the_step(batches: int, step: Step) -> None:
    filled = replace(timer(3, send_s=1e-4), batches=batches)
    parts = filled.parts(step)
    assert sum(parts.values()) == pytest.approx(filled.seconds(step))
    assert (*PARTS, "sends", "pipeline_idle") == tuple(parts)


def test_the_slowest_stage_sets_the_pace_where_all_are_filled() -> None:
    passing = timer(3)
    filled = replace(passing, batches=3)
    each = [stage.seconds(STEPS[0]) for stage in passing.stages]
    assert each[2] == max(each)  # which has the head
    assert filled.seconds(STEPS[0]) == 3 * each[2] > passing.seconds(STEPS[0]) == sum(each)


def test_a_filled_pipeline_answers_as_many_times_more() -> None:
    options = {"pipeline_parallel_size": 4}
    times = [answered(options=options, batch_size=number).time for number in (1, 4, 5, 16)]
    assert all(times)
    one, four, five, sixteen = (time.output_tokens_per_s for time in times if time)
    assert 2.5 * one < four < 4 * one  # the last stage is the slowest
    assert one < five < sixteen
    assert times[1] is not None
    assert times[1].step_sequences == 1  # of one batch
    assert times[1].step_parts_s["pipeline_idle"] > 0


def test_no_more_batches_are_under_way_than_sequences_fit_the_pool() -> None:
    """Two sequences of 30,000 tokens on the fullest of four stages, whatever is asked."""
    run = {"context": 32_768, "prompt_len": 30_000, "max_new_tokens": 100}
    options = {"pipeline_parallel_size": 4, "gpu_memory_utilization": 0.122}
    many = answered(options=options, batch_size=8, **run)
    assert many.kv_pool_tokens // 30_100 == 2
    two = answered(options=options, batch_size=2, **run)
    assert many.time is not None
    assert two.time is not None
    assert many.time.output_tokens_per_s == pytest.approx(two.time.output_tokens_per_s, rel=0.15)


def test_a_rate_of_arrivals_is_shared_by_the_batches() -> None:
    time = answered(options={"pipeline_parallel_size": 2}, request_rate=2.0).time
    assert time is not None
    assert time.requests_per_s == pytest.approx(2.0, rel=0.2)


def test_stages_on_other_nodes_wait_for_the_network() -> None:
    model = "meta-llama/Llama-3.1-70B"
    options = {"pipeline_parallel_size": 2, "tensor_parallel_size": 4}
    near = answered(model, options=options).time
    far = answered(model, options={**options, "tensor_parallel_size": 8}).time
    assert near is not None
    assert far is not None
    assert 0 < near.step_parts_s["sends"] < 1e-4
    assert 0 < far.step_parts_s["sends"] < 1e-3
    assert near.step_parts_s["communication"] > 0


def test_without_links_a_pipeline_has_no_time() -> None:
    options = {"pipeline_parallel_size": 2}
    answer = answered("Qwen/Qwen2.5-0.5B", gpu="gb10-128gb", options=options)
    assert answer.starts
    assert answer.time is None


def test_chunks_of_a_long_prompt_follow_each_other_from_stage_to_stage() -> None:
    def first_s(stages: int, number: int = 1) -> float:
        run = {"context": 40_000, "prompt_len": 32_768, "max_new_tokens": 8}
        options = {"max_num_batched_tokens": 4096, "pipeline_parallel_size": stages}
        time = answered(options=options, batch_size=number, **run).time
        assert time is not None
        return time.ttft_s

    assert 0.25 * first_s(1) < first_s(4) < 0.5 * first_s(1)  # eight chunks
    assert first_s(4, number=4) > 2 * first_s(4)


def test_a_stage_is_free_for_the_next_chunk_where_no_other_batch_takes_it() -> None:
    _, stepping = staged("vllm", 3)
    assert stepping.chunk_share(1) == 11 / 32
    assert stepping.chunk_share(3) == 1.0
    assert staged("vllm", 1)[1].chunk_share(1) == 1.0


@pytest.mark.parametrize("number", [1, 8])
def test_a_search_ranks_by_what_a_simulation_answers(number: int) -> None:
    run = RunConfig(
        model=LLAMA,
        phase="inference",
        serving="vllm",
        context=4096,
        prompt_len=512,
        max_new_tokens=128,
        batch_size=number,
        serving_options=(("pipeline_parallel_size", 2),),
    )
    calibration = load_calibration(H100)
    job = resolve(load_model(LLAMA), run, H100)
    service, time = service_of(job), predict(job.model, run, H100, calibration).serving
    assert service is not None
    assert time is not None
    assert time.time is not None
    steady = steady_time_per_token_s(job, job.served, service, calibration)
    assert steady == pytest.approx(1 / time.time.output_tokens_per_s, rel=0.15)


def test_costs_are_of_all_gpus_and_power_of_those_that_work() -> None:
    run = RunConfig(
        model=LLAMA,
        phase="inference",
        serving="vllm",
        context=4096,
        serving_options=(("pipeline_parallel_size", 2), ("tensor_parallel_size", 2)),
    )
    model, calibration = load_model(LLAMA), load_calibration(H100)
    offer = Offer(
        gpu=H100.key, provider="x", gpus=1, usd_per_hour=1.0, date="2026-01-01", source="x"
    )
    one = running_cost(predict(model, run, H100, calibration), H100, [offer], None)
    filled = replace(run, batch_size=2)
    two = running_cost(predict(model, filled, H100, calibration), H100, [offer], None)
    assert one is not None
    assert two is not None
    assert one.num_gpus == two.num_gpus == 4
    assert one.power_w is not None
    assert two.power_w is not None
    assert one.power_w[0] < two.power_w[0] < 2.1 * one.power_w[0]
