"""A digest of the formulas, so that coefficients of others are not trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whichlora.calibration import formula_version as formulas
from whichlora.calibration.load import load_calibration
from whichlora.predict.coefficients import prior_calibration
from whichlora.spec.run import RunConfig
from whichlora.store.coefficients import write_coefficients
from whichlora.store.gpus import find_gpu
from whichlora.timing import work
from whichlora.workflow import estimates

GPU = find_gpu("a10-24gb")  # without records of its own


def test_the_digest_changes_with_a_formula_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    before = formulas.answers_digest()
    assert formulas.answers_digest() == before
    monkeypatch.setattr(work, "OUTSIDE_OPS", work.OUTSIDE_OPS + 1)
    assert formulas.answers_digest() != before


def test_the_digest_is_kept_until_a_source_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = formulas.formulas_digest.__wrapped__
    asked: list[str] = []

    def answered() -> str:
        asked.append("")
        return 16 * "a"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(formulas, "answers_digest", answered)
    assert (digest(), digest(), len(asked)) == (16 * "a", 16 * "a", 1)
    kept = tmp_path / "whichlora" / "formulas.json"
    for broken in ('{"sources": 3', json.dumps(json.loads(kept.read_text()) | {"digest": "a\n"})):
        kept.write_text(broken)
        assert digest() == 16 * "a"
    assert len(asked) == 3
    monkeypatch.setattr(formulas, "_sources", lambda: "others")
    assert (digest(), len(asked)) == (16 * "a", 4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # a file, where no folder can be
    assert (digest(), len(asked)) == (16 * "a", 5)


def test_coefficients_of_other_formulas_are_fitted_anew(tmp_path: Path) -> None:
    payload = prior_calibration(GPU).to_dict() | {"formulas": "others"}
    model = payload["time"]["finetune"]
    model["mean"] = {name: 100 * value for name, value in model["mean"].items()}
    path = write_coefficients(tmp_path, GPU.key, payload)
    assert load_calibration(GPU, tmp_path).time == prior_calibration(GPU).time
    stored = json.loads(path.read_text()) | {"formulas": formulas.formulas_digest()}
    write_coefficients(tmp_path, GPU.key, stored)
    slow = load_calibration(GPU, tmp_path).time["finetune"].mean["products"]
    assert slow == 100 * prior_calibration(GPU).time["finetune"].mean["products"]


def test_coefficients_of_other_formulas_need_not_have_todays_features(tmp_path: Path) -> None:
    payload = prior_calibration(GPU).to_dict() | {"formulas": "others"}
    del payload["time"]["decode"]["mean"]["engine"]
    write_coefficients(tmp_path, GPU.key, payload)
    assert load_calibration(GPU, tmp_path).time == prior_calibration(GPU).time


def test_an_estimate_says_that_it_was_fitted_anew(tmp_path: Path) -> None:
    gpu = find_gpu("a100-sxm-80gb")  # records of it are shipped
    payload = load_calibration(gpu, tmp_path).to_dict() | {"formulas": "others"}
    write_coefficients(tmp_path, gpu.key, payload)
    run = RunConfig(model="HuggingFaceTB/SmolLM2-135M")
    (found,) = estimates.estimate([run], [gpu.key], calibration_dir=tmp_path)
    assert "fitted just now" in found.basis
    assert "640 with other versions" in found.basis
