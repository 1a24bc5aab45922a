"""One other estimator, asked through its own interface: `peer_adapters.py TOOL < requests`.

Runs under the interpreter that has the tools, where whichlora is not installed. Reads one JSON
object of arguments per line, made by `peer_requests.py`; writes the tool's version, then per line
`{"bytes": ...}`, with `low` and `high` where the tool states them, or `{"unanswered": why}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

GIB = 2**30
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
Answer = dict[str, float]


def size_in_bytes(text: str) -> float:
    """Bytes of a size as fm_training_estimator prints it, such as "12.3 GiB"."""
    number, unit = text.split()
    return float(number) * UNITS[unit]


def accelerate(arguments: dict[str, Any]) -> Answer:
    """What `accelerate estimate-memory` prints as "Training using Adam", without asking the Hub."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel

    with _model_folder(arguments["config"]) as folder, init_empty_weights():
        config = AutoConfig.from_pretrained(folder)
        model = AutoModel.from_config(config, torch_dtype=torch.float32)
    total, _ = calculate_maximum_sizes(model)
    return {"bytes": max(estimate_training_usage(total, arguments["dtype"]).values())}


def canifinetune(arguments: dict[str, Any]) -> Answer:
    """The total without the safety margin, which the tool's own reports subtract, too."""
    from canifinetune.estimator import EstimateRequest, estimate
    from canifinetune.estimator.model_metadata import KNOWN_MODELS

    if arguments["model_id"] in KNOWN_MODELS:
        arguments = arguments | {"override": None}
    memory = estimate(EstimateRequest(use_network=False, **arguments)).memory
    return {"bytes": (memory.total_estimated_gb - memory.safety_margin_gb) * GIB}


def fitcheck_llm(arguments: dict[str, Any]) -> Answer:
    """Its sum for a config and the parameter count that the Hub would state, without asking it."""
    from fitcheck import ModelConfig, TrainingConfig, config_parser, estimate, get_gpu

    name, config = arguments["model_id"], arguments["config"]
    config_parser._reject_unsupported(config, name)
    fields = config_parser._parse_fields(config)
    num_params = config_parser._reconcile_param_count(
        name, arguments["num_params"], config_parser._count_params(fields)
    )
    sizes = {one: getattr(fields, one) for one in fields.__dataclass_fields__}
    model = ModelConfig(name=name, num_params=num_params, **sizes)
    found = estimate(model, TrainingConfig(**arguments["settings"]), get_gpu(**arguments["gpu"]))
    return {"bytes": found.total_mib * UNITS["MiB"]}


def fitscout(arguments: dict[str, Any]) -> Answer:
    from fitscout.memory.estimator import estimate_memory
    from fitscout.model.profile import ModelProfile

    found = estimate_memory(ModelProfile(**arguments["profile"]), **arguments["settings"])
    margin = found.total_gb * found.margin_pct / 100
    return {
        "bytes": found.total_gb * GIB,
        "low": (found.total_gb - margin) * GIB,
        "high": found.upper_gb * GIB,
    }


def fm_training_estimator(arguments: dict[str, Any]) -> Answer:
    """The theory alone: no trained regressor is shipped, so their libraries are not loaded."""
    regressor = ModuleType("fm_training_estimator.regressor")
    regressor.LookupRegressor = regressor.GetRegressor = None  # type: ignore[attr-defined]
    sys.modules.setdefault(regressor.__name__, regressor)
    from fm_training_estimator.config import arguments as settings
    from fm_training_estimator.sdk import estimate_memory

    with _model_folder(arguments["config"]) as folder:
        job = settings.JobConfig(
            hf_training=settings.HFTrainingArguments(fsdp=[], **arguments["training"]),
            fm=settings.FMArguments(base_model_path=str(folder), **arguments["fm"]),
            data=settings.DataArguments(te_approach=1),  # 0 and 2 read a dataset
            infra=settings.InfraArguments(numGpusPerPod=1, **arguments["infra"]),
            peft_lora=settings.PeftLoraConfig(**arguments["lora"]),
            peft_qlora=settings.PeftQLoraConfig(**arguments["qlora"]),
        )
        asked = settings.EstimateInput([job], settings.EstimatorMetadata())
        return {"bytes": size_in_bytes(estimate_memory(asked).total_mem_estimate)}


def ftuneai(arguments: dict[str, Any]) -> Answer:
    from ftuneai import Estimator, ModelSpec
    from ftuneai.loader import load_models

    spec = ModelSpec(**arguments["model"])
    if spec.name not in _ftuneai_models():
        load_models()[spec.name] = spec  # where a config from the Hub would go
    found = Estimator(model=spec.name, **arguments["settings"]).estimate_memory()
    return {"bytes": found.total_gb * GIB}


@cache
def _ftuneai_models() -> frozenset[str]:
    """The models that the tool has on file."""
    from ftuneai import list_model_names

    return frozenset(list_model_names())


@contextlib.contextmanager
def _model_folder(config: dict[str, Any]) -> Iterator[Path]:
    """A folder that Transformers reads `config` from, and a tokenizer of one word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
        yield Path(folder)


ADAPTERS: dict[str, Callable[[dict[str, Any]], Answer]] = {
    one.__name__: one
    for one in (accelerate, canifinetune, fitcheck_llm, fitscout, fm_training_estimator, ftuneai)
}


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["LOG_LEVEL"] = "ERROR"
    tool = sys.argv[1]
    answers = sys.stdout
    answers.write(json.dumps({"version": version(tool)}) + "\n")
    for line in sys.stdin:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer: dict[str, Any] = dict(ADAPTERS[tool](json.loads(line)))
        except Exception as error:  # whatever a tool raises is that it has no answer
            answer = {"unanswered": f"{type(error).__name__}: {error}".strip().splitlines()[-1]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
