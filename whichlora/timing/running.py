"""A model as a run computes with it: what the work of every layer depends on beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from whichlora.methods.base import NO_ADAPTERS, Method
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.numeric import Count
from whichlora.spec.run import RunConfig
from whichlora.timing.chip import UNKNOWN_CHIP, Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """A model with the dtypes, adapters and chip that it runs with.

    Args:
        targets: names of the matrices whose adapters run beside them.
        r: of the run, or an array in its place.
    """

    model: ModelSpec
    run: RunConfig
    dtypes: Dtypes
    method: Method = NO_ADAPTERS
    targets: tuple[str, ...] = ()
    r: Count = 0
    chip: Chip = UNKNOWN_CHIP
