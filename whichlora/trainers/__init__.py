"""Trainers by name; one small file each, also from other packages.

A package adds its own trainer with an entry point in the group `whichlora.trainers` that loads a
`Trainer`.
"""

from __future__ import annotations

from whichlora.spec.members import Members
from whichlora.trainers import loop, loop_function, transformers
from whichlora.trainers.base import Trainer

_TRAINERS = Members[Trainer](
    "trainer",
    "trainers",
    Trainer,
    (module.TRAINER for module in (transformers, loop, loop_function)),
)
BUILT_IN = _TRAINERS.built_in
ENTRY_POINT_GROUP = _TRAINERS.group
list_trainers = _TRAINERS.all
get_trainer = _TRAINERS.get

__all__ = ["BUILT_IN", "ENTRY_POINT_GROUP", "Trainer", "get_trainer", "list_trainers"]
