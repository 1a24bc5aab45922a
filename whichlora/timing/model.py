"""Work and coefficients give seconds.

Every feature is the time that the datasheet promises for one kind of work; its coefficient says
how many times longer this device takes. So a coefficient of 1.3 is an efficiency of 77 %, the
prior comes from experience with other devices, and the fit stays readable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Real, added, quadratic_form, sqrt, where
from whichlora.timing.chip import Chip
from whichlora.timing.work import Work

DEVICE_FEATURES = (
    "products", "weights", "attention", "cache", "elementwise", "dequant", "optimizer", "kernels",
)  # fmt: skip
# Arithmetic and the bytes that it reads meanwhile: the slower of the two decides.
ROOFS = (("products", "weights"), ("attention", "cache"))
FEATURES = (*DEVICE_FEATURES, "launch", "trainer", "constant", "engine")
# What a run's time is of, in the order in which the first that holds counts: the host's launches,
# quantised weights that are unpacked, products and their bytes alone.
REGIMES = ("host", "unpacking", "device")
PER_COUNT = (
    "kernels",
    "launch",
    "trainer",
    "constant",
    "engine",
)  # whose coefficient is in seconds
# Whose coefficient is the device's, whatever runs on it: the rates of arithmetic and of memory.
# Those of the other kernels belong to the engine, whose kernels they are.
DEVICE_RATES = ("products", "weights")
# Of these, the ones that change between versions and hosts of one engine: what a host takes to
# launch and prepare, and the kernels of a quantisation library.
HOST_FEATURES = ("launch", "trainer", "constant", "engine")
STACK_FEATURES = ("dequant", *HOST_FEATURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Coefficients of one phase on one device, with what is known about their error.

    Args:
        mean: coefficient by feature; "launch" and "kernels" in seconds per kernel, of the host and
            of the device; "trainer" in seconds per module that it walks through; "constant" in
            seconds, "engine" in seconds per step of a serving engine.
        covariance: of the coefficients, rows and columns in the order of `FEATURES`.
        noise: standard deviation of the log of a single measurement around the model.
        interval_scale: what deviations are multiplied with, so that intervals hold as much as they
            state; from errors on runs that no fit saw (`calibration.intervals`).
        regime_scales: the same by `regime_of` a run, where its runs say more; a search, whose
            candidates err together, takes that of the phase.
        num_runs: measured runs behind it; 0 is the prior alone.
        overlaps: the host launches while the device computes (accelerators), so that the slower
            of both decides; on a CPU both are the same cores.
    """

    mean: Mapping[str, float]
    covariance: tuple[tuple[float, ...], ...]
    noise: float
    num_runs: int
    overlaps: bool
    interval_scale: float = 1.0
    regime_scales: Mapping[str, float] = field(default_factory=dict)


def of_another_engine(model: TimeModel, start: TimeModel) -> TimeModel:
    """`start`, the prior of the device, with what `model` learned of it under another engine.

    Kind: fitted. Source: `DEVICE_RATES` of `model`.
    """
    own = [name in DEVICE_RATES for name in FEATURES]
    covariance = tuple(
        tuple(
            (model if own[i] and own[j] else start).covariance[i][j] if own[i] == own[j] else 0.0
            for j in range(len(FEATURES))
        )
        for i in range(len(FEATURES))
    )
    rates = {name: model.mean[name] for name in DEVICE_RATES}
    return replace(start, mean={**start.mean, **rates}, covariance=covariance)


