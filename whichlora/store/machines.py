"""Machines of clouds and notebooks by the name people give them: `calibration/machines.json`."""

from __future__ import annotations

from whichlora.store.jsonfiles import read_object
from whichlora.store.paths import data_folder


def gpus_of_machine(name: str) -> tuple[int, str] | None:
    """How many GPUs the machine `name` has, and their key: g5.12xlarge has 4 a10g-24gb.

    None where no machine has that name.
    """
    machines = read_object(data_folder("calibration") / "machines.json")["machines"]
    machine = machines.get(name.strip().lower())
    return (machine["number"], machine["gpu"]) if machine else None
