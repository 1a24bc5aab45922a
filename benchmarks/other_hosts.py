"""A user whose host is faster than that of the shipped records: what is predicted of their GPU.

    python benchmarks/other_hosts.py

The user's GPU is the shipped one; their host takes `HOST` to launch and to prepare, which no
record knows. Printed: an unseen step, predicted with none, one and four runs of their own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from markdown_tables import markdown_table

from whichlora.calibration.fit import fit
from whichlora.calibration.load import ids_elsewhere, model_of
from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.quantities import step_features
from whichlora.predict.resolve import resolve
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.results import Measurement
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.measurements import read_measurements
from whichlora.store.models import find_model
from whichlora.timing.model import log_deviation, prior_model, seconds

GPU = find_gpu("h100-sxm-80gb")
MODEL = "Qwen/Qwen2.5-3B"
HOST = {"launch": 18e-6, "trainer": 9e-6, "constant": 5e-3, "products": 1.37}
OWN = ((1, 512), (2, 1024), (4, 1024), (1, 256))  # batch and length
UNSEEN = (1, 384)


def features(batch_size: int, seq_len: int) -> tuple[RunConfig, dict[str, float]]:
    run = RunConfig(model=MODEL, method="lora", batch_size=batch_size, seq_len=seq_len)
    model = find_model(MODEL)
    assert model is not None
    return run, {k: float(v) for k, v in step_features(resolve(model, run, GPU)).items()}


def true_s(found: dict[str, float]) -> float:
    prior = prior_model(GPU, "finetune")
    return float(seconds(replace(prior, mean={**prior.mean, **HOST}), found)[0])


def own_runs(shipped: Sequence[Measurement]) -> list[Measurement]:
    made = []
    for number, shape in enumerate(OWN):
        run, found = features(*shape)
        empty = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"))
        made.append(
            replace(
                shipped[0],
                id=f"own-{number}",
                config=run.to_dict(),
                step_s=(true_s(found),) * 5,
                batch_seq_len=(run.seq_len,) * 5,
                moment_peak_bytes={},
                **empty,
            )
        )
    return made


def predicted(records: Sequence[Measurement], elsewhere: Collection[str]) -> tuple[float, float]:
    """Error of the unseen step, and how many times the interval reaches."""
    fitted = fit(records, GPU, model_of, held_out=False, elsewhere=elsewhere).time["finetune"]
    _, found = features(*UNSEEN)
    step_s = float(seconds(fitted, found)[0])
    reach = TWO_SIDED_Z[TIME_CONFIDENCE] * log_deviation(fitted, found, step_s)
    return step_s / true_s(found) - 1, math.exp(float(reach))


def main() -> None:
    roots = (ROOT / "calibration",)
    found = read_measurements(roots, GPU.key)
    shipped = [one for one in found if one.outcome == "ok" and one.run.phase == "finetune"]
    own, ids = own_runs(shipped), ids_elsewhere(roots, GPU.key)
    rows = []
    for number in (0, 1, 4):
        for name, elsewhere in (("as the user's own", ()), ("as of another machine", ids)):
            error, reach = predicted([*shipped, *own[:number]], elsewhere)
            rows.append((number, name, f"{100 * error:+.0f} %", f"{reach:.2f} times"))
    print(markdown_table(("own runs", "shipped records taken", "error", "interval"), rows))


if __name__ == "__main__":
    main()
