"""One round of a sweep: predict for every GPU type, and write what is worth profiling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from whichlora.cluster.engine import Engine
from whichlora.cluster.prune import Judged, affordable, judge_groups
from whichlora.cluster.state import Array, Sweep
from whichlora.cluster.tasks import Task, TaskList
from whichlora.config import load_plan
from whichlora.errors import ConfigError
from whichlora.predict.words import describe
from whichlora.search.feasibility import Candidate
from whichlora.spec.plan import Plan
from whichlora.spec.profile_steps import steps_by_length
from whichlora.store.locks import hold_folder
from whichlora.workflow.session import Progress, Session


def plan_sweep(
    config: Path, engine: Engine, *, name: str, progress: Progress, fresh: bool
) -> Sweep:
    """Find the GPU types, predict for each, and write the first round.

    Raises:
        ConfigError: a fault in the config, no GPU that is known, or a sweep that is under way.
        DataFileError: a disk that refuses, or another process at work in the folder.
        MeasurementError: the cluster does not answer.
    """
    plan = load_plan(config)
    if plan.is_spread and plan.profile != "none":
        raise ConfigError(
            f"{config}: gpus: a sweep profiles on one GPU so far; set profile: none, and each GPU "
            "type of the cluster is predicted, or leave gpus out"
        )
    with hold_folder(plan.output_dir.absolute()):
        return _plan_sweep(plan, config, engine, name=name, progress=progress, fresh=fresh)


def _plan_sweep(
    plan: Plan, config: Path, engine: Engine, *, name: str, progress: Progress, fresh: bool
) -> Sweep:
    run_dir = plan.output_dir.absolute()
    if not fresh and _is_under_way(run_dir):
        raise ConfigError(
            f"{run_dir}: its sweep is under way or done; go on with 'whichlora slurm resume "
            f"{run_dir}', or start over with --fresh"
        )
    groups, unknown = engine.find_groups(plan)
    if not groups:
        partitions = ", ".join(plan.slurm.partitions)
        raise ConfigError(
            "; ".join(unknown)
            or f"slurm.partition: no GPU is up in {partitions or 'any partition'}; "
            "'sinfo -o \"%R %a %t %G\"' says what the cluster has"
        )
    sweep = Sweep(
        run_dir=run_dir,
        config=config.absolute(),
        engine=name,
        groups=tuple(groups),
        unknown=tuple(unknown),
    )
    if fresh:
        for group in groups:  # forget the records of the earlier sweep
            (run_dir / group.name / "run.json").unlink(missing_ok=True)
            for path in (run_dir / group.name / "started").glob("*.json"):
                path.unlink()
    return next_round(plan, sweep, judge_groups(plan, sweep, progress), engine)


def next_round(plan: Plan, sweep: Sweep, judged: Sequence[Judged], engine: Engine) -> Sweep:
    """Write lists and scripts of whatever is worth profiling and was in no list before.

    Returns:
        The sweep with the new arrays, saved; the same where nothing is left to ask.
    """
    number = 1 + max((array.round for array in sweep.arrays), default=0)
    for group in sweep.groups:
        listed = sweep.listed_runs(group.name)
        chosen: list[tuple[Session, Candidate]] = []
        for judged_group in judged:
            if judged_group.group.name == group.name:
                candidates = affordable(judged_group, plan, listed)
                chosen += [(judged_group.session, candidate) for candidate in candidates]
                listed |= {candidate.run for candidate in candidates}
        if chosen:
            sweep = sweep.with_array(_write_array(plan, sweep, group.name, number, chosen, engine))
    sweep.save()
    return sweep


def _write_array(
    plan: Plan,
    sweep: Sweep,
    group: str,
    number: int,
    chosen: Sequence[tuple[Session, Candidate]],
    engine: Engine,
) -> Array:
    first, _ = chosen[0]
    tasks = tuple(_task(plan, session, candidate) for session, candidate in chosen)
    names = dict.fromkeys(task.run.model for task in tasks)
    listed = TaskList(
        run_id=first.run_id,
        group=group,
        round=number,
        gpu=first.gpu.key,
        config=str(sweep.config),
        calibration_dir=first.roots[0].absolute(),
        models={name: dict(first.models[name].config) for name in names},
        tasks=tasks,
        pretend_memory_bytes=plan.slurm.pretend_memory_bytes,
    )
    array = Array(
        group=group,
        round=number,
        tasks_file=f"{group}/tasks-{number}.json",
        script=f"{group}/profile-{number}.sbatch",
        num_tasks=len(tasks),
        max_array_size=len(tasks),
    )
    listed.write(sweep.run_dir / array.tasks_file)
    limit_s = plan.slurm.startup_s / 2 + max(task.timeout_s for task in tasks)
    return engine.write(plan, sweep, array, limit_s=limit_s)


def _task(plan: Plan, session: Session, candidate: Candidate) -> Task:
    """One candidate as the profiler takes it.

    Half of `startup_time` is for loading the libraries, which the profiler does not count, half
    for building the model, which it does.
    """
    run = candidate.run
    training = run.phase == "finetune"
    number = plan.num_batches if training else plan.num_runs
    load = session.workload(run) if training else None
    lengths = load.profile_lengths(number) if load else (run.prompt_len,) * number
    steps = steps_by_length(lengths, session.gpu.backend.torch_device)
    upper_s = _upper_s(candidate) * steps.total()
    return Task(
        what=describe(run),
        run=run,
        target_modules=session.job(run).peft_targets,
        seq_lens=lengths,
        num_batches=number,
        timeout_s=round(min(plan.timeout_s, plan.slurm.startup_s / 2 + upper_s), 1),
        upper_s=round(upper_s, 3),
    )


def _upper_s(candidate: Candidate) -> float:
    """Seconds of one step, or of one generation, at the upper end of the interval."""
    prediction = candidate.prediction
    high = prediction.time.interval_s[1]
    training = prediction.run.phase == "finetune"
    return high if training else high * prediction.tokens_per_generation


def _is_under_way(run_dir: Path) -> bool:
    """Whether anything was submitted, by us or by hand: the lists must not change under it."""
    if not (run_dir / "sweep.json").exists():
        return False
    submitted = any(array.jobs for array in Sweep.load(run_dir).arrays)
    return submitted or any(run_dir.glob("*/started/*.json"))
