"""Every candidate on every GPU type, as judged now, and which of them are worth a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from whichlora import api
from whichlora.dataset import TokenLengths
from whichlora.plan import Plan, ProfilePolicy
from whichlora.search import Candidate, kept_models, may_beat
from whichlora.slurm.discovery import GpuGroup
from whichlora.store.jsonfiles import read_object
from whichlora.sweep.state import Sweep
from whichlora.workflow import Progress, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The candidates of both stages on the GPUs of one group."""

    group: GpuGroup
    session: Session
    inference: Sequence[Candidate]
    finetune: Sequence[Candidate]


def judge_groups(plan: Plan, sweep: Sweep, progress: Progress) -> list[Judged]:
    """Every group in the light of all records of its tasks.

    The group's accelerator is what the drivers on its nodes said; before the first task ran, what
    its type and features say. A group whose nodes differ is judged once for each kind.
    """
    lengths: dict[str, TokenLengths] = {}
    judged: list[Judged] = []
    for group in sweep.groups:
        folder = sweep.run_dir / group.name
        for key in _met(folder) or [group.gpu]:
            own = replace(plan, output_dir=folder, gpu=key)
            gpu = api.find_gpu(key)
            session = Session(own, gpu, progress, fresh=False, lengths=lengths)
            session.recall()
            if judged and judged[-1].group.name == group.name:  # its files lie beside the first's
                session.plan = replace(own, output_dir=folder / key)
            inference = [session.judge(run) for run in session.inference_runs()]
            alive = [one.run.model for one in inference if one.verdict != "misses"]
            if plan.profile == "none":
                alive = list(kept_models(inference, "none"))
            runs = session.finetune_runs(list(dict.fromkeys(alive)))
            judged.append(
                Judged(
                    group=replace(group, gpu=key),
                    session=session,
                    inference=inference,
                    finetune=[session.judge(run) for run in runs],
                )
            )
    return judged


def _met(folder: Path) -> list[str]:
    """Keys of the accelerators that tasks of a group have met, in their order."""
    files = sorted((folder / "started").glob("*.json"))
    return list(dict.fromkeys(str(read_object(path)["gpu"]) for path in files))


def worth_profiling(
    inference: Sequence[Candidate], finetune: Sequence[Candidate], policy: ProfilePolicy
) -> list[Candidate]:
    """Candidates whose runs could change the answer, all at once: an array has no second look.

    A candidate that surely meets every limit stands for the winner, so what could not beat it
    stays out, as in a run on one machine; it is measured itself, and so is one serving shape of
    every model that may win. Where a run refutes it, the next round asks for more.
    """
    everyone = [*finetune, *inference]
    if policy == "none":
        return []
    if policy == "all":
        return [one for one in everyone if not one.measured and not one.failure]
    served = {one.run.model for one in inference if one.verdict == "meets"}
    sure = [one for one in finetune if one.verdict == "meets" and one.run.model in served]
    best = min(sure, key=lambda one: one.rank, default=None)
    alive = [one for one in finetune if one.verdict != "misses"]
    rivals = [one for one in alive if one is best or may_beat(one, best)]
    chosen = [one for one in rivals if not one.measured]
    for model in dict.fromkeys(one.run.model for one in rivals):
        shapes = [one for one in inference if one.run.model == model]
        if any(one.measured and one.verdict == "meets" for one in shapes):
            continue
        left = [one for one in shapes if not one.measured and one.verdict != "misses"]
        likely = [one for one in left if one.verdict == "meets"]
        chosen += [max(likely, key=lambda one: one.chance)] if likely else left
    return chosen
