"""The table of a parameter guide: what each combination needs, and how long the data takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whichlora.dataset.workload import count_steps
from whichlora.errors import ConfigError
from whichlora.serving import get_engine
from whichlora.spec.costs import Offer
from whichlora.spec.numeric import ceil_div
from whichlora.spec.results import Answers, Interval, Prediction, Refused, known_values
from whichlora.spec.run import RunConfig
from whichlora.store.costs import Rates
from whichlora.workflow import estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideRow:
    """One combination of model, accelerator, method, batch and length.

    Args:
        num_steps: optimizer steps of the whole training; None where an engine answers requests.
        total_s: of all the data; `total_interval_s` as sure as the prediction's own interval.
    """

    prediction: Prediction
    num_steps: int | None
    total_s: float
    total_interval_s: Interval

    @property
    def tokens_per_s(self) -> float:
        """That are trained on, or answered by a serving engine."""
        serving = self.prediction.serving
        if serving is None:
            return self.prediction.time.tokens_per_s
        return math.nan if serving.time is None else serving.time.output_tokens_per_s

    @property
    def offer(self) -> Offer | None:
        cost = self.prediction.cost
        return None if cost is None else cost.offer

    @property
    def money(self) -> float | None:
        """What the whole training costs, in the currency of `offer`."""
        cost = self.prediction.cost
        return None if cost is None else cost.money(self.total_s)

    @property
    def kwh(self) -> Interval | None:
        """Bounds of the electricity that the boards take for it."""
        cost = self.prediction.cost
        return None if cost is None else cost.kwh(self.total_s)

    @property
    def co2_kg(self) -> Interval | None:
        """Bounds of the CO2 of that electricity."""
        cost = self.prediction.cost
        return None if cost is None else cost.co2_kg(self.total_s)

    def to_row(self) -> dict[str, Any]:
        """Flat, in base units: a row of a CSV file or of a DataFrame."""
        prediction, run = self.prediction, self.prediction.run
        low, high = prediction.memory.interval_bytes
        row = {
            "model": run.model,
            "gpu": prediction.gpu,
            "method": run.method,
            "r": run.r,
            "batch_size": run.batch_size,
            "seq_len": run.seq_len,
            "device_used_bytes": prediction.memory.device_used_bytes,
            "device_used_low_bytes": low,
            "device_used_high_bytes": high,
            "usable_bytes": prediction.usable_bytes,
            "verdict": prediction.verdict,
            "tokens_per_s": self.tokens_per_s,
            "step_s": prediction.time.step_s,
            "num_steps": self.num_steps,
            "total_s": self.total_s,
            "total_low_s": self.total_interval_s[0],
            "total_high_s": self.total_interval_s[1],
            "basis": prediction.basis,
            "money": self.money,
            "currency": None if self.offer is None else self.offer.currency,
            "kwh_low": None if self.kwh is None else self.kwh[0],
            "kwh_high": None if self.kwh is None else self.kwh[1],
            "co2_low_kg": None if self.co2_kg is None else self.co2_kg[0],
            "co2_high_kg": None if self.co2_kg is None else self.co2_kg[1],
        }
        return known_values(row)

    def served_columns(self) -> dict[str, Any]:
        """What a guide to serving engines has beside the columns of `to_row`."""
        run, serving = self.prediction.run, self.prediction.serving
        time = None if serving is None else serving.time
        columns = {
            "serving": run.serving,
            "serving_gpus": get_engine(run.serving).num_gpus(run),
            "context": run.longest_sequence,
            "max_running": None if serving is None else serving.max_running,
            "ttft_s": None if time is None else time.ttft_s,
            "tpot_s": None if time is None else time.tpot_s,
            "requests_per_s": None if time is None else time.requests_per_s,
        }
        return known_values(columns)

    def spread_columns(self) -> dict[str, Any]:
        """What a guide over several GPUs has beside the columns of `to_row`."""
        config = self.prediction.run.parallel
        columns = {
            "gpus": config.gpus,
            "nodes": config.nodes,
            "parallel": config.strategy,
            "gpu_s": config.gpus * self.total_s,
        }
        return known_values(columns)


def make_guide(
    runs: Iterable[RunConfig | Refused],
    gpus: Sequence[str],
    *,
    num_samples: int,
    epochs: float = 1.0,
    calibration_dir: Path | None = None,
    rates: Rates | None = None,
) -> Answers[GuideRow]:
    """A row for every run on every accelerator, `num_samples` rows of full length as data.

    A serving engine answers as many requests of the lengths of its run.

    Raises:
        ConfigError: an unknown model or accelerator, settings that exclude each other, or
            inference without a serving engine.
    """
    rows = []
    predictions = estimates.estimate(runs, gpus, calibration_dir=calibration_dir, rates=rates)
    for prediction in predictions:
        if prediction.serving is not None:
            rows.append(_served(prediction, num_samples * epochs))
            continue
        if prediction.time.step_s is None:
            raise ConfigError(
                "phase: a guide is of fine-tuning, and of inference with an engine; give serving "
                "vllm, or use estimate"
            )
        run = prediction.run
        at_once = run.batch_size  # over all GPUs
        if prediction.several_gpus is not None:
            at_once = prediction.several_gpus.global_batch_size // run.gradient_accumulation_steps
        num_batches = ceil_div(num_samples, at_once)
        num_steps, _ = count_steps(num_batches, run.gradient_accumulation_steps, epochs)
        low, high = prediction.time.interval_s
        rows.append(
            GuideRow(
                prediction=prediction,
                num_steps=num_steps,
                total_s=num_steps * prediction.time.step_s,
                total_interval_s=(num_steps * low, num_steps * high),
            )
        )
    return Answers(rows, predictions.refused)


def _served(prediction: Prediction, num_requests: float) -> GuideRow:
    """The row of an engine that answers `num_requests`."""
    serving = prediction.serving
    time = None if serving is None else serving.time
    if time is None:
        unknown = (math.nan, math.nan)
        return GuideRow(
            prediction=prediction, num_steps=None, total_s=math.nan, total_interval_s=unknown
        )
    total_s = num_requests / time.requests_per_s
    low, high = (
        total_s * time.output_tokens_per_s / end for end in time.interval_output_tokens_per_s[::-1]
    )
    return GuideRow(
        prediction=prediction, num_steps=None, total_s=total_s, total_interval_s=(low, high)
    )
