from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whichlora.errors import ConfigError, DataFileError
from whichlora.store import models
from whichlora.store.models import find_model, list_models, near_matches
from whichlora.store.paths import data_folder

INDEX = json.loads((data_folder("models_db") / "index.json").read_text(encoding="utf-8"))


def entries() -> dict[str, dict[str, Any]]:
    files = data_folder("models_db").glob("*.json")
    return {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in files
        if file.stem != "index"
    }


def test_the_index_says_what_the_files_say() -> None:
    found = entries()
    assert set(found) == set(INDEX["models"])
    for stem, entry in found.items():
        assert stem == entry["hub_id"].replace("/", "--")
        listed = INDEX["models"][stem]
        assert listed["model_type"] == entry["config"]["model_type"]
        shared = set(listed) - {"model_type"}
        assert {key: listed[key] for key in shared} == {key: entry[key] for key in shared}
        for name in (entry["hub_id"], *entry["aliases"]):
            assert INDEX["names"][name.lower()] == stem
    known = {x.lower() for entry in found.values() for x in (entry["hub_id"], *entry["aliases"])}
    assert set(INDEX["names"]) == known


def test_no_file_claims_a_revision_that_nobody_recorded() -> None:
    assert not any("revision" in entry for entry in entries().values())


@pytest.mark.parametrize("stem", INDEX["models"])
def test_every_hub_id_and_alias_resolves_in_any_case(stem: str) -> None:
    record = INDEX["models"][stem]
    for name in (record["hub_id"], *record["aliases"]):
        for spelled in (name, name.upper()):
            spec = find_model(spelled)
            assert spec is not None
            assert (spec.name.lower(), spec.num_params) == (name.lower(), record["params"])


def test_a_short_name_resolves_where_only_one_architecture_has_it() -> None:
    spec = find_model("llama-3.1-8b")
    assert spec is not None
    assert spec.name == "meta-llama/Llama-3.1-8B"


def test_an_alias_says_whose_shapes_it_has() -> None:
    spec = find_model("meta-llama/Llama-3.1-8B-Instruct")
    assert spec is not None
    assert any(note.startswith("shapes of meta-llama/Llama-3.1-8B;") for note in spec.notes)


@pytest.mark.parametrize("name", ["", " ", "/", "nobody/nothing", "../index", "index"])
def test_a_name_of_nothing_finds_nothing(name: str) -> None:
    assert find_model(name) is None


def test_listing_has_every_model_once_with_its_size() -> None:
    listed = list_models()
    assert len(listed) == len(INDEX["models"])
    assert [x.hub_id.lower() for x in listed] == sorted(x.hub_id.lower() for x in listed)
    assert all(record.params > 0 for record in listed)


def test_a_misspelled_name_has_near_matches_best_first() -> None:
    near = near_matches("meta-lama/llama3.1-8b")
    assert near[0] == "meta-llama/Llama-3.1-8B"
    assert len(near) == 5
    assert near_matches("zzzzzzzz") == ()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of two models that share a short name."""
    record = {
        "aliases": [],
        "model_type": "llama",
        "params": 1,
        "check": "exact",
        "license": "mit",
        "gated": None,
        "release_year": 2024,
    }
    index = {
        "schema_version": 1,
        "names": {"a/tiny": "a--tiny", "b/tiny": "b--tiny"},
        "models": {"a--tiny": {"hub_id": "a/tiny", **record}, "b--tiny": {"hub_id": "b/tiny"}},
    }
    (tmp_path / "index.json").write_text(json.dumps(index))
    monkeypatch.setattr(models, "data_folder", lambda _: tmp_path)
    return tmp_path


def test_an_ambiguous_short_name_is_refused_with_its_meanings(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'tiny' is ambiguous: a/tiny, b/tiny; give one"):
        find_model("tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"schema_version": 2}', "schema_version is 2, this release reads 1 to 1"),
        ('{"schema_version": 1}', "config: must be an object, got NoneType"),
        (
            '{"schema_version": 1, "config": {"model_type": "no"}}',
            "config: a/tiny: model_type 'no'",
        ),
        (
            '{"schema_version": 1, "config": {"model_type": "llama", "vocab_size": "x"}}',
            "config: a/tiny: vocab_size is 'x'",
        ),
    ],
)
def test_a_broken_file_is_named_with_its_key(folder: Path, text: str, message: str) -> None:
    (folder / "a--tiny.json").write_text(text)
    with pytest.raises(DataFileError, match=f"a--tiny.json: .*{message}"):
        find_model("a/tiny")


def test_a_missing_file_and_a_broken_record_are_named(folder: Path) -> None:
    with pytest.raises(DataFileError, match=r"a--tiny.json: can't be read"):
        find_model("a/tiny")
    with pytest.raises(DataFileError, match=r"index.json: models.b--tiny: "):
        list_models()
