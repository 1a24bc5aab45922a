"""`whichlora run`: a config file → the answer, on one GPU or on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from whichlora.config import load_plan
from whichlora.errors import ConfigError
from whichlora.exports.checks import require_library
from whichlora.html import write_report
from whichlora.predict.words import describe
from whichlora.profiler.installed import installed_versions
from whichlora.search.acquisition import Decision
from whichlora.search.feasibility import (
    least_chance,
)
from whichlora.search.gpu_choice import OnGpu, choose_gpu
from whichlora.search.loop import SearchLoop
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.plan import Plan, Prefer
from whichlora.spec.results import Measurement
from whichlora.store import written
from whichlora.store.jsonfiles import object_bytes
from whichlora.store.locks import hold_folder
from whichlora.workflow.answer import Answer, Ending, Search
from whichlora.workflow.conclude import conclude, summary
from whichlora.workflow.job import files_of, train, write_files
from whichlora.workflow.profiling import device_of, gpus_of, is_here, require_profiler
from whichlora.workflow.session import Progress, Session
from whichlora.workflow.spread_profiles import profile_best
from whichlora.workflow.training_data import Counted


def run_plan(
    config: Path, *, progress: Progress, fresh: bool = False, prefer: Prefer | None = None
) -> Answer:
    """Carry out the config file: predict, prune, profile, choose, write, and train if asked.

    Args:
        prefer: what ranks the candidates, in place of what the file says.

    Raises:
        ConfigError: a fault in the config, the data, a model or the device.
        DataFileError: a file that cannot be read or written, or another start in the same folder.
        MeasurementError: the profiler cannot start.
    """
    plan = load_plan(config)
    if prefer is not None:
        plan = replace(plan, objective=replace(plan.objective, prefer=prefer))
    gpus = gpus_of(plan)
    if plan.profile != "none" and not any(map(is_here, gpus)):
        device_of(gpus[0])  # says what this machine has
    if plan.train and len(gpus) > 1:
        raise ConfigError(
            f"{plan.source}: train: true needs one gpu, got {len(gpus)}; set train: false, and "
            "start the job of the recommended one there"
        )
    if plan.train:
        require_library(plan.finetune, f"{plan.source}: train: true needs train.py")
    if plan.profile != "none" or plan.train:
        require_profiler(plan.finetune)
    with hold_folder(plan.output_dir):
        if len(gpus) == 1:
            written.require_own(files_of(plan), instead=written.OTHER_FOLDER)
            return _run(plan, gpus[0], progress, fresh=fresh, lengths={})
        return _run_on_each(plan, gpus, progress, fresh=fresh)


def _run_on_each(plan: Plan, gpus: Sequence[GpuSpec], progress: Progress, *, fresh: bool) -> Answer:
    """The answer of the recommended GPU, with what the others come to; one folder for each.

    Only a GPU of this machine is profiled.

    Raises:
        ConfigError: none of them can carry out the plan.
    """
    lengths: Counted = {}
    answers: dict[str, Answer] = {}
    refusals: dict[str, ConfigError] = {}
    here = {gpu.key for gpu in gpus if plan.profile != "none" and is_here(gpu)}
    gpu_plans = [
        replace(
            plan,
            gpu=gpu.key,
            gpus=(gpu.key,),
            output_dir=plan.output_dir / gpu.key,
            profile=plan.profile if gpu.key in here else "none",
        )
        for gpu in gpus
    ]
    files = {
        "answer": plan.output_dir / "answer.json",
        "report": plan.output_dir / "report.html",
    }
    of_gpus = chain.from_iterable(map(files_of, gpu_plans))
    written.require_own([*files.values(), *of_gpus], instead=written.OTHER_FOLDER)
    for gpu, gpu_plan in zip(gpus, gpu_plans, strict=True):
        try:
            answers[gpu.key] = _run(gpu_plan, gpu, progress, fresh=fresh, lengths=lengths)
        except ConfigError as error:
            progress.say(f"{gpu.key} left out: {error}")
            refusals[gpu.key] = error
    if not answers:
        raise next(iter(refusals.values()))
    choice = choose_gpu(
        [_on_gpu(gpu.key, answers, refusals, measured=gpu.key in here) for gpu in gpus],
        plan.objective,
    )
    nearest = max(choice.gpus, key=lambda on: (on.gpu in answers, on.best_chance))
    best = answers[(choice.best or nearest).gpu]
    best = replace(best, choice=choice, files={**best.files, **files})
    return _write_answer(plan.output_dir, best)


def _on_gpu(
    key: str,
    answers: Mapping[str, Answer],
    refusals: Mapping[str, ConfigError],
    *,
    measured: bool,
) -> OnGpu:
    if key in refusals:
        return OnGpu(gpu=key, refusal=str(refusals[key]))
    answer = answers[key]
    return OnGpu(
        gpu=key,
        winner=answer.winner,
        finetune=answer.finetune,
        least_chance=least_chance(answer.plan),
        measured=measured,
        folder=str(answer.plan.output_dir),
    )


def _run(
    plan: Plan,
    gpu: GpuSpec,
    progress: Progress,
    *,
    fresh: bool,
    lengths: Counted,
) -> Answer:
    session = Session(plan, gpu, progress, fresh=fresh, lengths=lengths)
    try:
        answer = search(session)
        answer = replace(answer, files=write_files(session, answer))
        if plan.train and answer.winner is not None:
            answer = replace(answer, training=train(session, answer))
    finally:
        session.close()
    report = plan.output_dir / "report.html"
    answer = replace(answer, files={**answer.files, "report": report})
    return _write_answer(plan.output_dir, answer)


def _write_answer(folder: Path, answer: Answer) -> Answer:
    path = folder / "answer.json"
    written.write_files({path: object_bytes(answer.to_dict())}, instead=written.OTHER_FOLDER)
    write_report(folder, answer.files["report"])
    return answer


def search(session: Session) -> Answer:
    """The answer to the plan of `session`, before anything of it is written."""
    plan = session.plan
    num_candidates = session.space.number()
    most = "up to " if plan.is_spread else ""
    session.progress.say(
        f"{num_candidates[0]} inference and {most}{num_candidates[1]} fine-tuning candidates of "
        f"{'1 model' if len(plan.models) == 1 else f'{len(plan.models)} models'} "
        f"on {session.gpu.key}"
    )
    if session.space.is_answered and plan.profile != "none":
        session.progress.say(
            f"stage 1 is what {plan.inference.serving} answers when it starts: no inference is "
            "profiled; `whichlora calibrate --from-log` takes a running engine's log"
        )
    runs = session.runs()
    if session.is_large:
        session.progress.say(f"{len(runs)} of them may win and are looked at one by one")
    if plan.is_spread and plan.profile != "none":
        search_loop = profile_best(session)
        session.plan = replace(plan, profile="none")
    else:
        search_loop = session.search_loop(runs)
    search_loop, ended, position = _run_loop(session, search_loop)
    return conclude(session, search_loop, ended, position)


def _run_loop(session: Session, search_loop: SearchLoop) -> tuple[SearchLoop, Search, int | None]:
    """Measure as the plan asks; the position of the winner, where one was measured.

    The search loop is a longer one where what was measured has lengthened its shortlist.
    """
    plan = session.plan
    stopped_by: Ending

    def measure(position: int, decision: Decision | None) -> Measurement:
        return session.measure(search_loop, position, decision)

    if plan.profile != "none":
        recalled, refused = session.recall(search_loop, libraries=installed_versions())
        for run in recalled:
            session.progress.say(f"resumed: {describe(run)} was measured before")
        for difference, number in refused.items():
            runs = "1 run was" if number == 1 else f"{number} runs were"
            session.progress.say(f"{runs} measured before {difference}: measured again as needed")
    if plan.profile == "none":
        decision, stopped_by = search_loop.decide(), "not measured"
    elif plan.profile == "all":
        decision = search_loop.measure_all(measure, session.learn)
        stopped_by = "everything measured"
    else:
        decision, stopped_by = search_loop.measure_until_certain(
            measure, session.learn, plan.budget
        )
        while session.is_large and stopped_by in ("certain", "nothing left"):
            shortlisted = set(search_loop.runs)
            more = [run for run in session.runs() if run not in shortlisted]
            if not more:
                break
            session.progress.say(f"{len(more)} more candidates may win after these measurements")
            search_loop = session.lengthened(search_loop, more)
            decision, stopped_by = search_loop.measure_until_certain(
                measure, session.learn, plan.budget
            )
    return search_loop, summary(search_loop, decision, stopped_by), decision.best
