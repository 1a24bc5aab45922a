"""A recommended fine-tuning → another tool's files, predicted again as that tool runs it."""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whichlora.calibration.load import load_calibration
from whichlora.errors import ConfigError, DataFileError
from whichlora.exports import DATA_FILE, FORMATS, Export, Recipe
from whichlora.exports.recipe import VALIDATION_FILE
from whichlora.exports.simpler import simpler_row
from whichlora.predict.alike import Predictor
from whichlora.predict.parallel_choice import best_first, choice_notes
from whichlora.predict.predict import JudgedRun
from whichlora.predict.resolve import resolve
from whichlora.spec.data_format import AUDIO_ROWS, IMAGE_ROWS, KINDS, TRANSCRIPTS, DataFormat
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.parallel import AUTO
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.spec.words import unknown
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model_of
from whichlora.store.jsonfiles import read_object
from whichlora.store.written import OTHER_OUTPUT, write_files
from whichlora.tasks import rows_of
from whichlora.units import format_bytes
from whichlora.workflow import estimates

RECIPE_FILE = "recipe.json"
TRUSTS_CODE = "trust_remote_code is on: training runs code that comes with the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenExport:
    """What was written for a tool, and what changes under it.

    Args:
        before: the recommendation as WhichLoRA's own job runs it.
        after: the same as the tool runs it.
        paths: the files, the one to start from first.
        changes: setting to its values before and after.
    """

    to: str
    export: Export
    before: Prediction
    after: Prediction
    paths: tuple[Path, ...]
    changes: Mapping[str, tuple[Any, Any]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "to": self.to,
            "files": [str(path) for path in self.paths],
            "command": self.export.command,
            "notes": list(self.export.notes),
            "changes": {name: list(values) for name, values in self.changes.items()},
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
        }


def folder_of_winner(folder: Path) -> Path:
    """`folder` of a run; of a run for several GPUs, that of the recommended one within it.

    Raises:
        DataFileError: its answer can't be read.
    """
    path = folder / "answer.json"
    rows = read_object(path).get("gpus") if path.is_file() else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("recommended") is True:
            gpu = str(row.get("gpu"))
            if os.path.isfile(folder / gpu / RECIPE_FILE) and gpu == Path(gpu).name:
                return folder / gpu
    return folder


def read_recipe(folder: Path) -> Recipe:
    """The winner of the run in `folder`.

    Raises:
        ConfigError: the run found nothing that fits, or there is none.
        DataFileError: its file can't be read.
    """
    path, answer = folder / RECIPE_FILE, folder / "answer.json"
    # the recipe of an earlier start may still be there
    if answer.is_file() and read_object(answer).get("winner") is None:
        raise ConfigError(f"{folder}: nothing met the limits of this run; nothing to export")
    if not path.is_file():
        raise ConfigError(f"{folder}: has no {RECIPE_FILE}; give the folder of a whichlora run")
    return Recipe.from_dict(read_object(path), where=str(path))


def recipe_for(
    to: str, run: RunConfig, gpu: str, *, calibration_dir: Path | None = None, **job: Any
) -> tuple[Recipe, tuple[str, ...]]:
    """As `make_recipe`, "auto" being the best strategy that the tool can write; and notes.

    These say what the name of the accelerator was taken as, and why that strategy is the best.

    Args:
        to: the tool.

    Raises:
        ConfigError: as `make_recipe`, or the tool can write no strategy that accepts the run.
    """
    device = find_gpu(gpu, least_memory=True)
    calibration = load_calibration(device, calibration_dir)
    model = load_model_of(run)
    run, _ = estimates.on_device(model, run, device, calibration)
    if run.parallel.strategy != AUTO or to not in FORMATS:
        return make_recipe(run, gpu, **job), device.notes
    predictor = Predictor()
    run = replace(run, model=_from_anywhere(model.name))

    def judged(each: RunConfig) -> JudgedRun:
        made = FORMATS[to](make_recipe(each, gpu, **job))
        judged = predictor.judge(model, made.run, device, calibration)
        _check_loading(to, made, judged.counted.host.loading_bytes, device)
        return judged

    spreadings = best_first(run, judged)
    run = replace(run, parallel=spreadings[0].config)
    why = f"{choice_notes(spreadings)[0]}, of those that --to {to} can write"
    return make_recipe(run, gpu, **job), (*device.notes, why)


def _check_loading(to: str, made: Export, loading_bytes: int, gpu: GpuSpec) -> None:
    """Whether each GPU holds the weights that the tool loads there before they are sharded.

    Args:
        loading_bytes: of all processes of a node, on the host where another tool loads them.

    Raises:
        ConfigError: it does not.
    """
    each = loading_bytes // made.run.parallel.gpus_per_node
    if made.loads_on_gpu and each > gpu.memory_bytes:
        raise ConfigError(
            f"--to {to}: {made.run.parallel.strategy} loads all weights on each GPU before they "
            f"are sharded, {format_bytes(each)} on {format_bytes(gpu.memory_bytes)}; use --to "
            "transformers or trl"
        )


