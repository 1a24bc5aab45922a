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
get_engine = _ENGINES.get
own_name = _ENGINES.own_name
other_name_note = _ENGINES.other_name_note

__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "Engine",
    "get_engine",
    "list_engines",
    "other_name_note",
    "own_name",
]
