"""What a Python user calls; joins the files and devices at the edges to the formulas."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from whichlora import explanation, families, hub
from whichlora.architecture import ModelSpec
from whichlora.calibration import Calibration, digest_of, prior_calibration
from whichlora.errors import ConfigError, DataFileError
from whichlora.explanation import Explanation
from whichlora.formulas import formulas_digest
from whichlora.largest import Placement, Size, largest_that_fits, place, smallest_first, with_size
from whichlora.methods import with_defaults
from whichlora.prediction import predict
from whichlora.resolution import with_checkpointing
from whichlora.results import Answers, Measurement, Prediction, Refused, TracedPeak
from whichlora.specs import ALL_LINEAR, Engine, GpuSpec, RunConfig
from whichlora.store import gpus as gpu_store
from whichlora.store import models as model_store
from whichlora.store.coefficients import coefficients_file, read_coefficients, write_coefficients
from whichlora.store.measurements import read_measurements, record_ids
from whichlora.store.paths import data_folder, user_calibration_folder
from whichlora.targets import resolve_targets

MOST_COMBINATIONS = 20_000  # half a minute of predictions
# Settings that a phase does not read: a grid over them would only repeat itself.
_FINETUNE_ONLY = (
    "method",
    "seq_len",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "modules_to_save",
    "base_dtype",
    "adapter_dtype",
    "bias",
    "use_rslora",
    "loraplus_lr_ratio",
    "optimizer",
    "gradient_checkpointing",
    "gradient_accumulation_steps",
    "padding",
    "loss_head",
    "prepare_kbit",
)
# Those of them that a generation with an unmerged adapter reads.
_OF_ADAPTER = ("method", "r", "target_modules", "modules_to_save", "adapter_dtype")
_QUANTISED_ONLY = ("cache_backend", "cache_nbits", "cache_group_size", "cache_residual_length")
_INFERENCE_ONLY = ("prompt_len", "max_new_tokens", "serve", "kv_cache", *_QUANTISED_ONLY)


def load_model(name: str, *, trust_remote_code: bool = False) -> ModelSpec:
    """The architecture called `name`: a hub id, a local folder, or a name as people write it.

    Raises:
        ConfigError: unknown, and not to be found on the hub; the message has near matches.
    """
    return hub.load_model(name, trust_remote_code=trust_remote_code)


def is_known_model(name: str) -> bool:
    """Whether the database holds `name`, so that a record need not carry its config."""
    return model_store.find_model(name) is not None


def find_gpu(name: str = "auto", *, least_memory: bool = False) -> GpuSpec:
    """The accelerator called `name`: a key, an alias, a driver's name, "cpu" or "auto".

    Args:
        least_memory: of boards that share `name`, take the one with the least memory.

    Raises:
        ConfigError: unknown or ambiguous; the message has the candidates.
    """
    return gpu_store.find_gpu(name, least_memory=least_memory)


def find_target(name: str) -> GpuSpec:
    """What a prediction is asked for: an accelerator, or an amount of memory such as "24GB".

    Raises:
        ConfigError: unknown or ambiguous; the message has the candidates.
    """
    return gpu_store.find_target(name)


def list_gpus() -> tuple[GpuSpec, ...]:
    """Every accelerator of the catalog."""
    return gpu_store.list_gpus()


def list_models() -> tuple[model_store.ModelRecord, ...]:
    """Every model of the database."""
    return model_store.list_models()


def calibration_roots(calibration_dir: Path | None = None) -> tuple[Path, ...]:
    """Folders that hold calibrations: the user's, which goes before and is written to, and ours.

    Raises:
        ConfigError: a path that the file system does not take.
    """
    own = calibration_dir or user_calibration_folder()
    try:
        os.stat(own)
    except (FileNotFoundError, NotADirectoryError):
        pass  # to be made, or told by what writes there
    except (OSError, ValueError):
        raise ConfigError(
            f"calibration folder {str(own)[:80]!r}: can't be read; give another"
        ) from None
    return (own, data_folder("calibration"))


def load_calibration(gpu: GpuSpec, calibration_dir: Path | None = None) -> Calibration:
    """What runs on `gpu` taught so far; datasheet priors where there were none.

    Coefficients of other formulas than today's are not used, nor a broken file: the records are
    fitted anew, and `fallback` says of a broken file what is wrong with it.
    """
    roots = calibration_roots(calibration_dir)
    fallback = ""
    try:
        payload = read_coefficients(roots, gpu.key)
        if payload is None:
            return prior_calibration(gpu)
        if payload.get("formulas") == formulas_digest():  # others may lack what today's have
            return Calibration.from_dict(payload, source=str(coefficients_file(roots, gpu.key)))
    except DataFileError as error:
        fallback = str(error)
    try:
        return replace(_fit(gpu, roots, held_out=False), fallback=fallback)
    except ConfigError as error:  # the library that fits is not installed
        if not fallback:
            raise ConfigError(
                f"{gpu.key}/coefficients.json: is of other formulas; {error}"
            ) from None
        return replace(prior_calibration(gpu), fallback=fallback)


def refit(gpu: GpuSpec, calibration_dir: Path | None = None) -> Calibration:
    """Fit the predictors of `gpu` to every record there is, and store the coefficients.

    A record that can't be read is left out; `left_out` has its place and why.
    """
    roots = calibration_roots(calibration_dir)
    calibration = _fit(gpu, roots, held_out=True)
    if calibration.num_records:
        write_coefficients(roots[0], gpu.key, calibration.to_dict())
    return calibration


def _fit(gpu: GpuSpec, roots: Sequence[Path], *, held_out: bool) -> Calibration:
    from whichlora.fitting import fit

    unread: dict[str, str] = {}
    records = read_measurements(roots, gpu.key, leave_out=unread.__setitem__)
    calibration = fit(records, gpu, model_of, held_out=held_out)
    # the digest names all records that are there, so that those left out do not make it stale
    digest = digest_of(record_ids(roots, gpu.key))
    left_out = {**unread, **calibration.left_out}
    return replace(calibration, left_out=left_out, digest=digest)


def model_of(measurement: Measurement) -> ModelSpec:
    """Architecture that a record was measured on; offline.

    Raises:
        ConfigError: the record names a model that is neither in the database nor in the record.
    """
    from whichlora.families import build

    name = str(measurement.config.get("model", ""))
    if measurement.model_config is not None:
        return build(measurement.model_config, name=name)
    found = model_store.find_model(name)
    if found is None:
        raise ConfigError(
            f"record {measurement.id}: model {name!r} is not in the database; give the record its "
            "config as model_config"
        )
    return found


def grid(settings: Mapping[str, Sequence[Any]]) -> Iterator[RunConfig]:
    """Every combination of `settings` (a list of values by name of a `RunConfig` field).

    A setting that a phase does not read is left at its default there, so that no candidate
    appears twice: a method is one of an inference only where its model is served as trained.

    Raises:
        ConfigError: a value that is not accepted, or more combinations than `MOST_COMBINATIONS`.
    """
    yield from only_runs(combinations(settings))


def only_runs(runs: Iterable[RunConfig | Refused]) -> list[RunConfig]:
    """`runs`, none of which may be refused.

    Raises:
        ConfigError: one is.
    """
    accepted = []
    for run in runs:
        if isinstance(run, Refused):
            raise ConfigError(run.reason)
        accepted.append(run)
    return accepted


def combinations(settings: Mapping[str, Sequence[Any]]) -> Iterator[RunConfig | Refused]:
    """As `grid`; a combination whose settings exclude each other in its place.

    Raises:
        ConfigError: settings that none of the combinations can mean.
    """
    _check_number(settings)
    seen: set[RunConfig] = set()
    for phase in settings.get("phase", ("finetune",)):
        unread: Collection[str] = _INFERENCE_ONLY
        if phase == "inference":
            unread = set(_FINETUNE_ONLY) - set(_OF_ADAPTER)
        names = [name for name in settings if name not in unread and name != "phase"]
        for values in itertools.product(*(settings[name] for name in names)):
            chosen = dict(zip(names, values, strict=True))
            if phase == "inference" and _is_merged(chosen):
                merged = (*_OF_ADAPTER, "serve")
                chosen = {name: chosen[name] for name in chosen if name not in merged}
            if chosen.get("kv_cache") != "quantized":
                chosen = {name: chosen[name] for name in chosen if name not in _QUANTISED_ONLY}
            try:
                run = RunConfig(phase=phase, **chosen)
            except ConfigError as error:
                model = str(chosen.pop("model", ""))
                yield Refused(model=model, settings={"phase": phase, **chosen}, reason=str(error))
                continue
            if run not in seen:
                seen.add(run)
                yield run


def _check_number(settings: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a grid that nobody could wait for, nor read."""
    numbers = {name: len(set(values)) for name, values in settings.items()}
    combinations = math.prod(numbers.values())
    if combinations > MOST_COMBINATIONS:
        longest = sorted(numbers, key=lambda name: -numbers[name])[:3]
        most = ", ".join(f"{numbers[name]} of {name}" for name in longest if numbers[name] > 1)
        raise ConfigError(
            f"these settings make {combinations} combinations ({most}), more than "
            f"{MOST_COMBINATIONS}; give fewer values, or let 'whichlora run' search them with "
            "profile: none"
        )


