"""What of a record may be published: facts of the model, the run and the device; nothing of a user.

What is kept is listed, so that a new field is left out until somebody adds it here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, get_args, get_type_hints

from whichlora.errors import ConfigError
from whichlora.methods import list_methods
from whichlora.parallel import list_strategies
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import resolve
from whichlora.serving import list_engines
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import is_number
from whichlora.spec.parallel import AUTO, ParallelConfig
from whichlora.spec.results import Measurement
from whichlora.spec.run import ALL_LINEAR, ATTENTION, DEFAULT_TARGETS, RunConfig
from whichlora.spec.targets import all_linears
from whichlora.spec.versions import Libraries
from whichlora.store.models import is_known_model
from whichlora.store.reuse import model_digest
from whichlora.trainers import list_trainers

# Fields of a record that are numbers of the run alone.
MEASURED = (
    *("step_s", "batch_seq_len", "generate_s", "prefill_s", "decode_s_per_token"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes", "largest_blocks_bytes"),
    *("device_s", "build_s", "warm_up_s"),
)
# Of the environment: numbers, and texts that are versions. The device is named by its `gpu.json`.
NUMBERS = ("num_threads", "power_limit_w", "device_total_bytes", "device_used_idle_bytes")
VERSIONS = ("python", "cuda", "driver")
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "liger-kernel", "trl")
LEFT_OUT = {
    "provenance": "command, config file, host, run and whoever measured; that the device was busy "
    "stays",
    "environment": "host, platform and processor; versions stay without their local part",
    "detail": "the libraries' line of a failure, which may hold paths",
    "date": "the time of the day",
    "id": "replaced by a digest of what is left",
    "model_config": "none is needed: models that are not in the shipped database are left out",
}
_VERSION = re.compile(r"\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)*")


class NotPublicError(ConfigError):
    """Why a record can't be published, in words that hold nothing of it but a setting's name."""


def public_record(record: Measurement, model: ModelSpec, gpu: GpuSpec) -> Measurement:
    """`record` without anything that could tell who measured it, where, or on which data.

    Lengths of batches stay: times mean nothing without them.

    Args:
        model: that the shipped database has under the record's name.

    Raises:
        NotPublicError: it holds a text of the user's own that its meaning depends on.
        ConfigError: settings that this release does not know, or that exclude each other.
    """
    config = dict(record.config) | {"model": model.name}
    words = _words() | {model.name, *(linear.name for linear in all_linears(model))}
    for name, text in _texts(config):
        if text not in words and not _VERSION.fullmatch(text):
            raise NotPublicError(f"config: {name} is a text of your own")
    moments = ledger(resolve(model, record.run, gpu)).moments
    public = Measurement(
        id="",
        gpu=gpu.key,
        date=record.date[:10],
        config=config,
        outcome=record.outcome,
        moment_peak_bytes={
            name: size for name, size in record.moment_peak_bytes.items() if name in moments
        },
        engine_log={
            name: number for name, number in record.engine_log.items() if name in _log_names()
        },
        environment=_environment(record.environment, gpu),
        provenance={"source": "contributed"} | ({"busy": "yes"} if _is_busy(record) else {}),
        **{name: getattr(record, name) for name in MEASURED},
    )
    content = json.dumps(public.to_dict(), sort_keys=True)
    return replace(public, id=f"shared-{hashlib.sha256(content.encode()).hexdigest()[:32]}")


def require_public_model(record: Measurement, model: ModelSpec | None) -> ModelSpec:
    """`model`, where the shipped database has it as the record was measured on it.

    Raises:
        NotPublicError: it has not; the name, or the config, is then the user's own.
    """
    if model is None or not is_known_model(str(record.config.get("model", ""))):
        raise NotPublicError("its model is not in the shipped database")
    config = record.model_config
    if config is not None and model_digest(config) != model_digest(model.config):
        raise NotPublicError("its model has another config than the shipped database")
    return model


def _is_busy(record: Measurement) -> bool:
    return bool(record.provenance.get("busy"))


def _environment(environment: Mapping[str, Any], gpu: GpuSpec) -> dict[str, Any]:
    public: dict[str, Any] = {"device": gpu.name}
    public |= {name: environment[name] for name in NUMBERS if is_number(environment.get(name))}
    public |= _versions({name: environment.get(name) for name in VERSIONS})
    libraries = environment.get("libraries", environment.get("versions"))
    if isinstance(libraries, Mapping):
        public["libraries"] = _versions({name: libraries.get(name) for name in LIBRARIES})
    return public


def _versions(named: Mapping[str, Any]) -> dict[str, str]:
    """The public part of those that are versions: of 2.13.0+acme only 2.13.0."""
    matches = {name: _VERSION.match(str(version)) for name, version in named.items()}
    return {name: match[0] for name, match in matches.items() if match}


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text in `value`, keys among them, with the setting that it stands in."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield name, key
            yield from _texts(item, name or key)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, name)


@cache
def _words() -> frozenset[str]:
    """What this package itself calls settings and their values."""
    words = {ALL_LINEAR, AUTO, ATTENTION, DEFAULT_TARGETS, "embed_tokens", "lm_head"}
    for values in (RunConfig, ParallelConfig, Libraries):
        words.update(values.__dataclass_fields__)
    words.update(_literals(get_type_hints(RunConfig).values()))
    for members in (list_methods(), list_trainers(), list_engines(), list_strategies()):
        words.update(members)
        for member in members.values():
            for option in getattr(member, "options", ()):
                words.update((option.name, *option.choices))
    return frozenset(words)


def _literals(hints: Iterable[Any]) -> Iterator[str]:
    for hint in hints:
        if isinstance(hint, str):
            yield hint
        yield from _literals(get_args(hint))


@cache
def _log_names() -> frozenset[str]:
    """What logs of engines are read for."""
    logs = [engine.log for engine in list_engines().values() if engine.log is not None]
    return frozenset(
        name
        for log in logs
        for name in (
            *(line.states for line in log.lines),
            *log.histograms.values(),
            *log.means.values(),
        )
    )
