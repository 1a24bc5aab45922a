"""How fast a calibration database is read and fitted; records are made, not measured."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from whichlora.calibration.fit import fit
from whichlora.calibration.load import model_of
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.measurements import read_measurements, record_ids
from whichlora.store.models import list_models

GPU = "a100-sxm-80gb"
METHODS = ("lora", "qlora", "dora", "full")
ENVIRONMENT = {
    "device": "NVIDIA A100-SXM4-80GB",
    "driver": "570.86.15",
    "host": {"cpu": "AMD EPYC 7742 64-Core Processor", "cores": 16, "memory_bytes": 2**37},
    "versions": {"torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2"},
}


def records(count: int, dice: random.Random) -> Iterator[Measurement]:
    """Runs of every model of the database as the priors predict them, and noise."""
    gpu = find_gpu(GPU)
    calibration = prior_calibration(gpu)
    models = [load_model(one.hub_id) for one in list_models()]
    predicted: dict[RunConfig, Measurement] = {}
    for number in range(count):
        model = dice.choice(models)
        inference = number % 4 == 0
        run = RunConfig(
            model=model.name,
            phase="inference" if inference else "finetune",
            method=dice.choice(METHODS),
            batch_size=dice.choice((1, 2, 4, 8, 16, 32)),
            seq_len=dice.choice((256, 512, 1024, 2048, 4096)),
            r=dice.choice((8, 16, 64)),
            prompt_len=dice.choice((128, 512, 2048)),
            max_new_tokens=dice.choice((32, 128, 512)),
        )
        if run not in predicted:
            found = predict(model, run, gpu, calibration)
            memory, seconds = found.memory, found.time
            predicted[run] = Measurement(
                id="",
                gpu=GPU,
                date="2026-11-21T10:00:00+00:00",
                config=found.run.to_dict(),
                outcome="ok",
                step_s=(seconds.step_s,) * 5 if seconds.step_s else (),
                batch_seq_len=(run.seq_len,) * 5 if seconds.step_s else (),
                prefill_s=(seconds.prefill_s,) * 3 if seconds.prefill_s else (),
                decode_s_per_token=(seconds.decode_s_per_token,) * 3
                if seconds.decode_s_per_token
                else (),
                peak_allocated_bytes=memory.peak_allocated_bytes,
                peak_reserved_bytes=memory.peak_reserved_bytes,
                device_used_bytes=memory.device_used_bytes,
                environment=ENVIRONMENT,
                provenance={"run_id": uuid.UUID(int=number // 50).hex, "command": "whichlora run"},
            )
        one = predicted[run]

        def noisy(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(value * dice.lognormvariate(0, 0.03) for value in values)

        yield replace(
            one,
            id=uuid.UUID(int=dice.getrandbits(128)).hex,
            step_s=noisy(one.step_s),
            prefill_s=noisy(one.prefill_s),
            decode_s_per_token=noisy(one.decode_s_per_token),
        )


def write(root: Path, found: Iterator[Measurement], per_file: int = 500) -> int:
    """One file per `per_file` records; their bytes."""
    folder = root / GPU / "measurements"
    folder.mkdir(parents=True)
    for number in itertools.count():
        lines = [json.dumps(one.to_dict()) + "\n" for one in itertools.islice(found, per_file)]
        if not lines:
            return sum(path.stat().st_size for path in folder.iterdir())
        (folder / f"run-{number}.jsonl").write_text("".join(lines), encoding="utf-8")
    raise AssertionError


def timed(work: Callable[[], object], times: int) -> str:
    """Best wall time and best processor time, which other processes disturb less."""
    found = []
    for _ in range(times):
        start = time.perf_counter(), time.process_time()
        kept = work()  # freed after the clock stopped
        found.append((time.perf_counter() - start[0], time.process_time() - start[1]))
        del kept
    wall, processor = (min(column) for column in zip(*found, strict=True))
    return f"{wall:.2f} s | {processor:.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--read", type=int, default=100_000)
    parser.add_argument("--fit", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    dice = random.Random(0)
    print(f"Python {platform.python_version()}, {platform.machine()}, best of {options.times}\n")
    print("| what | records | MB | wall | processor |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = write(root, records(options.read, dice)) / 1e6
        for what, work in (
            ("read and check", lambda: read_measurements([root], GPU)),
            ("ids alone", lambda: record_ids([root], GPU)),
        ):
            print(f"| {what} | {options.read} | {size:.0f} | {timed(work, options.times)} |")
    some = list(records(options.fit, dice))
    gpu = find_gpu(GPU)
    row = timed(lambda: fit(some, gpu, model_of), options.times)
    print(f"| fit, left-out error included | {options.fit} | | {row} |")


if __name__ == "__main__":
    main()