def _is_merged(inference: Mapping[str, Any]) -> bool:
    """Whether the settings of an inference leave no adapter beside the weights."""
    names = ("method", "serve")
    given = {name: inference[name] for name in names if name in inference}
    return with_defaults(RunConfig(model="", phase="inference", **given)).serve == "merged"


def estimate(
    runs: Iterable[RunConfig | Refused],
    gpus: Sequence[str] = ("auto",),
    *,
    calibration_dir: Path | None = None,
    engine: Engine = "ledger",
    trace_layers: str = "2,4",
    maximise: Size | None = None,
) -> Answers[Prediction]:
    """Peak memory and time of every run on every accelerator. Nothing is run or downloaded.

    A combination whose settings exclude each other, or that the model or the accelerator lacks,
    is among the `refused` of the answers.

    Args:
        maximise: "batch_size" or "seq_len", which becomes the largest that fits each accelerator,
            or 1 where nothing does; a note says which.
        engine: "ledger" adds up what is known to live; "trace" runs the real code on tensors
            without storage, also of models that the ledger does not know, in seconds per run.
        trace_layers: "2,4" stretches the trace of four layers to all, "all" traces all.

    Raises:
        ConfigError: an unknown model or accelerator, or nothing is left of the combinations.
    """
    if maximise and engine == "trace":
        raise ConfigError(f"{maximise}: max needs --engine ledger; a trace takes seconds per value")
    if "all" in gpus:
        raise ConfigError("gpu: 'all' is no accelerator; 'whichlora where' judges every one")
    devices = [find_target(name) for name in gpus]
    calibrations = [load_calibration(gpu, calibration_dir) for gpu in devices]
    stale = [stale_note(calibration, calibration_dir) for calibration in calibrations]
    models: dict[str, ModelSpec] = {}
    predictions: list[Prediction] = []
    refused: list[Refused] = []
    for run in runs:
        if isinstance(run, Refused):
            refused.append(run)
            continue
        if run.model not in models:
            load = load_model if engine == "ledger" else _load_traceable
            models[run.model] = load(run.model)
        model = models[run.model]
        run = with_checkpointing(model, replace(run, model=model.name))
        traced = None
        for gpu, calibration, note in zip(devices, calibrations, stale, strict=True):
            try:
                if engine == "trace" and traced is None:
                    traced = _trace(model, run, trace_layers)
                found = _estimate(model, run, gpu, calibration, traced=traced, maximise=maximise)
            except ConfigError as error:
                settings = {k: v for k, v in run.chosen().items() if k != "model"}
                refused.append(
                    Refused(model=run.model, gpu=gpu.key, settings=settings, reason=str(error))
                )
                continue
            predictions.append(replace(found, basis=found.basis + note))
    return Answers(predictions, refused)


