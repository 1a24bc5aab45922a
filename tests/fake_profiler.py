"""A device that answers from the formulas: the workflow without torch, in milliseconds."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whichlora.families import build
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.counted import CountedRun
from whichlora.predict.judged import judged_memory, judged_time
from whichlora.predict.predict import predict_counted
from whichlora.predict.quantities import forward_features, mean_context, moment_parts, passes
from whichlora.predict.resolve import resolve
from whichlora.profiler.early_stop import is_enough
from whichlora.profiler.installed import installed_versions
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Measurement, Outcome
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.workflow import launch

if TYPE_CHECKING:
    import pytest

DATE = "2026-11-21T00:00:00+00:00"


class FakeProfiler:
    """Stands in for `device.profile.Profiler`.

    A step takes `TIME_FACTOR` times what the priors say and a peak `MEMORY_FACTOR` times; what
    needs more than `OUT_OF_MEMORY_BYTES` runs out of memory. Every call is noted in `calls`.
    """

    TIME_FACTOR = 1.3
    MEMORY_FACTOR = 1.02
    OUT_OF_MEMORY_BYTES = 1 << 60
    OUTCOMES: Mapping[str, Outcome] = {}  # method -> how its runs end
    SLEEP_S = 0.0
    calls: list[RunConfig] = []  # noqa: RUF012 - shared on purpose: the test reads it

    def __init__(self, *, gpu: str, provenance: Mapping[str, Any], **_: Any) -> None:
        self._gpu = find_gpu(gpu)
        self._provenance = dict(provenance)

    @staticmethod
    def require_libraries() -> None:
        """None: the formulas need neither torch nor the fit."""

    def close(self) -> None:
        pass

    def measure(
        self,
        run: RunConfig,
        *,
        model_config: Mapping[str, Any],
        target_modules: Sequence[str],
        seq_lens: Sequence[int],
        num_batches: int,
        timeout_s: float,
        decisive_s: Sequence[float] = (),
        predicted_s: Sequence[float] = (),
    ) -> Measurement:
        if run.model == launch.RUN.model:
            return _launches(self._gpu, self.TIME_FACTOR, self._provenance)
        time.sleep(self.SLEEP_S)
        self.calls.append(run)
        with open(os.environ.get("WHICHLORA_TEST_CALLS", os.devnull), "a") as calls:
            calls.write(f"{run}\n")
        model = load_model(run.model)
        prior = prior_calibration(self._gpu)
        job = resolve(model, run, self._gpu)
        # here and below without the replay, which moves the reserve alone
        peak = round(judged_memory(job, prior).peak_allocated_bytes * self.MEMORY_FACTOR)
        outcome = self.OUTCOMES.get(run.method, "ok") if run.phase == "finetune" else "ok"
        if peak > self.OUT_OF_MEMORY_BYTES:
            outcome = "oom"
        values: dict[str, Any] = {}
        if outcome == "ok" and run.phase == "finetune":
            steps = [judged_time(job, prior, seq_len=length).total_s for length in seq_lens]
            times = [self.TIME_FACTOR * step for step in steps if step]
            number = _made("finetune", times, decisive_s, predicted_s)
            values = {
                "step_s": tuple(times[:number]),
                "batch_seq_len": tuple(seq_lens[:number]),
                "peak_allocated_bytes": peak,
            }
        elif outcome == "ok":
            counted = CountedRun(
                job=job, moments=moment_parts(job), is_replayed=False, passes=passes(job)
            )
            found = predict_counted(counted, prior).time
            prefill = self.TIME_FACTOR * (found.prefill_s or 0)
            decode = self.TIME_FACTOR * (found.decode_s_per_token or 0)
            whole = prefill + (run.max_new_tokens - 1) * decode
            number = _made("inference", [whole] * len(seq_lens), decisive_s, predicted_s)
            values = {
                "prefill_s": (prefill,) * number,
                "decode_s_per_token": (decode,) * number if decode else (),
                "generate_s": (whole,) * number,
                "peak_allocated_bytes": peak,
            }
        return Measurement(
            id=uuid.uuid4().hex,
            gpu=self._gpu.key,
            date=DATE,
            config=run.to_dict(),
            model_config=dict(model_config),
            outcome=outcome,
            detail="" if outcome == "ok" else "on purpose",
            device_s=1.0,
            environment={"device": "formulas", "libraries": installed_versions()},
            provenance=self._provenance,
            **values,
        )


def pretend_device(patch: pytest.MonkeyPatch) -> None:
    """Profiles are answered from the formulas, on a machine that is not busy."""
    patch.setattr("whichlora.profiler.profile.Profiler", FakeProfiler)
    patch.setattr(FakeProfiler, "calls", [])
    patch.setattr("whichlora.workflow.session.busy", lambda _: "")  # this one may be


def _launches(gpu: GpuSpec, factor: float, provenance: Mapping[str, Any]) -> Measurement:
    """What the small model that decodes at the pace of the host measures."""
    context = mean_context(launch.RUN.prompt_len, launch.RUN.max_new_tokens)
    job = resolve(build(launch.MODEL_CONFIG, name=launch.RUN.model), launch.RUN, gpu)
    kernels = forward_features(job, context=context, decoding=True)["launch"]
    launch_s = prior_calibration(gpu).time["decode"].mean["launch"]
    return Measurement(
        id=uuid.uuid4().hex,
        gpu=gpu.key,
        date=DATE,
        config=launch.RUN.to_dict(),
        model_config=launch.MODEL_CONFIG,
        outcome="ok",
        detail="",
        generate_s=(1.0,),
        prefill_s=(0.1,),
        decode_s_per_token=(factor * launch_s * kernels,),
        device_s=1.0,
        environment={"device": "formulas", "libraries": installed_versions()},
        provenance=provenance,
    )


def _made(
    phase: str,
    times_s: Sequence[float],
    decisive_s: Sequence[float],
    predicted_s: Sequence[float],
) -> int:
    """Batches that a profile makes before it ends."""
    for number in range(1, len(times_s) + 1):
        if is_enough(phase, times_s[:number], decisive_s, predicted_s):
            return number
    return len(times_s)
