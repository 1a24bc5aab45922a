"""A training with the callback in each rank that torchrun starts: `callback_ranks.py CASE FOLDER`.

CASE is JSON: fields of `oracle_trainer.Case`. Each rank writes what it predicted and measured.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    folder = Path(sys.argv[2])
    settings: dict[str, Any] = json.loads(sys.argv[1])
    import oracle_trainer
    import torch

    settings["dtype"] = getattr(torch, settings.get("dtype", "float32"))
    trained = oracle_trainer.train(oracle_trainer.Case(name="ranks", **settings))
    forecast, measurement = trained.callback.forecast, trained.callback.measurement
    told: dict[str, Any] = {"lines": trained.lines}
    if forecast is not None and measurement is not None:
        told |= {
            "parallel": forecast.job.run.parallel.to_dict(),
            "predicted": forecast.prediction.memory.peak_allocated_bytes,
            "measured": measurement.peak_allocated_bytes,
        }
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
