"""Parameters of the real module of a config, on the meta device: no weight is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from whichlora.profiler.build import auto_class_of, config_object


def count_parameters(model_config: Mapping[str, Any]) -> int:
    """Parameters of the module that transformers builds, each tied tensor once.

    Raises:
        MeasurementError: a `model_type` that the installed transformers lacks.
    """
    config = config_object(model_config)
    sees = {"text_config", "vision_config"} & set(model_config)
    auto = AutoModelForImageTextToText if sees else auto_class_of(config)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in auto.from_config(config).parameters())
