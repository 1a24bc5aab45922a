"""What users of a serving engine wait against what it answers."""

from __future__ import annotations

from html import escape

from whichlora.html import axes
from whichlora.html.figures.frame import limit_lines, new_figure, shown_values
from whichlora.html.marks import Figure, Marks, error_bars
from whichlora.html.source import Source
from whichlora.units import format_count, format_seconds


def waits(source: Source, marks: Marks) -> Figure | None:
    """Time per token of one user over the tokens a second of all, one point per number of users."""
    shown = source.waits
    if source.winner is None or len(shown) < 2:
        return None
    rates = [each.output_tokens_per_s for each in shown]
    times = [each.tpot_s for each in shown]
    model = source.points[source.winner].model
    values, latencies = shown_values(rates), shown_values(times)
    lines, labels, beyond = limit_lines(
        [(source.limit("tpot_s"), "limit", format_seconds, "y", latencies)]
    )
    trace = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": escape(f"{marks.labels[model]} in {shown[0].engine}", quote=False),
        "x": [each.value for each in rates],
        "y": [each.value for each in times],
        "text": [str(each.concurrency) for each in shown],
        "textposition": "top left",
        "hoverinfo": "text",
        "hovertext": [
            f"{each.concurrency} user{'s' if each.concurrency > 1 else ''}: "
            f"{format_seconds(each.tpot_s.value)} per token, "
            f"{format_count(each.output_tokens_per_s.value)} tokens/s"
            for each in shown
        ],
        "error_x": error_bars(rates),
        "error_y": error_bars(times),
        "line": {"width": 2, "color": marks.colours[model]},
        "marker": {"size": 7, "color": marks.colours[model]},
    }
    return new_figure(
        "waits",
        "Serving: time per token and tokens a second",
        f"The winner with so many users at once. Lower right is better. Bars are 90 % "
        f"intervals.{beyond}",
        [trace],
        xaxis=axes.counts_axis("tokens a second, of all users", values),
        yaxis=axes.seconds_axis("time of each further token", latencies),
        shapes=lines,
        annotations=labels,
        showlegend=False,
    )