# Watts per TFLOP/s of peak from which a board's power no longer limits its products, and the share
# of the peak that they reach then. Architectures differ in 16 bit; TF32 is taken to need twice as
# much. Kind: fitted, to the best PyTorch products that others measured, of 38 boards in 16 bit and
# of 42 in fp32 (`benchmarks/board_power.py`).
OTHER_BOARDS = "other"
_ARCHITECTURES = ((8.0, "to 7.5"), (8.6, "8.0"), (8.9, "8.6"), (9.0, "8.9"))  # capability below
_FULL_WATTS = {
    "to 7.5": 9.4,
    "8.0": 2.9,
    "8.6": 4.5,
    "8.9": 3.6,
    "from 9.0": 2.2,
    OTHER_BOARDS: 6.0,
}
_FULL_SHARE = 1.08
_FULL_POWER_FP32 = (20.0, 0.92)
_UNMEASURED_KINDS = ("cpu", "hpu")  # of which no product was measured
# What the boards reach in 16 bit that the prior of the products comes from: the geometric mean of
# A100 and H100, as measured, and A40, by the law.
_USUAL_SHARE = 0.82

# What a kernel that Python launches costs the host: geometric mean and deviation of twelve hosts
# under eager PyTorch. Six of published decoding speeds on A100 and A800 (17, 18, 20, 21, 22 and 25
# microseconds; `docs/accuracy/published.md`), others of H20 (11), H100 (19), T4 (27, 28), and two
# virtual machines beside an H100 (30) and an H200 (22).
LAUNCH_S, LAUNCH_SPREAD = 20e-6, 0.27
# The same where the card is for desktops, whose processors run one thread about twice as fast.
# Three hosts: of an RTX 4090 (7.5), 4090 D (13) and 5090 (11). Kind: measured; the deviation is an
# estimate, as such cards are rented beside slower processors, too.
DESKTOP_LAUNCH_S, DESKTOP_LAUNCH_SPREAD = 10.5e-6, 0.35
# The same of a kernel whose operator autograd records for a backward, and of one of that backward,
# which C++ launches; in launches of a forward without a graph.
# Kind: measured, `benchmarks/host_costs.py`: 1.2 to 1.4, and 0.7 to 1.0. By them the hosts of an
# H100, an H200 and a T4 take as long in training as they do to decode.
RECORDED_LAUNCH, AUTOGRAD_LAUNCH = 1.3, 0.9
# And of one of an optimizer, whose operators no module calls. Kind: measured, the same script: 0.23
# to 0.28 on a CPU; Adafactor's on an H100 and an H200 take 0.3 and 0.7.
UPDATE_LAUNCH = 0.3
# What a trainer takes for each module of the model around a micro-step: `model.train()` and
# `num_parameters()` walk through them. It waits for the loss first (`logging_nan_inf_filter`), so
# that the device has nothing to do meanwhile.
# Kind: measured, `benchmarks/host_costs.py`: 0.5 to 1.1 of what a launch takes. Fits to training
# on A100, T4, H100 and H200 have 0.4 to 0.7.
MODULE_S, MODULE_SPREAD = 0.7 * LAUNCH_S, 0.5
# Relative deviation of a model's launches from another's on the same host. Kind: fitted, to the
# models of three published tables: 18.9 to 21.5, 21.1 to 24.3 and 22.4 to 23.4 microseconds.
LAUNCH_KNOWN = 0.06

# What a kernel takes on an accelerator beside its work, however small: the device starts it when
# the one before has ended. A captured graph's are in "engine".
# Kind: fitted. On A100 under transformers 4.2 to 4.7 microseconds in all phases; products of vLLM
# 6.8 (A100), 3.9 (H100) and 0 (L40S), attention 9 to 18 (`docs/accuracy/engine_kernels.md`);
# kernels of llama.cpp 2.4 to 13, geometric mean 5.1 (`docs/accuracy/llama_cpp_gpus.md`). With
# twice the deviation, training on A100 takes 18 for what quantised weights cost.
KERNEL_S, KERNEL_SPREAD = 5e-6, 0.19

# Such a time goes with the clock. By A100's, products of vLLM take 5.4 microseconds of its cycles
# on A100, and 5.3 to 5.8 on H100, H200 and B200.
_A100_CLOCK_HZ = 1.41e9
_OF_FEW_CORES, _FEW_CORES = ("6.0", "7.0", "7.5", "8.0"), 64  # of a multiprocessor