def make_recipe(run: RunConfig, gpu: str, **job: Any) -> Recipe:
    """A recipe for a run that was not searched for, and whose strategy is named.

    Args:
        job: epochs, learning_rate, seed and what else a `Recipe` holds.

    Raises:
        ConfigError: an unknown model or accelerator, settings that exclude each other, or rows
            longer than the positions that the model can look up.
    """
    device = find_gpu(gpu, least_memory=True)
    model = load_model_of(run)
    run, _ = estimates.on_device(model, run, device, load_calibration(device))
    most = model.longest_input
    if most and run.seq_len > most:
        raise ConfigError(f"seq_len: {run.model} looks up {most} positions; give {most} or less")
    resolved = resolve(model, replace(run, model=_from_anywhere(model.name)), device)
    data_format = DataFormat(kind=KINDS[rows_of(resolved.run)][0])
    if run.images:
        data_format = IMAGE_ROWS
    elif resolved.run.audios:
        data_format = AUDIO_ROWS
    elif model.tower is not None and model.tower.transcribes:
        data_format = TRANSCRIPTS
    rows = {"data_format": data_format}
    return Recipe(
        run=resolved.run,
        gpu=device.key,
        target_modules=resolved.peft_targets,
        model_config=dict(resolved.model.config),
        masked_lm=resolved.model.task == "encoder",
        batching="longest",
        **(rows | job),
    )


def _from_anywhere(model: str) -> str:
    """`model`; of a folder of this machine the absolute path, as jobs start in other folders."""
    path = os.path.abspath(os.path.expanduser(model))
    if os.path.basename(path) == "config.json" and os.path.isfile(path):
        return os.path.dirname(path)
    return path if os.path.isfile(os.path.join(path, "config.json")) else model


def write_export(
    recipe: Recipe,
    to: str,
    folder: Path,
    *,
    data: Path | None = None,
    calibration_dir: Path | None = None,
    notes: tuple[str, ...] = (),
) -> WrittenExport:
    """Write `recipe` for the tool `to` into `folder`, and predict it as that tool runs it.

    Args:
        data: the folder of `train.jsonl` and `validation.jsonl`, which are copied from there;
            None is `folder`.
        notes: on the recipe.

    Raises:
        ConfigError: no such tool, or something that it can't do.
        DataFileError: a file can't be written, or is one that WhichLoRA did not write, or rows that
            the tool needs can't be read.
    """
    if to not in FORMATS:
        raise ConfigError(unknown("--to", to, FORMATS))
    made = FORMATS[to](recipe)
    if recipe.trust_remote_code:
        made = replace(made, notes=(*made.notes, TRUSTS_CODE))
    rows, of_rows = _rows_to_copy(made, recipe, data or folder, folder)
    made = replace(made, notes=(*notes, *made.notes, *recipe.rate_notes, *of_rows))
    predictions = estimates.estimate(
        [recipe.predicted(recipe.run), recipe.predicted(made.run)],
        [recipe.gpu],
        calibration_dir=calibration_dir,
    )
    if predictions.refused:
        raise ConfigError(predictions.refused[0].reason)
    before, after = predictions
    if after.several_gpus is not None:
        gpu = find_gpu(recipe.gpu, least_memory=True)
        _check_loading(to, made, after.several_gpus.loading_host_bytes, gpu)
    texts = dict(made.files)
    for name, source in made.made_of.items():
        texts[name] = _simpler((data or folder) / source)
    contents = {folder / name: text.encode() for name, text in texts.items()}
    for file in rows:
        contents[folder / file.name] = _read(file)
    write_files(contents, instead=OTHER_OUTPUT)
    then, now = before.run.to_dict(), after.run.to_dict()
    return WrittenExport(
        to=to,
        export=made,
        before=before,
        after=after,
        paths=tuple(contents),
        changes={
            name: (then[name], now[name])
            for name in now
            if name in then and then[name] != now[name]
        },
    )


def _rows_to_copy(
    made: Export, recipe: Recipe, data: Path, folder: Path
) -> tuple[list[Path], list[str]]:
    """Files of rows in `data` that those of the tool name and `folder` lacks; and notes."""
    names = (DATA_FILE, VALIDATION_FILE)[: 1 + recipe.validation]
    copied: list[Path] = []
    notes: list[str] = []
    for name in names:
        source, target = data / name, folder / name
        if not any(name in text for text in made.files.values()):
            continue
        if not target.is_file():
            if source.is_file():
                copied.append(source)
                continue
            columns = f"a row a line, with {recipe.data_format.describe()}"
            notes.append(f"{target} is not there; write it before the start: {columns}")
        elif source.is_file() and not filecmp.cmp(source, target, shallow=False):
            notes.append(f"{target} was there and stays, with other rows than {source}")
    return copied, notes


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataFileError(
            f"{path}: can't be read ({error.strerror}); give the folder of a whichlora run"
        ) from None


def _simpler(path: Path) -> str:
    """The rows of a JSONL file in the formats that more tools take."""
    try:
        lines = _read(path).decode("utf-8").split("\n")
        rows = [simpler_row(json.loads(line)) for line in lines if line]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataFileError(
            f"{path}: has a row that is not of its recipe's format; run whichlora run again"
        ) from None
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


__all__ = [
    "DATA_FILE",
    "WrittenExport",
    "folder_of_winner",
    "make_recipe",
    "read_recipe",
    "recipe_for",
    "write_export",
]
