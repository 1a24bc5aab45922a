"""Exports of a model whose checkpoint has experts in mxfp4: each tool is told to expand them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from whichlora.cli import main


def exported(model: str, tool: str, folder: Path) -> Result:
    options = ["--to", tool, "--gpu", "h100-sxm-80gb", "--output", str(folder)]
    result = CliRunner().invoke(main, ["export", model, *options])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize(
    ("tool", "file", "line"),
    [
        ("transformers", "train.py", "quantization_config=Mxfp4Config(dequantize=True)"),
        ("axolotl", "axolotl.yaml", "model_quantization_config: Mxfp4Config"),
    ],
)
def test_a_packed_checkpoint_is_expanded_and_a_copy_is_not(
    tmp_path: Path, tool: str, file: str, line: str
) -> None:
    exported("openai/gpt-oss-20b", tool, tmp_path / "packed")
    exported("unsloth/gpt-oss-20b-BF16", tool, tmp_path / "copy")
    assert line in (tmp_path / "packed" / file).read_text()
    assert "Mxfp4" not in (tmp_path / "copy" / file).read_text()


def test_the_command_line_of_trl_has_no_key_for_it(tmp_path: Path) -> None:
    said = exported("openai/gpt-oss-20b", "trl", tmp_path).output
    assert "TRL's command line has no key for Mxfp4Config(dequantize=True)" in said
