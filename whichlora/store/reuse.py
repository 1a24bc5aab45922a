"""Whether a record can replace a new measurement: everything it depends on must agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whichlora.spec.results import Measurement

# Keys of a config.json that state its origin, not the model.
_ORIGIN = frozenset({"_name_or_path", "transformers_version"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Conditions that a measurement depends on, beside its settings and its device.

    Args:
        model_config: the Hugging Face config.
        num_batches: batches, or generations, that were asked for.
        timeout_s: device time after which a profile is stopped.
        memory_bytes: of the device; a run that exhausts a small container may fit a large one.
    """

    model_config: Mapping[str, Any]
    num_batches: int
    timeout_s: float
    memory_bytes: int

    def noted(self) -> dict[str, Any]:
        """These conditions as a record's provenance states them."""
        return {
            "model_digest": model_digest(self.model_config),
            "num_batches": self.num_batches,
            "timeout_s": self.timeout_s,
            "memory_bytes": self.memory_bytes,
        }


def model_digest(config: Mapping[str, Any]) -> str:
    """A digest of the model's config; the order of the keys does not matter."""
    content = {name: value for name, value in config.items() if name not in _ORIGIN}
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def other_model(record: Measurement, config: Mapping[str, Any], *, in_database: bool) -> str:
    """How the model that a record was measured on differs from `config`; empty where it does not.

    A record of an older release has no digest. It names a model of the database well enough, and
    a folder only with the config that it was measured on.
    """
    digest = record.provenance.get("model_digest")
    if digest is None and record.model_config is not None:
        digest = model_digest(record.model_config)
    if digest is None:
        return "" if in_database else "by a release that did not note the model's config"
    return "" if digest == model_digest(config) else "on another config.json of this model"


def other_circumstances(
    record: Measurement, now: Circumstances, libraries: Mapping[str, str]
) -> str:
    """How the conditions of a record differ from those of a new measurement; empty where equal.

    Args:
        libraries: version by library of a new measurement.
    """
    then = record.environment.get("libraries")
    if not isinstance(then, Mapping):
        return "with library versions that it does not state"
    changed = [
        f"{name} {then.get(name, 'missing')}"
        for name in sorted({*then, *libraries})
        if then.get(name) != libraries.get(name)
    ]
    if changed:
        return f"with {', '.join(changed)}"
    number = record.provenance.get("num_batches", _num_made(record))
    if number not in (None, now.num_batches):
        return f"with {number} {'batch' if number == 1 else 'batches'}"
    if record.outcome == "timeout" and not _at_least(record, "timeout_s", now.timeout_s):
        return "with a profile_timeout that was too short"
    if record.outcome in ("oom", "killed") and not _at_least(
        record, "memory_bytes", now.memory_bytes
    ):
        return "with less memory, which it ran out of"
    return ""


def _num_made(record: Measurement) -> int | None:
    return len(record.step_s or record.generate_s) or None


def _at_least(record: Measurement, name: str, wanted: float) -> bool:
    """Whether the provenance states at least `wanted`; False where it states nothing."""
    value = record.provenance.get(name)
    return isinstance(value, int | float) and value >= wanted
