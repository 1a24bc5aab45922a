"""Published rows as ordinary records, which `published_accuracy.py --records [--write]` writes.

Rebuilds `calibration/<gpu>/measurements/published.jsonl` from the tables here, for every
accelerator with `ENOUGH` runs; `whichlora calibrate --gpu KEY --calibration-dir calibration` then
fits the coefficients beside them. A row becomes a record where its cells are what a record's
fields mean; the other reasons are printed.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import published
from published import FOLDER, Observation, Quantity, gpu_of
from whichlora import families
from whichlora.calibration.share.physics import impossible
from whichlora.errors import ConfigError
from whichlora.spec.results import Measurement
from whichlora.store.models import find_model
from whichlora.store.record import encode_record

CALIBRATION = Path(__file__).resolve().parent.parent.parent / "calibration"
ENOUGH = 20
# Of one model at one length: what a card does there would be taken for what it does.
ONE_SHAPE = (
    "jenga_reproduction",
    "lambda_benchmark",
    "nntile_overhead",  # all in fp32, of one row
    "peft_method_comparison",
    "transformers_docs",
    "trl_notebooks",
)
UNDATED = (  # pages that do not say when they measured, of which no record can be made
    "inference_pages",
    "qwen3_speed",
    "training_pages",
    "transformers_sdpa",
    "transformers_sdpa_generate",
    "universal_llm_trainer",
)
FIELDS: dict[Quantity, str] = {
    "step_s": "step_s",
    "prefill_s": "prefill_s",
    "generate_s": "generate_s",
    "token_s": "decode_s_per_token",
    "peak_allocated": "peak_allocated_bytes",
    "peak_reserved": "peak_reserved_bytes",
    "device_used": "device_used_bytes",
}
# Pages without a date get that of their models.
RELEASED = {
    "qwen15_hf_infer": "2024-02-04",
    "qwen2_speed": "2024-06-06",
    "qwen25_speed": "2024-09-19",
}
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_VERSION = re.compile(r"([a-z][a-z0-9-]*) (\d+\.[\w.+]*)")

LeftOut = Counter[tuple[str, str]]


@cache
def rows_of(source: str) -> list[dict[str, str]]:
    with (FOLDER / f"{source}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _stack_of(row: dict[str, str]) -> str:
    """The versions and the date that a row states."""
    if "versions" in row:
        return row["versions"]
    libraries = ("torch", "transformers", "peft", "bitsandbytes")
    stated = [f"{name} {row[name].partition('+')[0]}" for name in libraries if row[name]]
    return "; ".join([*stated, row["notes"].partition(";")[0]])


def _refusal(one: Observation) -> str:
    """Why `one` can't be a record; empty where it can."""
    if one.quantity not in FIELDS:
        return f"{one.quantity}: no field of a record means that"
    if one.waits:
        return one.waits
    if one.run.kv_cache == "vllm":
        return "vLLM: another runtime than the one that is calibrated"
    known = find_model(one.model.name)
    try:
        built = known or families.build(dict(one.model.config), name=one.model.name)
    except ConfigError:
        built = None
    if built is None or built.groups != one.model.groups:
        return "architecture without a config that anybody could read"
    stack = _stack_of(rows_of(one.source)[one.line - 2])
    if one.source not in RELEASED and not _DATE.search(stack):
        return "no date"
    return ""


def _provenance(one: Observation, lines: list[int]) -> dict[str, Any]:
    row = rows_of(one.source)[one.line - 2]
    repository, _, rest = row["source_ref"].partition("@")
    commit, _, path = rest.partition(":")
    return {
        "source": f"https://github.com/{repository}/blob/{commit}/{path.partition(';')[0]}",
        "publisher": repository.partition("/")[0],
        "table": f"benchmarks/published/{one.source}.csv",
        "lines": lines,
        "stack": one.stack,
    }


def _record(found: list[Observation]) -> Measurement:
    """One record of the cells of one run."""
    one = found[0]
    row = rows_of(one.source)[one.line - 2]
    values: dict[str, Any] = {}
    for cell in found:
        field = FIELDS[cell.quantity]
        is_time = not field.endswith("_bytes")
        values[field] = (round(cell.value, 6),) if is_time else round(cell.value)
    stack = _stack_of(row)
    date = _DATE.search(stack)
    lines = sorted({cell.line for cell in found})
    provenance = _provenance(one, lines)
    if date is None:
        provenance["date"] = "of the models' release; the page states none"
    known = find_model(one.model.name) is not None
    # not the run's settings: a setting that is added must not make another record of it
    content = json.dumps([one.source, lines, values], sort_keys=True)
    gpu = gpu_of(one.gpu)
    limit = {"power_limit_w": gpu.power_limit_w} if gpu.power_limit_w else {}
    return Measurement(
        id=f"published-{hashlib.sha256(content.encode()).hexdigest()[:24]}",
        gpu=gpu.key,
        date=date[0] if date else RELEASED[one.source],
        config=replace(one.run, serve="merged").to_dict(),  # what was measured had no adapter
        model_config=None if known else dict(one.model.config),
        outcome="ok",
        environment={
            "device": row["gpu"],
            **limit,
            "versions": dict(_VERSION.findall(stack)),
        },
        provenance=provenance,
        **values,
    )


def _runs(observations: Iterable[Observation]) -> Iterator[list[Observation]]:
    """Cells of one run: neighbouring lines with the same settings, each counter once."""
    current: list[Observation] = []
    for one in observations:
        first = current[0] if current else None
        joins = (
            first is not None
            and (one.source, one.run, one.gpu, one.stack)
            == (first.source, first.run, first.gpu, first.stack)
            and one.line - current[-1].line <= 1
            and all(one.quantity != cell.quantity for cell in current)
        )
        if not joins and current:
            yield current
            current = []
        current.append(one)
    if current:
        yield current


@cache
def records() -> tuple[dict[str, list[Measurement]], LeftOut]:
    """Records by accelerator, and how many cells are none, by source and reason."""
    usable, left_out = [], LeftOut()
    for one in (each for each in published.read_all() if each.source not in ONE_SHAPE):
        if isinstance(one, Observation):
            refusal = _refusal(one)
            if refusal:
                left_out[one.source, refusal] += 1
            else:
                usable.append(one)
    found: dict[str, list[Measurement]] = defaultdict(list)
    for cells in _runs(usable):
        record = _record(cells)
        fault = impossible(record, cells[0].model, gpu_of(record.gpu))
        if fault:
            left_out[cells[0].source, re.sub(r"[\d.]+", "…", fault)] += len(cells)
        else:
            found[record.gpu].append(record)
    for gpu in [gpu for gpu, some in found.items() if len(some) < ENOUGH]:
        left_out[gpu, f"fewer than {ENOUGH} runs"] += len(found.pop(gpu))
    return dict(found), left_out


def write_records(*, write: bool) -> None:
    """Print what becomes a record and what is left out, and write the records if told."""
    found, left_out = records()
    for gpu, some in found.items():
        path = CALIBRATION / gpu / "measurements" / "published.jsonl"
        unique = {record.id: record for record in some}
        ordered = sorted(unique.values(), key=lambda record: (record.date, record.id))
        content = b"".join(encode_record(record, str(path)) for record in ordered)
        print(
            f"{path.relative_to(CALIBRATION.parent)}: {len(ordered)} records, {len(content)} bytes"
        )
        if write:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
    for (source, reason), count in sorted(left_out.items()):
        print(f"left out: {source}: {count}: {reason}")
