"""The report's figures as plotly's own JSON: what is drawn where, without plotly.

A trace's `customdata` holds indices into the candidates. The page filters by them and adds the
hover text; a picture of a figure needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from whichlora.html_report import axes
from whichlora.html_report.marks import (
    MUTED,
    PART_COLOURS,
    Figure,
    Marks,
    error_bars,
    limit_line,
    marks_of,
    shape_legend,
)
from whichlora.html_report.source import Estimate, Point, Source
from whichlora.units import format_bytes, format_seconds

MAX_ERROR_BARS = 300  # points; more of them hide each other, and the hover text has the interval
MAX_BARS = 8
MAX_LINES = 8
WITHIN_REACH = 4.0  # a limit this many times beyond the largest point still gets its line
PAIR = ([0.0, 0.455], [0.545, 1.0])


def build_figures(source: Source) -> list[Figure]:
    """Every figure that `source` has data for, in the order of the page."""
    marks = marks_of(source)
    makers: tuple[Callable[[Source, Marks], Figure | None], ...] = (
        finetune_plane,
        inference_plane,
        inference_shapes,
        finetune_batches,
        dataset_size,
        accuracy,
        breakdown,
        side_by_side,
    )
    return [figure for make in makers if (figure := make(source, marks)) is not None]


def _figure(name: str, title: str, about: str, data: Sequence[Any], **layout: Any) -> Figure:
    return {
        "id": name,
        "title": title,
        "about": about,
        "data": list(data),
        "layout": {"margin": {"l": 72, "r": 16, "t": 16, "b": 56}, "hovermode": "closest"} | layout,
    }


# --- the time-memory planes ---------------------------------------------------------------


def finetune_plane(source: Source, marks: Marks) -> Figure | None:
    """Whole fine-tuning time against peak memory."""
    chosen = source.indices("finetune")
    return _plane(
        source,
        marks,
        chosen,
        name="plane-finetune",
        title="Fine-tuning: total time and peak memory",
        time=lambda point: point.total_s,
        time_title="total time of the fine-tuning",
        time_limit=source.limit("total_time_s"),
        byte_limit=source.limit("finetune_bytes"),
    )


def inference_plane(source: Source, marks: Marks) -> Figure | None:
    """Time per generated token against peak memory."""
    return _plane(
        source,
        marks,
        source.indices("inference"),
        name="plane-inference",
        title="Inference: time per token and peak memory",
        time=lambda point: point.time_per_token_s,
        time_title="time per generated token",
        time_limit=source.limit("time_per_token_s"),
        byte_limit=source.limit("inference_bytes"),
    )


def _plane(
    source: Source,
    marks: Marks,
    indices: Sequence[int],
    *,
    name: str,
    title: str,
    time: Callable[[Point], Estimate | None],
    time_title: str,
    time_limit: float | None,
    byte_limit: float | None,
) -> Figure | None:
    shown = [i for i in indices if time(source.points[i]) is not None]
    if not shown:
        return None
    points = source.points
    bars = len(shown) <= MAX_ERROR_BARS
    data = []
    for model in dict.fromkeys(points[i].model for i in shown):
        own = [i for i in shown if points[i].model == model]
        times = [estimate for i in own if (estimate := time(points[i])) is not None]
        peaks = [points[i].peak_bytes for i in own]
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "markers",
            "name": model,
            "x": [one.value for one in times],
            "y": [one.value for one in peaks],
            "customdata": own,
            "marker": marks.markers([points[i] for i in own]),
        }
        if bars:
            trace |= {"error_x": error_bars(times), "error_y": error_bars(peaks)}
        data.append(trace)
    if source.winner in shown:
        best = points[source.winner]
        best_time = time(best)
        assert best_time is not None  # it is one of those shown
        ring = {"symbol": "circle-open", "size": 20, "color": "#C03028", "line": {"width": 2.5}}
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "winner",
                "x": [best_time.value],
                "y": [best.peak_bytes.value],
                "customdata": [source.winner],
                "marker": ring,
                "hoverinfo": "skip",
            }
        )
    data += shape_legend(marks, [points[i] for i in shown])
    known_times = _shown_values([one for i in shown if (one := time(points[i])) is not None])
    known_peaks = _shown_values([points[i].peak_bytes for i in shown])
    lines, labels, beyond = _limits(
        [
            (time_limit, "limit", format_seconds, "x", known_times),
            (byte_limit, "limit", format_bytes, "y", known_peaks),
            (source.limit("device_bytes"), "device", format_bytes, "y", known_peaks),
        ]
    )
    about = "Lower left is better. Dashed lines are the limits."
    if bars:
        about += " Bars are the intervals of the predictions."
    return _figure(
        name,
        title,
        f"{about}{beyond}",
        data,
        xaxis=axes.seconds_axis(time_title, known_times),
        yaxis=axes.bytes_axis("peak memory", known_peaks),
        shapes=lines,
        annotations=labels,
        legend={"orientation": "h", "y": -0.2},
    )


def _shown_values(estimates: Sequence[Estimate]) -> list[float]:
    """What an axis must show: the values, and the ends of their bars where these are drawn."""
    if len(estimates) > MAX_ERROR_BARS:
        return [one.value for one in estimates]
    return [value for one in estimates for value in (one.low, one.value, one.high)]


def _limits(
    wanted: Sequence[tuple[float | None, str, Callable[[float], str], str, list[float]]],
    axis: str = "",
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Lines and labels of the limits that lie near the points, which the axis is widened by.

    A limit far beyond every point would press them into a corner: it is told in words.
    """
    lines, labels, beyond = [], [], ""
    for value, what, show, across, known in wanted:
        if value is None:
            continue
        if not min(known) / WITHIN_REACH <= value <= max(known) * WITHIN_REACH:
            where = "above" if across == "y" else "right of"
            where = where if value > max(known) else "below" if across == "y" else "left of"
            beyond += f" The {what} of {show(value)} lies {where} the plot."
            continue
        known.append(value)
        line, label = limit_line(value, f"{what} {show(value)}", across=across, axis=axis)
        lines.append(line)
        labels.append(label)
    return lines, labels, beyond


