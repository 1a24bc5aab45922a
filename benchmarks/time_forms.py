"""Forms that a model of time could have, compared on published runs: `time_forms.py [--write]`.

Three forms: all terms added up; the roofline, the greatest of compute, bandwidth and launches with
one efficiency; and the form of `timing`, the slower of host and device with a coefficient for each
kind of work. Each with the same coefficients for all devices, and with one factor more for each
device, which a device never measured takes from the middle of the others. Prints the table of
`docs/accuracy/time_forms.md`; `--write` stores it there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from markdown_tables import Summary, markdown_table, summary, write_page
from published import Observation, gpu_of
from published.times import (
    HELD_OUT,
    HeldOut,
    TimeSample,
    leave_one_out,
    time_rows,
    timed_parts,
)

from whichlora.calibration.fit_time import regress, relative_spread
from whichlora.calibration.samples import Sample
from whichlora.predict.coefficients import TIME_PHASES
from whichlora.spec.gpu import GpuSpec
from whichlora.timing import model as timing
from whichlora.timing.model import DEVICE_FEATURES, TimeModel

PAGE, TITLE = "time_forms", "Forms of the time model"
LEGEND = (
    "Each form is fitted to the other models or GPUs of published runs. Cells are sizes of "
    "relative errors in per cent (median, 90th percentile, worst), then the share inside the 90 % "
    "interval. The last three rows have one factor more for each device."
)
ENDLESS = 1e30  # a rate at which work takes no time
DEVICE_ROUNDS = 4  # of coefficients and devices' factors in turn
TABLES = {
    "Training step on A100, a model never measured": "steps, A100, other model",
    "Decoding with transformers on A100, a model never measured": "decoding, A100, other model",
    "Forward and backward, a GPU never measured": "forward and backward, other GPU",
    "Forward in fp32, a GPU never measured": "forward, other GPU",
}


@dataclass(frozen=True, slots=True)
class Form:
    """One way to make seconds of work.

    Args:
        overlaps: the slower of host and device decides; else both are added up.
        one_roof: all FLOPs against all bytes, instead of each kind of work on its own.
        per_device: each device has a factor on all of its seconds.
    """

    name: str
    overlaps: bool = True
    one_roof: bool = False
    per_device: bool = False


_SHARED = (
    Form("all terms added up", overlaps=False),
    Form("roofline: compute, bandwidth or launches", one_roof=True),
    Form("**slower of host and device, by kind of work**"),
)
FORMS = (
    *_SHARED,
    *(replace(one, name=f"{one.name}; a factor per device", per_device=True) for one in _SHARED),
)


def under_one_roof(one: Observation, phase: str) -> dict[str, float]:
    """Features where all of a pass computes or all of it moves bytes, whichever is longer."""
    gpu = gpu_of(one.gpu)
    rates = dict.fromkeys(gpu.peak_flops_per_s, ENDLESS)
    computing = _features(one, phase, replace(gpu, bandwidth_bytes_per_s=ENDLESS))
    moving = _features(one, phase, replace(gpu, peak_flops_per_s=rates))
    seconds = max(sum(side[name] for name in DEVICE_FEATURES) for side in (computing, moving))
    return computing | dict.fromkeys(DEVICE_FEATURES, 0.0) | {"products": seconds}


def _features(one: Observation, phase: str, gpu: GpuSpec) -> Mapping[str, float]:
    return next(found for name, found, _ in timed_parts(one, gpu) if name == phase)


def _scaled(samples: Sequence[TimeSample], factors: Mapping[str, float]) -> list[Sample]:
    return [
        replace(one.sample, value=one.sample.value / factors[one.observation.gpu])
        for one in samples
    ]


def fitted(form: Form, kept: Sequence[TimeSample], phase: str, gpu: GpuSpec) -> TimeModel:
    """Coefficients of `form`, those of the middle device where each has a factor."""
    priors = {name: timing.prior_model(gpu, name) for name in TIME_PHASES}
    starts = {
        name: replace(prior, overlaps=form.overlaps, interval_scale=1.0)
        for name, prior in priors.items()
    }
    spreads = {name: relative_spread(gpu, name) for name in TIME_PHASES}
    factors = {one.observation.gpu: 1.0 for one in kept}
    model = regress({phase: _scaled(kept, factors)}, starts, spreads)[phase]
    if not form.per_device or len(factors) < 2:
        return model
    for _ in range(DEVICE_ROUNDS):
        logs = {
            key: mean(
                math.log(one.sample.value / float(timing.seconds(model, one.sample.features)[0]))
                for one in kept
                if one.observation.gpu == key
            )
            for key in factors
        }
        middle = median(logs.values())  # one odd device moves no other
        factors = {key: math.exp(value - middle) for key, value in logs.items()}
        model = regress({phase: _scaled(kept, factors)}, starts, spreads)[phase]
    between = mean((value - middle) ** 2 for value in logs.values()) ** 0.5
    return replace(model, noise=math.hypot(model.noise, between))


def judged(title: str, form: Form) -> list[HeldOut]:
    """Every group of one table of `HELD_OUT`, predicted by `form` from the others."""
    phase = HELD_OUT[title][2]
    samples = time_rows(title)
    if form.one_roof:
        samples = [
            replace(
                one,
                sample=replace(one.sample, features=under_one_roof(one.observation, phase)),
            )
            for one in samples
        ]
    return list(leave_one_out(samples, phase, lambda *given: fitted(form, *given)))


def _cell(found: Sequence[HeldOut]) -> str:
    pairs = [pair for one in found for pair in zip(one.errors, one.half_widths, strict=True)]
    errors: Summary = summary(math.expm1(error) for error, _ in pairs)
    inside = sum(abs(error) <= width for error, width in pairs) / len(pairs)
    sizes = (errors.median, errors.p90, abs(errors.worst))
    return f"{', '.join(f'{100 * one:.0f}' for one in sizes)}; {100 * inside:.0f}"


def document() -> str:
    """The table as Markdown."""
    rows = ([form.name, *(_cell(judged(title, form)) for title in TABLES)] for form in FORMS)
    return markdown_table(["form", *TABLES.values()], rows)


def main() -> None:
    text = document()
    print(text)
    if "--write" in sys.argv[1:]:
        write_page(PAGE, TITLE, f"{LEGEND}\n\n{text}")


if __name__ == "__main__":
    main()