# Instructions times lanes that unpack a byte which a kernel reads or writes, at the efficiency of
# the prior. Kind: fitted, geometric mean of bitsandbytes' kernels on A100, H100 and T4 (17, 14 and
# 16; those of AutoGPTQ and AutoAWQ on A100 13 to 17).
UNPACKING_SLOTS = 16.0
_A100_ISSUED_PER_BYTE = 9.6

# What a multiprocessor reads and writes of the second-level cache. Kind: measured, on one GPU:
# elementwise kernels of 256 tokens, whose tensors an H200's cache holds, move 4.9 to 5.6 TB/s of
# 132 multiprocessors, 1.7 microseconds of each kernel taken off (`benchmarks/gpu/kernel_times`).
L2_BYTES_PER_S = 40e9

# Mean and relative standard deviation of every coefficient before any run on the device.
# Products, their weights, bytes: 74 %, 72 % and 80 % efficiency, refitted from public operator
# profiles of three GPUs (`docs/time.md`). CPU: libraries reach about half
# of the peak that the core count promises, with a wide spread. Engine: the published speeds of
# small models under vLLM 0.4.2 and 0.6.3 are 2 to 3.5 ms per token above their graph's kernels.
# Deviations of an accelerator: the likeliest of 14 devices, 1,200 runs beside 22 hosts
# (`docs/accuracy/prior_spread.md`).
_ACCELERATOR_PRIOR = {
    "products": (1.0 / 0.74, 0.19),
    "weights": (1.0 / 0.72, 0.19),
    "attention": (1.0 / 0.45, 0.38),
    "cache": (1.0 / 0.45, 0.38),
    "elementwise": (1.0 / 0.8, 0.3),
    "dequant": (1.0 / 0.8, 0.34),
    "optimizer": (1.0 / 0.8, 0.38),
    "kernels": (KERNEL_S, KERNEL_SPREAD),
    "launch": (LAUNCH_S, LAUNCH_SPREAD),
    "trainer": (MODULE_S, MODULE_SPREAD),
    "engine": (2.5e-3, 0.4),
}
_CPU_PRIOR = {
    "products": (1.0 / 0.5, 0.6),
    "weights": (1.0 / 0.5, 0.6),
    "attention": (1.0 / 0.25, 1.0),
    "cache": (1.0 / 0.25, 1.0),
    "elementwise": (1.0 / 0.4, 0.8),
    "dequant": (1.0 / 0.2, 2.0),
    "optimizer": (1.0 / 0.4, 1.0),
    "kernels": (KERNEL_S, 0.6),  # counted on accelerators alone
    "launch": (16e-6, 0.8),
    "trainer": (11.2e-6, 0.8),
    "engine": (2.5e-3, 0.8),
}
# Seconds of a pass that no work explains. A training step's on accelerators: the geometric mean of
# fits on A100 (4.4 ms), T4 (5.5), H200 (29) and H100 (31), the last two in virtual machines.
_CONSTANT_S = {
    "accelerator": {"finetune": 12e-3, "prefill": 0.9e-3, "decode": 0.09e-3},
    "cpu": {"finetune": 10e-3, "prefill": 3e-3, "decode": 0.3e-3},
}
_CONSTANT_SPREAD = 1.0
# What deviations are multiplied with in decoding, where nearly all of the time is one kind of work:
# of the device, and of its host. Kind: fitted, as they are.
_DECODING_SPREAD, _DECODING_HOST_SPREAD = 0.5, 0.7
# Of a run around its device. Kind: fitted, as the deviations above are: 0.11.
PRIOR_NOISE = {"accelerator": 0.1, "cpu": 0.35}
# How much wider the interval of a run is that the host decides: such runs scatter by 0.14, others
# by 0.08. Kind: fitted, to what intervals hold of such runs (`docs/accuracy/prior_spread.md`).
HOST_SCALE = 1.2


