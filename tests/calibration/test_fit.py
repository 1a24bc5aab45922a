"""Measurements to coefficients: what is recovered, what the prior holds, what one outlier does."""

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whichlora.calibration.fit import digest, fit
from whichlora.calibration.fit_memory import fit_memory
from whichlora.calibration.fit_time import fit_phases
from whichlora.calibration.load import model_of
from whichlora.calibration.regression import (
    PRIOR_WEIGHT,
    conformal_scale,
    grouped_folds,
    student_scale,
)
from whichlora.calibration.samples import Sample, groups_of, time_samples
from whichlora.errors import ConfigError
from whichlora.memory.training import PARTS
from whichlora.predict.coefficients import Calibration, prior_calibration
from whichlora.predict.judged import judged_memory, judged_run, judged_time
from whichlora.predict.predict import memory_prediction, predict
from whichlora.predict.quantities import step_features
from whichlora.predict.resolve import resolve
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.measurements import read_measurements
from whichlora.timing.model import FEATURES, REGIMES, prior_model, seconds

GPU = find_gpu("a100-sxm-80gb")
CPU = find_gpu("cpu")
MODELS = (
    "HuggingFaceTB/SmolLM2-1.7B",
    "Qwen/Qwen2.5-7B",
    "meta-llama/Llama-3.1-8B",
    "EleutherAI/pythia-2.8b",
)
SHAPES = ((1, 512), (4, 1024), (8, 2048), (16, 512))
METHODS = ("lora", "full", "qlora")


def runs() -> list[RunConfig]:
    return [
        RunConfig(model=model, method=method, batch_size=batch_size, seq_len=seq_len)
        for model in MODELS
        for method in METHODS
        for batch_size, seq_len in SHAPES
    ]


def true_calibration(**factors: float) -> Calibration:
    """A device whose coefficients are the prior's times `factors`."""
    start = prior_calibration(GPU)
    model = start.time["finetune"]
    mean = {name: model.mean[name] * factors.get(name, 1.0) for name in FEATURES}
    return replace(start, time={**start.time, "finetune": replace(model, mean=mean)})


def measured(
    run: RunConfig,
    truth: Calibration,
    *,
    memory_factor: float = 1.0,
    noise: Callable[[], float] = lambda: 1.0,
    **changes: Any,
) -> Measurement:
    """What a device that `truth` describes would record."""
    job = resolve(load_model(run.model), run, GPU)
    step_s = judged_time(job, truth).total_s
    assert step_s is not None
    memory = judged_memory(job, truth)  # a replay would move the reserve alone
    fields: dict[str, Any] = {
        "id": f"{run.model}-{run.method}-{run.batch_size}-{run.seq_len}",
        "gpu": GPU.key,
        "date": "2026-11-21T00:00:00+00:00",
        "config": job.run.to_dict(),
        "outcome": "ok",
        "step_s": tuple(step_s * noise() for _ in range(3)),
        "batch_seq_len": (run.seq_len,) * 3,
        "peak_allocated_bytes": round(memory.peak_allocated_bytes * memory_factor),
    }
    return Measurement(**(fields | changes))


def generated(model: str, truth: Calibration) -> Measurement:
    """What a device that `truth` describes would record of a generation."""
    run = RunConfig(model=model, phase="inference", prompt_len=512, max_new_tokens=64)
    time = predict(load_model(model), run, GPU, truth).time
    return Measurement(
        id=f"{model} generates",
        gpu=GPU.key,
        date="2026-11-21T00:00:00+00:00",
        config=run.to_dict(),
        outcome="ok",
        generate_s=(64 * time.time_per_token_s,),
        prefill_s=(time.prefill_s or 0.0,),
        decode_s_per_token=(time.decode_s_per_token or 0.0,),
    )


def slower(k: float, phase: str | None = None, parts: Collection[str] = FEATURES) -> Calibration:
    """A device whose `parts` take `k` times as long as the prior, in all phases or in one."""
    start = prior_calibration(GPU)
    time = {
        name: replace(
            model, mean={part: k * s if part in parts else s for part, s in model.mean.items()}
        )
        if phase in (None, name)
        else model
        for name, model in start.time.items()
    }
    return replace(start, time=time)


