"""Parallel strategies by name; one small file each, also from other packages.

A package adds its own strategy with an entry point in the group `whichlora.parallel` that loads a
`Strategy`.
"""

from __future__ import annotations

from whichlora.parallel import cp, ddp, device_map, fsdp, pp, tp, zero1, zero2, zero3
from whichlora.parallel.base import Strategy
from whichlora.spec.members import Members
from whichlora.spec.options import Option

_STRATEGIES = Members[Strategy](
    "parallel",
    "parallel",
    Strategy,
    (module.STRATEGY for module in (cp, ddp, device_map, fsdp, pp, tp, zero1, zero2, zero3)),
)
BUILT_IN = _STRATEGIES.built_in
ENTRY_POINT_GROUP = _STRATEGIES.group
list_strategies = _STRATEGIES.all
get_strategy = _STRATEGIES.get


def strategy_options() -> dict[str, tuple[Option, ...]]:
    """What the strategies declare, by name; strategies that share an option declare it each."""
    by_name: dict[str, tuple[Option, ...]] = {}
    for strategy in list_strategies().values():
        for option in strategy.options:
            by_name[option.name] = (*by_name.get(option.name, ()), option)
    return by_name


__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "Strategy",
    "get_strategy",
    "list_strategies",
    "strategy_options",
]
