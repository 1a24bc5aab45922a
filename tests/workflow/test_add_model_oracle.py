"""The count of an added model against the module of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.store.models import find_model
from whichlora.workflow import add_model

pytestmark = pytest.mark.oracle
pytest.importorskip("torch")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WHICHLORA_MODELS", str(tmp_path / "own"))
    packaged = find_model("Qwen/Qwen3-0.6B")
    assert packaged is not None
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**packaged.config, "num_hidden_layers": 2}))
    return path


def test_an_equal_count_is_added_as_checked(config: Path) -> None:
    assert add_model.add("my-org/small", config).is_checked


def test_another_count_is_refused_and_not_kept(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = families.build
    monkeypatch.setattr(
        families, "build", lambda values, name: build({**values, "num_hidden_layers": 3}, name=name)
    )
    with pytest.raises(ConfigError, match="it was not added"):
        add_model.add("my-org/small", config)
    assert not (config.parent / "own").exists()
