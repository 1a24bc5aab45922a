"""Every candidate on every GPU type, as judged now, and which of them are worth a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from whichlora import api
from whichlora.dataset import TokenLengths
from whichlora.plan import Budget, Plan, ProfilePolicy
from whichlora.policy import Decision
from whichlora.pursuit import Pursuit
from whichlora.search import MIN_CHANCE, Candidate
from whichlora.session import Progress, Session
from whichlora.slurm.discovery import GpuGroup
from whichlora.store.jsonfiles import read_object
from whichlora.sweep.state import Sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Where the search stands on the GPUs of one group.

    Args:
        candidates: of both stages, in the order of `pursuit`.
    """

    group: GpuGroup
    session: Session
    pursuit: Pursuit
    decision: Decision
    candidates: Sequence[Candidate]


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
            pursuit = session.pursuit(session.runs())
            session.recall(pursuit)
            if judged and judged[-1].group.name == group.name:  # its files lie beside the first's
                session.plan = replace(own, output_dir=folder / key)
            judged.append(
                Judged(
                    group=replace(group, gpu=key),
                    session=session,
                    pursuit=pursuit,
                    decision=pursuit.decide(),
                    candidates=session.candidates(pursuit),
                )
            )
    return judged


def _met(folder: Path) -> list[str]:
    """Keys of the accelerators that tasks of a group have met, in their order."""
    files = sorted((folder / "started").glob("*.json"))
    return list(dict.fromkeys(str(read_object(path)["gpu"]) for path in files))


def worth_profiling(
    candidates: Sequence[Candidate], decision: Decision, policy: ProfilePolicy, budget: Budget
) -> list[Candidate]:
    """Candidates whose runs could change the answer, all at once: an array has no second look.

    Those that win in most of the drawn worlds, until what is left out wins in no more of them than
    the asked confidence allows; and with them what shows that their models serve. Where results
    reopen the question, the next round asks for more.
    """
    if policy == "none":
        return []
    if policy == "all":
        return [one for one in candidates if not one.measured and not one.failure]
    doubt, chosen = 1 - decision.confidence, list[Candidate]()
    models: dict[str, None] = {}
    for position in decision.chance_to_win.argsort()[::-1].tolist():
        wins = float(decision.chance_to_win[position])
        if wins <= 0 or doubt <= 1 - budget.confidence:
            break
        doubt -= wins
        if not candidates[position].measured:
            chosen.append(candidates[position])
        models[candidates[position].run.model] = None
    for model in models:
        chosen += _serving(model, candidates, decision)
    return chosen


def _serving(model: str, candidates: Sequence[Candidate], decision: Decision) -> list[Candidate]:
    """The shape that surely serves within the limits, or else every one that may."""
    shapes = [
        (float(decision.chance_to_meet[position]), position)
        for position, one in enumerate(candidates)
        if one.run.phase == "inference" and one.run.model == model
    ]
    if any(candidates[i].measured and candidates[i].verdict == "meets" for _, i in shapes):
        return []
    left = [(c, i) for c, i in shapes if c >= MIN_CHANCE and not candidates[i].measured]
    if left and max(left)[0] >= 1 - MIN_CHANCE:
        left = [max(left)]
    return [candidates[position] for _, position in left]
