"""Plans of three small models on a device that answers from the formulas."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from whichlora.predict.words import describe
from whichlora.spec.run import RunConfig

MODELS = ("HuggingFaceTB/SmolLM2-135M", "EleutherAI/pythia-160m", "Qwen/Qwen2.5-0.5B")
CONFIG = """
stage1_profile:
  model_names: [{models}]
  batch_size: [1, 2]
  prefill_length: 16
  tokens_to_generate: 8
  peak_memory: {inference_memory}
stage2_profile:
  batch_size: [1, 2, 4]
  total_time: {total_time}
  peak_memory: {finetune_memory}
methods: {methods}
ranks: 8
dataset: {{path: data.jsonl, text_column: text}}
sequence_length: 64
gpu: cpu
precision: fp32
weights: random
profile: {profile}
output_dir: out
calibration_dir: calibration
"""


class Silent:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def profiling(self, run: RunConfig, *, number: int, open_candidates: int) -> None:
        self.said.append(f"profile {number}: {describe(run)}")

    def learned(self, measurement: Any, prediction: Any) -> None:
        self.said.append(f"learned {measurement.outcome}")

    def training(self, job: Path, *, expected_s: float | None) -> None:
        self.said.append(f"training: {job}")


def write_config(folder: Path, **changes: str) -> Path:
    rng = random.Random(0)
    rows = [{"text": "x" * rng.randint(5, 90)} for _ in range(200)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "models": ", ".join(MODELS),
        "methods": "[lora, qlora]",
        "profile": "frontier",
        "inference_memory": "64GiB",
        "finetune_memory": "64GiB",
        "total_time": "10h",
    }
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(**(values | changes)))
    return path
