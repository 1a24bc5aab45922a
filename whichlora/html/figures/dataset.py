"""Total time against dataset size."""

from __future__ import annotations

from html import escape
from typing import Any

from whichlora.html import axes
from whichlora.html.figures.frame import best_of_each, limit_line, limit_lines, new_figure
from whichlora.html.marks import MUTED, Figure, Marks
from whichlora.html.source import Source
from whichlora.units import format_seconds

MAX_LINES = 8


def dataset_size(source: Source, marks: Marks) -> Figure | None:
    """Time of the whole fine-tuning over the number of sequences: the best of each variant."""
    sequences = source.num_sequences
    timed = (i for i in best_of_each(source, MAX_LINES) if source.points[i].total_s is not None)
    chosen = list(timed)
    if not sequences or not chosen:
        return None
    sizes = [sequences * factor for factor in (0.1, 1.0, 10.0, 100.0)]
    data: list[dict[str, Any]] = []
    for i in chosen:
        point = source.points[i]
        assert point.total_s is not None  # nothing else is chosen
        model = marks.labels[point.model]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": escape(f"{model} {point.variant}, batch {point.batch_size}", quote=False)
                + (" (winner)" if i == source.winner else ""),
                "x": sizes,
                "y": [point.total_s.value * size / sequences for size in sizes],
                "customdata": [i] * len(sizes),
                "line": {
                    "width": 3 if i == source.winner else 1.5,
                    "color": marks.colours[point.model],
                    "dash": marks.dashes[point.method],
                },
                "marker": {"size": 5, "color": marks.colours[point.model]},
            }
        )
    times = [value for trace in data for value in trace["y"]]
    lines, labels, beyond = limit_lines(
        [(source.limit("total_time_s"), "limit", format_seconds, "y", times)]
    )
    here, here_label = limit_line(sequences, f"this data: {sequences:.0f} ", across="x")
    here["line"] = here["line"] | {"dash": "dot", "color": MUTED}
    here_label["font"] = here_label["font"] | {"color": MUTED}
    return new_figure(
        "dataset",
        "Total time against dataset size",
        "Sequences of the same lengths as in this data; the best batch size of each model and "
        f"variant, {MAX_LINES} at most.{beyond}",
        data,
        xaxis=axes.counts_axis("sequences", sizes),
        yaxis=axes.seconds_axis("total time of the fine-tuning", times),
        shapes=[*lines, here],
        annotations=[*labels, here_label],
        legend={"orientation": "h", "y": -0.2},
    )