def _estimate(
    model: ModelSpec,
    run: RunConfig,
    gpu: GpuSpec,
    calibration: Calibration,
    *,
    traced: TracedPeak | None,
    maximise: Size | None,
) -> Prediction:
    """One run on one accelerator, as large as it fits where `maximise` says so.

    Raises:
        ConfigError: settings that exclude each other.
    """
    if maximise is None:
        return predict(model, run, gpu, calibration, traced=traced)
    most = largest_that_fits(model, run, gpu, calibration, maximise)
    largest = with_size(run, maximise, max(1, most.value))
    kind = "inference" if run.phase == "inference" else run.method
    note = f"{run.model.rpartition('/')[2]} {kind} on {gpu.key}: {most.note}"
    found = predict(model, largest, gpu, calibration)
    return replace(found, notes=(note, *found.notes))


def explain(
    run: RunConfig, gpu: str = "auto", *, calibration_dir: Path | None = None
) -> Explanation:
    """The prediction of `run` taken apart, and what other choices would change.

    Raises:
        ConfigError: an unknown model or accelerator, or settings that exclude each other.
    """
    device = find_target(gpu)
    calibration = load_calibration(device, calibration_dir)
    model = load_model(run.model)
    run = replace(run, model=model.name)
    found = explanation.explain(model, run, device, calibration)
    prediction = found.prediction
    basis = prediction.basis + stale_note(calibration, calibration_dir)
    return replace(found, prediction=replace(prediction, basis=basis))


