"""Adding a model to one's own database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whichlora.errors import ConfigError
from whichlora.store.models import find_model
from whichlora.workflow import add_model


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICHLORA_MODELS", str(tmp_path / "own"))
    monkeypatch.setattr(add_model, "find_spec", lambda name: None)  # no libraries to check with


def config_file(folder: Path, **changed: object) -> Path:
    packaged = find_model("Qwen/Qwen3-8B")
    assert packaged is not None
    path = folder / "config.json"
    path.write_text(json.dumps({**packaged.config, "num_hidden_layers": 3, **changed}))
    return path


def test_without_the_libraries_it_is_kept_and_not_checked(tmp_path: Path) -> None:
    added = add_model.add("my-org/small", config_file(tmp_path))
    assert not added.is_checked
    found = find_model("my-org/small")
    assert found is not None
    assert found.num_params == added.num_params


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("small", {}, "model: 'small' is no hub id; give organisation/name"),
        ("./my/small", {}, "is no hub id"),
        ("../x", {}, "is no hub id"),
        ("qwen/qwen3-8b", {}, "is in the database already"),
        ("my-org/odd", {"model_type": "odd"}, "model_type 'odd' is not known to the formulas"),
        ("my-org/odd", {"hidden_size": "x"}, "hidden_size is 'x'"),
    ],
)
def test_what_can_not_be_added_is_one_line(
    tmp_path: Path, name: str, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        add_model.add(name, config_file(tmp_path, **changed))
    assert not (tmp_path / "own").exists()
