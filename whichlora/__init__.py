"""WhichLoRA: the largest model, LoRA variant and batch size that fit your GPU."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whichlora.api import calibrate, estimate, explain, life, recommend, to_frame, where
    from whichlora.errors import ConfigError, WhichLoraError
    from whichlora.spec.run import RunConfig

__version__ = "0.1.0"
_ELSEWHERE = {  # than in `api`
    "ConfigError": "whichlora.errors",
    "RunConfig": "whichlora.spec.run",
    "WhichLoraError": "whichlora.errors",
}
__all__ = [
    "ConfigError",
    "RunConfig",
    "WhichLoraError",
    "__version__",
    "calibrate",
    "estimate",
    "explain",
    "life",
    "recommend",
    "to_frame",
    "where",
]


def __getattr__(name: str) -> Any:
    """What `__all__` names, loaded when it is first asked for: the import itself stays instant."""
    if name in __all__:
        return getattr(import_module(_ELSEWHERE.get(name, "whichlora.api")), name)
    raise AttributeError(f"module 'whichlora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
