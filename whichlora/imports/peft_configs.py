"""Configs of PEFT in scripts, told by the methods whose configs they are; PEFT is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports.base import Keys, names_or_pattern
from whichlora.methods import list_methods
from whichlora.methods.base import Method
from whichlora.spec.run import ALL_LINEAR, FOUR_BIT_BNB

LORA = "LoraConfig"


class _Config:
    """A config as PEFT would make it; None is what neither a script nor a default names."""

    def __init__(self, method: Method, values: Mapping[str, Any]) -> None:
        usual = {option.name: option.default for option in method.options}
        self._values = {**usual, **dict(method.peft_defaults), **values}

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name)


def config_classes() -> dict[str, list[Method]]:
    """The methods of each config class but LoRA's, by its name."""
    by_class: dict[str, list[Method]] = {}
    for method in list_methods().values():
        name = method.peft_class.rpartition(".")[2]
        if name and name != LORA:
            by_class.setdefault(name, []).append(method)
    return by_class


def other_adapter(keys: Keys, quant: str) -> dict[str, Any] | None:
    """The settings of a run whose adapters are not LoRA's; None where there is no such config.

    Raises:
        ConfigError: a value that is computed, or is none that its method reads.
    """
    for name, methods in config_classes().items():
        if name in keys:
            return _settings(keys, name, methods, quant)
    return None


def _settings(keys: Keys, name: str, methods: list[Method], quant: str) -> dict[str, Any]:
    keys.raw(name)
    if any(keys.refuse_unread("method", f"{name}.{field}") for field in keys.under(name)):
        return {"method": methods[0].name, "target_modules": (ALL_LINEAR,)}
    values = {field: keys.raw(f"{name}.{field}") for field in keys.under(name)}
    targets = names_or_pattern(keys, f"{name}.target_modules")
    read = []
    for method in methods:
        config = type(name, (_Config,), {})(
            method, {**values, "target_modules": list(targets) or None}
        )
        try:
            settings = method.read_peft(config)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{keys.where(name)}: is not read: {error}") from None
        if settings is not None:
            read.append((method, settings))
    method, settings = next(
        (each for each in read if (each[0].base_quant in FOUR_BIT_BNB) == (quant in FOUR_BIT_BNB)),
        read[0],
    )
    choice: dict[str, Any] = {"method": method.name}
    if quant != method.base_quant:
        choice["quant"] = quant
    if "target_modules" not in method.ignores:
        if not targets:
            text = "is missing, and PEFT's own depends on the method"
            keys.refuse("target_modules", f"{name}.target_modules", text)
        choice["target_modules"] = targets or (ALL_LINEAR,)
    return choice | dict(settings)
