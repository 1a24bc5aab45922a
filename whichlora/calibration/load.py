"""The calibration of one device: read where it is stored, fitted anew where it is stale."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from whichlora.calibration.formula_version import formulas_digest
from whichlora.errors import ConfigError, DataFileError
from whichlora.predict.coefficients import Calibration, digest_of, prior_calibration
from whichlora.serving.base import LoggedTimes
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Measurement
from whichlora.store import models
from whichlora.store.coefficients import coefficients_file, read_coefficients, write_coefficients
from whichlora.store.gpus import host_memory_beside
from whichlora.store.host import read_host
from whichlora.store.links import LinkFiles
from whichlora.store.measurements import is_of_log, read_measurements, record_ids
from whichlora.store.paths import data_folder, user_calibration_folder


def calibration_roots(calibration_dir: Path | None = None) -> tuple[Path, ...]:
    """Folders that hold calibrations: the user's, which goes before and is written to, and ours.

    Raises:
        ConfigError: a path that the file system does not take.
    """
    user_folder = calibration_dir or user_calibration_folder()
    try:
        os.stat(user_folder)
    except (FileNotFoundError, NotADirectoryError):
        pass  # to be made, or told by what writes there
    except (OSError, ValueError):
        raise ConfigError(
            f"calibration folder {str(user_folder)[:80]!r}: can't be read; give another"
        ) from None
    return (user_folder, data_folder("calibration"))


def load_calibration(gpu: GpuSpec, calibration_dir: Path | None = None) -> Calibration:
    """What runs on `gpu` taught so far, and what is known of this host; else datasheet priors.

    Raises:
        DataFileError: the file on the host is broken.
    """
    roots = calibration_roots(calibration_dir)
    calibration = replace(
        _stored(gpu, roots),
        machines=LinkFiles(roots),
        this_host_bytes=cache(partial(host_memory_beside, gpu)),
        logged_times=cache(partial(_logged_times, gpu, roots)),
    )
    host = read_host(roots[0], gpu.key)
    if host is None:
        return calibration
    path = coefficients_file(roots, gpu.key)
    other_host = path is None or path.parent.parent != roots[0]
    return calibration.with_launch(host.launch_s, other_host=other_host)


def _stored(gpu: GpuSpec, roots: Sequence[Path]) -> Calibration:
    """What `coefficients.json` says, or datasheet and priors.

    Coefficients of other formulas than today's are not used, nor a broken file: the records are
    fitted anew, and `fallback` says of a broken file what is wrong with it.
    """
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


def _logged_times(gpu: GpuSpec, roots: Sequence[Path]) -> tuple[LoggedTimes, ...]:
    """What logs of serving engines on `gpu` state of requests; broken records are left out."""
    records = read_measurements(roots, gpu.key, leave_out=lambda place, fault: None)
    return tuple(
        LoggedTimes(run=record.run, values=record.engine_log)
        for record in records
        if record.outcome == "ok" and record.engine_log
    )


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
    from whichlora.calibration.fit import fit

    unread: dict[str, str] = {}
    records = read_measurements(roots, gpu.key, leave_out=unread.__setitem__)
    calibration = fit(
        records, gpu, model_of, held_out=held_out, elsewhere=ids_elsewhere(roots, gpu.key)
    )
    # the digest names all records that are there, so that those left out do not make it stale
    digest = digest_of(_ids_to_fit(roots, gpu.key))
    left_out = {**unread, **calibration.left_out}
    return replace(calibration, left_out=left_out, digest=digest)


def _ids_to_fit(roots: Sequence[Path], gpu: str) -> set[str]:
    """Ids of all records but those of engines' logs."""
    return {each for each in record_ids(roots, gpu) if not is_of_log(each)}


def ids_elsewhere(roots: Sequence[Path], gpu: str) -> set[str]:
    """Ids of the records that come with this package, whose machines are not this one."""
    return record_ids(roots[-1:], gpu)


def model_of(measurement: Measurement) -> ModelSpec:
    """Architecture that a record was measured on; offline.

    Raises:
        ConfigError: the record names a model that is neither in the database nor in the record.
    """
    from whichlora.families import build

    name = str(measurement.config.get("model", ""))
    if measurement.model_config is not None:
        return build(measurement.model_config, name=name)
    model = models.find_model(name)
    if model is None:
        raise ConfigError(
            f"record {measurement.id}: model {name!r} is not in the database; give the record its "
            "config as model_config"
        )
    return model


def stale_note(calibration: Calibration, calibration_dir: Path | None) -> str:
    """What a prediction must say where its coefficients are not those of the records.

    Ids alone are read: 100,000 in 0.2 s. A refit would cost seconds and is one command away.
    """
    roots = calibration_roots(calibration_dir)
    if calibration.fallback:
        number = calibration.num_records
        stand_in = f"a fit to the {number} records just now" if number else "datasheet priors"
        return f"; {calibration.fallback}; used until then: {stand_in}"
    ids = _ids_to_fit(roots, calibration.gpu)
    if not ids and not calibration.digest:
        return ""
    if digest_of(ids) == calibration.digest:
        payload = read_coefficients(roots, calibration.gpu) or {}
        if payload.get("formulas", "") == calibration.formulas:
            return ""
        return (
            "; fitted just now, since the stored coefficients were fitted with other formulas: "
            f"whichlora calibrate --gpu {calibration.gpu} stores them"
        )
    there = "1 record there is" if len(ids) == 1 else f"{len(ids)} records there are"
    return f"; not fitted to the {there} now: whichlora calibrate --gpu {calibration.gpu}"
