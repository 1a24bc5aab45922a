"""Every model, every type with every method, both phases: a prediction, offline, without torch."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.methods import list_methods
from whichlora.spec.checkpoint import stored_quant
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.store.models import ModelRecord, list_models
from whichlora.workflow import combinations, estimates

PUBLISHED = list_models()
# Stored in 4-bit integers, which engines alone read.
PACKED = [each for each in PUBLISHED if stored_quant(load_model(each.hub_id).config) == "w4a16"]
MODELS = [each for each in PUBLISHED if each not in PACKED]
METHODS = tuple(list_methods())
BY_PARAMS = sorted(MODELS, key=lambda model: model.params, reverse=True)
SMALLEST = {model.model_type: model.hub_id for model in BY_PARAMS}  # of each type
TURNS = {model.hub_id: METHODS[turn % len(METHODS)] for turn, model in enumerate(MODELS)}
ALL_METHODS = "meta-llama/Llama-3.1-8B"  # whose matrices every method takes
SEED = 20261123
LARGER = sorted({model.hub_id for model in MODELS} - set(SMALLEST.values()))
ON_A_GPU = {*SMALLEST.values(), *random.Random(SEED).sample(LARGER, 20)}
"""Models with runs whose requests are replayed: on a CPU there is no caching allocator."""


def methods_of(model: ModelRecord) -> tuple[str, ...]:
    """A fifth of the methods for the smallest model of a type; they take turns over its others."""
    if model.hub_id == ALL_METHODS:
        return METHODS
    if SMALLEST[model.model_type] != model.hub_id:
        return (TURNS[model.hub_id],)
    dice = random.Random(f"{SEED} {model.model_type}")
    return tuple(dice.sample(METHODS, len(METHODS))[: len(METHODS) // 5])


def checked(one: Prediction) -> None:
    memory, time = one.memory, one.time
    assert sum(memory.breakdown.values()) == memory.device_used_bytes
    assert all(size >= 0 for size in memory.breakdown.values()), memory.breakdown
    assert 0 < memory.peak_allocated_bytes <= memory.peak_reserved_bytes
    assert memory.peak_reserved_bytes <= memory.device_used_bytes
    low, high = memory.interval_bytes
    assert 0 < low <= memory.device_used_bytes <= high
    total = time.step_s
    if total is None:
        assert time.prefill_s is not None
        total = time.time_per_token_s
    low_s, high_s = time.interval_s
    assert 0 < low_s < total < high_s < math.inf
    parts = sum(time.breakdown.values())
    if time.step_s is not None:
        assert parts == pytest.approx(time.step_s)
    assert all(0 <= seconds < math.inf for seconds in time.breakdown.values()), time.breakdown
    assert 0 < time.tokens_per_s < math.inf
    assert one.basis


def runs_of(model: ModelRecord, methods: Sequence[str]) -> list[RunConfig]:
    """A fine-tuning with each method, and a generation."""
    settings: dict[str, list[Any]] = {"model": [model.hub_id], "seq_len": [448], "batch_size": [2]}
    training: dict[str, Sequence[Any]] = {
        "phase": ["finetune"],
        "method": methods,
        "gradient_checkpointing": [None],
    }
    generation: dict[str, list[Any]] = {"phase": ["inference"], "prompt_len": [64]}
    return [*combinations.grid(settings | training), *combinations.grid(settings | generation)]


@pytest.mark.sampled(80)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.hub_id)
def test_a_model_is_estimated_in_both_phases(model: ModelRecord) -> None:
    predictions = estimates.estimate(runs_of(model, methods_of(model)), ["cpu"])
    methods = [one.run.method for one in predictions if one.run.phase == "finetune"]
    assert len(predictions) == len(methods) + 1
    for refused in set(methods_of(model)) - set(methods):
        fault = (
            rf"^(method: ({refused} |what is trained )|adapter_layers must not be above "
            r"|quant: (the experts|transformers clamps) )"
        )
        with pytest.raises(ConfigError, match=fault):
            estimates.estimate(runs_of(model, [refused])[:1], ["cpu"])
    if model.hub_id in ON_A_GPU:
        two = random.Random(f"{SEED} {model.hub_id}").sample(methods, min(2, len(methods)))
        predictions += estimates.estimate(runs_of(model, two), ["h100-sxm-80gb"])
    for one in predictions:
        checked(one)
        assert one.num_params == model.params


@pytest.mark.parametrize("model", PACKED, ids=lambda model: model.hub_id)
def test_a_packed_model_is_served_and_not_trained(model: ModelRecord) -> None:
    with pytest.raises(ConfigError, match="and nothing here trains"):
        estimates.estimate(runs_of(model, ["lora"])[:1], ["h100-sxm-80gb"])
    ranks = (("tensor_parallel_size", 8),)
    run = RunConfig(
        model=model.hub_id, phase="inference", serving="vllm", serving_options=ranks, context=8192
    )
    (one,) = estimates.estimate([run], ["h200-sxm-141gb"])
    assert one.serving is not None
    assert one.serving.starts


def test_no_estimate_loads_torch() -> None:
    code = (
        "import sys, json\n"
        "from whichlora.workflow import combinations, estimates\n"
        "settings = {'phase': ['finetune', 'inference'], 'seq_len': [448]}\n"
        f"types = settings | {{'model': {list(SMALLEST.values())!r}, 'method': ['lora']}}\n"
        "types |= {'gradient_checkpointing': [False]}  # ALBERT has none\n"
        f"methods = settings | {{'model': ['{ALL_METHODS}'], 'method': {METHODS!r}}}\n"
        "methods |= {'gradient_checkpointing': [None]}  # as the method has it\n"
        "runs = [*combinations.grid(types), *combinations.grid(methods)]\n"
        "found = estimates.estimate(runs, ['h100-sxm-80gb'])\n"
        "print(json.dumps([len(found), sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    count, modules = json.loads(done.stdout)
    # served is what is merged, whatever trained it, and what is served as trained
    as_trained = sum(method.serve == "as-trained" for method in list_methods().values())
    assert count == 2 * len(SMALLEST) + len(METHODS) + 1 + as_trained
    heavy = {"torch", "transformers", "peft", "bitsandbytes", "pandas", "sklearn", "scipy"}
    assert not heavy & set(modules)
