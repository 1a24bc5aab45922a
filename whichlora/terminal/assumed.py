"""What was assumed of settings that nobody stated, and what would make a run fit, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whichlora.predict.assumed import MOVING, NOTABLE
from whichlora.predict.words import on_gpus
from whichlora.spec.results import Assumed, Prediction, WayOut
from whichlora.spec.run import RunConfig
from whichlora.trainers import get_trainer
from whichlora.units import counted, format_bytes

_WORDS: Mapping[str, Mapping[Any, str]] = {
    "precision": {
        "bf16": "bf16 with autocast",
        "fp16": "fp16 with autocast",
        "bf16-pure": "bf16 weights without autocast",
        "fp16-pure": "fp16 weights without autocast",
        "bf16-no-autocast": "bf16 weights without autocast",
        "fp16-no-autocast": "fp16 weights without autocast",
    },
    "base_dtype": {"float32": "fp32 weights"},
    "gradient_checkpointing": {True: "gradient checkpointing", False: "no gradient checkpointing"},
    "optimizer": {"adamw_torch_fused": "fused AdamW", "adamw_torch": "AdamW (foreach)"},
    "attn": {"sdpa": "SDPA"},
}


def assumed_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    """What the predictions assumed, in one line, and what their trainers do by themselves."""
    told = [(each, each.assumed) for each in predictions if each.assumed is not None]
    if not told:
        return
    words: dict[str, dict[str, None]] = {}
    for _, assumed in told:
        for name in MOVING:
            if name in assumed.settings:
                text = _of_dtypes(assumed) if name == "precision" else _word(name, assumed.settings)
                words.setdefault(name, {})[text] = None
    settings = ", ".join(" or ".join(texts) for texts in words.values())
    release = next((_release(each.run) for each, assumed in told if assumed.by_release), "")
    clauses = [f"assumed{release}: {settings}", *_by_themselves(told)]
    yield "; ".join(clauses)


def _of_dtypes(assumed: Assumed) -> str:
    settings = assumed.settings
    if settings.get("base_dtype") == "float32":
        return f"fp32 weights under {settings['precision']} autocast"
    return _word("precision", settings)


def _word(name: str, settings: Mapping[str, Any]) -> str:
    value = settings[name]
    if name == "seq_len":
        return counted(value, "token")
    return _WORDS.get(name, {}).get(value) or str(value)


def _release(run: RunConfig) -> str:
    trainer = get_trainer(run.trainer)
    stated = dict(run.libraries).get(trainer.dated_by)
    if stated is None:
        return f", as trainer {run.trainer} has them"
    return f", as {trainer.dated_by} {stated} has them"


def _by_themselves(told: Sequence[tuple[Prediction, Assumed]]) -> Iterator[str]:
    """What each trainer does where nobody states it, and the memory with that."""
    groups: dict[str, list[tuple[Prediction, Assumed]]] = {}
    for prediction, assumed in told:
        if assumed.own:
            groups.setdefault(_called(prediction.run), []).append((prediction, assumed))
    for called, group in groups.items():
        words = (_word(name, assumed.own) for _, assumed in group for name in assumed.own)
        does = " and ".join(dict.fromkeys(words))
        yield f"{called} by itself has {does}{_memory(group)}"


def _called(run: RunConfig) -> str:
    trainer = get_trainer(run.trainer)
    return trainer.class_name or f"a {trainer.name}"


def _memory(group: Sequence[tuple[Prediction, Assumed]]) -> str:
    """What it takes, where that is another amount."""
    known = [
        (assumed.own_bytes, prediction.memory.device_used_bytes)
        for prediction, assumed in group
        if assumed.own_bytes is not None
    ]
    if not known or all(abs(own / used - 1) <= NOTABLE for own, used in known):
        return ""
    if len(known) == 1:
        return f": {format_bytes(known[0][0])}"
    ratios = sorted(own / used for own, used in known)
    return f": {ratios[0]:.1f} to {ratios[-1]:.1f} times the memory"


def ways_out_lines(predictions: Sequence[Prediction]) -> Iterator[str]:
    """What makes the run of one of `predictions` fit, none of which does."""
    for prediction in predictions:
        for way in prediction.ways_out:
            share = way.device_used_bytes / way.usable_bytes
            size = format_bytes(way.device_used_bytes)
            fits = "may fit" if way.is_lower_bound else "fits"
            yield f"{fits} {_way(way)}{_in_file(way)}: {size}, {share:.0%}"


def _way(way: WayOut) -> str:
    if way.gpu:
        return f"on {way.gpu}"
    config = way.settings.get("parallel")
    words = []
    if config is not None and config.is_one_device:
        words = ["without a strategy (--parallel none)"]
    elif config is not None:
        words = [f"on {on_gpus(config)}".replace("on ", "with ", 1)]
    flags = [
        _flag(name, value)
        for name, value in way.settings.items()
        if name != "parallel" and value not in (None, ())
    ]
    return " ".join([*(["with", *flags] if flags else []), *words])


def _in_file(way: WayOut) -> str:
    """As the file that the run was read from says it."""
    texts = (
        f"{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in way.keys.items()
    )
    return f" ({', '.join(texts)} in the file)" if way.keys else ""


def _flag(name: str, value: Any) -> str:
    """As the command line takes it."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"--{flag} {text}"
