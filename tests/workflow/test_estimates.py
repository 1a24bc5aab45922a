"""Predictions of models that the formulas do not know."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from whichlora.errors import ConfigError
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
    with pytest.raises(ConfigError, match="is not known to the formulas"):
        estimates.estimate([unknown], ["t4-16gb"], engine="ledger")


def test_the_largest_batch_of_a_traced_model_is_not_searched(
    unknown: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whichlora.tracer.client.require_tracing", lambda asker: None)
    with pytest.raises(ConfigError, match="batch_size: max needs a model that the formulas know"):
        estimates.estimate([unknown], ["t4-16gb"], maximise="batch_size")
