"""Scores of models: a CSV file of the user's, such as results of an evaluation harness.

None ships: of the public tables with many base models, none states a licence to redistribute it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.quality import Score
from whichlora.store.models import resolve_name
from whichlora.store.table import number, read_table

COLUMNS = ("model", "score", "benchmark", "date", "source", "licence")
NEEDED = ("model", "score")


def read_scores(path: Path) -> Mapping[str, Score]:
    """The score of each model in the file at `path`, by the name that it means.

    Raises:
        DataFileError: naming file, line, column and what is accepted; two benchmarks, or two
            scores of one model.
    """
    scores: dict[str, Score] = {}
    benchmarks: dict[str, str] = {}
    for where, cells in read_table(path, COLUMNS, NEEDED):
        texts = {name: cells.get(name, "") for name in COLUMNS[2:]}
        try:
            model, _ = resolve_name(cells["model"])
            score = Score(model=model, score=number(cells, "score", where), **texts)
        except ConfigError as error:
            raise DataFileError(f"{where}: {error}") from None
        if model in scores:
            raise DataFileError(f"{where}: {model} has a score already; keep one of both")
        scores[model] = score
        benchmarks.setdefault(score.benchmark, where)
    if len(benchmarks) > 1:
        first, second = list(benchmarks)[:2]
        raise DataFileError(
            f"{benchmarks[second]}: benchmark is {second!r}, and {first!r} above; scores of two "
            "benchmarks can't be compared, keep one"
        )
    if not scores:
        raise DataFileError(f"{path}: has no row; give the score of one model or leave it out")
    return scores
