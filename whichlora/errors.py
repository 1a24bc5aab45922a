"""The errors that WhichLoRA raises on purpose; each message is one clear line."""

from __future__ import annotations


class WhichLoraError(Exception):
    """Any deliberate error: what was wrong, the value, what is accepted, what to do."""


class ConfigError(WhichLoraError):
    """The request can't work on any GPU: an unknown name, a wrong type, an impossible value."""


class DataFileError(WhichLoraError):
    """A file of ours or the user's can't be read; the message starts with path, then key."""


class CalibrationError(WhichLoraError):
    """Too few or too poor measured runs for the request."""


class MeasurementError(WhichLoraError):
    """The profiler itself failed. Out of memory is a result, never this error."""


class InfeasibleError(WhichLoraError):
    """Nothing meets the limits; the message names the closest candidate and what it lacks."""
