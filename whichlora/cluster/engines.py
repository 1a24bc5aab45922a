"""Who can run the tasks of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from whichlora.cluster.engine import Engine
from whichlora.cluster.on_skypilot import SkyPilotEngine
from whichlora.cluster.on_slurm import SlurmEngine
from whichlora.cluster.on_this_machine import LocalEngine

ENGINES: dict[str, Callable[[], Engine]] = {
    "slurm": SlurmEngine,
    "local": LocalEngine,
    "skypilot": SkyPilotEngine,
}