def error_of(calibration: Calibration, truth: Calibration, run: RunConfig) -> float:
    job = resolve(load_model(run.model), run, GPU)
    predicted, real = (judged_time(job, one).total_s for one in (calibration, truth))
    assert predicted is not None
    assert real is not None
    return abs(math.log(predicted / real))


def width(calibration: Calibration, run: RunConfig) -> float:
    low, high = predict(load_model(run.model), run, GPU, calibration).time.interval_s
    return math.log(high / low)


# --- the whole fit


def test_without_measurements_the_priors_stand_alone() -> None:
    found = fit([], GPU, model_of)
    start = prior_calibration(GPU)
    assert found.time == start.time
    assert found.memory == start.memory
    assert found.num_records == 0
    assert "no run on this device yet" in found.basis(
        memory_runs=0, time_runs=0, passes={"finetune": {}}
    )


def test_known_coefficients_are_recovered_from_noisy_runs() -> None:
    dice = random.Random(0)
    truth = true_calibration(products=1.3, attention=0.6, elementwise=1.5, optimizer=1.4)
    records = [measured(run, truth, noise=lambda: dice.lognormvariate(0, 0.02)) for run in runs()]
    found = fit(records, GPU, model_of)
    model = found.time["finetune"]
    assert model.num_runs == len(records)
    for name, tolerance in (("products", 0.05), ("elementwise", 0.15)):  # a tenth of most steps
        wanted = truth.time["finetune"].mean[name]
        assert model.mean[name] == pytest.approx(wanted, rel=tolerance), name
    errors = sorted(error_of(found, truth, run) for run in runs())
    assert errors[len(errors) // 2] < 0.02
    assert errors[-1] < 0.08
    before = [error_of(prior_calibration(GPU), truth, run) for run in runs()]
    assert max(before) > 0.2


def test_two_runs_narrow_the_interval_of_a_third() -> None:
    truth = true_calibration(products=1.2)
    cold = prior_calibration(GPU)
    first, second, third = (
        RunConfig(model=model, batch_size=8, seq_len=1024) for model in MODELS[:3]
    )
    found = fit([measured(run, truth) for run in (first, second)], GPU, model_of)
    assert found.time["finetune"].num_runs == 2
    assert width(found, third) < 0.85 * width(cold, third)
    assert error_of(found, truth, third) < error_of(cold, truth, third) / 2


def test_the_fit_explains_the_next_prediction() -> None:
    truth = true_calibration(products=1.2)
    records = [measured(run, truth) for run in runs()[:5]]
    found = fit(records, GPU, model_of)
    basis = predict(load_model(MODELS[0]), runs()[0], GPU, found).basis
    assert basis.startswith(
        "memory by the config, corrected by 5 runs; times fitted to 5 of 5 runs "
        f"on {GPU.key}; finetune "
    )
    assert basis.endswith("% off on 2 left out")  # the others wait for the device


def test_an_answer_states_the_error_of_runs_that_the_same_decides() -> None:
    """Short runs wait for a host that nobody knows; that says nothing of long ones."""
    truth = true_calibration(launch=3.0)
    records = [measured(run, truth, noise=lambda: 1.0) for run in runs()]
    found = fit(records, GPU, model_of)
    by_regime = found.held_out_by_regime["finetune"]
    assert sum(error.num_runs for error in by_regime.values()) == len(records)
    short = RunConfig(model=MODELS[0], batch_size=1, seq_len=16)
    for run in (short, replace(short, batch_size=64, seq_len=2048)):
        prediction = predict(load_model(MODELS[0]), run, GPU, found)
        by_host = prediction.time.breakdown["launch"] > 0
        error = by_regime["host" if by_host else "device"]
        cause = "the host" if by_host else "the device"
        said = f"bound by {cause} {error.median:.0%} off on {error.num_runs} left out"
        assert prediction.basis.endswith(said)


def test_a_stage_without_runs_says_whose_speed_it_has() -> None:
    found = fit([measured(run, slower(3.0)) for run in runs()[:5]], GPU, model_of)
    run = RunConfig(model=MODELS[0], phase="inference")
    basis = predict(load_model(MODELS[0]), run, GPU, found).basis
    assert "times fitted to 0 of 5 runs" in basis
    assert "the speed is from 5 runs of other phases" in basis


def test_a_fit_that_is_worse_on_left_out_runs_gives_way_to_the_datasheet() -> None:
    """Four models that err in turns: three of them always mislead about the fourth."""
    errors = dict(zip(MODELS, (1.8, 1 / 1.8, 1.8, 1 / 1.8), strict=True))
    cold = prior_calibration(GPU)
    records = [measured(run, cold, noise=lambda run=run: errors[run.model]) for run in runs()]
    found = fit(records, GPU, model_of)
    assert found.by_datasheet == ("finetune",)
    assert found.held_out["finetune"].median > found.cold["finetune"].median
    assert found.time["finetune"].mean == cold.time["finetune"].mean
    assert found.time["finetune"].noise > cold.time["finetune"].noise
    assert found.time["finetune"].num_runs == 0
    basis = predict(load_model(MODELS[0]), runs()[0], GPU, found).basis
    assert "times fitted to 0 of " in basis
    assert "finetune by the datasheet, which is better on runs left out of a fit" in basis
    assert Calibration.from_dict(found.to_dict(), source="coefficients.json") == found


def test_a_fit_that_learned_is_used() -> None:
    found = fit([measured(run, true_calibration(products=1.3)) for run in runs()], GPU, model_of)
    assert found.by_datasheet == ()


def test_held_out_errors_are_of_models_the_fit_did_not_see() -> None:
    truth = true_calibration(products=1.3)
    records = [measured(run, truth) for run in runs()]
    found = fit(records, GPU, model_of)
    held_out = found.held_out["finetune"]
    assert held_out.num_runs == len(records)
    assert 0.0 <= held_out.median <= held_out.worst < 0.1
    assert "memory" in found.held_out
    assert fit(records, GPU, model_of, held_out=False).held_out == {}


def test_one_wild_record_shows_in_the_error_and_does_not_crash() -> None:
    truth = true_calibration(products=1.2)
    records = [measured(run, truth) for run in runs()]
    clean = fit(records, GPU, model_of)
    wild = replace(records[7], step_s=tuple(10 * s for s in records[7].step_s))
    found = fit([*records[:7], wild, *records[8:]], GPU, model_of)
    assert found.held_out["finetune"].worst > 0.8
    assert found.held_out["finetune"].worst > 5 * clean.held_out["finetune"].worst
    assert found.time["finetune"].noise > clean.time["finetune"].noise
    assert all(
        math.isfinite(value) and value >= 0 for value in found.time["finetune"].mean.values()
    )
    assert width(found, runs()[0]) > width(clean, runs()[0])


def with_wild(records: Sequence[Measurement], factor: float, count: int) -> list[Measurement]:
    """The records, every so many of them with times that are `factor` of what they were."""
    every = len(records) // count
    return [
        replace(record, step_s=tuple(factor * s for s in record.step_s))
        if i % every == every // 2
        else record
        for i, record in enumerate(records)
    ]


@pytest.mark.parametrize("k", [0.2, 0.5, 3.0, 8.0, 20.0])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_handful_of_runs_teaches_a_device_far_from_its_prior(k: float, noise: float) -> None:
    dice = random.Random(2)
    truth = slower(k)
    taught = [run for run in runs() if run.model != MODELS[1]][::8]
    records = [measured(run, truth, noise=lambda: dice.lognormvariate(0, noise)) for run in taught]
    found = fit(records, GPU, model_of)
    assert len(records) == 5
    errors = sorted(error_of(found, truth, run) for run in runs() if run.model == MODELS[1])
    assert errors[len(errors) // 2] < 0.1
    assert errors[-1] < 0.15


@pytest.mark.parametrize("k", [0.2, 8.0, 20.0])
def test_one_run_already_brings_others_near(k: float) -> None:
    truth = slower(k)
    run, *others = runs()[5:8]
    found = fit([measured(run, truth)], GPU, model_of, held_out=False)
    for other in others:
        assert error_of(found, truth, other) < 0.15


@pytest.mark.parametrize("k", [0.75, 1.3])
def test_a_slow_host_does_not_make_the_device_slow(k: float) -> None:
    truth = slower(k, parts=("launch", "trainer", "constant"))
    launched, computed = runs()[::12], runs()[2::12]
    records = [measured(run, truth) for run in launched] + [generated(m, truth) for m in MODELS]
    found = fit(records, GPU, model_of, held_out=False)
    for run in computed:
        assert error_of(found, truth, run) < 0.05


@pytest.mark.parametrize("name", ["products", "elementwise", "launch"])
def test_one_kind_of_work_may_be_slow_alone(name: str) -> None:
    truth = true_calibration(**{name: 10.0})
    records = [measured(run, truth) for run in runs() if run.model != MODELS[1]][::3]
    found = fit(records, GPU, model_of, held_out=False)
    errors = sorted(error_of(found, truth, run) for run in runs() if run.model == MODELS[1])
    assert errors[len(errors) // 2] < 0.1


def generation_s(calibration: Calibration, model: str) -> tuple[float, float]:
    """Seconds per token and how far up their interval reaches, as a log."""
    run = RunConfig(model=model, phase="inference", batch_size=2)
    found = predict(load_model(model), run, GPU, calibration).time
    return found.time_per_token_s, math.log(found.interval_s[1] / found.time_per_token_s)


def test_training_runs_tell_of_inference_with_a_wider_interval() -> None:
    truth, cold = slower(8.0), prior_calibration(GPU)
    records = [measured(run, truth) for run in runs()[::8]]
    found = fit(records, GPU, model_of)
    assert found.time["decode"].num_runs == 0
    seconds, reach = generation_s(found, MODELS[1])
    assert seconds == pytest.approx(generation_s(truth, MODELS[1])[0], rel=0.25)
    trained = width(found, RunConfig(model=MODELS[1], batch_size=8, seq_len=1024)) / 2
    assert trained < reach
    assert reach < 1.2 * generation_s(cold, MODELS[1])[1]


def test_a_phase_that_differs_from_the_others_is_learned_by_its_runs() -> None:
    truth = slower(8.0, "finetune")
    records = [measured(run, truth) for run in runs()[::8]]
    found = fit([*records, generated(MODELS[0], truth)], GPU, model_of)
    assert error_of(found, truth, runs()[1]) < 0.1
    wanted, _ = generation_s(truth, MODELS[1])
    assert generation_s(found, MODELS[1])[0] == pytest.approx(wanted, rel=0.25)


@pytest.mark.parametrize(
    "changes",
    [
        {"step_s": (1e-9,) * 3},
        {"step_s": (1e9,) * 3},
        {"peak_allocated_bytes": 1},
        {"config": {"batch_size": 10**9}},
        {"config": {"seq_len": 10**9, "batch_size": 10**9}},
    ],
)
def test_a_record_that_no_device_can_have_measured_is_left_out_by_name(
    changes: dict[str, Any],
) -> None:
    truth = true_calibration(products=1.2)
    records = [measured(run, truth) for run in runs()[:6]]
    if "config" in changes:
        changes = {"config": records[0].config | changes["config"]}
    absurd = replace(records[0], id="absurd", **changes)
    found = fit([absurd, *records], GPU, model_of)
    (why,) = found.left_out.values()
    assert "times what the datasheet says" in why
    assert found.left_out.keys() == {"absurd"}
    assert found.time == fit(records, GPU, model_of).time


@pytest.mark.parametrize("factor", [0.1, 3.0, 100.0])
def test_a_tenth_of_wrong_records_does_not_bend_the_others(factor: float) -> None:
    dice = random.Random(1)
    truth = true_calibration(products=1.3)
    records = [measured(run, truth, noise=lambda: dice.lognormvariate(0, 0.02)) for run in runs()]
    found = fit(with_wild(records, factor, 4), GPU, model_of, held_out=False)
    errors = sorted(error_of(found, truth, run) for run in runs())
    assert errors[len(errors) // 2] < 0.04
    assert errors[-1] < 0.12


def test_what_was_down_weighted_is_named_with_its_ratio() -> None:
    truth = true_calibration(products=1.3)
    records = [measured(run, truth) for run in runs()]
    assert fit(records, GPU, model_of, held_out=False).outliers == ()
    wild = with_wild(records, 5.0, 4)
    changed = {b.id for a, b in zip(records, wild, strict=True) if a.step_s != b.step_s}
    found = fit(wild, GPU, model_of, held_out=False).outliers
    assert {one.record for one in found} == changed
    assert len(changed) == 4
    for one in found:
        assert one.phase == "finetune"
        assert one.weight < 0.25
        assert one.ratio == pytest.approx(5.0, rel=0.1)


def test_a_fit_states_its_range_and_what_the_priors_alone_would_miss() -> None:
    records = [measured(run, true_calibration(products=1.3)) for run in runs()]
    found = fit(records, GPU, model_of)
    assert found.ranges["finetune"]["batch_size"] == (1, 16)
    assert found.ranges["finetune"]["tokens"] == (512, 2048)
    assert found.cold["finetune"].median > 2 * found.held_out["finetune"].median
    assert found.ranges.keys() == found.cold.keys() == {"finetune", "memory"}


def test_failed_runs_teach_nothing_but_are_counted() -> None:
    truth = true_calibration()
    good = measured(runs()[0], truth)
    failed = replace(
        measured(runs()[1], truth),
        outcome="oom",
        step_s=(),
        batch_seq_len=(),
        peak_allocated_bytes=None,
    )
    found = fit([good, failed], GPU, model_of)
    assert found.time["finetune"].num_runs == 1
    assert found.num_records == 2


def test_a_record_whose_model_is_not_at_hand_is_left_out() -> None:
    def unknown(record: Measurement) -> Any:
        raise ConfigError(f"record {record.id}: unknown model")

    found = fit([measured(runs()[0], true_calibration())], GPU, unknown)
    assert found.time == prior_calibration(GPU).time
    (why,) = found.left_out.values()
    assert "unknown model" in why


FIXTURE = Path(__file__).parents[1] / "golden" / "calibration"


def test_runs_that_a_real_cpu_recorded_are_read_and_fitted() -> None:
    gpu = replace(CPU, key="cpu-intel-xeon-2c")
    records = read_measurements([FIXTURE], gpu.key)
    found = fit(records, gpu, model_of)
    assert (len(records), found.num_older, dict(found.left_out)) == (6, 0, {})
    assert found.time["finetune"].num_runs >= 4
    assert found.time["decode"].num_runs == 1
    assert found.held_out["finetune"].num_runs == 8


OLDER = (("transformers", "4.44.2"),)


def test_runs_on_other_versions_teach_the_device() -> None:
    truth = true_calibration(products=1.4)
    records = [measured(replace(run, libraries=OLDER), truth) for run in runs()]
    found = fit(records, GPU, model_of)
    run = RunConfig(model=MODELS[1], batch_size=8, seq_len=1024)
    cold = prior_calibration(GPU)
    assert error_of(found, truth, run) < error_of(cold, truth, run) / 4
    assert "48 with other versions" in found.basis(
        memory_runs=0, time_runs=48, passes={"finetune": {}}
    )


def test_records_of_another_engine_are_left_out_and_say_so() -> None:
    truth = true_calibration(products=1.2)
    own = [measured(run, truth) for run in runs()[:4]]
    serving = RunConfig(model=MODELS[0], phase="inference", kv_cache="vllm", max_new_tokens=8)
    fields = own[0].to_dict() | {"id": "served", "config": serving.to_dict(), "step_s": ()}
    del fields["schema_version"]
    other = Measurement(**fields | {"generate_s": (1.0,)})
    found = fit([*own, other], GPU, model_of)
    assert found.left_out == {"served": "runs on vllm, and this calibration is of transformers"}
    assert found.time == fit(own, GPU, model_of).time


def test_a_stack_of_other_software_narrows_the_interval_as_one_run() -> None:
    """All agree to the digit. Four stacks of many runs say less of the next than as many runs."""
    truth = true_calibration(products=1.2, launch=1.1)
    versions = [(("transformers", f"4.{minor}.0"),) for minor in (38, 41, 44, 47)]
    older = [
        measured(replace(run, libraries=versions[i % 4]), truth) for i, run in enumerate(runs())
    ]
    current = [measured(run, truth) for run in runs()]
    of_stacks, of_runs = (fit(some, GPU, model_of).time["finetune"] for some in (older, current))
    least = math.sqrt(PRIOR_WEIGHT / (PRIOR_WEIGHT + 4)) * student_scale(4, 0.9)
    assert least <= of_stacks.interval_scale < 1.1 * least
    assert of_runs.interval_scale < of_stacks.interval_scale
    assert set(of_stacks.regime_scales) <= set(REGIMES)


def test_older_runs_of_several_stacks_are_held_out_by_stack() -> None:
    samples = [
        Sample(f"model {i}", {}, 1.0, f"record {i}", stack=f"stack {i % 3}") for i in range(9)
    ]
    assert groups_of(samples) == [f"stack {i % 3}" for i in range(9)]


def test_another_engine_takes_the_rates_of_the_device_and_the_prior_for_the_rest() -> None:
    start = prior_calibration(GPU)
    slow = {name: 3.0 * value for name, value in start.time["decode"].mean.items()}
    decode = replace(start.time["decode"], mean=slow, num_runs=50, noise=0.02)
    found = replace(start, time={**start.time, "decode": decode}, num_records=50)
    other = found.for_engine("vllm", GPU)
    mean, prior = other.time["decode"].mean, start.time["decode"].mean
    assert {name for name in FEATURES if mean[name] != prior[name]} == {"products", "weights"}
    assert mean["weights"] == slow["weights"]
    assert other.time["decode"].noise == start.time["decode"].noise
    assert other.time["finetune"] == found.time["finetune"]
    assert found.for_engine("transformers", GPU) is found
    assert other.for_engine("vllm", GPU) is other
    run = RunConfig(model=MODELS[0], phase="inference", kv_cache="vllm")
    basis = predict(load_model(MODELS[0]), run, GPU, found).basis
    assert "its times are not of vllm: arithmetic and bandwidth are from transformers" in basis


def test_a_run_on_the_current_versions_outweighs_any_number_of_older_ones() -> None:
    before, now = true_calibration(products=1.0), true_calibration(products=1.5)
    older = [measured(replace(run, libraries=OLDER), before) for run in runs()]
    run = RunConfig(model=MODELS[1], batch_size=8, seq_len=1024)
    own = [measured(run, now, id=f"own-{i}") for i in range(3)]
    one = fit([*older, *own], GPU, model_of)
    many = fit([*older * 20, *own], GPU, model_of)
    assert error_of(one, now, run) < 0.1
    assert error_of(many, now, run) < 0.1


def test_own_runs_outweigh_those_of_another_machine() -> None:
    """Whose host takes twice as long: there is one of it, here and anywhere else another."""
    slow, fast = (true_calibration(launch=k, trainer=k, constant=k) for k in (2.0, 0.8))
    theirs = [measured(run, slow) for run in runs()]
    own = [measured(run, fast, id=f"own-{n}") for n, run in enumerate(runs()[:3])]
    ids = {record.id for record in theirs}
    run = runs()[0]
    alike = fit([*theirs, *own], GPU, model_of, held_out=False)
    apart = fit([*theirs, *own], GPU, model_of, held_out=False, elsewhere=ids)
    assert error_of(apart, fast, run) < 0.1 < error_of(alike, fast, run)
    alone, known = (fit(theirs, GPU, model_of, held_out=False, elsewhere=e) for e in (ids, ()))
    assert width(alone, run) > 2 * width(known, run)


def test_memory_is_not_taught_by_other_versions() -> None:
    records = [
        measured(replace(run, libraries=OLDER), true_calibration(), memory_factor=1.3)
        for run in runs()
    ]
    assert fit(records, GPU, model_of).memory == prior_calibration(GPU).memory


def test_work_is_that_of_the_power_which_the_driver_allowed() -> None:
    """What took longer at a limit teaches of the board without one what it takes there."""
    assert GPU.power_w is not None
    limit = GPU.power_w / 2
    records = [
        replace(
            measured(run, true_calibration(), environment={"power_limit_w": limit}),
            step_s=(judged_time(limited, true_calibration()).total_s,) * 3,
        )
        for run in runs()
        for limited in [resolve(load_model(run.model), run, replace(GPU, power_limit_w=limit))]
    ]
    fitted = fit(records, GPU, model_of).time["finetune"].mean["products"]
    assert fitted == pytest.approx(prior_calibration(GPU).time["finetune"].mean["products"], 0.01)
    unstated = [replace(record, environment={"power_limit_w": "?"}) for record in records]
    assert fit(unstated, GPU, model_of).time["finetune"].mean["products"] > 1.1 * fitted


def test_the_forward_of_an_encoder_teaches_no_decoding() -> None:
    run = RunConfig(model="google-bert/bert-base-uncased", phase="inference", precision="fp32")
    job = resolve(load_model(run.model), run, CPU)
    record = Measurement(
        id="one",
        gpu=CPU.key,
        date="2026-11-21T00:00:00+00:00",
        config=job.run.to_dict(),
        outcome="ok",
        generate_s=(100.0,),
        prefill_s=(100.0,),
    )
    assert set(time_samples(job, record)) == {"prefill"}


def test_a_generation_alone_teaches_decoding() -> None:
    run = RunConfig(model=MODELS[1], phase="inference", prompt_len=64, max_new_tokens=256)
    cold = prior_calibration(GPU)
    prediction = predict(load_model(run.model), run, GPU, cold).time
    assert prediction.prefill_s is not None
    assert prediction.decode_s_per_token is not None
    whole = prediction.prefill_s + 255 * 2 * prediction.decode_s_per_token
    fields = {"generate_s": (whole,), "step_s": (), "batch_seq_len": ()}
    plain = measured(RunConfig(model=run.model), cold)
    records = [
        replace(plain, id=f"generated-{i}", config=run.to_dict(), **fields) for i in range(4)
    ]
    found = predict(load_model(run.model), run, GPU, fit(records, GPU, model_of)).time
    assert found.decode_s_per_token == pytest.approx(2 * prediction.decode_s_per_token, rel=0.1)


def test_a_generation_that_is_mostly_prompt_teaches_nothing() -> None:
    run = RunConfig(model=MODELS[1], phase="inference", prompt_len=8192, max_new_tokens=2)
    record = replace(
        measured(RunConfig(model=run.model), prior_calibration(GPU)),
        config=run.to_dict(),
        step_s=(),
        batch_seq_len=(),
        generate_s=(1.0,),
    )
    assert fit([record], GPU, model_of).time == prior_calibration(GPU).time


def test_times_of_a_busy_device_count_only_where_quiet_ones_are_few() -> None:
    truth = prior_calibration(GPU)
    quiet = [measured(run, truth) for run in runs()[:4]]
    busy = [
        measured(
            run, slower(3.0), id=f"busy-{number}", provenance={"busy": "other programs use 90%"}
        )
        for number, run in enumerate(runs()[:4])
    ]
    alone = fit(busy, GPU, model_of)
    assert alone.time["finetune"].num_runs == 4
    assert alone.left_out == {}
    both = fit([*quiet, *busy], GPU, model_of)
    assert both.time["finetune"].num_runs == 4
    assert error_of(both, truth, runs()[5]) < 0.05
    assert set(both.left_out) == {f"busy-{number}" for number in range(4)}
    assert both.memory.num_runs == 8


def test_the_order_of_records_does_not_matter() -> None:
    truth = true_calibration(products=1.3)
    records = [measured(run, truth) for run in runs()[:6]]
    forward, backward = (fit(one, GPU, model_of) for one in (records, records[::-1]))
    assert forward.digest == backward.digest == digest(records)
    for name in FEATURES:
        assert forward.time["finetune"].mean[name] == pytest.approx(
            backward.time["finetune"].mean[name]
        )


def test_memory_corrects_what_is_least_known_first() -> None:
    truth = true_calibration()
    records = [measured(run, truth, memory_factor=1.03) for run in runs()]
    found = fit(records, GPU, model_of)
    assert found.memory.mean["weights"] == pytest.approx(1.0, abs=0.02)
    job = resolve(load_model(MODELS[1]), runs()[4], GPU)
    cold, _ = memory_prediction(judged_run(job, truth))
    fitted, _ = memory_prediction(judged_run(job, found))
    target = 1.03 * cold.peak_allocated_bytes
    assert abs(fitted.peak_allocated_bytes - target) < abs(cold.peak_allocated_bytes - target)


def test_a_calibration_reads_back_as_it_was_written() -> None:
    found = fit([measured(run, true_calibration()) for run in runs()[:4]], GPU, model_of)
    assert Calibration.from_dict(found.to_dict(), source="coefficients.json") == found


# --- its pieces


def samples(count: int, *, groups: int) -> list[Sample]:
    job = resolve(load_model(MODELS[0]), RunConfig(model=MODELS[0]), GPU)
    model = prior_calibration(GPU).time["finetune"]
    found = []
    for i in range(count):
        features = step_features(job, seq_len=128 * (i + 1))
        found.append(Sample(f"model-{i % groups}", features, float(seconds(model, features)[0])))
    return found


@pytest.mark.parametrize(("count", "groups"), [(12, 4), (12, 2), (5, 1), (30, 1)])
def test_every_sample_is_held_out_once(count: int, groups: int) -> None:
    found = samples(count, groups=groups)
    labels = groups_of(found)
    held = [test for _, test in grouped_folds(labels).split(found, groups=labels)]
    assert sorted(i for fold in held for i in fold) == list(range(count))
    assert len(held) == min(10, groups if groups >= 3 else count)
    if groups >= 3:
        assert all(len({found[i].group for i in fold}) == 1 for fold in held)


def test_a_run_is_left_out_as_a_whole_where_models_are_few() -> None:
    found = [replace(one, record=f"run-{i // 2}") for i, one in enumerate(samples(8, groups=2))]
    labels = groups_of(found)
    for _, held in grouped_folds(labels).split(found, groups=labels):
        assert len({found[i].record for i in held}) == len(held) / 2 == 1


def test_coefficients_are_never_negative() -> None:
    found = [replace(sample, value=sample.value / 50) for sample in samples(8, groups=1)]
    assert all(
        value >= 0 for value in fit_phases({"finetune": found}, GPU)["finetune"].mean.values()
    )


def test_more_equal_runs_are_never_less_certain() -> None:
    def noise_of(found: Sequence[Sample]) -> float:
        return fit_phases({"finetune": found}, GPU)["finetune"].noise

    found = samples(12, groups=1)
    assert noise_of(found) <= noise_of(found[:4]) <= noise_of(found[:1])


def test_no_memory_sample_leaves_the_start() -> None:
    start = prior_calibration(GPU).memory
    assert fit_memory([], start) is start
    assert set(start.mean) == set(PARTS)


def test_a_coefficient_that_no_time_is_left_for_falls_and_stays_in_the_fit() -> None:
    """Doubling the tokens doubles the time, so nothing is left for what is constant in them."""
    model = prior_model(CPU, "finetune")
    features = {**dict.fromkeys(FEATURES, 0.0), "constant": 1.0}
    samples = [
        Sample("a", features | {"products": 0.4 * n, "dequant": 0.12}, 0.4 * n, record=str(n))
        for n in (1, 2, 4, 8)
    ]
    fitted = fit_phases({"finetune": samples}, CPU)["finetune"]
    assert 0 < fitted.mean["dequant"] < 0.25 * model.mean["dequant"]
    for sample in samples:
        predicted, _ = seconds(fitted, sample.features)
        assert predicted == pytest.approx(sample.value, rel=0.2)


def test_the_scale_makes_intervals_hold_what_they_state() -> None:
    dice = np.random.default_rng(3)
    deviations = dice.uniform(0.1, 0.3, 400)
    errors = 2.5 * deviations * dice.standard_normal(400)  # stated too small
    scale = conformal_scale(errors[:200], deviations[:200], 0.9)
    assert scale == pytest.approx(2.5, rel=0.15)
    inside = np.abs(errors[200:]) <= TWO_SIDED_Z[0.9] * scale * deviations[200:]
    assert 0.85 <= inside.mean() <= 0.95


def test_a_rank_that_is_not_there_has_no_scale() -> None:
    ones = np.ones(9)
    assert conformal_scale(ones[:8], ones[:8], 0.9) is None
    assert conformal_scale(ones, ones, 0.9) == pytest.approx(1 / TWO_SIDED_Z[0.9])


def test_many_held_out_runs_set_the_scale_of_the_device() -> None:
    dice = random.Random(5)
    records = [
        measured(run, true_calibration(), noise=lambda: dice.lognormvariate(0, 0.05))
        for run in runs()
    ]
    few, many = (fit(found, GPU, model_of).time["finetune"] for found in (records[:6], records))
    assert student_scale(2, 0.9) > few.interval_scale > student_scale(6, 0.9)  # some are followed
    assert few.regime_scales == pytest.approx({"host": 1.2 * few.interval_scale})
    assert 0.5 < many.interval_scale < 1.5
    assert many.interval_scale != student_scale(len(records), 0.9)


def test_few_runs_widen_the_interval_as_a_deviation_known_from_few_does() -> None:
    scales = [student_scale(number, 0.9) for number in (1, 3, 10, 1000)]
    assert scales == sorted(scales, reverse=True)
    assert scales[0] == pytest.approx(2.015 / TWO_SIDED_Z[0.9], rel=1e-3)  # five degrees of freedom
    assert scales[-1] == pytest.approx(1.0, abs=0.002)
