"""Parallel strategies by name; one small file each, also from other packages.

A package adds its own strategy with an entry point in the group `whichlora.parallel` that loads a
`Strategy`.
"""

from __future__ import annotations

from whichlora.parallel import ddp, tp
from whichlora.parallel.base import Option, Strategy
from whichlora.spec.members import Members

_STRATEGIES = Members[Strategy](
    "parallel", "parallel", Strategy, (module.STRATEGY for module in (ddp, tp))
)
BUILT_IN = _STRATEGIES.built_in
ENTRY_POINT_GROUP = _STRATEGIES.group
list_strategies = _STRATEGIES.all
get_strategy = _STRATEGIES.get

__all__ = ["BUILT_IN", "ENTRY_POINT_GROUP", "Option", "Strategy", "get_strategy", "list_strategies"]
