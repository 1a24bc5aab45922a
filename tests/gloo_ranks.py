"""Small models on several gloo processes of this CPU, and the live tensor bytes of one of them.

`gloo_worker.py` is one rank: it reads cases (JSON) and writes a reading of each.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from devices import CPU
from small_models import CONFIGS, IMAGE_CONFIGS
from train_runs import run_ranks

from whichlora.families import build
from whichlora.predict.quantities import training_step
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig

WORKER = Path(__file__).with_name("gloo_worker.py")
HAS_DEEPSPEED = find_spec("deepspeed") is not None
SECONDS_OF_CASE = 120
Reading = dict[str, Any]  # bytes at rest, and the peaks of forward, backward and step; or an error


def readings(cases: Sequence[Mapping[str, Any]], *, world_size: int) -> list[Reading]:
    """What the ranks that need most of each case hold, at rest and at the peak of each pass.

    Args:
        cases: "family", "config", and "run": the fields of a `RunConfig` that are not defaults.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "cases.json").write_text(json.dumps(list(cases)))
        run_ranks(
            WORKER,
            str(root),
            world_size=world_size,
            logs_folder=root,
            timeout_s=60 + SECONDS_OF_CASE * len(cases),
        )
        if os.environ.get("NAME_STORAGES"):
            for rank in range(world_size):
                text = (root / f"rank{rank}.log").read_text()
                Path(os.environ["STORAGES_LOG"] + f".{rank}").write_text(text)
        answers = (root / f"rank{rank}.json" for rank in range(world_size))
        by_rank = [json.loads(answer.read_text()) for answer in answers]
    return [_largest(of_case) for of_case in zip(*by_rank, strict=True)]


def _largest(of_ranks: Iterable[Reading]) -> Reading:
    of_ranks = list(of_ranks)
    for reading in of_ranks:
        if "error" in reading:
            return reading
    return {name: max(reading[name] for reading in of_ranks) for name in of_ranks[0]}


FORWARD = ("images_forward", "layer_forward", "loss_forward")
UPDATE = ("optimizer_step", "flat_gradient", "gradient_norm")


def predicted_peaks(case: Mapping[str, Any]) -> dict[str, int]:
    """The formulas' peaks of forward, backward and step."""
    run = RunConfig.from_dict({"model": case["family"]} | case["run"])
    known = (CONFIGS | IMAGE_CONFIGS)[case["family"]]
    config = {"model_type": case["family"]} | known | case["config"]
    job = resolve(build(config, name=case["family"]), run, CPU)
    assert job.layout is not None
    step = training_step(job)
    (kind,) = job.layout.rank_kinds(step)
    counted = job.layout.ledger(kind)
    peaks: dict[str, int] = {}
    for moment in counted.moments:
        of_pass = "forward" if moment in FORWARD else "step" if moment in UPDATE else "backward"
        peaks[of_pass] = max(peaks.get(of_pass, 0), int(counted.moment_bytes(moment)))
    return peaks
