"""Every command says which of several cards an inexact name was taken as, and names the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from whichlora.cli import main

MODEL = "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", MODEL),
        ("estimate", MODEL, "--gpus", "2"),
        ("explain", MODEL),
        ("explain", MODEL, "--life"),
        ("where", MODEL),
        ("guide", "--models", MODEL),
        ("export", MODEL, "--to", "trl"),
        ("export", MODEL, "--to", "transformers", "--gpus", "2", "--parallel", "auto"),
        ("recommend", "--models", MODEL),
    ],
    ids=" ".join,
)
def test_a_name_of_several_cards_is_told(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"COLUMNS": "300"}).invoke(main, [*words, "--gpu", "v100"])
    assert result.exit_code == 0, result.output
    told = "note: v100: taken as v100-sxm2-16gb, the one with the least memory of v100-pcie-16gb, "
    told += "v100-pcie-32gb, v100-sxm2-16gb, v100-sxm2-32gb"
    assert result.output.count(told) == 1