def prior(gpu: GpuSpec, phase: str) -> tuple[dict[str, float], dict[str, float]]:
    """Mean and standard deviation of each coefficient before any run on `gpu`.

    Kind: fitted, to other devices.
    Source: `docs/time.md`.
    """
    kind = _kind_of(gpu)
    table = _CPU_PRIOR if kind == "cpu" else _ACCELERATOR_PRIOR
    table = table | {"constant": (_CONSTANT_S[kind][phase], _CONSTANT_SPREAD)}
    if is_for_desktops(gpu):
        table["launch"] = (DESKTOP_LAUNCH_S, DESKTOP_LAUNCH_SPREAD)
        table["trainer"] = (MODULE_S * DESKTOP_LAUNCH_S / LAUNCH_S, MODULE_SPREAD)
    mean = {name: value for name, (value, _) in table.items()}
    spread = {name: value * relative for name, (value, relative) in table.items()}
    if kind == "accelerator" and phase == "decode":
        for name in spread:
            spread[name] *= _DECODING_HOST_SPREAD if name in HOST_FEATURES else _DECODING_SPREAD
    return mean, spread


def is_for_desktops(gpu: GpuSpec) -> bool:
    """Whether its maker sells it for desktops. Kind: exact. Source: its name."""
    return "GeForce" in gpu.name


def _kind_of(gpu: GpuSpec) -> str:
    return "cpu" if gpu.is_cpu else "accelerator"


def prior_model(gpu: GpuSpec, phase: str) -> TimeModel:
    """The model of a device that nobody measured: datasheet and priors.

    Kind: fitted. Source: `prior`.
    """
    mean, spread = prior(gpu, phase)
    covariance = tuple(tuple(spread[a] ** 2 if a == b else 0.0 for b in FEATURES) for a in FEATURES)
    return TimeModel(
        mean=mean,
        covariance=covariance,
        noise=PRIOR_NOISE[_kind_of(gpu)],
        num_runs=0,
        overlaps=not gpu.is_cpu,
        regime_scales={"host": HOST_SCALE} if not gpu.is_cpu else {},
    )


def with_launch(model: TimeModel, launch_s: float, *, other_host: bool) -> TimeModel:
    """`model` with what was measured of this host: seconds of a launch, to `LAUNCH_KNOWN`.

    What other coefficients share with a launch moves with it.

    Args:
        other_host: the coefficient is of runs beside other hosts: here it is as uncertain as the
            prior is, whatever the others are.

    Kind: exact. Source: the update of a normal distribution by one observed coordinate.
    """
    row, noise = FEATURES.index("launch"), (LAUNCH_KNOWN * launch_s) ** 2
    covariance = [list(values) for values in model.covariance]
    if other_host:
        for column in range(len(FEATURES)):
            covariance[row][column] = covariance[column][row] = 0.0
        unsure = (LAUNCH_SPREAD * model.mean["launch"]) ** 2
        covariance[row][row] = max(model.covariance[row][row], unsure)
    gains = [values[row] / (covariance[row][row] + noise) for values in covariance]
    error_s = launch_s - model.mean["launch"]
    return replace(
        model,
        mean={
            name: max(0.0, model.mean[name] + gain * error_s)
            for name, gain in zip(FEATURES, gains, strict=True)
        },
        covariance=tuple(
            tuple(
                value - gain * shared for value, shared in zip(values, covariance[row], strict=True)
            )
            for values, gain in zip(covariance, gains, strict=True)
        ),
    )


def product_rate(gpu: GpuSpec, dtype: str) -> float:
    """Peak FLOP/s of matrix products in `dtype`; without hardware for it, the fp32 rate.

    Kind: exact. Source: the datasheet, `gpu.json`.
    """
    return gpu.peak_flops_per_s[_rated(gpu, dtype)]


def _rated(gpu: GpuSpec, dtype: str) -> str:
    """The dtype at whose rate products in `dtype` run."""
    return dtype if dtype in gpu.peak_flops_per_s else "fp32"


def limited_as(gpu: GpuSpec) -> str:
    """Boards that need about as much power for a FLOP/s: of one CUDA architecture, or all others.

    Kind: exact. Source: CUDA's compute capability.
    """
    try:
        capability = float(gpu.compute_capability or "")
    except ValueError:  # AMD's and Intel's name an architecture
        return OTHER_BOARDS
    return next((name for below, name in _ARCHITECTURES if capability < below), "from 9.0")


