"""How the fine-tuned model is served: engines by name, one small file each.

A package adds its own engine with an entry point in the group `whichlora.serving` that loads an
`Engine`.
"""

from __future__ import annotations

from whichlora.serving import llama_cpp, sglang, transformers, vllm
from whichlora.serving.base import Engine
from whichlora.spec.members import Members

_ENGINES = Members[Engine](
    "serving",
    "serving",
    Engine,
    (module.ENGINE for module in (transformers, vllm, sglang, llama_cpp)),
)
BUILT_IN = _ENGINES.built_in
ENTRY_POINT_GROUP = _ENGINES.group
list_engines = _ENGINES.all


def get_engine(name: str) -> Engine:
    """The engine called `name`, or that runs what is called so, such as Ollama.

    Raises:
        ConfigError: there is none.
    """
    return _also_called(name) or _ENGINES.get(name)


def own_name(name: str) -> str:
    """The name of the engine that is also called `name`; `name` where there is none."""
    engine = _also_called(name)
    return engine.name if engine else name


def other_name_note(name: str) -> str:
    """What a user must know who calls an engine `name`; empty where that is nothing."""
    engine = _also_called(name)
    note = engine.also_called[name.lower()] if engine else ""
    return f"{name}: served as {engine.name}; {note}" if engine and note else ""


def _also_called(name: str) -> Engine | None:
    if name in BUILT_IN:
        return None
    lower = name.lower()
    return next((each for each in BUILT_IN.values() if lower in each.also_called), None)


__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "Engine",
    "get_engine",
    "list_engines",
    "other_name_note",
    "own_name",
]
