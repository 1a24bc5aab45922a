"""The answer of a run on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from candidates import USABLE_BYTES, plan, prediction

from whichlora.search.feasibility import Candidate, judge
from whichlora.spec.plan import Limits
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.terminal import print_short
from whichlora.terminal.short import MAX_MODELS
from whichlora.units import GiB
from whichlora.workflow.answer import Answer, Search

TRAIN = RunConfig(model="org/best", batch_size=4, seq_len=100)
FITS, MAY_FIT, MISSES = 8 * GiB, int(1.02 * USABLE_BYTES), 40 * GiB


def candidates(kind: str, used: float, number: int) -> list[Candidate]:
    runs = [replace(TRAIN, model=f"org/{kind}-{i}") for i in range(number)]
    return [judge(prediction(run, used_bytes=used), Limits()) for run in runs]


def printed(
    capsys: pytest.CaptureFixture[str],
    fit: Sequence[Candidate],
    unsure: Sequence[Candidate],
    miss: Sequence[Candidate],
) -> str:
    looked_at = (*fit, *unsure, *miss)
    models = tuple(candidate.run.model for candidate in looked_at)
    search = Search(confidence=0.97, stopped_by="dry run", runs=0, device_s=0.0, chance_to_win={})
    answer = Answer(
        plan=plan(TRAIN, models, profile="none"),
        gpu=find_gpu("h100-sxm-80gb"),
        basis="made up",
        inference=[],
        finetune=looked_at,
        kept=models,
        winner=fit[0],
        front=[fit[0]],
        search=search,
        compared=(),
        tokens="12 sequences",
        may_fit=unsure,
    )
    print_short(answer)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("fit", "unsure", "miss", "said"),
    [
        (1, 0, 0, "1 more likely meets every limit: --all"),
        (2, 1, 0, "2 more likely meet every limit, 1 may fit: --all"),
        (0, 2, 1, "2 more may fit, 1 misses a limit: --all"),
        (0, 0, 2, "2 more miss a limit: --all"),
    ],
)
def test_models_that_are_not_shown_are_counted_as_what_they_are(
    fit: int, unsure: int, miss: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(
        capsys,
        candidates("fits", FITS, MAX_MODELS + fit),
        candidates("unsure", MAY_FIT, unsure),
        candidates("misses", MISSES, miss),
    )
    before, found, _ = shown.partition(said)
    assert found
    assert "more" not in before.split("Winner")[0]