# --- time per token and peak, by shape and by batch ---------------------------------------


def inference_shapes(source: Source, marks: Marks) -> Figure | None:
    """Time per token and peak of every inference configuration, models side by side."""
    chosen = source.indices("inference")
    if not chosen:
        return None
    points = source.points
    shapes = list(dict.fromkeys((points[i].tokens, points[i].batch_size) for i in chosen))
    models = list(dict.fromkeys(points[i].model for i in chosen))
    step = 0.6 / max(1, len(models) - 1)

    def place(point: Point) -> float:
        beside = (models.index(point.model) - (len(models) - 1) / 2) * step
        return shapes.index((point.tokens, point.batch_size)) + beside

    groups = [(model, [i for i in chosen if points[i].model == model]) for model in models]
    every = max(1, len(shapes) // 12)
    figure = _pair(
        source,
        marks,
        groups,
        place=place,
        mode="markers",
        name="inference",
        title="Inference: each configuration",
        about="Crosses ran out of memory, or would by prediction (open).",
        xaxis={
            "title": {"text": "prompt + new tokens, batch size"},
            "range": [-0.5, len(shapes) - 0.5],
            "tickvals": list(range(0, len(shapes), every)),
            "ticktext": [f"{tokens}<br>batch {batch}" for tokens, batch in shapes[::every]],
        },
        limits=("time_per_token_s", "inference_bytes"),
    )
    figure["data"] += shape_legend(marks, [points[i] for i in chosen])
    return figure


def finetune_batches(source: Source, marks: Marks) -> Figure | None:
    """Time per token and peak by batch size, one line per model and variant."""
    chosen = source.indices("finetune")
    if not chosen:
        return None
    points = source.points
    groups: dict[tuple[str, str], list[int]] = {}
    for i in sorted(chosen, key=lambda i: points[i].batch_size):
        groups.setdefault((points[i].model, points[i].variant), []).append(i)
    batches = sorted({points[i].batch_size for i in chosen})
    figure = _pair(
        source,
        marks,
        [
            (f"{model.rsplit('/', 1)[-1]} {variant}", own)
            for (model, variant), own in groups.items()
        ],
        place=lambda point: batches.index(point.batch_size),
        mode="lines+markers",
        name="finetune",
        title="Fine-tuning: by batch size",
        about="One line per model and variant. Crosses ran out of memory, or would by prediction.",
        xaxis={
            "title": {"text": "batch size"},
            "range": [-0.3, len(batches) - 0.7],
            "tickvals": list(range(len(batches))),
            "ticktext": [str(batch) for batch in batches],
        },
        limits=(None, "finetune_bytes"),
    )
    figure["layout"]["showlegend"] = len(groups) <= 24
    return figure


def _pair(
    source: Source,
    marks: Marks,
    groups: Sequence[tuple[str, list[int]]],
    *,
    place: Callable[[Point], float],
    mode: str,
    name: str,
    title: str,
    about: str,
    xaxis: dict[str, Any],
    limits: tuple[str | None, str],
) -> Figure:
    """Time per token on the left, peak on the right, over the same horizontal axis."""
    points = source.points
    data: list[dict[str, Any]] = []
    num_shown = sum(len(own) for _, own in groups)
    known: tuple[list[float], list[float]] = ([], [])
    for label, own in groups:
        own_points = [points[i] for i in own]
        for axis, quantity in enumerate(("time_per_token_s", "peak_bytes")):
            estimates: list[Estimate] = [getattr(point, quantity) for point in own_points]
            bars = mode == "markers" and num_shown <= MAX_ERROR_BARS
            known[axis].extend(_shown_values(estimates) if bars else (e.value for e in estimates))
            trace: dict[str, Any] = {
                "type": "scatter",
                "mode": mode,
                "name": label,
                "legendgroup": label,
                "showlegend": axis == 0,
                "x": [place(point) for point in own_points],
                "y": [one.value for one in estimates],
                "xaxis": f"x{axis + 1}",
                "yaxis": f"y{axis + 1}",
                "customdata": own,
                "marker": marks.markers(own_points),
                "line": {
                    "width": 1.5,
                    "color": marks.colours[own_points[0].model],
                    "dash": marks.dashes[own_points[0].method],
                },
            }
            if bars:
                trace["error_y"] = error_bars(estimates)
            data.append(trace)
    time_limit = None if limits[0] is None else source.limit(limits[0])
    times = _limits([(time_limit, "limit", format_seconds, "y", known[0])])
    peaks = _limits(
        [
            (source.limit(limits[1]), "limit", format_bytes, "y", known[1]),
            (source.limit("device_bytes"), "device", format_bytes, "y", known[1]),
        ],
        axis="2",
    )
    return _figure(
        name,
        title,
        about + times[2] + peaks[2],
        data,
        xaxis=xaxis | {"domain": PAIR[0]},
        xaxis2=xaxis | {"domain": PAIR[1], "anchor": "y2"},
        yaxis=axes.seconds_axis("time per token", known[0]),
        yaxis2=axes.bytes_axis("peak memory", known[1]) | {"anchor": "x2"},
        shapes=times[0] + peaks[0],
        annotations=times[1] + peaks[1],
        legend={"orientation": "h", "y": -0.25},
    )


# --- total time against dataset size ------------------------------------------------------


def dataset_size(source: Source, marks: Marks) -> Figure | None:
    """Time of the whole fine-tuning over the number of sequences: the best of each variant."""
    sequences = (source.values.get("dataset") or {}).get("num_sequences")
    chosen = _best_of_each(source, MAX_LINES)
    if not sequences or not chosen:
        return None
    sizes = [sequences * factor for factor in (0.1, 1.0, 10.0, 100.0)]
    data: list[dict[str, Any]] = []
    for i in chosen:
        point = source.points[i]
        assert point.total_s is not None  # _best_of_each takes no other
        model = point.model.rsplit("/", 1)[-1]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"{model} {point.variant}, batch {point.batch_size}"
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
    known = [value for trace in data for value in trace["y"]]
    lines, labels, beyond = _limits(
        [(source.limit("total_time_s"), "limit", format_seconds, "y", known)]
    )
    here, here_label = limit_line(sequences, f"this data: {sequences} ", across="x")
    here["line"] = here["line"] | {"dash": "dot", "color": MUTED}
    here_label["font"] = here_label["font"] | {"color": MUTED}
    return _figure(
        "dataset",
        "Total time against dataset size",
        "Sequences of the same lengths as in this data; the best batch size of each model and "
        f"variant, {MAX_LINES} at most.{beyond}",
        data,
        xaxis=axes.counts_axis("sequences", sizes),
        yaxis=axes.seconds_axis("total time of the fine-tuning", known),
        shapes=[*lines, here],
        annotations=[*labels, here_label],
        legend={"orientation": "h", "y": -0.2},
    )


def _best_of_each(source: Source, count: int) -> list[int]:
    """The winner, then the best-ranked candidate of every other model and variant."""
    order = sorted(
        (i for i in source.indices("finetune") if source.points[i].total_s is not None),
        key=lambda i: (i != source.winner, *_rank(source.points[i])),
    )
    best: dict[tuple[str, str], int] = {}
    for i in order:
        best.setdefault((source.points[i].model, source.points[i].variant), i)
    return list(best.values())[:count]


def _rank(point: Point) -> tuple[bool, bool, int, float]:
    """As the search ranks: what meets the limits first, then the larger model, then the faster."""
    assert point.total_s is not None  # only candidates of fine-tuning are ranked here
    return (point.failed, point.verdict == "misses", -point.num_params, point.total_s.value)


# --- predicted against measured -----------------------------------------------------------


def accuracy(source: Source, marks: Marks) -> Figure | None:
    """Predictions and their intervals over what was measured in this run."""
    rows = source.values.get("comparison") or ()
    if not rows:
        return None
    stages = (
        ("cold", "datasheet alone", "circle-open", MUTED),
        ("before", "when it was chosen", "diamond", "#E69F00"),
        ("after", "after the refit", "circle", "#0072B2"),
    )
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"legend": {"orientation": "h", "y": -0.2}, "shapes": []}
    for axis, (quantity, make) in enumerate(
        (("memory_bytes", axes.bytes_axis), ("time_per_token_s", axes.seconds_axis)), start=1
    ):
        own = [row for row in rows if row["quantity"] == quantity]
        known: list[float] = []
        for stage, label, symbol, colour in stages:
            guesses = [
                Estimate(value=guess["value"], low=guess["low"], high=guess["high"])
                for guess in (row[stage] for row in own)
            ]
            known += [bound for one in guesses for bound in (one.low, one.high)]
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": label,
                    "legendgroup": label,
                    "showlegend": axis == 1,
                    "x": [row["measured"] for row in own],
                    "y": [one.value for one in guesses],
                    "text": [
                        f"<b>{row['name']}</b><br>measured {_shown(quantity, row['measured'])}"
                        f"<br>{label} {_shown(quantity, one.value)} "
                        f"({one.value / row['measured'] - 1:+.1%})<br>"
                        f"{row[stage]['confidence']:.0%} between {_shown(quantity, one.low)} and {_shown(quantity, one.high)}"
                        for row, one in zip(own, guesses, strict=True)
                    ],
                    "hovertemplate": "%{text}<extra></extra>",
                    "xaxis": f"x{axis}",
                    "yaxis": f"y{axis}",
                    "marker": {"symbol": symbol, "color": colour, "size": 9},
                    "error_y": error_bars(guesses),
                }
            )
        measured = [row["measured"] for row in own]
        known += measured
        low, high = axes.span(known)
        layout["shapes"].append(
            {
                "type": "line",
                "xref": f"x{axis}",
                "yref": f"y{axis}",
                "x0": low,
                "y0": low,
                "x1": high,
                "y1": high,
                "layer": "below",
                "line": {"width": 1, "color": MUTED},
            }
        )
        number = "" if axis == 1 else str(axis)
        what = "peak memory" if quantity == "memory_bytes" else "time per token"
        layout[f"xaxis{number}"] = make(f"measured {what}", measured) | {
            "domain": PAIR[axis - 1],
            "anchor": f"y{axis}",
        }
        layout[f"yaxis{number}"] = make(f"predicted {what}", known) | {"anchor": f"x{axis}"}
    return _figure(
        "accuracy",
        "Predicted against measured",
        "On the line a prediction was exact. Bars are its interval.",
        data,
        **layout,
    )