def _full_power(gpu: GpuSpec, dtype: str) -> tuple[float, float]:
    """Watts for each TFLOP/s from which power no longer limits products, and their share then."""
    if _rated(gpu, dtype) == "fp32":
        return _FULL_POWER_FP32
    return _FULL_WATTS[limited_as(gpu)] * (2 if dtype == "tf32" else 1), _FULL_SHARE


def sustained_factor(gpu: GpuSpec, dtype: str) -> float:
    """How much more of its peak rate a board sustains in large products than the prior's boards do.

    As measured, where somebody did. Else by its power: a board that may draw less than its peak
    needs lowers clock and voltage together. Power goes with the clock times the square of the
    voltage, so the rate goes with the cube root of the power. One where the power is not known
    either, and for kinds of device of which no product was measured. A driver's limit takes off
    what this law does between it and the board's own.

    Kind: estimate: measured, or fitted (`_FULL_WATTS`).
    Source: `gpu.json`; `benchmarks/board_power.py`.
    """
    measured = gpu.measured_flops_per_s.get(_rated(gpu, dtype))
    if measured is None:
        return _share_at(gpu, dtype, gpu.most_w) / _USUAL_SHARE
    reached = measured / product_rate(gpu, dtype) / _USUAL_SHARE
    if gpu.power_limit_w is None:
        return reached
    return reached * _share_at(gpu, dtype, gpu.most_w) / _share_at(gpu, dtype, gpu.power_w)


def _share_at(gpu: GpuSpec, dtype: str, limit_w: float | None) -> float:
    """The share of its peak rate that a board reaches with `limit_w`, by the law for its kind."""
    if gpu.kind in _UNMEASURED_KINDS or limit_w is None:
        return _USUAL_SHARE
    full_watts, share = _full_power(gpu, dtype)
    watts = limit_w / (product_rate(gpu, dtype) / 1e12)
    return share * min(1.0, math.cbrt(watts / full_watts))


def power_w(gpu: GpuSpec, dtype: str, breakdown: Mapping[str, float]) -> tuple[float, float] | None:
    """What a board draws at least and at most, mean over a run; None where its limit is not known.

    At most its limit, which it keeps by itself. At least what matrix products alone take, for
    their share of the time: products at full rate draw the power from which a limit slows them.

    Args:
        breakdown: seconds by feature, as in `TimePrediction`.

    Kind: upper bound, and an estimate of the lower one, which leaves idle power out.
    Source: the datasheet; `benchmarks/board_power.py`.
    """
    total_s = added(breakdown.values())
    if gpu.most_w is None or not total_s > 0:
        return None
    full_watts, _ = _full_power(gpu, dtype)
    needed = min(gpu.most_w, full_watts * product_rate(gpu, dtype) / 1e12)
    return needed * breakdown.get("products", 0.0) / total_s, gpu.most_w


def tiled_multiprocessors(gpu: GpuSpec, dtype: str) -> int | None:
    """Multiprocessors that products in `dtype` fill tile by tile; None where nothing is known.

    Products in fp32 lose nothing of their last wave, and little at edges: their tiles are small.

    Kind: exact. Source: the datasheet, `gpu.json`; `docs/accuracy/product_tiles.md`.
    """
    by_matrix_units = _rated(gpu, dtype) != "fp32"
    return gpu.num_multiprocessors if gpu.kind in ("cuda", "rocm") and by_matrix_units else None


def chip_of(gpu: GpuSpec, dtype: str) -> Chip:
    """What the counts of work in `dtype` ask of `gpu`.

    Kind: the datasheet's facts, and an estimate of the cache's speed. Source: `gpu.json`.
    """
    saves, unpacking = 0.0, 1.0
    if gpu.num_multiprocessors is not None and gpu.is_timed:
        cached = L2_BYTES_PER_S * gpu.num_multiprocessors
        saves = max(0.0, 1 - gpu.bandwidth_bytes_per_s / cached)
    if gpu.is_timed and not gpu.is_cpu:
        unpacking = UNPACKING_SLOTS * gpu.bandwidth_bytes_per_s / issued_per_s(gpu, dtype)
    return Chip(tiled_multiprocessors(gpu, dtype), gpu.l2_bytes, saves, unpacking)


