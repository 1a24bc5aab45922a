"""Lengths of rows beside the positions that a model looks up."""

from __future__ import annotations

import pytest

from whichlora.api import estimate, explain, where
from whichlora.errors import ConfigError
from whichlora.predict.lengths import USUAL_LENGTH, within_positions
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model

BERT = "bert-base-uncased"


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        (BERT, 512),
        ("gpt2", 1024),
        ("BAAI/bge-base-en-v1.5", 512),
        ("facebook/bart-base", 1024),
        ("FacebookAI/roberta-base", 512),  # of 514, the first two of which are of padding
        ("FacebookAI/xlm-roberta-base", 512),
    ],
)
def test_the_usual_length_is_cut_to_learned_positions(name: str, positions: int) -> None:
    run, notes = within_positions(load_model(name), RunConfig(model=name))
    assert run.seq_len == positions
    assert notes == (
        f"seq_len: {USUAL_LENGTH} is cut to the {positions} positions that {name} looks up",
    )
    as_long = RunConfig(model=name, seq_len=positions)
    assert within_positions(load_model(name), as_long) == (as_long, ())


def test_computed_positions_have_no_end() -> None:
    for name in ("HuggingFaceTB/SmolLM2-135M", "google-t5/t5-small"):
        run = RunConfig(model=name, seq_len=100_000)
        assert within_positions(load_model(name), run) == (run, ())


def test_a_stated_length_beyond_them_is_refused_by_every_command() -> None:
    message = r"^seq_len: 513 tokens are more than the 512 positions that bert-base-uncased looks"
    settings = {"task": "sequence-classification", "method": "full", "seq_len": 513}
    for ask in (estimate, explain, where):
        with pytest.raises(ConfigError, match=message):
            ask(BERT, gpu="t4", **settings)  # type: ignore[operator]
    answers = estimate(BERT, "t4", **{**settings, "seq_len": [512, 513]})  # type: ignore[arg-type]
    assert [each.run.seq_len for each in answers] == [512]
    assert [each.settings["seq_len"] for each in answers.refused] == [513]


def test_every_command_cuts_the_usual_length_with_a_note() -> None:
    settings = {"task": "sequence-classification", "method": "full"}
    (estimated,) = estimate(BERT, "t4", **settings)  # type: ignore[arg-type]
    explained = explain(BERT, "t4", **settings).prediction  # type: ignore[arg-type]
    (placed,) = where(BERT, gpu="t4", **settings)  # type: ignore[arg-type]
    assert placed.prediction is not None
    for prediction in (estimated, explained, placed.prediction):
        assert prediction.run.seq_len == 512
        assert sum("is cut to the 512 positions" in note for note in prediction.notes) == 1
