"""Fine-tuning methods by name; one small file each, also from other packages.

A package adds its own method with an entry point in the group `whichlora.methods` that loads a
`Method`.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from whichlora.errors import ConfigError
from whichlora.methods import dora, full, lora, qdora, qlora
from whichlora.methods.base import Method

ENTRY_POINT_GROUP = "whichlora.methods"

_BUILT_IN: dict[str, Method] = {
    module.METHOD.name: module.METHOD for module in (full, lora, qlora, dora, qdora)
}


def list_methods() -> dict[str, Method]:
    """Every method by name: the built-in ones, then those of installed packages.

    Raises:
        ConfigError: an entry point that does not load a `Method`, or takes a built-in name.
    """
    methods = dict(_BUILT_IN)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        method = point.load()
        if not isinstance(method, Method):
            raise ConfigError(f"entry point {point.value!r}: is not a whichlora.methods.Method")
        if method.name in methods:
            raise ConfigError(f"entry point {point.value!r}: method {method.name!r} exists already")
        methods[method.name] = method
    return methods


def get_method(name: str) -> Method:
    """The method called `name`.

    Raises:
        ConfigError: no such method.
    """
    found = _BUILT_IN.get(name)
    if found is None:  # installed packages are asked only now: scanning them takes time
        methods = list_methods()
        if name not in methods:
            raise ConfigError(f"method: {name!r} is not known; accepted are {', '.join(methods)}")
        found = methods[name]
    return found


__all__ = ["ENTRY_POINT_GROUP", "Method", "get_method", "list_methods"]
