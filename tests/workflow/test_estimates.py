"""Predictions of models that the formulas do not know."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.workflow import estimates


@pytest.fixture
def unknown(tmp_path: Path) -> RunConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "unheard_of", **sizes, **heads}))
    return RunConfig(model=str(path))


def test_without_the_libraries_of_a_trace_one_line_says_how(
    unknown: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    with pytest.raises(
        ConfigError,
        match=r"model_type 'unheard_of' is not known; tracing its real code: needs torch.*: "
        r"pip install 'whichlora\[profile\]'$",
    ):
        estimates.estimate([unknown], ["t4-16gb"])


def test_the_formulas_alone_refuse_it(unknown: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"is not known to the formulas; .* neither serving nor"):
        estimates.estimate([unknown], ["t4-16gb"], engine="ledger")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"phase": "inference", "serving": "vllm"},
            "serving: vllm is predicted by formulas, which do not know model_type 'unheard_of'; "
            "leave it out: generate is traced",
        ),
        (
            {"parallel": ParallelConfig(strategy="ddp", gpus=2)},
            "gpus: 2 are predicted by formulas, which do not know model_type 'unheard_of'; give 1, "
            "of which it is traced",
        ),
    ],
)
def test_what_no_trace_tells_of_it_is_refused_by_its_type(
    unknown: RunConfig, changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        estimates.estimate([replace(unknown, **changes)], ["h100-sxm-80gb"])
    assert str(error.value) == line


def test_the_largest_batch_of_a_traced_model_is_not_searched(
    unknown: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whichlora.tracer.client.require_tracing", lambda asker: None)
    with pytest.raises(ConfigError, match="batch_size: max needs a model that the formulas know"):
        estimates.estimate([unknown], ["t4-16gb"], maximise="batch_size")