def issued_per_s(gpu: GpuSpec, dtype: str) -> float:
    """Lanes times instructions that all multiprocessors issue in a second of a run in `dtype`.

    Four schedulers issue one instruction of 32 lanes each cycle, on P100 two; where products lower
    the clock, fewer. Of other makers' devices nothing is known: as many, beside their memory, as an
    A100.

    Kind: exact but for the clock. Source: the datasheet's fp32 rate; CUDA programming guide, table
    of arithmetic instructions; `sustained_factor`.
    """
    if gpu.kind != "cuda" or "fp32" not in gpu.peak_flops_per_s:
        return gpu.bandwidth_bytes_per_s * _A100_ISSUED_PER_BYTE
    capability = gpu.compute_capability or ""
    lanes = 64 if capability == "6.0" else 128
    clock = min(1.0, sustained_factor(gpu, dtype))
    return clock * gpu.peak_flops_per_s["fp32"] * lanes / (2 * cuda_cores(capability))


def cuda_cores(capability: str) -> int:
    """Fp32 cores of a multiprocessor. Kind: exact. Source: as of `issued_per_s`."""
    return _FEW_CORES if capability in _OF_FEW_CORES else 128


def kernel_time(gpu: GpuSpec) -> float:
    """What a small kernel takes, where it takes 1 on an A100: starting one takes cycles.

    Kind: estimate: of other makers' devices as on an A100.
    Source: the datasheet's fp32 rate, of two operations for each core and cycle.
    """
    if gpu.kind != "cuda" or gpu.num_multiprocessors is None:
        return 1.0
    cores = cuda_cores(gpu.compute_capability or "") * gpu.num_multiprocessors
    return _A100_CLOCK_HZ * 2 * cores / gpu.peak_flops_per_s["fp32"]


def features(work: Work, gpu: GpuSpec, *, dtype: str) -> dict[str, Real]:
    """Datasheet seconds by kind of work; those of `PER_COUNT` are counts.

    On a CPU, whose launches are added to the work, a kernel costs nothing more.

    Of an amount of memory, whose rates nobody knows, the constant alone: all passes take as long.

    Kind: exact. Source: work over the rates of the datasheet.
    """
    once = 1.0 + 0 * work.launches
    if not gpu.is_timed:
        return dict.fromkeys(FEATURES, 0.0 * once) | {"constant": once}
    rate = product_rate(gpu, dtype)
    wide = "fp32" if "fp32" in gpu.peak_flops_per_s else dtype  # Gaudi states none
    wide_rate = product_rate(gpu, wide)
    sustained = rate * sustained_factor(gpu, dtype)
    wide_sustained = wide_rate * sustained_factor(gpu, wide)
    bandwidth = gpu.bandwidth_bytes_per_s
    kernels = work.launches + work.autograd_launches + work.update_launches
    return {
        "products": (work.product_flops + work.idle_flops) / sustained
        + work.wide_product_flops / wide_sustained,
        "weights": work.weight_read_bytes / bandwidth,
        "attention": work.attention_flops / rate + work.wide_attention_flops / wide_rate,
        "cache": work.attention_bytes / bandwidth,
        "elementwise": work.elementwise_bytes / bandwidth,
        "dequant": work.dequant_bytes / bandwidth,
        "optimizer": work.optimizer_bytes / bandwidth + work.optimizer_flops / wide_rate,
        "kernels": kernels * kernel_time(gpu) * (not gpu.is_cpu),
        "launch": work.launches
        + (RECORDED_LAUNCH - 1) * work.recorded_launches
        + AUTOGRAD_LAUNCH * work.autograd_launches
        + UPDATE_LAUNCH * work.update_launches
        + work.host_launches,
        "trainer": work.walked_modules + 0.0 * work.launches,
        "constant": once,
        "engine": work.engine_steps + 0.0 * work.launches,
    }