def where(run: RunConfig, *, calibration_dir: Path | None = None) -> list[Placement]:
    """`run` on every accelerator of the catalog, the smallest that fits first.

    Raises:
        ConfigError: an unknown model, or settings that no accelerator can run.
    """
    model = load_model(run.model)
    run = replace(run, model=model.name)
    placements = [
        place(model, run, gpu, load_calibration(gpu, calibration_dir)) for gpu in list_gpus()
    ]
    if all(one.prediction is None for one in placements):
        raise ConfigError(placements[0].refusal)
    return smallest_first(placements)


def _load_traceable(name: str) -> ModelSpec:
    """The model called `name`; one of an unknown family as a Llama of its sizes, and saying so.

    Raises:
        ConfigError: no such model, or a config whose sizes go by other names.
    """
    try:
        return load_model(name)
    except ConfigError:
        if model_store.find_model(name) is not None:
            raise
        config = hub.load_config(name)
    if config.get("model_type") in families.known_types():
        return load_model(name)  # it has another fault
    found = families.build(config | {"model_type": "llama"}, name=name)
    note = (
        f"model_type {config.get('model_type')!r} is not known to the ledger: memory is traced, "
        "time is that of a Llama of the same sizes"
    )
    return replace(found, config=config, notes=(*found.notes, note))


def _trace(model: ModelSpec, run: RunConfig, layers: str) -> TracedPeak:
    from whichlora.device.tracer import trace_peaks

    targets: tuple[str, ...] = ()
    if run.phase == "finetune" or with_defaults(run).serve == "as-trained":
        targets = resolve_targets(model, run.target_modules)
    return trace_peaks(
        run,
        model_config=model.config,
        target_modules=ALL_LINEAR if run.target_modules == (ALL_LINEAR,) else targets,
        layers=layers,
    )


def stale_note(calibration: Calibration, calibration_dir: Path | None) -> str:
    """What a prediction must say where its coefficients are not those of the records.

    Ids alone are read: 100,000 in 0.2 s. A refit would cost seconds and is one command away.
    """
    roots = calibration_roots(calibration_dir)
    if calibration.fallback:
        number = calibration.num_records
        stand_in = f"a fit to the {number} records just now" if number else "datasheet priors"
        return f"; {calibration.fallback}; used until then: {stand_in}"
    ids = record_ids(roots, calibration.gpu)
    if not ids and not calibration.digest:
        return ""
    if digest_of(ids) == calibration.digest:
        payload = read_coefficients(roots, calibration.gpu) or {}
        if payload.get("formulas", "") == calibration.formulas:
            return ""
        return (
            "; fitted just now, since the stored coefficients are of other formulas: "
            f"whichlora calibrate --gpu {calibration.gpu} stores them"
        )
    return (
        f"; not fitted to the {len(ids)} records there are now: "
        f"whichlora calibrate --gpu {calibration.gpu}"
    )
