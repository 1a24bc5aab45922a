"""How fast a calibration database is read and fitted; records are made, not measured."""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from whichlora import api
from whichlora.calibration import prior_calibration
from whichlora.fitting import fit
from whichlora.prediction import predict
from whichlora.results import Measurement
from whichlora.specs import RunConfig
from whichlora.store.measurements import read_measurements, record_ids

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
    gpu = api.find_gpu(GPU)
    calibration = prior_calibration(gpu)
    models = [api.load_model(one.hub_id) for one in api.list_models()]
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


def write(root: Path, found: list[Measurement], per_file: int = 500) -> int:
    """One file per `per_file` records; their bytes."""
    folder = root / GPU / "measurements"
    folder.mkdir(parents=True)
    for start in range(0, len(found), per_file):
        text = "".join(json.dumps(one.to_dict()) + "\n" for one in found[start : start + per_file])
        (folder / f"run-{start}.jsonl").write_text(text, encoding="utf-8")
    return sum(path.stat().st_size for path in folder.iterdir())


def best_of(work: Callable[[], object], times: int) -> tuple[float, float]:
    """Shortest and longest wall time: the machine is rarely ours alone."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found), max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--read", type=int, default=100_000)
    parser.add_argument("--fit", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    made = list(records(max(options.read, options.fit), random.Random(0)))
    print(f"{platform.python_version()} on {platform.machine()}, best and worst of {options.times}")
    print("| what | records | bytes | best | worst |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = write(root, made[: options.read])
        for what, work in (
            ("read and check", lambda: read_measurements([root], GPU)),
            ("ids alone", lambda: record_ids([root], GPU)),
        ):
            best, worst = best_of(work, options.times)
            print(f"| {what} | {options.read} | {size} | {best:.2f} s | {worst:.2f} s |")
    some = made[: options.fit]
    best, worst = best_of(lambda: fit(some, api.find_gpu(GPU), api.model_of), options.times)
    print(f"| fit, held-out error included | {options.fit} | | {best:.2f} s | {worst:.2f} s |")


if __name__ == "__main__":
    main()
