"""Tasks by name; one small file each, also from other packages.

A package adds its own task with an entry point in the group `whichlora.tasks` that loads a `Task`.
A run without one trains, and serves, what the model's type implies: texts or masked words.
"""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.data_format import Rows
from whichlora.spec.loss_heads import LOSS_HEADS
from whichlora.spec.members import Members
from whichlora.spec.options import filled, known
from whichlora.spec.run import USUAL_TRAINER, RunConfig
from whichlora.tasks import (
    embedding,
    question_answering,
    reranking,
    reward,
    sequence_classification,
    token_classification,
)
from whichlora.tasks.base import Task
from whichlora.trainers import get_trainer

_TASKS = Members[Task](
    "task",
    "tasks",
    Task,
    (
        module.TASK
        for module in (
            sequence_classification,
            token_classification,
            question_answering,
            reward,
            reranking,
            embedding,
        )
    ),
)
BUILT_IN = _TASKS.built_in
ENTRY_POINT_GROUP = _TASKS.group
list_tasks = _TASKS.all
get_task = _TASKS.get


def task_of(run: RunConfig) -> Task | None:
    """The task of `run`: the one that it names, or that its trainer is for.

    Raises:
        ConfigError: no such task or trainer.
    """
    name = run.task or get_trainer(run.trainer).task
    return get_task(name) if name else None


def rows_of(run: RunConfig) -> Rows:
    """What a run learns from: the rows of its task, else those of its trainer.

    Raises:
        ConfigError: no such task or trainer.
    """
    task = task_of(run)
    if task is not None and task.rows is not None:
        return task.rows
    return get_trainer(run.trainer).rows


def with_task(run: RunConfig) -> RunConfig:
    """`run` with a trainer of its task, and every option of the task.

    Raises:
        ConfigError: no such task, an option that it lacks, or a trainer that does not train it.
    """
    task = task_of(run)
    asked = dict(run.task_options)
    if task is None:
        if asked:
            raise ConfigError(
                f"task_options: {next(iter(asked))} is of a task; give task {', '.join(BUILT_IN)}"
            )
        return run
    known(task.options, asked, setting="task_options", owner=f"task {task.name}")
    values = filled(task.options, asked).items()
    options = tuple(sorted((name, value) for name, value in values if value is not None))
    trainer = run.trainer
    if trainer == USUAL_TRAINER:
        trainer = task.trainers[0]
    if trainer not in task.trainers:
        raise ConfigError(
            f"trainer: {trainer} does not train task {task.name}; accepted are "
            f"{', '.join(task.trainers)}"
        )
    if LOSS_HEADS[run.loss_head].has_vocabulary:
        raise ConfigError(
            f"loss_head: {run.loss_head} is of a vocabulary, which task {task.name} has none of; "
            "leave it out"
        )
    if (trainer, options) == (run.trainer, run.task_options):
        return run
    return replace(run, trainer=trainer, task_options=options)


__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "Task",
    "get_task",
    "list_tasks",
    "rows_of",
    "task_of",
    "with_task",
]
