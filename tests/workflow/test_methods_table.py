"""`whichlora methods`: every method on one model, against LoRA."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from whichlora.cli import main
from whichlora.errors import ConfigError
from whichlora.methods import list_methods
from whichlora.workflow.methods import method_rows


def test_each_method_has_a_row_with_numbers_or_a_reason() -> None:
    rows = {row.name: row for row in method_rows("HuggingFaceTB/SmolLM2-135M", "a100-sxm-80gb")}
    assert list(rows) == list(list_methods())
    lora = rows["lora"]
    assert (lora.peak_share, lora.step_share) == (1.0, 1.0)
    assert "vllm" in lora.engines
    assert rows["dora"].engines == ("transformers",)
    assert rows["vera"].num_trainable_params < lora.num_trainable_params // 10
    assert not rows["full"].merges
    assert "block_size must divide 576" in rows["c3a"].refusal
    assert rows["c3a"].peak_bytes is None


def test_the_command_prints_them_and_their_fields() -> None:
    arguments = ["methods", "HuggingFaceTB/SmolLM2-135M", "--json"]
    shown = json.loads(CliRunner().invoke(main, arguments).output)
    assert [row["name"] for row in shown["methods"]] == list(list_methods())
    text = CliRunner().invoke(main, arguments[:-1]).output
    assert "lokr" in text
    assert "1.00" in text


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not in the database"):
        method_rows("no-such-model-7000b")
