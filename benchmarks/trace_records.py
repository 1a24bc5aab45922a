"""What the scripts of traces share: peaks of drawn runs, kept records, and tables of errors.

A record is one JSON line: a run, the depth that was traced, and the peak of the libraries' code on
fake tensors.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from whichlora.errors import ConfigError
from whichlora.memory.allocator import REMAINDERS
from whichlora.memory.allocator_simulator import replay
from whichlora.memory.loading import UNSPLIT_WEIGHTS
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.numeric import added

if TYPE_CHECKING:
    from whichlora.tracer.extrapolate import TracedEvent

Line = dict[str, Any]


def live_bytes(job: ResolvedRun) -> dict[str, int]:
    """Live bytes at each moment as the ledger has them; loading is not traced."""
    # remainders of blocks are the allocator's: no storage of a trace has them
    return {
        name: int(
            added(x.num_bytes for x in entries if x.fact not in (REMAINDERS, UNSPLIT_WEIGHTS))
        )
        for name, entries in ledger(job).moments.items()
        if name != "loading"
    }


def traced_peak(job: ResolvedRun, config: Mapping[str, Any]) -> int:
    """Live bytes at the peak of the real code of `job` on fake tensors, loading left out."""
    return traced_peaks(job, config)["traced"]


def traced_peaks(job: ResolvedRun, config: Mapping[str, Any]) -> dict[str, int]:
    """The same, and what the allocator's rules reserve for all of it, loading included."""
    from whichlora.tracer.trace import trace

    events = list(trace(job.run, config, target_modules=job.peft_targets))
    requests = [(event.storage, event.num_bytes) for event in events]
    return {"traced": live_peak(events), "reserved": replay(requests).peak_reserved_bytes}


def live_peak(events: Iterable[TracedEvent]) -> int:
    """Live bytes at the peak of what a trace recorded, loading left out."""
    peak = live = 0
    sizes: dict[int, int] = {}
    for event in events:
        if event.num_bytes is None:
            live -= sizes.pop(event.storage)
        else:
            sizes[event.storage] = event.num_bytes
            live += event.num_bytes
        if event.moment not in ("load", "adapters"):
            peak = max(peak, live)
    return peak


def read(path: Path) -> Iterator[Line]:
    for text in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(text)


def row(name: str, sizes: list[float]) -> str:
    """Median, 90th and 95th percentile and the worst of some errors, as a row of a table."""
    two = sizes if len(sizes) > 1 else sizes * 2  # of fewer there are no quantiles
    p90, p95 = (quantiles(two, n=20, method="inclusive")[place] for place in (17, 18))
    shown = (f"{100 * size:.3f} %" for size in (median(sizes), p90, p95, max(sizes)))
    return f"| {name} | {len(sizes)} | {' | '.join(shown)} |"


def first_accepted(
    propose: Callable[[], Line | None], predicted: Callable[[Line], int]
) -> tuple[Line, int]:
    """The first of the proposed runs that `predicted` accepts, and how many came before it.

    Args:
        propose: the next run; None for one that is left out.
    """
    for refused in range(1000):
        line = propose()
        if line is None:
            continue
        try:
            predicted(line)
        except ConfigError:
            continue
        return line, refused
    raise AssertionError("no run is accepted")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRuns:
    """Runs that are drawn with a seed, traced, and kept.

    Args:
        records: where they are kept.
        page: the page of their errors.
        kind: what the rows of its table are, such as "method"; a field of a run.
        text: what the page says above its table.
        draw: seed -> a run, and how many drawn before it were refused.
        predicted, traced: the peak of one.
    """

    records: Path
    page: Path
    kind: str
    text: str
    draw: Callable[[int], tuple[Line, int]]
    predicted: Callable[[Line], int]
    traced: Callable[[Line], int]

    def kept(self) -> Iterator[Line]:
        return read(self.records)

    def errors(self) -> dict[str, list[float]]:
        """Relative errors of the ledger over all kept records, by kind."""
        by_kind: dict[str, list[float]] = {}
        for line in self.kept():
            error = abs(self.predicted(line) / line["traced"] - 1)
            by_kind.setdefault(line["run"][self.kind], []).append(error)
        return by_kind

    def rows(self) -> list[str]:
        by_kind = self.errors()
        every = [size for sizes in by_kind.values() for size in sizes]
        return [row("all", every), *(row(name, sizes) for name, sizes in by_kind.items())]

    def table(self) -> str:
        """The page."""
        header = f"| {self.kind} | runs | median | p90 | p95 | worst |"
        lines = [header, "| --- | ---: | ---: | ---: | ---: | ---: |", *self.rows()]
        models = sorted({line["run"]["model"] for line in self.kept()})
        return f"{self.text}\n\n" + "\n".join(lines) + f"\n\nModels: {', '.join(models)}.\n"

    def main(self, description: str | None) -> None:
        """The command line: draw and trace, write the page, or print its table."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--draw", type=int, metavar="N", help="trace N runs and keep them")
        parser.add_argument("--first", type=int, default=0, help="seed of the first")
        parser.add_argument("--output", type=Path, default=self.records)
        parser.add_argument("--write", action="store_true", help="write the page")
        arguments = parser.parse_args()
        if arguments.draw:
            warnings.simplefilter("ignore")
            with arguments.output.open("a", encoding="utf-8") as file:
                for seed in range(arguments.first, arguments.first + arguments.draw):
                    line, _ = self.draw(seed)
                    line["traced"] = self.traced(line)
                    print(json.dumps(line), file=file, flush=True)
        if arguments.write:
            self.page.write_text(self.table(), encoding="utf-8")
            return
        print("\n".join(self.rows()))
