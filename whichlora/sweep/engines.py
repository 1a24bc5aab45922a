"""Who can run the tasks of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from whichlora.sweep.engine import Engine
from whichlora.sweep.on_skypilot import SkyPilotEngine
from whichlora.sweep.on_slurm import SlurmEngine
from whichlora.sweep.on_this_machine import LocalEngine

ENGINES: dict[str, Callable[[], Engine]] = {
    "slurm": SlurmEngine,
    "local": LocalEngine,
    "skypilot": SkyPilotEngine,
}
