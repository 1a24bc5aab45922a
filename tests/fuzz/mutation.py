"""Values as no honest file has them, and honest values with some of these in them."""

from __future__ import annotations

import copy
import random
from typing import Any

NUMBERS = (
    0, -1, 1, 2, 3, 7, 8, 64, 4095, 65536, 10**6, 2**31, 10**9, 10**12, 2**63, 10**18, 10**30,
    10**400, -(10**18), 0.0, -0.0, 0.5, 1.5, -1.5, 1e-300, 1e-9, 1e9, 1e17, 1e308, -1e308,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "0", "-1", "1e999", "nan", "None", "null", "true", "all", "max", "auto", "cpu",
    "=1+1", "../../etc/passwd", "/", "~", "a,b", "a b", "x" * 3000, "\x1b[2J", "\u202egnp",
    "\ud800", "</script>", "'; import os #", '"""', "{}", "[]", "${HOME}", "%s", "\x00", "é",
    "模型", "lora", "16GiB", "-5GB", "1e400GB", "10min", "9e99h", "bfloat16", "llama", "silu",
)  # fmt: skip


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can say."""
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice((None, True, False))
    if kind == 6:
        return rng.choice(([], {}, [[]], [None], {"": None}))
    if kind == 7:
        return [odd_value(rng, depth + 1) for _ in range(rng.randrange(1, 5))]
    return {rng.choice(TEXTS): odd_value(rng, depth + 1) for _ in range(rng.randrange(1, 4))}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in `value` but itself."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return []
    found = []
    for key, item in items:
        found.append((*path, key))
        found += places(item, (*path, key))
    return found


def mutated(rng: random.Random, value: Any, *, most: int = 3) -> Any:
    """A copy of `value` with one to `most` changes anywhere in it."""
    changed = copy.deepcopy(value)
    for _ in range(rng.randrange(1, most + 1)):
        everywhere = places(changed)
        if not everywhere:
            return odd_value(rng)
        *path, last = rng.choice(everywhere)
        holder = changed
        for key in path:
            holder = holder[key]
        _change(rng, holder, last)
    return changed


def _change(rng: random.Random, holder: Any, key: Any) -> None:
    old = holder[key]
    way = rng.randrange(7)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    elif way == 2 and isinstance(old, int | float) and not isinstance(old, bool):
        holder[key] = rng.choice((-old, old + 1, old - 1, old * 1000, old // 3, str(old), [old]))
    elif way == 3 and isinstance(old, list):
        holder[key] = old * rng.choice((2, 50)) if old else [odd_value(rng)]
    else:
        holder[key] = odd_value(rng)
