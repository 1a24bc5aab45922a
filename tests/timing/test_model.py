"""Work and coefficients to seconds: the parts add up, and the slower of host and device counts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whichlora.predict.coefficients import TIME_PHASES, prior_calibration
from whichlora.predict.judged import judged_time
from whichlora.predict.predict import predict
from whichlora.predict.quantities import forward_features, step_features
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.timing import model as timing
from whichlora.timing.model import DEVICE_FEATURES, FEATURES
from whichlora.timing.work import Work

GPU = find_gpu("h100-sxm-80gb")
CPU = find_gpu("cpu")
RUN = RunConfig(model="HuggingFaceTB/SmolLM2-135M", seq_len=128)
SPEC = load_model(RUN.model)

found_features = st.fixed_dictionaries(
    {name: st.floats(0, 1e3) for name in DEVICE_FEATURES}
    | {name: st.integers(0, 10**6) for name in ("launch", "trainer")}
    | {"constant": st.just(1.0), "engine": st.integers(0, 1)}
)
FEW = Work(
    product_flops=10**12,
    weight_read_bytes=10**6,
    attention_flops=0,
    attention_bytes=10**9,
    elementwise_bytes=0,
    dequant_bytes=0,
    optimizer_bytes=0,
    launches=100,
)


@pytest.mark.parametrize("gpu", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("phase", TIME_PHASES)
@given(found=found_features)
def test_the_breakdown_adds_up_to_the_seconds(gpu: object, phase: str, found: dict) -> None:  # type: ignore[type-arg]
    model = timing.prior_model(gpu, phase)  # type: ignore[arg-type]
    total, parts = timing.seconds(model, found)
    assert set(parts) == set(FEATURES)
    assert all(part >= 0 for part in parts.values())
    assert sum(parts.values()) == pytest.approx(total)


def test_a_product_takes_as_long_as_the_slower_of_arithmetic_and_weights() -> None:
    model = replace(timing.prior_model(GPU, "finetune"), overlaps=False)
    bound_by_flops = timing.features(FEW, GPU, dtype="bf16")
    rate = GPU.peak_flops_per_s["bf16"] * timing.sustained_factor(GPU, "bf16")
    assert bound_by_flops["products"] == FEW.product_flops / rate
    _, parts = timing.seconds(model, bound_by_flops)
    assert parts["products"] > 0 == parts["weights"]
    bound_by_bytes = timing.features(replace(FEW, weight_read_bytes=10**13), GPU, dtype="bf16")
    assert bound_by_bytes["weights"] == 10**13 / GPU.bandwidth_bytes_per_s
    _, parts = timing.seconds(model, bound_by_bytes)
    assert parts["weights"] > 0 == parts["products"]


def test_which_of_arithmetic_and_weights_is_slower_depends_on_the_device() -> None:
    model = replace(timing.prior_model(GPU, "finetune"), overlaps=False)
    features = dict.fromkeys(FEATURES, 0.0) | {"products": 2.0, "weights": 1.0}
    slow_memory = replace(model, mean=model.mean | {"weights": 3 * model.mean["weights"]})
    assert timing.seconds(model, features)[1]["weights"] == 0
    total, parts = timing.seconds(slow_memory, features)
    assert total == parts["weights"] == 3 * model.mean["weights"]


def test_a_dtype_without_units_takes_the_fp32_rate() -> None:
    turing = find_gpu("t4-16gb")
    assert "bf16" not in turing.peak_flops_per_s
    assert timing.product_rate(turing, "bf16") == turing.peak_flops_per_s["fp32"]


def stated_priors() -> list[tuple[str, list[str]]]:
    """Rows of the table of priors in `docs/time.md`: coefficient, and four cells."""
    page = (Path(__file__).parents[2] / "docs" / "time.md").read_text(encoding="utf-8")
    table = page.split("| coefficient | accelerator | deviation |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [(row[0], row[1:]) for row in rows[2:]]


def stated_value(cell: str) -> float:
    number, unit = cell.split()[:2]
    return 100 / float(number) if unit == "%" else float(number) * {"ms": 1e-3, "µs": 1e-6}[unit]


PHASES_OF = {
    "training": ("finetune",),
    "prompt": ("prefill",),
    "decoding": ("decode",),
    "prompt or decoding": ("prefill", "decode"),
}


@pytest.mark.parametrize(("label", "cells"), stated_priors(), ids=lambda part: str(part)[:30])
def test_the_page_states_the_priors_in_use(label: str, cells: list[str]) -> None:
    name, _, which = label.partition(", ")
    phases = PHASES_OF.get(which, TIME_PHASES)
    names = [name] if which in ("", *PHASES_OF) else [name, which]
    for gpu, mean, deviation in ((GPU, *cells[:2]), (CPU, *cells[2:])):
        for phase in phases:
            model = timing.prior_model(gpu, phase)
            for feature in names:
                row = FEATURES.index(feature)
                spread = math.sqrt(model.covariance[row][row])
                assert model.mean[feature] == pytest.approx(stated_value(mean)), phase
                in_decoding = 0.7 if feature in timing.HOST_FEATURES else 0.5
                narrowed = in_decoding if (gpu, phase) == (GPU, "decode") else 1.0
                expected = float(deviation) * narrowed
                assert spread / model.mean[feature] == pytest.approx(expected), phase


def test_the_host_of_a_card_for_desktops_launches_twice_as_fast() -> None:
    desktop, server = (timing.prior_model(find_gpu(key), "decode") for key in ("4090", "l40s"))
    for name in ("launch", "trainer"):
        assert server.mean[name] / desktop.mean[name] == pytest.approx(2, rel=0.1)
    assert server.mean["constant"] == desktop.mean["constant"]


def test_a_device_that_nobody_measured_has_no_runs_and_independent_coefficients() -> None:
    assert {feature.partition(",")[0] for feature, _ in stated_priors()} >= {
        "launch",
        "constant",
        "engine",
    }
    for gpu, noise in ((GPU, 0.1), (CPU, 0.35)):
        model = timing.prior_model(gpu, "finetune")
        assert (model.num_runs, model.noise, model.interval_scale) == (0, noise, 1)
        assert model.overlaps == (gpu is GPU)
        rows = enumerate(model.covariance)
        assert not any(value for i, row in rows for j, value in enumerate(row) if i != j)


@pytest.mark.parametrize(
    ("key", "dtype", "factor"),
    [
        ("a100-sxm-80gb", "bf16", 1.03),
        ("h100-sxm-80gb", "bf16", 0.97),
        ("l4-24gb", "bf16", 0.67),
        ("l4-24gb", "fp32", 0.48),
        ("t4-16gb", "fp16", 0.45),
        ("rtx-4090-24gb", "bf16", 1.23),
        ("mi300x-192gb", "bf16", 0.60),
    ],
)
def test_the_page_states_what_boards_sustain(key: str, dtype: str, factor: float) -> None:
    assert timing.sustained_factor(find_gpu(key), dtype) == pytest.approx(factor, abs=0.005)


UNMEASURED = replace(GPU, measured_flops_per_s={})


@pytest.mark.parametrize("dtype", ["fp16", "tf32"])
def test_the_power_of_16_bit_counts_alike_and_of_tf32_twice(dtype: str) -> None:
    half = timing.sustained_factor(UNMEASURED, "bf16")
    rate = timing.product_rate(GPU, dtype) / timing.product_rate(GPU, "bf16")
    needed = 2 if dtype == "tf32" else 1
    sustained = timing.sustained_factor(UNMEASURED, dtype)
    assert sustained == pytest.approx(half / math.cbrt(rate * needed))


def test_a_measured_board_is_taken_at_its_word_in_that_dtype_alone() -> None:
    half = timing.product_rate(GPU, "bf16") / 2
    gpu = replace(UNMEASURED, measured_flops_per_s={"bf16": half})
    assert timing.sustained_factor(gpu, "bf16") == pytest.approx(0.5 / 0.82)
    assert timing.sustained_factor(gpu, "fp32") == timing.sustained_factor(UNMEASURED, "fp32")


@pytest.mark.parametrize(
    ("key", "architecture"),
    [
        ("t4-16gb", "to 7.5"),
        ("a30-24gb", "8.0"),
        ("a10g-24gb", "8.6"),
        ("l40-48gb", "8.9"),
        ("gh200-96gb", "from 9.0"),
        ("rtx-5090-32gb", "from 9.0"),
        ("mi300x-192gb", "other"),
        ("m4-max-128gb", "other"),
    ],
)
def test_boards_of_one_architecture_share_a_law(key: str, architecture: str) -> None:
    assert timing.limited_as(find_gpu(key)) == architecture


def test_the_deviation_of_a_run_joins_its_coefficients_and_its_noise() -> None:
    """Two features of 3 s and 4 s, each known to a tenth: 0.5 s of 7 s, and 0.2 of a run."""
    model = replace(timing.prior_model(CPU, "finetune"), noise=0.2, interval_scale=2.0)
    size = range(len(FEATURES))
    mean = dict.fromkeys(FEATURES, 1.0)
    diagonal = tuple(tuple(0.01 * (i == j) for j in size) for i in size)
    model = replace(model, mean=mean, covariance=diagonal)
    features = dict.fromkeys(FEATURES, 0.0) | {"elementwise": 3.0, "constant": 4.0}
    total, _ = timing.seconds(model, features)
    assert total == 7
    expected = 2 * math.hypot(0.5 / 7, 0.2)
    assert timing.log_deviation(model, features, total) == pytest.approx(expected)
    # where both errors go together, they add up
    together = tuple(tuple(0.01 for _ in size) for _ in size)
    shared = timing.log_deviation(replace(model, covariance=together), features, total)
    assert shared == pytest.approx(2 * math.hypot(0.7 / 7, 0.2))
    assert timing.log_deviation(model, features, 0.0) == 2 * 0.2


def test_a_drivers_limit_takes_off_what_the_law_does_also_of_a_measured_board() -> None:
    board = find_gpu("a100-sxm-80gb")
    limited = replace(board, power_limit_w=275.0)
    # fp32 needs 20 W for a TFLOP/s, of which the board has 19.5: it is not limited at 400 W
    for dtype, watts in (("bf16", 400), ("fp32", 20 * 19.5)):
        share = timing.sustained_factor(limited, dtype) / timing.sustained_factor(board, dtype)
        assert share == pytest.approx(math.cbrt(275 / watts))
    above = replace(board, power_limit_w=500.0)
    assert timing.sustained_factor(above, "bf16") == timing.sustained_factor(board, "bf16")
    unmeasured = replace(UNMEASURED, power_limit_w=100.0)
    as_built = replace(UNMEASURED, power_w=100.0)
    same = timing.sustained_factor(unmeasured, "bf16"), timing.sustained_factor(as_built, "bf16")
    assert same[0] == same[1]


def test_less_power_never_multiplies_faster_and_an_eighth_of_it_half_as_fast() -> None:
    factors = [
        timing.sustained_factor(replace(UNMEASURED, power_w=watts), "bf16")
        for watts in (50, 400, 10**4, 10**5)
    ]
    assert factors == sorted(factors)
    assert factors[1] == pytest.approx(2 * factors[0])
    assert factors[2] == factors[3]  # no clock beyond the boost clock
    assert timing.sustained_factor(replace(UNMEASURED, power_w=None), "bf16") == 1
    assert timing.sustained_factor(CPU, "fp32") == 1


def test_a_small_step_is_bound_by_the_host_and_a_large_one_by_the_device() -> None:
    def parts_of(run: RunConfig) -> dict[str, float]:
        job = resolve(SPEC, run, GPU)
        return dict(judged_time(job, prior_calibration(GPU)).breakdown)

    small = parts_of(RUN)
    assert small["launch"] > 0
    assert small["optimizer"] > 0  # which starts when the backward is done
    assert all(small[name] == 0 for name in DEVICE_FEATURES if name != "optimizer")
    large = parts_of(replace(RUN, batch_size=64, seq_len=2048))
    assert large["launch"] == 0
    assert large["products"] > 0


def test_on_a_cpu_host_and_device_are_the_same_cores() -> None:
    job = resolve(SPEC, replace(RUN, precision="fp32"), CPU)
    parts = judged_time(job, prior_calibration(CPU)).breakdown
    assert parts["launch"] > 0
    assert parts["products"] > 0


@pytest.mark.parametrize(
    ("counts", "launch", "kernels"),
    [
        ({"autograd_launches": 60}, 100 + 60 * 0.9, 160),
        ({"recorded_launches": 100}, 130, 100),
        ({"update_launches": 40}, 100 + 40 * 0.3, 140),
        ({"host_launches": 50}, 150, 100),
    ],
)
def test_a_kernel_takes_the_host_as_long_as_whoever_launches_it(
    counts: dict[str, int], launch: float, kernels: int
) -> None:
    found = timing.features(replace(FEW, **counts), GPU, dtype="bf16")
    assert found["launch"] == pytest.approx(launch)
    assert found["kernels"] == pytest.approx(kernels * timing.kernel_time(GPU))
    assert timing.features(FEW, CPU, dtype="fp32")["kernels"] == 0


def test_host_bound_time_does_not_depend_on_the_batch() -> None:
    calibration = prior_calibration(GPU)
    one, two = (
        judged_time(resolve(SPEC, replace(RUN, batch_size=size), GPU), calibration).total_s
        for size in (1, 2)
    )
    assert one == two


def test_the_deviation_is_at_least_the_noise_of_a_run() -> None:
    model = timing.prior_model(GPU, "finetune")
    features = step_features(resolve(SPEC, RUN, GPU))
    total, _ = timing.seconds(model, features)
    assert timing.log_deviation(model, features, total) > model.noise


def test_certain_coefficients_leave_only_the_noise() -> None:
    model = timing.prior_model(GPU, "finetune")
    zeros = tuple(tuple(0.0 for _ in FEATURES) for _ in FEATURES)
    sure = replace(model, covariance=zeros, interval_scale=1.0, regime_scales={})
    features = step_features(resolve(SPEC, RUN, GPU))
    total, _ = timing.seconds(sure, features)
    assert timing.log_deviation(sure, features, total) == pytest.approx(model.noise)
    wide = replace(sure, interval_scale=1.5)
    assert timing.log_deviation(wide, features, total) == pytest.approx(1.5 * model.noise)


@pytest.mark.parametrize(
    ("changes", "gpu", "regime", "scale"),
    [
        ({}, GPU, "host", 0.5),
        (
            {"batch_size": 64, "seq_len": 2048, "quant": "nf4", "method": "qlora"},
            GPU,
            "unpacking",
            2.0,
        ),
        ({"batch_size": 64, "seq_len": 2048}, GPU, "device", 1.5),  # has no scale of its own
        ({"precision": "fp32"}, CPU, "device", 1.5),  # a host that launches also computes
    ],
)
def test_a_regime_has_its_own_scale_or_that_of_the_phase(
    changes: dict[str, Any], gpu: GpuSpec, regime: str, scale: float
) -> None:
    model = replace(timing.prior_model(gpu, "finetune"), regime_scales={})
    features = step_features(resolve(SPEC, replace(RUN, **changes), gpu))
    total, _ = timing.seconds(model, features)
    scales = {"host": 0.5, "unpacking": 2.0}
    scaled = replace(model, interval_scale=1.5, regime_scales=scales)
    assert timing.regime_of(model, features) == regime
    plain = timing.log_deviation(model, features, total)
    assert timing.log_deviation(scaled, features, total) == pytest.approx(scale * plain)


def test_before_any_run_a_time_that_the_host_decides_is_less_certain() -> None:
    model = timing.prior_model(GPU, "finetune")
    features = step_features(resolve(SPEC, RUN, GPU))
    total, _ = timing.seconds(model, features)
    plain = timing.log_deviation(replace(model, regime_scales={}), features, total)
    assert timing.regime_of(model, features) == "host"
    assert timing.log_deviation(model, features, total) == pytest.approx(1.2 * plain)


def test_an_engine_takes_its_turn_after_every_step_of_the_device() -> None:
    run = RunConfig(model=SPEC.name, phase="inference", kv_cache="vllm", max_new_tokens=2)
    model = timing.prior_model(GPU, "decode")
    found = forward_features(resolve(SPEC, run, GPU), context=512, decoding=True)
    _, parts = timing.seconds(model, found)
    assert parts["engine"] == model.mean["engine"] > parts["launch"] == 0
    assert parts["weights"] > 0


def test_an_interval_is_symmetric_in_the_logarithm() -> None:
    time = predict(SPEC, RUN, GPU, prior_calibration(GPU)).time
    low, high = time.interval_s
    assert time.step_s is not None
    assert math.sqrt(low * high) == pytest.approx(time.step_s)


def test_tokens_per_second_and_time_per_token_are_of_the_same_step() -> None:
    run = replace(RUN, batch_size=4, gradient_accumulation_steps=2)
    time = predict(SPEC, run, GPU, prior_calibration(GPU)).time
    assert time.step_s is not None
    assert time.tokens_per_s * time.step_s == pytest.approx(4 * 2 * 128)
    assert time.time_per_token_s * time.tokens_per_s == pytest.approx(1.0)


def test_a_generation_is_its_prompt_and_its_later_tokens() -> None:
    run = replace(RUN, phase="inference", batch_size=3, prompt_len=64, max_new_tokens=11)
    time = predict(SPEC, run, GPU, prior_calibration(GPU)).time
    assert time.prefill_s is not None
    assert time.decode_s_per_token is not None
    whole_s = time.prefill_s + 10 * time.decode_s_per_token  # the prompt gives the first token
    assert time.time_per_token_s == pytest.approx(whole_s / (3 * 11))
    assert sum(time.breakdown.values()) == pytest.approx(whole_s)


def test_tf32_products_run_at_their_own_rate_on_the_bytes_of_fp32() -> None:
    gpu, model = find_gpu("a100-sxm-80gb"), load_model("llama-3.1-8b")
    gpu = replace(gpu, num_multiprocessors=None)  # whose waves are counted for matrix units alone
    plain, tf32 = (
        step_features(resolve(model, RunConfig(model=model.name, precision=precision), gpu))
        for precision in ("fp32", "tf32")
    )
    sustained = timing.sustained_factor(gpu, "tf32") / timing.sustained_factor(gpu, "fp32")
    assert plain["products"] / tf32["products"] == pytest.approx(156 / 19.5 * sustained)
    assert tf32["elementwise"] == plain["elementwise"]


def test_a_known_launch_moves_the_coefficient_as_far_as_the_other_is_unsure() -> None:
    model, row = timing.prior_model(GPU, "decode"), FEATURES.index("launch")
    known = timing.with_launch(model, 12e-6, other_host=True)
    assert known.mean["launch"] == pytest.approx(12e-6, rel=0.03)
    assert math.sqrt(known.covariance[row][row]) < 0.06 * 12e-6
    assert known.mean["weights"] == model.mean["weights"]
    sure = [list(values) for values in model.covariance]
    sure[row][row] = (0.001 * model.mean["launch"]) ** 2
    fitted = replace(model, covariance=tuple(map(tuple, sure)))
    here = timing.with_launch(fitted, 12e-6, other_host=False)
    assert here.mean["launch"] == pytest.approx(model.mean["launch"], rel=0.01)
    beside = timing.with_launch(fitted, 12e-6, other_host=True)
    assert beside.mean["launch"] == pytest.approx(12e-6, rel=0.03)


def test_a_board_draws_its_limit_at_most_and_what_its_products_take_at_least() -> None:
    half = {"products": 1.0, "elementwise": 1.0}
    strong = find_gpu("rtx-3090-24gb")  # 350 W for 71 TFLOP/s: products need nearly all of it
    low, high = timing.power_w(strong, "bf16", half) or (0.0, 0.0)
    assert high == strong.power_w
    assert low == pytest.approx(4.5 * strong.peak_flops_per_s["bf16"] / 1e12 / 2)
    weak = find_gpu("l4")  # 72 W for 121 TFLOP/s: its limit slows them
    assert timing.power_w(weak, "bf16", half) == pytest.approx((36.0, 72.0))
    assert timing.power_w(weak, "bf16", {}) is None
    assert timing.power_w(replace(weak, power_w=None), "bf16", half) is None
