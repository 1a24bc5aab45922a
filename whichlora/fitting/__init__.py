"""Measurements become coefficients: `samples` of runs, through `regression`, per phase and device.

Coefficients of the time phases and factors on the parts of the ledger are fitted alike. Every fit
reports the error on runs it was not fitted to. Importing this package raises `ConfigError` where
scikit-learn is not installed.
"""

from __future__ import annotations

from whichlora.extras import require

require("a fit to recorded runs", "sklearn", extra="profile")  # before their import below

from whichlora.fitting.device import FindModel, digest, fit
from whichlora.fitting.memory_parts import fit_memory
from whichlora.fitting.time_phases import fit_phases, fit_time, regress, relative_spread

__all__ = [
    "FindModel",
    "digest",
    "fit",
    "fit_memory",
    "fit_phases",
    "fit_time",
    "regress",
    "relative_spread",
]
