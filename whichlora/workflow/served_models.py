"""The largest models that an engine serves on a GPU, each in the widest weights that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from whichlora.config import models_for
from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving import get_engine
from whichlora.serving.base import Engine
from whichlora.spec.results import Answers, Prediction
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model, load_model_of
from whichlora.store.models import list_models
from whichlora.workflow import estimates
from whichlora.workflow.combinations import of_one_number

MOST_SHOWN = 8


def asks_for_models(settings: Mapping[str, Sequence[Any]]) -> bool:
    """Whether no model is named beside an engine that says what it starts."""
    engines = settings.get("serving", ())
    return not settings["model"] and any(get_engine(name).start is not None for name in engines)


def largest_served(
    settings: Mapping[str, Sequence[Any]], gpus: Sequence[str], **options: Any
) -> Answers[Prediction]:
    """The largest of the models that people compare, the largest first.

    Of each the widest of the engine's usual weights, or of those asked for, that start with all of
    the model on GPUs and run as many sequences as are asked for. Empty where none does.

    Args:
        settings: as of `estimates.estimate_grid`, without a model.
        gpus: one type, whose number may stand before it.
        options: of `estimates.estimate_grid`.

    Raises:
        ConfigError: several types or engines.
    """
    engine = get_engine(_only("serving", settings["serving"]))
    settings = {**settings, "phase": ["inference"]}
    numbered, types = of_one_number(settings, gpus)
    gpu = find_target(_only("gpu", types))
    number = max((count or 1 for count in numbered.get("gpus", [1])), default=1)
    names = models_for(number * gpu.memory_bytes)
    models = sorted(map(load_model, names), key=lambda model: model.num_params, reverse=True)
    forms = settings.get("quant", [None])
    if forms == [None]:
        forms = engine.usual_quants
    served: list[Prediction] = []
    for model in models:
        asked = {**settings, "model": [model.name], "quant": list(forms)}
        answers = estimates.estimate_grid(asked, gpus, **options)
        widest = next((each for each in answers if _is_served(engine, each)), None)
        served += [widest] if widest is not None else []
        if len(served) == MOST_SHOWN:
            break
    if not served:
        return Answers([])
    note = (
        f"the largest of {len(models)} widely used models of {len(list_models())} known; name "
        "models to compare others"
    )
    return Answers([replace(served[0], notes=(note, *served[0].notes)), *served[1:]])


def _only(name: str, values: Sequence[str]) -> str:
    if len(values) != 1:
        raise ConfigError(f"{name}: without a model give one, got {', '.join(values)}")
    return values[0]


def _is_served(engine: Engine, prediction: Prediction) -> bool:
    """Whether it surely starts, whole and with all sequences at once."""
    serving, run = prediction.serving, prediction.run
    if serving is None or prediction.verdict != "fits" or serving.refuses:
        return False
    job = resolve(load_model_of(run), run, find_target(prediction.gpu))
    assert engine.start is not None
    return serving.max_running >= serving.concurrency and engine.start(job.served).is_whole
