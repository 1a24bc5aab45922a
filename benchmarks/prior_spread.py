"""How far devices are from the time model's priors, and runs from their device.

    python benchmarks/prior_spread.py --write

Runs beside one host err alike: its coefficients are not the prior's. Around that each run scatters.
Log errors of a host are jointly normal, with the shares of a run's time as loads of coefficients.
The likeliest three numbers are printed: what the stated deviations of the device's coefficients and
of the host's are to be multiplied with, and the scatter of a run (`timing/model.py`). Each host is
also judged by the three numbers of all others. Runs are published ones, predicted by datasheet and
priors, and the records of `benchmarks/gpu/`.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np
from markdown_tables import markdown_table, write_page
from numpy.typing import NDArray
from part_spread import GPUS, records
from published import gpu_of
from published.times import timed_observations, timed_parts
from scipy.optimize import minimize

from whichlora.calibration.fit_time import RESOURCES, relative_spread
from whichlora.calibration.load import model_of
from whichlora.calibration.samples import time_samples
from whichlora.predict.coefficients import TIME_PHASES
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.store.gpus import find_gpu
from whichlora.timing import model as timing
from whichlora.timing.model import FEATURES, HOST_SCALE, PRIOR_NOISE

PAGE, TITLE = "prior_spread", "Devices around the priors of time"
LEGEND = (
    "Datasheet and priors beside published runs and the records of this repository. Spreads are "
    "multiples of the stated deviations of coefficients (`timing/model.py`); scatter is that of a "
    "run, as a log."
)
START = (0.7, 0.8, 0.1)
SPREADS = ("device", "host", "scatter")
HOSTS = np.array([name in RESOURCES["host"] for name in FEATURES])
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Run:
    """One time beside its prediction.

    Args:
        host: a GPU in one source, or one that this repository measured.
        error: log of measured over predicted.
        loads: what a relative error of each coefficient adds to it, in stated deviations.
    """

    host: str
    phase: str
    regime: str
    error: float
    loads: Array


@dataclass(frozen=True, slots=True)
class Spreads:
    """What deviations are multiplied with, and the scatter of a run.

    Args:
        of_host_bound: what the deviation of a run that the host decides is multiplied with.
    """

    device: float
    host: float
    scatter: float
    of_host_bound: float = 1.0

    def deviation(self, run: Run) -> float:
        scales = np.where(HOSTS, self.host, self.device)
        deviation = math.hypot(float(np.linalg.norm(run.loads * scales)), self.scatter)
        return deviation * (self.of_host_bound if run.regime == "host" else 1.0)

    def holds(self, run: Run) -> bool:
        return abs(run.error) <= TWO_SIDED_Z[TIME_CONFIDENCE] * self.deviation(run)


def runs() -> Iterator[Run]:
    for row in timed_observations():
        host = f"{row.gpu}, {row.source}, {row.run.engine}"
        yield compared(host, gpu_of(row.gpu), timed_parts(row), row.value)
    for key in GPUS:
        gpu = find_gpu(key)
        for record in records(key):
            by_phase = time_samples(resolve(model_of(record), record.run, gpu), record)
            for phase, samples in by_phase.items():
                for sample in samples:
                    parts = [(phase, sample.features, 1)]
                    yield compared(f"{key}, measured here", gpu, parts, sample.value)


def compared(
    host: str,
    gpu: GpuSpec,
    parts: Iterable[tuple[str, Mapping[str, float], int]],
    measured_s: float,
) -> Run:
    """One run whose passes, each so many times, took `measured_s`."""
    by_feature = np.zeros(len(FEATURES))
    loads = np.zeros(len(FEATURES))
    longest = (0.0, "", "")
    for phase, features, times in parts:
        model, spread = timing.prior_model(gpu, phase), relative_spread(gpu, phase)
        seconds, shares = timing.seconds(model, features)
        part_s = times * np.array([float(shares[name]) for name in FEATURES])
        by_feature += part_s
        loads += part_s * [spread[name] for name in FEATURES]
        longest = max(longest, (times * float(seconds), phase, timing.regime_of(model, features)))
    total_s = float(by_feature.sum())
    return Run(host, longest[1], longest[2], math.log(measured_s / total_s), loads / total_s)


def by_host(all_runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs whose coefficients are the same: of one host in one phase."""
    groups = defaultdict(list)
    for run in all_runs:
        groups[run.host, run.phase].append(run)
    return groups


