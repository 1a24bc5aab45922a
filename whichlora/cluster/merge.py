"""What the tasks measured → an answer per GPU type, the best of all, and its batch script."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whichlora.cluster.prune import Judged, spent_on, worth_profiling
from whichlora.cluster.slurm.scripts import training_script
from whichlora.cluster.state import Sweep
from whichlora.html import write_report
from whichlora.search.acquisition import exhausted
from whichlora.search.feasibility import Candidate
from whichlora.search.gpu_choice import rank_across
from whichlora.spec.plan import Plan
from whichlora.spec.results import SCHEMA_VERSION
from whichlora.spec.run import RunConfig
from whichlora.store import written
from whichlora.store.jsonfiles import object_bytes, write_object
from whichlora.terminal import candidate_row
from whichlora.workflow.answer import Answer, Ending
from whichlora.workflow.conclude import conclude, summary
from whichlora.workflow.job import write_files

_TRAINING_MARGIN = 1.5  # of the time limit over the expected time: a killed training is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """The answer on one GPU type.

    Args:
        open_candidates: how many could still change it.
        script: of the winning fine-tuning job.
    """

    judged: Judged
    answer: Answer
    open_candidates: int
    script: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answers of all GPU types; `best` is the best-ranked winner, queue wait aside."""

    groups: Sequence[GroupAnswer]
    best: GroupAnswer | None

    @property
    def open_candidates(self) -> int:
        return sum(group_answer.open_candidates for group_answer in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """The content of `recommendation.json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "best": None if self.best is None else self.best.judged.group.name,
            "groups": [_row(group_answer) for group_answer in self.groups],
        }


def merge(plan: Plan, sweep: Sweep, judged: Sequence[Judged]) -> Recommendation:
    """Write the answer of every group into its folder, and the recommendation beside them.

    Raises:
        DataFileError: a disk that refuses.
    """
    groups = [_conclude(plan, sweep, judged_group) for judged_group in judged]
    ranked = [
        (rank_across(plan.objective, winner, group_answer.judged.group.gpu), number)
        for number, group_answer in enumerate(groups)
        if (winner := group_answer.answer.winner) is not None
    ]
    best = groups[min(ranked)[1]] if ranked else None
    recommendation = Recommendation(groups=groups, best=best)
    write_object(sweep.run_dir / "recommendation.json", recommendation.to_dict())
    return recommendation


def _conclude(plan: Plan, sweep: Sweep, judged: Judged) -> GroupAnswer:
    session = judged.session
    session.plan.output_dir.mkdir(parents=True, exist_ok=True)
    decision = judged.decision
    open_candidates = worth_profiling(judged.candidates, decision, plan.profile, plan.budget)
    listed = sweep.listed_runs(judged.group.name)
    search = summary(
        judged.search_loop, decision, _stopped_by(plan, judged, open_candidates, listed)
    )
    answer = conclude(session, judged.search_loop, search, decision.best)
    files = write_files(session, answer)
    if "measurements" in files:  # one file per task, not one of the session
        files["measurements"] = session.log.path.parent
    answer = replace(answer, files=files)
    script = _write_training(plan, sweep, judged, answer)
    if script is not None:
        answer = replace(answer, files={**answer.files, "script": script})
    folder = session.plan.output_dir
    answer = replace(answer, files={**answer.files, "report": folder / "report.html"})
    answer_bytes = object_bytes(answer.to_dict())
    written.write_files({folder / "answer.json": answer_bytes}, instead=written.OTHER_FOLDER)
    write_report(folder, folder / "report.html")
    return GroupAnswer(
        judged=judged, answer=answer, open_candidates=len(open_candidates), script=script
    )


def _stopped_by(
    plan: Plan, judged: Judged, open_candidates: Sequence[Candidate], listed: Collection[RunConfig]
) -> Ending:
    if plan.profile == "none":
        return "not measured"
    if open_candidates:
        waiting = any(candidate.run in listed for candidate in open_candidates)
        spent = plan.profile != "all" and exhausted(spent_on(judged, listed), plan.budget)
        return "under way" if waiting or not spent else spent
    if plan.profile == "all":
        return "everything measured"
    return "certain" if judged.decision.confidence >= plan.budget.confidence else "nothing left"


def _write_training(plan: Plan, sweep: Sweep, judged: Judged, answer: Answer) -> Path | None:
    best, job = answer.winner, answer.files.get("job")
    if best is None or job is None or sweep.engine != "slurm":
        return None
    assert best.total_s is not None
    text = training_script(
        judged.group,
        plan.slurm,
        job=job,
        run=best.run,
        limit_s=plan.slurm.startup_s + _TRAINING_MARGIN * best.total_s.high,
        python=sys.executable,
    )
    path = job.with_name("train.sbatch")
    written.write_files({path: text.encode()}, instead=written.OTHER_FOLDER)
    return path


def _row(group_answer: GroupAnswer) -> dict[str, Any]:
    group, answer = group_answer.judged.group, group_answer.answer
    best = answer.winner
    return {
        "group": group.name,
        "gpu": group.gpu,
        "cluster": group.cluster,
        "partitions": list(group.partitions),
        "measured": len(answer.compared),
        "open_candidates": group_answer.open_candidates,
        "search": answer.search.to_dict(),
        "winner": None if best is None else candidate_row(best),
        "files": {name: str(path) for name, path in answer.files.items()},
    }
