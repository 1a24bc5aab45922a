"""Defaults of PEFT's configs that a script leaves to it, beside PEFT's own."""

from __future__ import annotations

import dataclasses

import peft
import pytest

from whichlora.imports.peft_configs import RANKS

pytestmark = pytest.mark.oracle


def test_numbers_that_a_config_does_not_state_are_pefts() -> None:
    for name, stated in RANKS.items():
        fields = {field.name: field.default for field in dataclasses.fields(getattr(peft, name))}
        assert {field: fields[field] for field in stated} == stated
