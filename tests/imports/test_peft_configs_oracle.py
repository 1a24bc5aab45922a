"""Defaults of PEFT's configs that a script leaves to it, beside PEFT's own."""

from __future__ import annotations

import dataclasses

import peft
import pytest

from whichlora.methods import list_methods

pytestmark = pytest.mark.oracle


def test_numbers_that_a_config_does_not_state_are_pefts() -> None:
    for method in list_methods().values():
        stated = dict(method.peft_defaults)
        if stated:
            config = getattr(peft, method.peft_class.rpartition(".")[2])
            fields = {field.name: field.default for field in dataclasses.fields(config)}
            assert {name: fields[name] for name in stated} == stated, method.name
