"""Measure the designs on the GPU of this machine: in slices, resumed, without network or weights.

    python benchmarks/gpu/sweep.py --out calibration              slices of 9 minutes, all groups
    python benchmarks/gpu/sweep.py --out OUT --seen calibration --groups activations,puzzle
    python benchmarks/gpu/sweep.py --gpu h100-sxm-80gb --list     what would run, with predictions

Writes ordinary measurement records to OUT/<gpu>/measurements/<run id>.jsonl, one line as soon as
a run ends, and `OUT/<gpu>/facts.json`: context, workspaces and memory of the device.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from designs import GROUPS, Planned, model_of, planned, predicted

from whichlora.predict.resolve import resolve
from whichlora.profiler.kept_model import build_settings
from whichlora.profiler.profile import Profiler
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Measurement, Prediction
from whichlora.spec.run import FOUR_BIT_BNB
from whichlora.store.gpus import find_gpu
from whichlora.store.jsonfiles import write_object
from whichlora.store.measurements import MeasurementLog, read_measurements
from whichlora.units import format_bytes

SLICE_MINUTES = 9.0
OVERHEAD_S = 2.0  # of a run beside its batches
BUILD_PARAMS_PER_S = 2e9
REPLACED_WORKER_S = 25.0  # a run out of memory costs a new worker
DONE = ("ok", "oom")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-records"), help="where records go")
    parser.add_argument("--seen", type=Path, action="append", default=[], help="records to skip")
    parser.add_argument("--groups", default=",".join(GROUPS), help="in this order")
    parser.add_argument("--models", default="", help="only these, with commas")
    parser.add_argument("--minutes", type=float, default=SLICE_MINUTES, help="no run starts later")
    parser.add_argument("--group-minutes", type=float, default=math.inf, help="most of each group")
    parser.add_argument("--gpu", default="auto", help="key of the accelerator")
    parser.add_argument("--list", action="store_true", help="say what would run, and stop")
    options = parser.parse_args()

    start_s = time.monotonic()
    gpu = find_gpu(options.gpu)
    groups = options.groups.split(",")
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown:
        parser.error(f"--groups: {unknown[0]!r} is not known; known are {', '.join(GROUPS)}")
    models = options.models.split(",") if options.models else []
    wanted = [one for one in planned(gpu, groups) if not models or one.run.model in models]
    if options.list:
        show(wanted, gpu)
        return
    done = {
        tuple(record.provenance.get("design", ()))
        for record in read_measurements([options.out, *options.seen], gpu.key)
        if record.outcome in DONE
    }
    left = by_build([one for one in wanted if design_of(one) not in done])
    print(f"{gpu.key}: {len(wanted)} runs, {len(left)} left", flush=True)
    if gpu.kind == "cuda" and not (options.out / gpu.key / "facts.json").is_file():
        write_object(options.out / gpu.key / "facts.json", device_facts())
    deadline_s = start_s + 60 * options.minutes
    sweep(left, gpu, options.out, deadline_s=deadline_s, group_s=60 * options.group_minutes)


def by_build(left: list[Planned]) -> list[Planned]:
    """`left` with runs of one model as it is built beside each other, groups in their order."""
    first: dict[Any, int] = {}

    def place(one: Planned) -> tuple[int, int]:
        build = (one.group, json.dumps(build_settings(one.run.to_dict()), sort_keys=True))
        return first.setdefault(one.group, len(first)), first.setdefault(build, len(first))

    return sorted(left, key=place)


def sweep(
    left: list[Planned], gpu: GpuSpec, out: Path, *, deadline_s: float, group_s: float
) -> None:
    """Measure what is `left` until the time is over; every record is on the disk at once.

    Args:
        group_s: no run of a group starts later than so long after its first one.
    """
    run_id = datetime.now(UTC).strftime("gpu-sweep-%Y%m%dt%H%M%S")
    log = MeasurementLog(out, gpu.key, run_id)
    outcomes: Counter[str] = Counter()
    device = "cuda" if gpu.kind != "cpu" else "cpu"
    provenance = {"run_id": run_id, "command": " ".join(["python", *sys.argv]), "commit": commit()}
    log_path = out / gpu.key / "sweep.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    previous, measured, group_end_s = "", "", math.inf
    with Profiler(
        gpu=gpu.key,
        device=device,
        provenance=provenance,
        memory_limit_bytes=gpu.memory_bytes if device == "cpu" else None,
        log_path=log_path,
    ) as profiler:
        for one in left:
            missing = missing_package(one)
            if missing:
                outcomes[f"left out: {missing} is not installed"] += 1
                continue
            prediction = predicted(one.run, gpu)
            needs_s = expected_seconds(one, prediction)
            if one.group != previous:
                previous, group_end_s = one.group, time.monotonic() + group_s
            remaining_s = min(deadline_s, group_end_s) - time.monotonic()
            if needs_s > remaining_s:
                outcomes["left for the next slice"] += 1
                continue
            if one.group == "repeats" or one.group != measured == "repeats":
                profiler.close()  # repetitions are of whole processes
            measured = one.group
            found = measure(profiler, one, gpu, timeout_s=max(20.0, min(remaining_s, 4 * needs_s)))
            log.append(found)
            outcomes[found.outcome] += 1
            print(line(one, found, prediction), flush=True)
    print(", ".join(f"{count} {what}" for what, count in outcomes.items()) or "nothing to do")


def measure(profiler: Profiler, one: Planned, gpu: GpuSpec, *, timeout_s: float) -> Measurement:
    model = model_of(one.run)
    found = profiler.measure(
        one.run,
        model_config=model.config,
        target_modules=resolve(model, one.run, gpu).peft_targets,
        seq_lens=one.lengths or (one.run.seq_len,),
        num_batches=one.num_batches,
        timeout_s=timeout_s,
        in_order=one.in_order,
        keeps_history=one.keeps_history,
    )
    provenance = dict(found.provenance) | {"design": list(design_of(one)), "group": one.group}
    if one.expected:
        provenance["expected"] = one.expected
    return replace(found, provenance=provenance)


def design_of(one: Planned) -> tuple[Any, ...]:
    """Names a planned run in the records, so that a later slice knows it."""
    config = json.dumps(one.run.to_dict(), sort_keys=True)
    digest = hashlib.sha256(f"{config}{one.lengths}".encode()).hexdigest()[:16]
    return (one.group, digest, one.repeat)


def expected_seconds(one: Planned, prediction: Prediction) -> float:
    """Predicted device time of a run: building, warm-up and batches."""
    time_of = prediction.time
    if time_of.step_s is not None:
        each = time_of.step_s
        if one.lengths:
            each *= sum(one.lengths) / len(one.lengths) / one.run.seq_len
    else:
        generated = one.run.max_new_tokens - 1
        each = (time_of.prefill_s or 0.0) + generated * (time_of.decode_s_per_token or 0.0)
    building = OVERHEAD_S + prediction.num_params / BUILD_PARAMS_PER_S
    if one.expected == "fails":
        return building + each + REPLACED_WORKER_S
    return building + 1.5 * each * (1 + one.num_batches)


def missing_package(one: Planned) -> str:
    """The package that `one` needs and this machine lacks, or ""."""
    needed = []
    if one.run.quant in FOUR_BIT_BNB | {"int8"} or "8bit" in one.run.optimizer:
        needed.append("bitsandbytes")
    if one.run.attn == "flash_attention_2":
        needed.append("flash_attn")
    if one.run.loss_head == "liger":
        needed.append("liger_kernel")
    return next((name for name in needed if importlib.util.find_spec(name) is None), "")


def device_facts() -> dict[str, Any]:
    """What the device takes beside tensors, asked in a process of its own."""
    code = (HERE / "facts.py").read_text(encoding="utf-8")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return {"schema_version": 1, "date": datetime.now(UTC).isoformat(timespec="seconds"), **facts}


def commit() -> str:
    """The commit of this checkout; empty where git or its folder is not there."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def show(wanted: Iterable[Planned], gpu: GpuSpec) -> None:
    total_s: dict[str, float] = {}
    for one in wanted:
        prediction = predicted(one.run, gpu)
        needs_s = expected_seconds(one, prediction)
        total_s[one.group] = total_s.get(one.group, 0.0) + needs_s
        print(f"{needs_s:6.1f} s  {name(one)}, predicted {gib(prediction)}, {prediction.verdict}")
    for group, seconds in total_s.items():
        print(f"{group}: {seconds / 60:.1f} min")
    print(f"all: {sum(total_s.values()) / 60:.1f} min by prediction")


