"""Why a run is refused before anything is predicted of it."""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model


def refusal(run: RunConfig, gpu: str) -> str:
    """The line that refuses `run` on `gpu`; empty where it is accepted."""
    try:
        resolve(load_model(run.model), run, find_gpu(gpu))
    except ConfigError as error:
        return str(error)
    return ""
