"""Trainers by name; one small file each, also from other packages.

A package adds its own trainer with an entry point in the group `whichlora.trainers` that loads a
`Trainer`.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from whichlora.errors import ConfigError
from whichlora.trainers import transformers
from whichlora.trainers.base import Trainer

ENTRY_POINT_GROUP = "whichlora.trainers"

BUILT_IN: dict[str, Trainer] = {module.TRAINER.name: module.TRAINER for module in (transformers,)}


def list_trainers() -> dict[str, Trainer]:
    """Every trainer by name: the built-in ones, then those of installed packages.

    Raises:
        ConfigError: an entry point that does not load a `Trainer`, or takes a built-in name.
    """
    trainers = dict(BUILT_IN)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        trainer = point.load()
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"entry point {point.value!r}: is not a whichlora.trainers.Trainer; uninstall it"
            )
        if trainer.name in trainers:
            raise ConfigError(
                f"entry point {point.value!r}: trainer {trainer.name!r} exists already; rename it"
            )
        trainers[trainer.name] = trainer
    return trainers


def get_trainer(name: str) -> Trainer:
    """The trainer called `name`.

    Raises:
        ConfigError: no such trainer.
    """
    trainer = BUILT_IN.get(name)
    if trainer is None:  # installed packages are asked only now: scanning them takes time
        trainers = list_trainers()
        if name not in trainers:
            raise ConfigError(f"trainer: {name!r} is not known; accepted are {', '.join(trainers)}")
        trainer = trainers[name]
    return trainer


__all__ = ["BUILT_IN", "ENTRY_POINT_GROUP", "Trainer", "get_trainer", "list_trainers"]