def gib(prediction: Prediction) -> str:
    return format_bytes(prediction.memory.peak_allocated_bytes)


def name(one: Planned) -> str:
    run = one.run
    shape = f"{run.batch_size} x {run.seq_len}"
    if run.phase == "inference":
        shape = f"{run.batch_size} x {run.prompt_len} + {run.max_new_tokens} {run.kv_cache}"
    words = [one.group, run.model.partition("/")[2], run.method, run.precision, shape]
    if run.phase == "inference":
        words.remove(run.method)
    words += [run.quant] if run.quant not in (None, "none") else []
    words += [run.attn] if run.attn != "sdpa" else []
    words += ["ckpt"] if run.gradient_checkpointing and run.phase == "finetune" else []
    words += [f"must {one.expected.removesuffix('s')}"] if one.expected else []
    return " ".join(str(word) for word in words)


def line(one: Planned, found: Measurement, prediction: Prediction) -> str:
    """One line per run: what came out beside what was expected."""
    text = f"{found.device_s:6.1f} s  {name(one)}: {found.outcome}"
    if found.outcome != "ok":
        return f"{text} {found.detail[:120]}"
    if found.peak_allocated_bytes:
        memory = prediction.memory
        text += f", allocated {format_bytes(found.peak_allocated_bytes)}"
        text += f" ({100 * (memory.peak_allocated_bytes / found.peak_allocated_bytes - 1):+.1f} %)"
    if found.peak_reserved_bytes:
        error = prediction.memory.peak_reserved_bytes / found.peak_reserved_bytes - 1
        text += f", reserved {100 * error:+.1f} %"
    for measured, expected, what in (
        (found.step_s, prediction.time.step_s, "step"),
        (found.prefill_s, prediction.time.prefill_s, "prefill"),
        (found.decode_s_per_token, prediction.time.decode_s_per_token, "decode"),
    ):
        if measured and expected and not one.lengths:
            middle = sorted(measured)[len(measured) // 2]
            text += f", {what} {1e3 * middle:.1f} ms ({100 * (expected / middle - 1):+.0f} %)"
    return text


if __name__ == "__main__":
    main()