def deciding(model: TimeModel, features: Mapping[str, Real]) -> dict[str, Real]:
    """The features that decide the time of a run; the others are zero.

    Where arithmetic and its reads overlap, or host and device, the one that waits for the other
    counts nothing. The update starts when the backward is done, so that it is added.

    Kind: exact. Source: the roofline model: Williams et al. 2009, doi:10.1145/1498765.1498785.
    """
    decided = dict(features)
    for arithmetic, reads in ROOFS:
        waits = model.mean[arithmetic] * features[arithmetic] < model.mean[reads] * features[reads]
        decided[arithmetic] = features[arithmetic] * (1 - waits)
        decided[reads] = features[reads] * waits
    if not model.overlaps:
        return decided
    overlapping = [name for name in DEVICE_FEATURES if name != "optimizer"]
    device = added(model.mean[name] * decided[name] for name in overlapping)
    host_bound = device < model.mean["launch"] * features["launch"]
    for name in overlapping:
        decided[name] = decided[name] * (1 - host_bound)
    decided["launch"] = features["launch"] * host_bound
    return decided


def seconds(model: TimeModel, features: Mapping[str, Real]) -> tuple[Real, dict[str, Real]]:
    """Seconds of one pass, and their breakdown by feature, which adds up to them.

    Kind: fitted. Source: the coefficients of `model`.
    """
    return _priced(model, deciding(model, features))


def regime_of(model: TimeModel, features: Mapping[str, float]) -> str:
    """Which of `REGIMES` one run is in.

    Kind: exact. Source: `deciding`.
    """
    return regime_of_parts(model, deciding(model, features))


def regime_of_parts(model: TimeModel, parts: Mapping[str, Real]) -> str:
    """The same of a pass whose breakdown is `parts`, in which the side that waits counts zero."""
    if model.overlaps and parts.get("launch", 0.0) > 0:
        return "host"
    return "unpacking" if parts.get("dequant", 0.0) > 0 else "device"


def log_deviation(model: TimeModel, features: Mapping[str, Real], total: Real) -> Real:
    """Standard deviation of the log of the predicted seconds `total` of one run.

    The coefficients' covariance seen through this run's features, plus the noise of a run; times
    the scale that held-out runs gave.

    Kind: fitted. Source: the covariance of `model`.
    """
    return _deviation(model, deciding(model, features), total)


def pass_time(model: TimeModel, features: Mapping[str, Real]) -> tuple[Real, dict[str, Real], Real]:
    """`seconds` with their breakdown, and their `log_deviation`.

    Kind: fitted. Source: the coefficients of `model` and their covariance.
    """
    decided = deciding(model, features)
    total, parts = _priced(model, decided)
    return total, parts, _deviation(model, decided, total)


def _priced(model: TimeModel, decided: Mapping[str, Real]) -> tuple[Real, dict[str, Real]]:
    parts = {name: model.mean[name] * decided[name] for name in FEATURES}
    return added(parts.values()), parts


def _deviation(model: TimeModel, decided: Mapping[str, Real], total: Real) -> Real:
    variance = quadratic_form([decided[name] for name in FEATURES], model.covariance)
    takes_time = total > 0  # coefficients may all be zero: then nothing but noise is known
    relative = where(takes_time, variance, 0.0) / where(takes_time, total, 1.0) ** 2
    return _scale(model, decided) * sqrt(relative + model.noise**2)


def _scale(model: TimeModel, decided: Mapping[str, Real]) -> Real:
    if not model.regime_scales:
        return model.interval_scale
    host, unpacking, device = (
        model.regime_scales.get(name, model.interval_scale) for name in REGIMES
    )
    of_device = where(decided["dequant"] > 0, unpacking, device)
    return where(decided["launch"] > 0, host, of_device) if model.overlaps else of_device