def _shown(quantity: str, value: float) -> str:
    return format_bytes(value) if quantity == "memory_bytes" else format_seconds(value)


# --- bytes by part ------------------------------------------------------------------------


def breakdown(source: Source, marks: Marks) -> Figure | None:
    """Predicted bytes by part of the best candidates; the page swaps in any other."""
    chosen = [i for i in _best_of_each(source, MAX_BARS) if source.points[i].breakdown]
    if not chosen:
        return None
    shown = [source.points[i] for i in chosen]
    names = [_bar_name(point) for point in shown]
    data = _stack(shown, names, horizontal=True)
    for trace in data:
        trace["customdata"] = chosen
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "measured peak",
            "x": [
                one.peak_bytes.value if one.measured and not one.failed else None for one in shown
            ],
            "y": names,
            "customdata": chosen,
            "marker": {
                "symbol": "line-ns-open",
                "size": 18,
                "color": "#C03028",
                "line": {"width": 3},
            },
            "hovertemplate": "measured peak<extra></extra>",
        }
    )
    highest = max(max(one.predicted_peak_bytes, one.peak_bytes.value) for one in shown)
    return _figure(
        "breakdown",
        "What the bytes are",
        "Predicted bytes at the peak, by part. Choose any candidate below, or with its button in "
        "the table.",
        data,
        barmode="stack",
        xaxis=axes.linear_bytes_axis("device memory", highest),
        yaxis={"autorange": "reversed", "automargin": True},
        legend={"orientation": "h", "y": -0.25, "traceorder": "normal"},
    )


