"""Files of other tools beside the settings of a user, which count more."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError
from whichlora.imports import Imported, import_files
from whichlora.imports.spread import runs_alone
from whichlora.imports.trl import FULL_ROWS
from whichlora.methods import list_methods
from whichlora.parallel import strategy_options
from whichlora.spec.releases import installed_in
from whichlora.spec.run import RunConfig
from whichlora.spec.versions import Libraries
from whichlora.store.gpus import number_in
from whichlora.workflow.combinations import check_asked
from whichlora.workflow.file_images import leaves_images_out, with_file_images
from whichlora.workflow.whole_training import FromFiles, OlderReleases

# Settings of the files that go with another one, and fall where the user gives that one.
_WITH = {
    "method": ("method_options",),
    "precision": ("base_dtype", "adapter_dtype", "compute_dtype"),
    "trainer": ("trainer_options", "loss_head"),
    "global_batch_size": ("gradient_accumulation_steps",),
    "serving": ("serving_options",),
}
# Pairs of names and values, of which the user's replace those of the files by name.
_PAIRS = ("serving_options", "trainer_options", "method_options", "task_options")


def with_files(
    paths: Sequence[Path],
    settings: Mapping[str, list[Any]],
    stated: Collection[str],
    targets: Sequence[str] = (),
) -> tuple[dict[str, list[Any]], FromFiles]:
    """`settings` with those of the files where the user states none, and what else these say.

    Args:
        settings: of `combinations.grid`, with the defaults of what is not stated.
        stated: names of those that the user gives, and "data" where it is given.
        targets: types of GPU; where all state a number ("2xh100"), the files' one falls.

    Raises:
        ConfigError: a file that can't be read, or says what can't be predicted.
    """
    numbers = [number_in(target) for target in targets]
    of_targets = "gpus" not in stated and bool(numbers) and None not in numbers
    asked: Sequence[int | None] = settings.get("gpus", ()) if "gpus" in stated else ()
    if of_targets:
        asked = numbers
    counts = [count for count in asked if count]
    trainers = settings.get("trainer", ()) if "trainer" in stated else ()
    trainer = str(trainers[0]) if len(trainers) == 1 else ""
    models = settings.get("model", ())
    (versions, *_) = settings.get("libraries") or [()]
    imported = import_files(
        paths,
        gpus=max(counts, default=None),
        trainer=trainer,
        libraries=Libraries.of(versions) if versions else None,
        model=str(models[0]) if "model" in stated and len(models) == 1 else "",
    )
    dropped = _dropped(imported, settings, stated, counts)
    if of_targets and counts:
        dropped.add("gpus")
    merged = dict(settings)
    for name, value in imported.settings.items():
        if name in dropped:
            continue
        if name not in stated:
            merged[name] = [value]
        elif name in _PAIRS:
            merged[name] = [_over(value, own or ()) for own in merged[name]]
    for name, fault in imported.refused.items():
        if name not in stated:
            raise ConfigError(fault)
    if not merged.get("model") or merged["model"] == [""]:
        raise ConfigError(
            f"{imported.path}: names no model; name it before the file: "
            f"whichlora estimate MODEL --from {imported.path}"
        )
    check_asked(merged, stated)
    strategy = merged.get("parallel", [None])[0]
    says_number = bool(counts) or merged.get("gpus", [None]) != [None]
    if strategy is not None and "parallel" not in stated and not says_number:
        raise ConfigError(
            f"{imported.path}: asks for {strategy} and does not say how many GPUs the run has; "
            "pass --gpus, such as --gpus 4"
        )
    of_images: tuple[str, ...] = ()
    trains = "serving" not in imported.settings
    if trains:
        merged, of_images = with_file_images(merged, imported, stated)
    packed = any(FULL_ROWS in text for text in imported.assumed)
    left_open = _left_open(imported, merged, stated, says_number=says_number) if trains else ()
    return merged, FromFiles(
        notes=(*of_images, *imported.notes, *left_open),
        packed=packed,
        epochs=imported.epochs,
        eval_batch_size=imported.eval_batch_size,
        stated=frozenset({*imported.settings, *stated}),
        is_lower_bound=imported.is_lower_bound or leaves_images_out(merged, imported, of_images),
        keys={name: key for name, key in imported.keys.items() if name not in stated},
        older=_older(paths, settings, stated, targets, imported),
    )


def _dropped(
    imported: Imported,
    settings: Mapping[str, list[Any]],
    stated: Collection[str],
    counts: Sequence[int],
) -> set[str]:
    """Settings of the files that fall with those that the user states.

    Args:
        counts: GPUs that the user asks for.
    """
    dropped = {name for given in stated for name in _WITH.get(given, ())}
    if _quantises({name: values for name, values in settings.items() if name in stated}):
        dropped.add("base_dtype")
    for name in ("trainer", "serving"):
        if name in stated and settings[name] == [imported.settings.get(name)]:
            dropped -= {*_WITH[name]}
    options = strategy_options().keys()
    if "parallel" in stated or (
        counts == [1] and not runs_alone(imported.settings.get("parallel", ""))
    ):
        dropped |= {"parallel", *options}
    if counts:
        dropped.add("nodes")
    return dropped


def _over(
    pairs: Iterable[tuple[str, Any]], own: Iterable[tuple[str, Any]]
) -> tuple[tuple[str, Any], ...]:
    """The user's `own` options over those of a file; another name of an option counts behind it."""
    stated = {name for name, _ in own}
    return (*(pair for pair in pairs if pair[0] not in stated), *own)


def _older(
    paths: Sequence[Path],
    settings: Mapping[str, list[Any]],
    stated: Collection[str],
    targets: Sequence[str],
    imported: Imported,
) -> OlderReleases | None:
    """The same files under the first releases that take them, where these are others."""
    if not imported.oldest:
        return None
    libraries = [tuple(sorted(installed_in(imported.oldest).items()))]
    beside = {**settings, "libraries": libraries}
    try:
        merged, _ = with_files(paths, beside, {*stated, "libraries"}, targets)
    except ConfigError:  # what the formulas do not know of them
        return None
    return OlderReleases(path=imported.path, month=imported.oldest, settings=merged)


def _left_open(
    imported: Imported,
    merged: Mapping[str, list[Any]],
    stated: Collection[str],
    *,
    says_number: bool,
) -> list[str]:
    """What neither the files nor the user say, and what is assumed."""
    notes = []
    if not says_number:
        notes.append(
            f"{imported.path}: does not say how many GPUs the run has; assumed: 1 (--gpus)"
        )
    if "seq_len" not in (imported.settings.keys() | {*stated}):
        (tokens, *_) = merged.get("seq_len", [RunConfig(model="").seq_len])
        notes.append(
            f"{imported.path}: does not say how long rows are; assumed: {tokens} tokens, or as "
            "many as the model looks up, or those of --data (--seq-len)"
        )
    return notes


def _quantises(stated: Mapping[str, Sequence[Any]]) -> bool:
    """Whether the user's method or quant stores the base in fewer bits, which have no dtype."""
    methods = list_methods()
    of_methods = [methods[name].base_quant for name in stated.get("method", ()) if name in methods]
    return any(quant not in (None, "none") for quant in (*of_methods, *stated.get("quant", ())))
