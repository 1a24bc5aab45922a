"""Lengths of rows, beside the positions that a model looks up."""

from __future__ import annotations

from dataclasses import replace

from whichlora.errors import ConfigError
from whichlora.predict.images import with_lengths
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import RunConfig


class BeyondPositionsError(ConfigError):
    """Rows are longer than the positions that a model looks up."""


USUAL_LENGTH = RunConfig(model="").seq_len  # of a training that states none


def within_positions(model: ModelSpec, run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """`run` with no longer rows than `model` has learned positions for, and a note where it cuts.

    The usual length is cut, as the model's tokenizer cuts rows. Looking up more fails on the GPU.

    Raises:
        BeyondPositionsError: another length beyond them.
    """
    longest = model.longest_row
    if run.phase != "finetune" or longest is None or run.seq_len <= longest:
        return run, ()
    if model.tower is not None and model.tower.transcribes:
        return with_lengths(model, run), ()
    if run.seq_len != USUAL_LENGTH:
        raise BeyondPositionsError(
            f"seq_len: {run.seq_len} tokens are more than the {longest} positions that "
            f"{model.name} looks up; give {longest} or less"
        )
    note = f"seq_len: {run.seq_len} is cut to the {longest} positions that {model.name} looks up"
    return replace(run, seq_len=longest), (note,)
