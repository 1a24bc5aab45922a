"""The model of the last measurement, for the next one that would build the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from whichlora.spec.run import BATCH_SETTINGS

if TYPE_CHECKING:
    from torch import nn

    from whichlora.profiler.meter import Meter

_LOOKUP_TABLES_BYTES = 2**20  # more than bitsandbytes keeps after its first use: kilobytes


def leaves_no_bytes(meter: Meter, before_bytes: int) -> bool:
    """Whether no tensor is alive beside those of `before_bytes`."""
    return bool(abs(meter.live_bytes() - before_bytes) <= _LOOKUP_TABLES_BYTES)


class KeptModel:
    """One model at a time, as it was built: with its modules, hooks and settings, and no gradients.

    Building takes a quarter of a profile. What a measurement has changed of the modules is undone;
    the values of the weights, which neither bytes nor time depend on, stay as they were trained.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Free the model."""
        self.num_bytes = 0
        self._key = ""
        self._model: Any = None
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._requires_grad: list[tuple[nn.Parameter, bool]] = []

    def drop_unless(self, request: Mapping[str, Any]) -> None:
        """Free the model where `request` needs another one."""
        if self._key != build_key(request):
            self.drop()

    def model_for(self, request: Mapping[str, Any], meter: Meter, build: Callable[[], Any]) -> Any:
        """The kept model, or the one that `build` makes, which is kept from now on."""
        if self._model is None:
            before = meter.live_bytes()
            self._model, self._key = build(), build_key(request)
            self.num_bytes = meter.live_bytes() - before
            self._attributes = [
                (module, {name: _copied(value) for name, value in vars(module).items()})
                for module in self._model.modules()
            ]
            self._requires_grad = [(p, p.requires_grad) for p in self._model.parameters()]
        return self._model

    def restore(self) -> None:
        """Undo what a measurement did to the modules and parameters."""
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update({name: _copied(value) for name, value in attributes.items()})
        for parameter, requires_grad in self._requires_grad:
            parameter.grad = None
            parameter.requires_grad_(requires_grad)


def _copied(value: Any) -> Any:
    """Registries of parameters, modules and hooks are changed in place."""
    return copy.copy(value) if isinstance(value, dict) else value


def build_key(request: Mapping[str, Any]) -> str:
    """What the model of a measurement is built from: equal where it can be kept."""
    settings = build_settings(request["run"])
    return json.dumps(
        [settings, request["model_config"], request["target_modules"]], sort_keys=True
    )


def build_settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings of `run` that its model is built from."""
    return {name: value for name, value in run.items() if name not in BATCH_SETTINGS}
