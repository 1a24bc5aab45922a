"""The sweep that tests of every engine run: one model, LoRA, three batch sizes, 200 rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VALUES: dict[str, Any] = {
    "models": "EleutherAI/pythia-160m",
    "stage1_profile": {"batch_size": 1, "prefill_length": 16, "tokens_to_generate": 8},
    "stage2_profile": {"batch_size": [1, 2, 4]},
    "methods": "lora",
    "ranks": 8,
    "dataset": {"path": "data.jsonl", "text_column": "text"},
    "sequence_length": 64,
    "weights": "random",
    "profile": "all",
    "num_batches": 3,
}


def write_config(folder: Path, **settings: Any) -> Path:
    """A config of `VALUES` and `settings`, with its rows beside it."""
    rows = [{"text": "x" * (10 + index % 60)} for index in range(200)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "config.yaml"
    path.write_text(json.dumps(VALUES | settings))  # JSON is YAML
    return path
