"""Profiles on one GPU for a plan over several: what one computes, each of several does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whichlora.search.acquisition import Spent, exhausted
from whichlora.search.feasibility import LIKELY, accepted
from whichlora.spec.parallel import ONE_GPU
from whichlora.spec.run import RunConfig
from whichlora.workflow.session import Session

MOST_LOOKED_AT = 5  # candidates, the best first, whose computing one GPU may tell


def profile_on_one_gpu(session: Session) -> Spent:
    """Profile what the best candidates compute until the best one's has been; what that took.

    A candidate is stood for by the run of the same model, method and batch on one GPU, where it may
    fit there. Profiles of several GPUs themselves would take this function's place.
    """
    spent = Spent()
    profiled: set[RunConfig] = set()
    while exhausted(spent, session.plan.budget) is None:
        chosen = next(_not_profiled(session, profiled), None)
        if chosen is None:
            break
        profiled.add(chosen)
        measurement = session.measure(session.search_loop([chosen]), 0, None)
        session.learn(measurement)
        spent.runs += 1
        spent.device_s += measurement.device_s
    return spent


def _not_profiled(session: Session, profiled: set[RunConfig]) -> Iterator[RunConfig]:
    """The run on one GPU that stands for the best candidate, or for the next where it can't fit.

    None where that of the best which can has been profiled.
    """
    candidates = session.candidates(session.search_loop(session.runs()))
    training = [each for each in candidates if each.run.phase == "finetune"]
    likely = [each for each in training if accepted(each, LIKELY)]
    for candidate in sorted(likely, key=lambda each: each.rank)[:MOST_LOOKED_AT]:
        alone = replace(candidate.run, parallel=ONE_GPU, gradient_accumulation_steps=1)
        if session.predict(alone).verdict == "fails":
            continue
        if alone not in profiled:
            yield alone
        return