def _bar_name(point: Point) -> str:
    return point.name.replace(", ", "<br>", 1)


def side_by_side(source: Source, marks: Marks) -> Figure | None:
    """Bytes by part of one shape with every method and rank."""
    shown = [point for point in source.side_by_side if point.breakdown]
    if not shown:
        return None
    names: list[list[str]] = [
        [point.method for point in shown],
        [point.variant.partition(" ")[2] or "all" for point in shown],
    ]
    known = [point.predicted_peak_bytes for point in shown]
    limit = source.limit("finetune_bytes") or source.limit("device_bytes")
    lines, labels, beyond = [], [], ""
    if limit is not None and limit <= WITHIN_REACH * max(known):
        line, label = limit_line(limit, f"limit {format_bytes(limit)}", across="y")
        lines, labels = [line], [label | {"y": limit}]
        known.append(limit)
    elif limit is not None:
        beyond = f" The limit of {format_bytes(limit)} lies above the plot."
    first = shown[0]
    axis = axes.linear_bytes_axis("device memory", max(known))
    return _figure(
        "methods",
        "Methods and ranks side by side",
        f"{first.model}, batch size {first.batch_size}, {first.tokens} tokens: predicted bytes at "
        f"the peak.{beyond}",
        _stack(shown, names, horizontal=False),
        barmode="stack",
        xaxis={"type": "multicategory", "tickangle": 0},
        yaxis=axis,
        shapes=lines,
        annotations=labels,
        legend={"orientation": "h", "y": -0.25, "traceorder": "normal"},
    )


def _stack(points: Sequence[Point], names: Any, *, horizontal: bool) -> list[dict[str, Any]]:
    """One trace per part that any of `points` has."""
    parts = list(dict.fromkeys(part for point in points for part in point.breakdown))
    parts.sort(key=lambda part: list(PART_COLOURS).index(part) if part in PART_COLOURS else 99)
    data: list[dict[str, Any]] = []
    for part in parts:
        sizes = [point.breakdown.get(part, 0) for point in points]
        bars = {"x": sizes, "y": names} if horizontal else {"x": names, "y": sizes}
        data.append(
            {
                "type": "bar",
                "name": part.replace("_", " "),
                **bars,
                "text": [format_bytes(size) for size in sizes],
                "textposition": "none",
                "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
                "orientation": "h" if horizontal else "v",
                "marker": {"color": PART_COLOURS.get(part, MUTED)},
                "meta": {"part": part},
            }
        )
    return data