def likeliest(groups: Iterable[Sequence[Run]]) -> Spreads:
    """The spreads under which the errors of all groups are most likely."""
    known = [
        (np.array([run.error for run in group]), np.array([run.loads for run in group]))
        for group in groups
    ]

    def surprise(logs: Array) -> float:
        device, host, scatter = np.exp(logs)
        scales = np.where(HOSTS, host, device) ** 2
        total = 0.0
        for errors, loads in known:
            covariance = (loads * scales) @ loads.T + scatter**2 * np.eye(len(errors))
            _, log_determinant = np.linalg.slogdet(covariance)
            total += log_determinant + errors @ np.linalg.solve(covariance, errors)
        return total / 2

    best = minimize(surprise, np.log(START), method="Nelder-Mead")
    return Spreads(*np.exp(best.x).tolist())


def document() -> str:
    """Both tables as Markdown."""
    groups = by_host(runs())
    hosts = sorted({host for host, _ in groups})
    stated = Spreads(1.0, 1.0, PRIOR_NOISE["accelerator"], HOST_SCALE)
    rows = [("none", *spread_cells(likeliest(groups.values())))]
    judged: dict[tuple[str, str], list[tuple[Run, Spreads]]] = defaultdict(list)
    for left_out in hosts:
        spreads = likeliest(group for (host, _), group in groups.items() if host != left_out)
        rows.append((left_out, *spread_cells(spreads)))
        for (host, phase), group in groups.items():
            if host == left_out:
                for run in group:
                    judged[phase, run.regime].append((run, spreads))
    by_left_out = markdown_table(("left out", *SPREADS), rows)
    return f"{by_phase(groups)}\n\n{by_left_out}\n\n{coverage(judged, stated)}"


def by_phase(groups: Mapping[tuple[str, str], Sequence[Run]]) -> str:
    """The likeliest spreads of each phase alone."""
    rows = []
    for phase in TIME_PHASES:
        of_phase = [group for (_, name), group in groups.items() if name == phase]
        rows.append((phase, len(of_phase), *spread_cells(likeliest(of_phase))))
    return markdown_table(("phase", "hosts", *SPREADS), rows)


def spread_cells(spreads: Spreads) -> tuple[str, ...]:
    return tuple(f"{spread:.2f}" for spread in (spreads.device, spreads.host, spreads.scatter))


def coverage(
    judged: Mapping[tuple[str, str], Sequence[tuple[Run, Spreads]]], stated: Spreads
) -> str:
    """What 90 % intervals hold: by the spreads of the other hosts, and by those that are stated."""
    rows = []
    for (phase, regime), pairs in sorted(judged.items()):
        each_host = defaultdict(list)
        for run, _ in pairs:
            each_host[run.host].append(stated.holds(run))
        reach = median(stated.deviation(run) for run, _ in pairs) * TWO_SIDED_Z[TIME_CONFIDENCE]
        shares = (
            mean(of_others.holds(run) for run, of_others in pairs),
            mean(stated.holds(run) for run, _ in pairs),
            mean(map(mean, each_host.values())),
        )
        figures = (f"{100 * share:.0f} %" for share in shares)
        rows.append(
            (phase, regime, len(each_host), len(pairs), *figures, f"{math.exp(reach):.2f} times")
        )
    head = ("phase", "regime", "hosts", "runs", "inside, by the other hosts")
    return markdown_table((*head, "inside, as stated", "mean of hosts", "median reach"), rows)


def main() -> None:
    text = document()
    print(text)
    if "--write" in sys.argv[1:]:
        write_page(PAGE, TITLE, f"{LEGEND}\n\n{text}")


if __name__ == "__main__":
    main()
