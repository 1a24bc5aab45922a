"""Trainers by name; one small file each, also from other packages.

A package adds its own trainer with an entry point in the group `whichlora.trainers` that loads a
`Trainer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.spec.architecture import Task
from whichlora.spec.members import Members
from whichlora.spec.options import filled, known
from whichlora.spec.run import RunConfig
from whichlora.trainers import (
    cpo,
    dpo,
    grpo,
    kto,
    litgpt,
    llamafactory_dpo,
    llamafactory_kto,
    loop,
    loop_function,
    orpo,
    reward,
    sentence_transformers,
    sft,
    torchtune,
    transformers,
    unsloth,
    unsloth_grpo,
)
from whichlora.trainers.base import Repeats, Trainer

_TRAINERS = Members[Trainer](
    "trainer",
    "trainers",
    Trainer,
    (
        module.TRAINER
        for module in (
            transformers,
            loop,
            loop_function,
            sft,
            dpo,
            kto,
            grpo,
            reward,
            orpo,
            cpo,
            llamafactory_dpo,
            llamafactory_kto,
            unsloth,
            unsloth_grpo,
            sentence_transformers,
            litgpt,
            torchtune,
        )
    ),
)
RECIPE = sft.TRAINER.name  # the usual trainer of texts that takes the least memory
BUILT_IN = _TRAINERS.built_in
ENTRY_POINT_GROUP = _TRAINERS.group
list_trainers = _TRAINERS.all
get_trainer = _TRAINERS.get
own_name = _TRAINERS.own_name
other_name_note = _TRAINERS.other_name_note


def suits_recipe(tasks: Iterable[Task], *, on_cpu: bool) -> bool:
    """Whether `RECIPE` is what to train models of `tasks` with, where nobody names a trainer.

    On a GPU it holds less and takes as long, since it makes no logits. On a CPU it is slower. It
    trains models that write texts, also about images.
    """
    return not on_cpu and all(task == "causal-lm" for task in tasks)


def with_trainer(run: RunConfig) -> RunConfig:
    """`run` with its trainer's own name, its usual loss, and every option of the trainer.

    Raises:
        ConfigError: no such trainer, or an option or a loss that it does not have.
    """
    trainer = get_trainer(run.trainer)
    if trainer.name != run.trainer:
        run = replace(run, trainer=trainer.name)
    asked = dict(run.trainer_options)
    known(trainer.options, asked, setting="trainer_options", owner=f"trainer {trainer.name}")
    values = filled(trainer.options, asked).items()
    options = tuple(sorted((name, value) for name, value in values if value is not None))
    if options != run.trainer_options:
        run = replace(run, trainer_options=options)
    loss_head = trainer.loss_head(run)
    return run if loss_head == run.loss_head else replace(run, loss_head=loss_head)


def trainer_of(library_class: str) -> Trainer:
    """The trainer whose steps are those of `library_class`, a dotted name.

    Raises:
        ConfigError: none.
    """
    for trainer in list_trainers().values():
        if library_class and trainer.library_class == library_class:
            return trainer
    raise ConfigError(f"trainer: no trainer has the steps of {library_class!r}")


def requirement(run: RunConfig) -> str:
    """What pip installs for the trainer of `run` beside the `profile` extra; empty for nothing."""
    package = get_trainer(run.trainer).library
    if package in ("", "transformers"):
        return ""
    version = getattr(run.versions, package, "")
    return f"{package}=={version}" if version else package


__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "RECIPE",
    "Repeats",
    "Trainer",
    "get_trainer",
    "list_trainers",
    "other_name_note",
    "own_name",
    "requirement",
    "trainer_of",
    "with_trainer",
]
