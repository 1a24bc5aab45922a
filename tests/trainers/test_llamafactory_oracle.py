"""LLaMA-Factory's own trainers, and TRL's of older releases, traced on fake tensors."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import pytest

pytest.importorskip("trl", reason="pip install trl beside the profile extra")

import trainer_traces

pytestmark = pytest.mark.oracle
TRL = version("trl")


@pytest.mark.skipif(not TRL.startswith("0.24"), reason="pip install --no-deps trl==0.24.0")
@pytest.mark.skipif(not find_spec("llamafactory"), reason="needs LLaMA-Factory")
@pytest.mark.parametrize("trainer", trainer_traces.OF_LLAMAFACTORY)
@pytest.mark.parametrize("seed", [1000, 1001, 1002])
def test_the_ledger_has_the_bytes_of_llamafactory_s_code(seed: int, trainer: str) -> None:
    trainer_traces.beside_transformers_5()
    line = trainer_traces.draw(seed, trainer)
    assert trainer_traces.predicted(line) == pytest.approx(trainer_traces.traced(line), rel=0.015)


@pytest.mark.skipif(not TRL.startswith("1.9"), reason="pip install --no-deps trl==1.9.0")
@pytest.mark.parametrize("trainer", trainer_traces.OF_TRL_1_9)
@pytest.mark.parametrize("seed", [1000, 1001, 1002])
def test_the_ledger_has_the_bytes_of_the_trl_that_axolotl_needs(seed: int, trainer: str) -> None:
    line = trainer_traces.draw(seed, trainer, TRL)
    assert trainer_traces.predicted(line) == pytest.approx(trainer_traces.traced(line), rel=0.015)
