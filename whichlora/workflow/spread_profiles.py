"""Profiles for a plan over several GPUs: of its ranks where they are here, else on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whichlora.search.acquisition import Spent, exhausted
from whichlora.search.feasibility import LIKELY, accepted
from whichlora.search.loop import SearchLoop
from whichlora.spec.parallel import ONE_GPU
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.workflow.profiling import has_ranks_of
from whichlora.workflow.session import Session

MOST_LOOKED_AT = 5  # candidates, the best first, that a profile may tell about


def profile_best(session: Session) -> SearchLoop:
    """The search over all candidates, of which the best have been profiled.

    Profiles are made until the best candidate has one. A candidate is profiled with all of its
    ranks where this machine has the GPUs; else the run of the same model, method and batch on one
    GPU stands for it, which tells what each of several computes.
    """
    spent = Spent()
    measured: dict[RunConfig, Measurement] = {}
    while exhausted(spent, session.plan.budget) is None:
        run = next(_not_profiled(session, measured), None)
        if run is None:
            break
        measured[run] = session.measure(session.search_loop([run]), 0, None)
        session.learn(measured[run])
        spent.runs += 1
        spent.device_s += measured[run].device_s
    search_loop = _with_measured(session, measured)
    search_loop.spent = spent
    return search_loop


def _with_measured(session: Session, measured: dict[RunConfig, Measurement]) -> SearchLoop:
    """The search over all candidates; `measured` are profiles, also of runs that are none."""
    runs = session.runs()
    of_several = [run for run in measured if not run.parallel.is_one_device]
    search_loop = session.search_loop(list(dict.fromkeys([*runs, *of_several])))
    search_loop.measured = {
        position: measured[run]
        for position, run in enumerate(search_loop.runs)
        if not run.parallel.is_one_device and run in measured
    }
    return search_loop


def _not_profiled(session: Session, measured: dict[RunConfig, Measurement]) -> Iterator[RunConfig]:
    """The run to profile for the best candidate, or for the next where it can't fit.

    None where that of the best which can has been profiled.
    """
    candidates = session.candidates(_with_measured(session, measured))
    training = [each for each in candidates if each.run.phase == "finetune"]
    likely = [each for each in training if accepted(each, LIKELY)]
    for candidate in sorted(likely, key=lambda each: each.rank)[:MOST_LOOKED_AT]:
        run = candidate.run
        if not has_ranks_of(run, session.gpu):
            run = replace(run, parallel=ONE_GPU, gradient_accumulation_steps=1)
        if session.predict(run).verdict == "fails":
            continue
        if run not in measured:
            yield run
        return
